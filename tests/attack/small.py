"""Small models and data for bad inputs, kills and writers; cached per process, never modified."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.model.metadata import Metadata
from random_ensembles import noisy
from random_ensembles import small as config_of
from unit.pipeline.build_cases import recipe as recipe
from zero_shot_models import word_tokenizer

CLASSES, LAYERS, HEADS = 3, 3, 4
SIZE = 8  # image size in pixels
VOCABULARY, TOKENS, LONGEST = 60, 6, 12
BLOCKS: dict[str, Any] = {"width": 12, "layers": LAYERS, "heads": HEADS, "head_dim": 3, "mlp_width": 16}
WORDS = {"vocabulary": VOCABULARY, "positions": LONGEST}
LABELS = ("cat", "dog", "bus")
NAMES = ("cat", "dog", "red bus", "green tree")

Batch = tuple[Any, Tensor]


@cache
def model(kind: str = "image", seed: int = 4, dropout: float = 0.0) -> he.Ensemble:
    """A classifier with one member, class names and preprocessing."""
    config = config_of(classes=CLASSES, projection_dropout=dropout, **BLOCKS)
    preprocessing: Any = he.ImagePreprocessing((SIZE, SIZE), mean=(0.5,) * 3, std=(0.5,) * 3)
    if kind == "text":
        preprocessing = he.TextPreprocessing(LONGEST, segments=True, tokenizer=word_tokenizer().tokenizer)
        readout, after = {"hidden": "tanh", "norm": "none"}, {"norm_first": False, "projection_dropout": dropout}
        config = config_of(kind, CLASSES, text={**WORDS, "segments": 2}, readout=readout, **after, **BLOCKS)
    return noisy(config, seed, metadata=Metadata(source="a test", labels=LABELS, preprocessing=preprocessing))


@cache
def hydra(kind: str = "image", dropout: float = 0.0) -> he.Ensemble:
    """Two members of one model with different heads, calibrated."""
    base = model(kind, dropout=dropout)
    fused = he.fuse([he.prune(base, [(0, 1), (2, 2)]), he.prune(base, [(1, 0), (2, 3)])])
    return he.calibrate(fused, batches(kind, seed=9))


@cache
def dual(seed: int = 0) -> he.DualEncoder:
    """Two towers with one member each, for images of 8x8 pixels and a few words."""
    readout, seen = {"pool": "mean", "norm": "none"}, Metadata(preprocessing=he.ImagePreprocessing((SIZE, SIZE)))
    read = Metadata(preprocessing=word_tokenizer(mask=True), history=("made",))
    texts = config_of("text", 0, text=WORDS, readout=readout, norm_first=False, **BLOCKS)
    towers = noisy(config_of(classes=0, **BLOCKS), seed, metadata=seen), noisy(texts, seed + 1, metadata=read)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return he.DualEncoder(*towers, he.Projections.fresh(12, 12, 8)).eval()


def samples(kind: str, count: int, seed: int = 1, shift: float = 0.0) -> Batch:
    """Inputs of a kind, texts right-padded, and labels; `shift` is added to images and changes the words of texts."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    if kind == "image":
        images = torch.randn(count, 3, SIZE, SIZE, generator=generator) + shift
        images[torch.arange(count), labels] += 1.0
        return images, labels
    lengths = torch.randint(2, TOKENS + 1, (count, 1), generator=generator)
    mask = (torch.arange(TOKENS)[None] < lengths).long()  # [B, T]
    low = VOCABULARY // 2 if shift else 1
    ids = torch.randint(low, low + VOCABULARY // 2 - 1, (count, TOKENS), generator=generator) * mask
    segments = (torch.arange(TOKENS)[None] >= 2).long() * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}, labels


def rows(inputs: Any, index: Any) -> Any:
    return inputs[index] if isinstance(inputs, Tensor) else {key: value[index] for key, value in inputs.items()}


def batches(kind: str = "image", count: int = 24, size: int = 4, seed: int = 1, shift: float = 0.0) -> list[Batch]:
    inputs, labels = samples(kind, count, seed, shift)
    cuts = [slice(start, start + size) for start in range(0, count, size)]
    return [(rows(inputs, cut), labels[cut]) for cut in cuts]


class Shuffled:
    """Samples in batches, reshuffled by torch's generator on every pass."""

    def __init__(self, kind: str, count: int = 12, size: int = 4, seed: int = 1) -> None:
        (self.inputs, self.labels), self.size = samples(kind, count, seed), size

    def __len__(self) -> int:
        return len(self.labels) // self.size

    def __iter__(self) -> Iterator[Batch]:
        for chosen in torch.randperm(len(self.labels)).split(self.size):
            yield rows(self.inputs, chosen), self.labels[chosen]
