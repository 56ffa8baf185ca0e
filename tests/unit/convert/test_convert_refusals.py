"""What cannot be converted is refused: the error says what it is, why, and the nearest way that works."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from convert_cases import changed, refused, vit
from torch import nn

import hydra_ensembles as he
from architectures import timm_model
from architectures_clip import SIGLIP_IMAGE, open_clip_model, transformers_clip
from architectures_transformers import TEXT, VISION, transformers_model
from hydra_ensembles.convert.convert import ARCHITECTURES, DUAL_ARCHITECTURES
from hydra_ensembles.convert.refusals import REFUSALS, refusal
from hydra_ensembles.errors import HydraWarning

Rows = list[tuple[Callable[[], Any], str]]

_GPT = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 60, "pad_token_id": 0}
_T5 = {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 16, "d_kv": 8, "vocab_size": 60}
EVA02, DISTILLED = "eva02_base_patch14_224", "deit_tiny_distilled_patch16_224"


def timm_tiny(name: str) -> Any:
    import timm

    with torch.device("meta"):
        return timm.create_model(name, num_classes=5)


def hf(model: str, settings: dict[str, Any], **changes: Any) -> Any:
    return transformers_model(model, {**settings, **changes})


class Around(nn.Module):
    """A wrapper around another model, as in training libraries."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: torch.Tensor) -> Any:
        return self.net(images)


def subclass_of(model: nn.Module) -> nn.Module:
    model.__class__ = type("Mine", (type(model),), {})
    return model


KINDS: Rows = [
    (lambda: timm_tiny("swin_tiny_patch4_window7_224"), "hierarchical"),
    (lambda: hf("GPT2ForSequenceClassification", _GPT), "decoder"),
    (lambda: hf("BertForMaskedLM", TEXT), "another task.*num_labels"),
    (lambda: hf("T5EncoderModel", _T5), "relative position bias"),
    (lambda: nn.LSTM(3, 4), r"docs/models\.md.*declaration=.*own_model"),
    (lambda: Around(vit()), r"he\.convert\(model\.net\).*model\.net\.head = .*a new one"),
    (lambda: subclass_of(vit()), "subclass of VisionTransformer"),
]


def bert(**changes: Any) -> Any:
    return hf("BertForSequenceClassification", TEXT, **changes)


def with_adapters() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(bert(), peft.LoraConfig(r=2, target_modules=["query", "value"]))


DEEP = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
EXTRA, NAN, INF = nn.Parameter(torch.zeros(3)), float("nan"), float("inf")
HALF = nn.Linear(32, 32).half()
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
VARIANTS: Rows = [
    (lambda: "vit_tiny_patch16_224", "str; load it"),
    (lambda: he.convert(vit()), "Ensemble already"),
    (lambda: vit(patch_drop_rate=0.5), "rate of 0, which gives the same"),
    (with_adapters, "peft.*merge_and_unload"),
    (lambda: vit(num_classes=1), "one output"),
    (lambda: vit(norm_layer=partial(nn.LayerNorm, elementwise_affine=False)), "LayerNorm without weights"),
    (lambda: changed(vit(), "head.bias", nn.Parameter(torch.tensor([0, 1, NAN, 2, INF]))), "2 of the 5 values of head"),
    (lambda: changed(vit(), "head", nn.Linear(32, 5).to(torch.float8_e4m3fn)), "float8_e4m3fn.*quantised"),
    (lambda: changed(vit(), "blocks.1", vit().blocks[1].to("meta")), r"blocks\.1\..* meta device"),
    (lambda: changed(timm_model(DISTILLED), "head", DEEP), "Sequential"),
    # rotary positions
    (lambda: timm_model(EVA02, scale_attn_inner=True), r"no canonical place.*attn\.norm"),
    (lambda: hf("GteModel", TEXT, rope_parameters=LINEAR_ROPE), "linear"),
    (lambda: hf("AlbertModel", TEXT, embedding_size=16, num_hidden_groups=2), "canonical place.*layer_groups.1"),
    # transformers
    (lambda: bert(is_decoder=True), "decoder"),
    (lambda: bert(hidden_act="mish"), "mish"),
    (lambda: vit(img_size=36, patch_size=8), r"36x36 is not a multiple .* 8x8.*set_input_size\(\(32, 32\)\)"),
    (lambda: hf("ViTForImageClassification", VISION, problem_type="multi_label_classification"), "multi_label"),
    # two towers
    (lambda: open_clip_model({"patch_dropout": 0.5}), "patch_dropout"),
    (lambda: open_clip_model({"layers": (1, 1, 1, 1)}), "the image tower is a ModifiedResNet"),
    (lambda: open_clip_model(text={"pool_type": "none"}), "pool_type is 'none'"),
    (lambda: transformers_clip({}, {"eos_token_id": 49407}), "eos_token_id.*49407"),
    (lambda: changed(open_clip_model(), "adapter", EXTRA), r"no canonical place: \['adapter'\]"),
    (lambda: changed(vit(), "norm", nn.LayerNorm(32).bfloat16()), r"different types.*model\.float\(\)"),
    (lambda: changed(bert(), "bert.encoder.layer.0.attention.self.key", HALF), "different types"),  # joined with others
]


@pytest.mark.parametrize(("build", "token"), [*KINDS, *VARIANTS])
def test_what_cannot_be_converted_is_refused_with_what_works(build: Any, token: str) -> None:
    refused(build(), token)


def test_images_of_broken_patches_are_told_where_the_model_takes_others() -> None:
    """As in SigLIP with 384 pixels and patches of 14: the convolution ignores the remainder; images must omit it."""
    model = hf("SiglipVisionModel", SIGLIP_IMAGE, image_size=36, patch_size=8)
    with pytest.warns(HydraWarning, match="36x36 is not a multiple.*give it images of 32x32"):
        converted = he.convert(model, num_labels=5)
    assert converted(torch.zeros(1, 3, 32, 32)).shape[-1] == 5


def test_settings_of_the_conversion_that_do_not_fit_the_model_are_refused() -> None:
    refused(bert(), r"5 classes.*model\.base_model", num_labels=3)
    other = bert(problem_type="multi_label_classification").base_model
    refused(other, "at least 2", num_labels=1)
    assert he.convert(other, num_labels=3).num_classes == 3  # its training task does not matter
    refused(open_clip_model(), "no classifier", num_labels=3)


def test_nothing_that_is_supported_has_a_row_and_no_row_hides_another() -> None:
    names = [name for one in (*ARCHITECTURES, *DUAL_ARCHITECTURES) for name in one.classes]
    assert [name for name in names if refusal(name)] == []
    for row in REFUSALS:
        for family in row.families.split():
            forms = (family, f"transformers.models.{family}.modeling_{family}.Model")
            assert all(refusal(name) is row for name in (forms if family[0] != "*" else (f"a.My{family[1:]}",))), family
