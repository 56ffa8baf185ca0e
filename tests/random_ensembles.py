"""Small random ensembles of every shape of block and readout, and random batches for them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hydra_ensembles.model.config import (
    EncoderConfig,
    EnsembleConfig,
    KeptHeads,
    PatchStemConfig,
    ReadoutConfig,
    Sharing,
    TextStemConfig,
    all_heads,
)
from hydra_ensembles.model.ensemble import Ensemble

CLASSES = 4
LAYERS, HEADS, HEAD_DIM, WIDTH = 3, 4, 3, 10

Batch = tuple[Tensor | dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """The parts of an ensemble that the tests vary."""

    stem: PatchStemConfig | TextStemConfig
    encoder: EncoderConfig
    readout: ReadoutConfig


def encoder(**changes: object) -> EncoderConfig:
    """An encoder in which no two sizes are equal."""
    return EncoderConfig(
        **({"width": WIDTH, "layers": LAYERS, "heads": HEADS, "head_dim": HEAD_DIM, "mlp_width": 14} | changes)
    )


IMAGE = PatchStemConfig(patch_size=(2, 2), grid=(2, 3))
TEXT = TextStemConfig(vocabulary=20, positions=8, embedding_width=WIDTH)

SHAPES = {
    "image-cls": Shape(IMAGE, encoder(), ReadoutConfig(num_classes=CLASSES)),
    "image-mean-layerscale": Shape(
        IMAGE, encoder(layer_scale=True), ReadoutConfig(pool="mean", num_classes=CLASSES, norm="pooled")
    ),
    "image-qknorm-gated": Shape(
        IMAGE,
        encoder(qk_norm=True, gated=True, activation="silu", qkv_bias=False),
        ReadoutConfig(pool="cls_mean", num_classes=CLASSES),
    ),
    "image-map-rms": Shape(
        IMAGE,
        encoder(norm="rms", out_bias=False),
        ReadoutConfig(pool="map", num_classes=CLASSES, map_heads=2, map_mlp_width=7),
    ),
    "text-post-norm": Shape(
        TEXT,
        encoder(norm_first=False, activation="relu"),
        ReadoutConfig(num_classes=CLASSES, norm="none", hidden="tanh"),
    ),
    "text-mean-post-norm": Shape(
        TEXT, encoder(norm_first=False), ReadoutConfig(pool="mean", num_classes=CLASSES, norm="none")
    ),
    "text-causal": Shape(TEXT, encoder(causal=True), ReadoutConfig(pool="last", num_classes=CLASSES)),
}

MORE_SHAPES = {  # for tests that look at every readout and stem
    "image-distilled-registers": Shape(
        PatchStemConfig(patch_size=(2, 2), grid=(2, 3), distillation_token=True, registers=2, position_prefix=2),
        encoder(),
        ReadoutConfig(pool="distilled", num_classes=CLASSES),
    ),
    "image-post-norm-cls": Shape(IMAGE, encoder(norm_first=False), ReadoutConfig(num_classes=CLASSES, norm="none")),
    "image-qknorm-cls": Shape(IMAGE, encoder(qk_norm=True, layer_scale=True), ReadoutConfig(num_classes=CLASSES)),
    "text-end-of-text": Shape(
        TEXT, encoder(causal=True, activation="quick_gelu"), ReadoutConfig(pool="eot", num_classes=CLASSES)
    ),
    "text-segments-projected": Shape(
        TextStemConfig(
            vocabulary=20, positions=10, embedding_width=WIDTH - 3, segments=2, positions_after=1, project=True
        ),
        encoder(norm_first=False, out_bias=False),
        ReadoutConfig(num_classes=CLASSES, norm="none"),
    ),
}
ALL_SHAPES = {**SHAPES, **MORE_SHAPES}


def random_ensemble(
    shape: str = "image-cls",
    heads: KeptHeads | None = None,
    sharing: Sharing = Sharing(),  # noqa: B008 (frozen)
    trunk: int = 0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Ensemble:
    """An ensemble in eval mode whose weights, biases and scales are all random, so that none is neutral."""
    parts = ALL_SHAPES[shape]
    kept = all_heads(parts.encoder) if heads is None else heads
    ensemble = Ensemble(EnsembleConfig(parts.stem, parts.encoder, parts.readout, kept, sharing, trunk)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in ensemble.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.4 * noise + (parameter == 1.0))
    return ensemble.eval()


def random_batches(ensemble: Ensemble, sizes: tuple[int, ...] = (5, 5, 2), seed: int = 0) -> list[Batch]:
    """Labelled batches of the given sizes; texts are padded."""
    generator = torch.Generator().manual_seed(100 + seed)
    batches: list[Batch] = []
    for size in sizes:
        labels = torch.randint(CLASSES, (size,), generator=generator)
        if ensemble.kind == "image":
            batches.append((torch.randn(size, 3, 4, 6, generator=generator, dtype=torch.float64), labels))
            continue
        lengths = torch.randint(3, 8, (size, 1), generator=generator)
        mask = (torch.arange(7)[None] < lengths).long()
        ids = torch.randint(20, (size, 7), generator=generator)
        batches.append(({"input_ids": ids, "attention_mask": mask}, labels))
    return batches


def without_heads(ensemble: Ensemble, heads: set[tuple[int, int]]) -> Ensemble:
    """The same single model with heads cut out of its weights."""
    config = ensemble.config
    kept = tuple(
        tuple(head for head in config.heads[0][layer] if (layer, head) not in heads)
        for layer in range(config.encoder.layers)
    )
    state = ensemble.state_dict()
    for layer, left in enumerate(kept):
        rows = [config.heads[0][layer].index(head) for head in left]
        for name in ("qkv", "qkv_bias", "out"):
            key = f"encoder.layers.{layer}.attention.{name}"
            if key in state:
                state[key] = state[key][rows]
    pruned = EnsembleConfig(config.stem, config.encoder, config.readout, (kept,))
    return Ensemble.from_state(pruned, state)
