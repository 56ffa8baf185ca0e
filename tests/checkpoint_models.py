"""Small random ensembles that together use every part of the checkpoint format."""

from typing import Any

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
)
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.metadata import Calibration, Metadata
from hydra_ensembles.preprocessing import ImagePreprocessing, TextPreprocessing

TOKENIZER = (
    '{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,'
    ' "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,'
    ' "model": {"type": "WordLevel", "vocab": {"[PAD]": 0, "hello": 1, "wörld": 2}, "unk_token": "[PAD]"}}\n'
)

RAGGED: KeptHeads = (((0, 1), (), (3,)), ((0, 2), (1, 2, 3), ()), ((1,), (), (0, 1, 2, 3)))


def encoder(layers: int = 3, **changes: object) -> EncoderConfig:
    return EncoderConfig(width=8, layers=layers, heads=4, head_dim=2, mlp_width=12, **changes)  # type: ignore[arg-type]


def single() -> EnsembleConfig:
    stem, blocks = PatchStemConfig((4, 4), (2, 2)), encoder()
    return EnsembleConfig(stem, blocks, ReadoutConfig(num_classes=3))


def ragged() -> EnsembleConfig:
    """Three members, nothing shared, different heads each, some layers without heads."""
    return EnsembleConfig(PatchStemConfig((4, 4), (2, 3)), encoder(), ReadoutConfig(num_classes=3), RAGGED)


def hydra() -> EnsembleConfig:
    """Three members over a shared stem, trunk and MLP, with LayerScale and a gated MLP."""
    blocks = encoder(layer_scale=True, gated=True, activation="silu", qk_norm=True, drop_path=(0.0, 0.1, 0.2))
    heads = tuple(((0, 1), *member[1:]) for member in RAGGED)
    stem = PatchStemConfig((4, 4), (2, 2), distillation_token=True, registers=2, position_prefix=2)
    readout = ReadoutConfig(pool="distilled", num_classes=3)
    return EnsembleConfig(stem, blocks, readout, heads, Sharing(stem=True, mlp=True), trunk=1)


def map_pooled() -> EnsembleConfig:
    stem = PatchStemConfig((2, 2), (2, 2), class_token=False, position_prefix=0)
    readout = ReadoutConfig(pool="map", map_heads=2, map_mlp_width=6)
    return EnsembleConfig(stem, encoder(norm="rms", qkv_bias=False), readout, RAGGED, Sharing(readout=True))


def text() -> EnsembleConfig:
    stem = TextStemConfig(vocabulary=11, positions=9, embedding_width=6, segments=2, project=True)
    readout = ReadoutConfig(pool="cls", num_classes=2, hidden="tanh", norm="none")
    return EnsembleConfig(stem, encoder(norm_first=False), readout, RAGGED, Sharing(stem=True, norms=True))


CONFIGS = {f.__name__: f for f in (single, ragged, hydra, map_pooled, text)}


def metadata_for(config: EnsembleConfig) -> Metadata:
    """Metadata with every field set."""
    of_texts = TextPreprocessing(max_length=9, segments=True, tokenizer=TOKENIZER)
    of_images = ImagePreprocessing(size=(8, 8), interpolation="bilinear", crop_fraction=0.875)
    return Metadata(
        source="timm VisionTransformer | vit_tiny",
        labels=tuple(f"class {i} “ü”" for i in range(config.readout.num_classes)),
        preprocessing=of_texts if config.kind == "text" else of_images,
        calibration=Calibration(temperature=0.5, threshold=0.1, score="entropy"),
        history=("converted", "pruned 4 heads\nwith taylor"),
        metrics={"accuracy": 0.1 + 0.2, "nll": 1e-300},
    )


def ensemble(config: EnsembleConfig, dtype: torch.dtype = torch.float32, metadata: Metadata | None = None) -> Ensemble:
    """An ensemble with random values in every parameter, biases and norms included."""
    generator = torch.Generator().manual_seed(0)
    model = Ensemble(config, metadata_for(config) if metadata is None else metadata)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


def inputs_for(config: EnsembleConfig, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(config.stem, TextStemConfig):
        return torch.randint(0, config.stem.vocabulary, (2, min(5, config.stem.max_tokens)), generator=generator)
    return torch.randn(2, config.stem.channels, *config.stem.image_size, generator=generator).to(dtype)


def labelled(config: EnsembleConfig, count: int = 120, seed: int = 0, size: int = 16, shift: float = 0.0) -> list[Any]:
    """Labelled batches whose inputs depend on the class (images only); `shift` is added to all images."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % config.readout.num_classes
    if isinstance(config.stem, TextStemConfig):
        inputs = torch.randint(1, config.stem.vocabulary, (count, 5), generator=generator)
    else:
        noise = torch.randn(count, config.stem.channels, *config.stem.image_size, generator=generator)
        inputs = noise + labels[:, None, None, None] + shift
    order = torch.randperm(count, generator=generator)
    return list(zip(inputs[order].split(size), labels[order].split(size), strict=True))


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equal dtype, shape and bytes; unlike `torch.equal`, NaN equals NaN and 0 differs from -0."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    one, two = (t.detach().contiguous().flatten().view(torch.uint8) for t in (first, second))
    return torch.equal(one, two)


def same_state(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """Parameters of equal names, in the same order, with the same bits."""
    one, two = first.state_dict(), second.state_dict()
    return list(one) == list(two) and all(same_bits(one[name], two[name]) for name in one)
