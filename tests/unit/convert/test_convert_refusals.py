"""What cannot be converted is refused: the error says what it is, why, and the nearest way that works."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from convert_cases import changed, refused, vit
from torch import nn
from torch.nn.utils import parametrizations
from torchvision.models.vision_transformer import ConvStemConfig

import hydra_ensembles as he
from architectures import timm_model, torchvision_model
from architectures_clip import SIGLIP_IMAGE, open_clip_from_timm, open_clip_model, transformers_clip
from architectures_transformers import DINOV3, DISTILBERT, MODERNBERT, TEXT, VISION, transformers_model
from hydra_ensembles.convert.convert import ARCHITECTURES, DUAL_ARCHITECTURES
from hydra_ensembles.convert.refusals import REFUSALS, refusal
from hydra_ensembles.errors import ConversionError, HydraWarning

Rows = list[tuple[Callable[[], Any], str]]

_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1], "num_heads": [2], "window_size": 4}
_GPT = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 60, "pad_token_id": 0}
_T5 = {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 16, "d_kv": 8, "vocab_size": 60}
EVA02, EVA_DINOV3, DISTILLED = "eva02_base_patch14_224", "vit_small_patch16_dinov3", "deit_tiny_distilled_patch16_224"


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


def without(part: str, model: nn.Module) -> nn.Module:
    """The model as an older release of the library builds it, without a part."""
    delattr(model, part)
    return model


def subclass_of(model: nn.Module) -> nn.Module:
    model.__class__ = type("Mine", (type(model),), {})
    return model


KINDS: Rows = [
    (lambda: timm_tiny("swin_tiny_patch4_window7_224"), "hierarchical"),
    (lambda: timm_tiny("resnet18"), "convolutional"),
    (lambda: hf("SwinForImageClassification", _SWIN), "hierarchical"),
    (lambda: hf("GPT2ForSequenceClassification", _GPT), "decoder"),
    (lambda: hf("BertForMaskedLM", TEXT), "another task.*num_labels"),
    (lambda: hf("BertForTokenClassification", TEXT), "BertForTokenClassification.*each token"),
    (lambda: hf("T5EncoderModel", _T5), "relative position bias"),
    (lambda: nn.LSTM(3, 4), r"docs/models\.md.*declaration=.*own_model"),
    (lambda: Around(vit()), r"he\.convert\(model\.net\).*model\.net\.head = .*a new one"),
    (lambda: nn.Sequential(vit()), r"model\.get_submodule\('0'\)"),
    (lambda: subclass_of(vit()), "subclass of VisionTransformer"),
    (lambda: without("fc_norm", timm_model(EVA02)), r"fc_norm.*installed timm.*hydra-ensembles\[timm"),
    (lambda: timm_model(EVA02, rope_type="mixed"), "RotaryEmbeddingMixed.*without it"),
]


@pytest.mark.parametrize(("build", "token"), KINDS)
def test_it_is_said_what_it_is_why_and_what_works(build: Any, token: str) -> None:
    with pytest.raises(ConversionError, match=rf"(?s){token}") as caught:
        he.convert(build())
    assert 2 < len(str(caught.value).splitlines()) <= 5


def parallel_blocks() -> Any:
    from timm.models.vision_transformer import ParallelScalingBlock

    return vit(block_fn=ParallelScalingBlock)


def bert(**changes: Any) -> Any:
    return hf("BertForSequenceClassification", TEXT, **changes)


def with_adapters(inside: bool) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    settings = peft.LoraConfig(r=2, target_modules=["query", "value"])
    return peft.inject_adapter_in_model(settings, bert()) if inside else peft.get_peft_model(bert(), settings)


def with_prompts() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(bert(), peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2))


def quantised() -> Any:
    with warnings.catch_warnings(action="ignore"):
        return torch.ao.quantization.quantize_dynamic(bert(), {nn.Linear})


DEEP = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
EXTRA, NAN, INF = nn.Parameter(torch.zeros(3)), float("nan"), float("inf")
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
ELECTRA = "ElectraForSequenceClassification"
VARIANTS: Rows = [
    (lambda: 3, "int"),
    (lambda: "vit_tiny_patch16_224", "str; load it"),
    (lambda: he.convert(vit()), "Ensemble already"),
    (lambda: vit(patch_drop_rate=0.5), "rate of 0, which gives the same"),
    (lambda: with_adapters(inside=True), "peft.*merge_and_unload"),
    (lambda: with_adapters(inside=False), "peft.*merge_and_unload"),
    (with_prompts, "cannot be merged"),
    (quantised, "before it was quantised"),
    (
        lambda: changed(vit(), "blocks.1.mlp.fc1", parametrizations.weight_norm(nn.Linear(32, 64))),
        "remove_parametrizations",
    ),
    (lambda: timm_tiny("vit_small_r26_s32_224"), "embedded by HybridEmbed.*without it"),
    (lambda: changed(vit(), "head", nn.utils.spectral_norm(nn.Linear(32, 5))), "hook SpectralNorm of.*remove_spectral"),
    (lambda: nn.Linear(2, 2), "Linear.*timm"),
    (lambda: vit(num_classes=1), "one output"),
    (lambda: changed(vit(), "head.bias", nn.Parameter(torch.tensor([0, 1, NAN, 2, INF]))), "2 of the 5 values of head"),
    (lambda: changed(vit(), "blocks.1.mlp.fc1", nn.Linear(32, 100)), r"blocks\.1\.mlp\.fc1\.weight.*100"),
    (lambda: changed(vit(), "head", nn.Linear(32, 5).to(torch.float8_e4m3fn)), "float8_e4m3fn.*quantised"),
    (lambda: changed(vit(), "blocks.1", vit().blocks[1].to("meta")), r"blocks\.1\..* meta device"),
    (parallel_blocks, "ParallelScalingBlock.*nearest way"),
    (lambda: changed(timm_model(DISTILLED), "head", DEEP), "Sequential"),
    (lambda: changed(timm_model(DISTILLED), "head_dist", DEEP), "Sequential"),
    # rotary positions
    (lambda: timm_model(EVA02, scale_attn_inner=True), r"scale_attn_inner .*no canonical place.*attn\.norm"),
    (lambda: vit(norm_layer=lambda width, **_: nn.Identity()), "no norms"),
    (lambda: vit(global_pool="map", final_norm=False), "final_norm"),
    (lambda: timm_model(EVA02, use_post_norm=True), "EvaBlockPostNorm"),
    (lambda: changed(timm_model(EVA02), "rope.rotate_half", True), "in different ways"),
    (lambda: timm_model(EVA_DINOV3, rope_grid_offset=0.5), "RotaryEmbeddingDinoV3"),
    (lambda: timm_model(EVA_DINOV3, attn_only_layer_scale=True), "attn_only_layer_scale, no tensor.*mlp.scale"),
    (
        lambda: timm_model(EVA_DINOV3, attn_type="rope", qkv_fused=False, num_kv_heads=2),
        "num_kv_heads, .*cannot become",
    ),
    (lambda: hf("GteModel", TEXT, rope_parameters=LINEAR_ROPE), "linear"),
    (lambda: hf("DINOv3ViTModel", DINOV3, value_bias=False), "value_bias, .*v_proj.bias"),
    (lambda: hf("AlbertModel", TEXT, embedding_size=16, num_hidden_groups=2), "num_hidden_groups, the model has"),
    (lambda: hf("AlbertModel", TEXT, embedding_size=16, inner_group_num=2), "inner_group_num, the model has"),
    # torchvision
    (lambda: torchvision_model(representation_size=16), r"representation_size, heads\."),
    (lambda: torchvision_model(conv_stem_configs=[ConvStemConfig(8, 3, 8)]), r"conv_stem_configs, conv_proj\."),
    (lambda: hf("ModernBertForSequenceClassification", MODERNBERT, classifier_activation="silu"), "silu"),
    # transformers
    (lambda: bert(is_decoder=True), "decoder"),
    (lambda: hf(ELECTRA, TEXT, is_decoder=True, add_cross_attention=True), "decoder"),
    (lambda: bert(hidden_act="mish"), "mish"),
    (lambda: hf("DistilBertForSequenceClassification", DISTILBERT, activation="gelu_10"), "gelu_10"),
    (lambda: hf("Dinov2ForImageClassification", VISION, image_size=(16, 64)), "not square"),
    (lambda: hf("ViTForImageClassification", VISION, image_size=36, patch_size=8), "36x36 is not a multiple .* 8x8"),
    (lambda: transformers_clip({"image_size": 36, "patch_size": 8}, {}), "36x36 is not a multiple .* 8x8"),
    (lambda: vit(img_size=36, patch_size=8), r"36x36 is not a multiple .* 8x8.*set_input_size\(\(32, 32\)\)"),
    (lambda: vit(img_size=30, patch_size=8, dynamic_img_size=True, dynamic_img_pad=True), "30x30 is not a multiple"),
    (lambda: hf("ViTForImageClassification", VISION, problem_type="multi_label_classification"), "multi_label"),
    (lambda: hf("RobertaForSequenceClassification", TEXT, problem_type="regression"), "regression"),
    (lambda: hf(ELECTRA, TEXT, num_labels=1), "one output"),
    (lambda: hf("Dinov2ForImageClassification", VISION, num_labels=1), "one output"),
    (lambda: changed(bert(), "classifier", nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 5))), "Sequential"),
    (lambda: hf("SiglipVisionModel", SIGLIP_IMAGE, vision_use_head=False), "vision_use_head"),
    (lambda: hf("Siglip2VisionModel", SIGLIP_IMAGE, num_patches=16), "NaFlex"),
    # two towers
    (lambda: open_clip_model({"patch_dropout": 0.5}), "patch_dropout"),
    (lambda: open_clip_model({"pool_type": "none"}), "pool_type is 'none'"),
    (lambda: open_clip_model({"scale_heads": True}), "scale_heads, .*head_scale"),
    (lambda: open_clip_model({"scale_fc": True}), r"scale_fc, .*mlp\.ln"),
    (lambda: open_clip_model({"scale_attn": True}), r"scale_attn, .*ln_attn"),
    (lambda: open_clip_model({"scale_attn_inner": True}), r"scale_attn_inner, .*ln_inner"),
    (lambda: open_clip_model({"attentional_pool": True}), "attentional_pool, "),
    (lambda: open_clip_model(text={"scaled_cosine_attn": True}), "scaled_cosine_attn, .*logit_scale"),
    (lambda: open_clip_model({"layers": (1, 1, 1, 1)}), "the image tower is a ModifiedResNet"),
    (lambda: open_clip_model(text={"embed_cls": True}, custom=True), "embed_cls, .*cls_emb"),
    (lambda: open_clip_model(text={"pool_type": "none"}), "pool_type is 'none'"),
    (lambda: open_clip_model(text={"output_tokens": True}, custom=True), "output_tokens"),
    (lambda: open_clip_from_timm("vit_base_patch16_224", "token", "mlp"), r"head is made of \['mlp'\]"),
    (lambda: transformers_clip({"hidden_act": "tanh"}, {}), "'tanh'"),
    (lambda: transformers_clip({}, {"eos_token_id": 49407}), "eos_token_id.*49407"),
    (lambda: changed(open_clip_model(), "adapter", EXTRA), r"no canonical place: \['adapter'\]"),
    (lambda: changed(open_clip_model(custom=True), "adapter", EXTRA), r"no canonical place: \['adapter'\]"),
    (lambda: changed(open_clip_model(custom=True), "text", nn.Linear(2, 2)), "text tower is a Linear"),
    (lambda: changed(open_clip_model(), "logit_scale", None), "logit_scale"),
    (lambda: changed(vit(), "norm", nn.LayerNorm(32).bfloat16()), r"different types.*model\.float\(\)"),
]


@pytest.mark.parametrize(("build", "token"), VARIANTS)
def test_a_variant_without_canonical_form_is_refused(build: Any, token: str) -> None:
    refused(build(), token)


def test_images_of_broken_patches_are_told_where_the_model_takes_others() -> None:
    """As in SigLIP with 384 pixels and patches of 14: the convolution ignores the remainder; images must omit it."""
    for name, settings in (("SiglipVisionModel", SIGLIP_IMAGE), ("Dinov2ForImageClassification", VISION)):
        model = hf(name, settings, image_size=36, patch_size=8)
        with pytest.warns(HydraWarning, match="36x36 is not a multiple.*give it images of 32x32"):
            converted = he.convert(model, num_labels=5 if "Model" in name else None)
        assert converted(torch.zeros(1, 3, 32, 32)).shape[-1] == converted.num_classes


def test_settings_of_the_conversion_that_do_not_fit_the_model_are_refused() -> None:
    refused(bert(), r"5 classes.*model\.base_model", num_labels=3)
    other = bert(problem_type="multi_label_classification").base_model
    refused(other, "at least 2", num_labels=1)
    assert he.convert(other, num_labels=3).num_classes == 3  # its training task does not matter
    refused(open_clip_model(), "no classifier", num_labels=3)
    refused(open_clip_model(), "no classifier", labels=["a"])


def test_nothing_that_is_supported_has_a_row_and_no_row_hides_another() -> None:
    names = [name for one in (*ARCHITECTURES, *DUAL_ARCHITECTURES) for name in one.classes]
    assert [name for name in names if refusal(name)] == []
    for row in REFUSALS:
        for family in row.families.split():
            forms = (family, f"transformers.models.{family}.modeling_{family}.Model")
            assert all(refusal(name) is row for name in (forms if family[0] != "*" else (f"a.My{family[1:]}",))), family


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("swinv2_base_window8_256", "hierarchical"),
        ("qwen3", "decoder"),
        ("timm.models.gemma4_vit.Gemma4VitClassifier", "language model"),
        ("transformers.models.data2vec.modeling_data2vec_vision.Data2VecVisionModel", "relative position bias"),
        ("transformers.models.data2vec.modeling_data2vec_audio.Data2VecAudioModel", "sound"),
        ("transformers.models.data2vec.modeling_data2vec_text.Data2VecTextModel", None),
        ("vit_base_patch16_224", None),
        ("optimal.Net", None),
    ],
)
def test_names_are_known_by_how_they_begin(name: str, token: str | None) -> None:
    row = refusal(name)
    assert row is None if token is None else row is not None and token in row.what
