"""Models altered by users: each is refused with a clear error or converted correctly; none is converted wrongly."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from convert_cases import alike, changed, refused, vit
from torch import Tensor, nn

import hydra_ensembles as he
from architectures import timm_model
from architectures_clip import CONTEXT, DUAL_CASES
from contract.all_architectures import ALL_CASES

KNOWN: dict[str, Any] = {str(case): case for case in (*ALL_CASES, *DUAL_CASES)}
CASES = {
    "timm": KNOWN["timm-vit"],
    "timm-siglip": KNOWN["timm-siglip"],
    "torchvision": KNOWN["torchvision-vit"],
    **{name: KNOWN[f"transformers-{name}"] for name in ("vit", "bert", "roberta")},
    "clip": KNOWN["transformers-quickgelu"],
    "open_clip": KNOWN["open_clip-plain"],
    "open_clip-timm": KNOWN["open_clip-timm-linear"],
}

Change = Callable[[Any], object]


class Adapted(nn.Linear):
    """A hand-written low-rank adapter; its tensors keep the names of the original layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * x.sum(-1, keepdim=True)


def adapted(place: str) -> Change:
    def change(model: Any) -> None:
        model.get_submodule(place).__class__ = Adapted

    return change


def put(place: str, value: Any, *also: tuple[str, Any]) -> Change:
    """Replace parts, numbers or settings after the model was built."""
    return lambda model: [changed(model, *one) for one in ((place, value), *also)]


def replaced(place: str) -> Change:
    """Replace a method of one part on the instance by one that adds a constant to its result."""

    def change(model: Any) -> None:
        above, _, method = place.rpartition(".")
        part = model.get_submodule(above)
        original = getattr(part, method)
        setattr(part, method, lambda *given, **named: original(*given, **named) + 0.3)

    return change


BLOCK, LAYER = "blocks.1.", "encoder.layers.encoder_layer_1."
OPEN = "visual.transformer.resblocks.1."
BEHIND_DROPOUT = nn.Sequential(nn.Dropout(0.25), nn.Linear(32, 5)).eval()

# Model, change, and a token of the error; None where the conversion may succeed. `attack/altered_models.py` has more.
ALTERED: list[tuple[str, Change, str | None]] = [
    # timm
    ("timm", put(BLOCK + "mlp.act", nn.ReLU()), "blocks.1.mlp.act"),
    ("timm", lambda model: [put("attn.scale", 1.0)(block) for block in model.blocks], "scale 1.0"),
    ("timm", adapted(BLOCK + "attn.qkv"), "Adapted"),
    ("timm", put(BLOCK + "drop_path1", nn.Tanh()), "drop_path1"),
    ("timm", put("fc_norm", nn.LayerNorm(32)), "LayerNorm after it"),
    ("timm", put("patch_embed.proj.stride", (4, 4)), "cannot answer"),
    ("timm", replaced("forward_head"), "forward_head"),
    ("timm", lambda model: put("blocks.0.forward", torch.compile(lambda x: 2 * x))(model), "blocks.0 (Block)"),
    ("timm", lambda model: put("blocks.0.forward", model.blocks[0].forward)(model), None),  # the original method again
    ("timm", lambda model: put("blocks.0", torch.compile(model.blocks[0]))(model), "compiled on its own"),
    ("timm", lambda model: model.norm.register_forward_hook(lambda *given: given[2] * 2), "forward hook"),
    ("timm", put("pool_include_prefix", True, ("global_pool", "avg")), None),
    ("timm", put("no_embed_class", True), "stem.position"),
    ("timm", put("head", BEHIND_DROPOUT), None),
    ("timm", put("head", nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))), "not an nn.Linear"),
    ("timm-siglip", put("attn_pool.mlp.act", nn.Tanh()), "activation 'Tanh'"),
    ("timm-siglip", put("attn_pool.pool", "avg"), None),
    # torchvision
    ("torchvision", put(LAYER + "mlp.1", nn.ReLU()), "encoder_layer_1"),
    ("torchvision", put("heads", nn.Identity()), None),
    # transformers
    ("vit", put("classifier", BEHIND_DROPOUT), None),
    ("roberta", put("classifier", BEHIND_DROPOUT), "classifier is a"),
    ("bert", put("config.hidden_act", "relu"), "intermediate_act_fn"),
    ("bert", lambda model: model.bert.embeddings.position_ids.copy_(torch.arange(23, -1, -1)[None]), "embedded"),
    ("bert", lambda model: model.bert.encoder.layer.pop(1), "model.config in agreement"),
    ("bert", lambda model: put("bert.encoder.layer.1", model.bert.encoder.layer[0])(model), None),  # layer used twice
    # dual encoders
    ("clip", put("text_model.eos_token_id", 7), "text_model.eos_token_id"),
    ("open_clip", put("attn_mask", torch.zeros(CONTEXT, CONTEXT)), "in transformer.resblocks.0"),
    ("open_clip", replaced("encode_text"), "encode_text"),
]


@pytest.mark.parametrize(
    ("name", "change", "token"), ALTERED, ids=[f"{number}-{one[0]}" for number, one in enumerate(ALTERED)]
)
@torch.no_grad()
def test_no_altered_model_answers_otherwise(name: str, change: Change, token: str | None) -> None:
    case = CASES[name]
    model = case.build()
    change(model)
    if token is not None:
        refused(model, re.escape(token))
        return
    alike(he.convert(model)(case.inputs())[0], case.logits(model, case.inputs()), within=1e-4)


BARE = nn.LayerNorm(32, elementwise_affine=False)


@pytest.mark.parametrize(
    ("name", "change", "token"),
    [
        ("timm", put("fc_norm", BARE), "LayerNorm after it"),
        ("timm-siglip", put("attn_pool.mlp.norm", nn.Tanh()), "attn_pool.mlp.norm is a"),
        ("torchvision", put("heads.extra", nn.ReLU()), "heads.extra is a"),
        ("open_clip", put("visual.transformer.resblocks.0.ls_2", BARE, (OPEN + "ls_2", BARE)), "ls_2 is a"),
        ("open_clip-timm", put("visual.head", nn.Tanh()), "head is made of Tanh"),
    ],
)
def test_a_part_without_weights_is_refused_also_where_no_answers_are_compared(
    name: str, change: Change, token: str
) -> None:
    """Parts with weights are noticed by left-over tensors; these have none."""
    model = CASES[name].build()
    change(model)
    refused(model, re.escape(token), probe=False)


def test_dropout_before_a_classifier_is_that_of_the_original() -> None:
    """Two dropouts in a row combine into one; DeiT's two classifiers have none, whatever the model's rate."""
    model = changed(vit(drop_rate=0.5), "head", BEHIND_DROPOUT)
    assert he.convert(model).config.readout.dropout == 0.5 + 0.25 - 0.5 * 0.25
    assert model.head is BEHIND_DROPOUT
    assert (
        he.convert(changed(CASES["bert"].build(), "classifier", BEHIND_DROPOUT)).config.readout.hidden_dropout == 0.25
    )
    assert he.convert(timm_model("deit_base_distilled_patch16_224", drop_rate=0.5)).config.readout.dropout == 0.0
