"""Small random ensembles of every shape of block and readout, and random batches for them."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles.model.config import (
    EncoderConfig,
    EnsembleConfig,
    KeptHeads,
    PatchStemConfig,
    ReadoutConfig,
    RotaryConfig,
    Sharing,
    TextStemConfig,
)
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.member_states import ungrouped
from hydra_ensembles.model.metadata import Metadata

CLASSES = 4
LAYERS, HEADS, HEAD_DIM, WIDTH = 3, 4, 3, 10

Batch = tuple[Tensor | dict[str, Tensor], Tensor]


def encoder(**changes: Any) -> EncoderConfig:
    """An encoder whose sizes all differ."""
    sizes = {"width": WIDTH, "layers": LAYERS, "heads": HEADS, "head_dim": HEAD_DIM, "mlp_width": 14}
    return EncoderConfig(**(sizes | changes))


def shape(stem: PatchStemConfig | TextStemConfig, readout: dict[str, Any], **changes: Any) -> EnsembleConfig:
    """A single model with all heads; `changes` override the encoder's settings."""
    blocks = encoder(**changes)
    return EnsembleConfig(stem, blocks, ReadoutConfig(num_classes=CLASSES, **readout))


IMAGE = PatchStemConfig(patch_size=(2, 2), grid=(2, 3))
DISTILLED = replace(IMAGE, distillation_token=True, registers=2, position_prefix=2)
TEXT = TextStemConfig(vocabulary=20, positions=8, embedding_width=WIDTH)
PROJECTED = TextStemConfig(20, 10, embedding_width=WIDTH - 3, segments=2, positions_after=1, project=True)
MAP = {"pool": "map", "map_heads": 2, "map_mlp_width": 7}
GATED = {"gated": True, "activation": "silu"}
EVEN = {"head_dim": 4}  # 2D rotary positions need a multiple of 4, 1D ones of 2
JOINT = {"joint_qk_norm": True, "attention_scale": 0.4}
PARTIAL = RotaryConfig(10.0, frequencies=(0.5,))  # rotates the first two numbers of each head

SHAPES = {
    "image-cls": shape(IMAGE, {}),
    "image-mean-layerscale": shape(IMAGE, {"pool": "mean", "norm": "pooled"}, layer_scale=True),
    "image-qknorm-gated": shape(IMAGE, {"pool": "cls_mean"}, qk_norm=True, qkv_bias=False, **GATED),
    "image-map-rms": shape(IMAGE, MAP, norm="rms", out_bias=False),
    "text-post-norm": shape(TEXT, {"norm": "none", "hidden": "tanh"}, norm_first=False, activation="relu"),
    "text-mean-post-norm": shape(TEXT, {"pool": "mean", "norm": "none"}, norm_first=False),
    "text-causal": shape(TEXT, {"pool": "last"}, causal=True),
    "text-grouped": shape(TEXT, {"pool": "last"}, causal=True, kv_heads=2, norm="rms", qk_norm=True, **GATED),
}
DECODERS = {
    "text-grouped": SHAPES["text-grouped"],
    "text-multi-query": shape(TEXT, {"pool": "mean"}, kv_heads=1, head_dim=5, out_bias=False),
    "text-grouped-rotary": shape(TEXT, {"pool": "last"}, kv_heads=2, **EVEN, rotary=RotaryConfig(10.0), causal=True),
    "text-gemma": shape(
        replace(TEXT, learned_positions=False),
        {"pool": "last"},
        head_dim=6,
        causal=True,
        norm="rms",
        kv_heads=2,
        sandwich=True,
        qk_norm=True,
        softcap=2.0,
        attention_scale=0.7,
        rotary=RotaryConfig(100.0, local_base=10.0, frequencies=(1.0, 0.3, 0.01), attention_factor=1.2),
        local=(True, False, True),
        window=2,
        **GATED,
    ),
    "text-olmo": shape(TEXT, {"pool": "last"}, causal=True, norm="rms", norm_after=True, qk_norm=True, **JOINT),
    "text-olmo-grouped": shape(TEXT, {"pool": "last"}, causal=True, kv_heads=2, norm="rms", qk_norm=True, **JOINT),
    "text-phi": shape(
        TEXT, {"pool": "last"}, **EVEN, causal=True, parallel=1, rotary=PARTIAL, rotated=(True, False, True)
    ),
    "text-neox": shape(TEXT, {"pool": "last"}, **EVEN, causal=True, parallel=2, rotary=PARTIAL, layer_scale=True),
}
ALL_SHAPES = (
    SHAPES
    | DECODERS
    | {  # for tests of every readout and stem
        "image-distilled-registers": shape(DISTILLED, {"pool": "distilled"}),
        "image-post-norm-cls": shape(IMAGE, {"norm": "none"}, norm_first=False),
        "image-qknorm-cls": shape(IMAGE, {}, qk_norm=True, layer_scale=True),
        "text-end-of-text": shape(TEXT, {"pool": "eot"}, causal=True, activation="quick_gelu"),
        "image-rotary": shape(
            replace(IMAGE, learned_positions=False, registers=2, norm=True, norm_kind="layer_no_bias"),
            {"pool": "mean", "pool_prefix": True},
            **EVEN,
            **GATED,
            rotary=RotaryConfig(10.0, offset=1.0, reference=(3, 2)),
            mlp_norm=True,
            key_bias=False,
        ),
        "image-rotary-centred": shape(IMAGE, {}, **EVEN, rotary=RotaryConfig(10.0, centred=True), norm="layer_no_bias"),
        "text-rotary-local": shape(
            replace(TEXT, learned_positions=False, norm_kind="layer_no_bias"),
            {"hidden": "gelu", "hidden_norm": True, "hidden_bias": False},
            **EVEN,
            rotary=RotaryConfig(100.0, local_base=10.0),
            local=(False, True, True),
            window=2,
            first_norm=False,
            up_bias=False,
            norm="layer_no_bias",
        ),
        "text-final": shape(TEXT, {"pool": "final"}),
        "text-segments-projected": shape(PROJECTED, {"norm": "none"}, norm_first=False, out_bias=False),
    }
)


def small(
    kind: str = "image",
    classes: int = 3,
    members: int = 1,
    sharing: Sharing = Sharing(),  # noqa: B008 (frozen)
    trunk: int = 0,
    text: dict[str, Any] | None = None,
    readout: dict[str, Any] | None = None,
    **blocks: Any,
) -> EnsembleConfig:
    """A config for images of 8 x 8 pixels or short texts, with all heads; `blocks` are settings of the encoder."""
    made = EncoderConfig(**{"width": 16, "layers": 2, "heads": 2, "head_dim": 8, "mlp_width": 24, **blocks})
    words = {"vocabulary": 20, "positions": 8, "embedding_width": made.width, **(text or {})}
    stem = TextStemConfig(**words) if kind == "text" else PatchStemConfig((4, 4), (2, 2))
    head = ReadoutConfig(num_classes=classes, **(readout or {}))
    return EnsembleConfig(stem, made, head, ((),) * members, sharing, trunk)


def random_ensemble(
    shape: str = "image-cls",
    heads: KeptHeads | None = None,
    sharing: Sharing = Sharing(),  # noqa: B008 (frozen)
    trunk: int = 0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Ensemble:
    """An ensemble in eval mode with random weights, biases and scales, so that none is neutral."""
    config = ALL_SHAPES[shape]
    ensemble = Ensemble(replace(config, heads=heads or config.heads, sharing=sharing, trunk=trunk)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in ensemble.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.4 * noise + (parameter == 1.0))
    return ensemble.eval()


def noisy(config: EnsembleConfig, seed: int = 0, noise: float = 0.2, metadata: Metadata | None = None) -> Ensemble:
    """A freshly initialised ensemble with noise on every parameter, so that each has an effect."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        ensemble = Ensemble(config, metadata)
        for parameter in ensemble.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return ensemble.eval()


def random_batches(
    ensemble: Ensemble, sizes: tuple[int, ...] = (5, 5, 2), seed: int = 100, ragged: bool = False
) -> list[Batch]:
    """Labelled batches of the given sizes; with `ragged`, each batch of texts is padded to a different length."""
    generator = torch.Generator().manual_seed(seed)
    batches: list[Batch] = []
    for index, size in enumerate(sizes):
        labels = torch.randint(CLASSES, (size,), generator=generator)
        labels[0] = index % CLASSES  # more than one class once there are two batches
        if ensemble.kind == "image":
            batches.append((torch.randn(size, 3, 4, 6, generator=generator, dtype=torch.float64), labels))
            continue
        longest = 5 + (index + seed) % 3 if ragged else 7
        lengths = torch.randint(2, longest + 1, (size, 1), generator=generator)
        lengths[0] = longest
        mask = torch.arange(longest)[None] < lengths
        ids = torch.randint(2, 19, (size, longest), generator=generator)
        ids[torch.arange(size), lengths[:, 0] - 1] = 19  # the end token has the highest id
        inputs = {"input_ids": ids.masked_fill(~mask, 1), "attention_mask": mask.long()}
        if ensemble.config.stem.kind == "text" and ensemble.config.stem.segments:
            inputs["token_type_ids"] = (torch.arange(longest)[None] > 2).long().expand(size, -1)
        batches.append((inputs, labels))
    return batches


def without_heads(ensemble: Ensemble, heads: set[tuple[int, int]]) -> Ensemble:
    """The same single model with these heads removed from its weights."""
    config = ensemble.config
    kept = tuple(
        tuple(head for head in there if (layer, head) not in heads) for layer, there in enumerate(config.heads[0])
    )
    config, state = ungrouped(config, ensemble.state_dict())
    state = dict(state)
    for layer, left in enumerate(kept):
        rows = [config.heads[0][layer].index(head) for head in left]
        for name in ("out",) if config.encoder.joint_qk_norm else ("qkv", "qkv_bias", "out"):
            key = f"encoder.layers.{layer}.attention.{name}"
            if key in state:
                state[key] = state[key][rows]
    return Ensemble.from_state(replace(config, heads=(kept,)), state)
