"""Tiny models and learnable data for the tests of training: a classifier, and a dual encoder for pairs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import hydra_ensembles as he
from hydra_ensembles.data.dataset import BatchLoader
from hydra_ensembles.data.dataset import batches as data_batches
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.model.metadata import Calibration, Metadata
from random_ensembles import noisy, small
from unit.pipeline import build_cases
from unit.pipeline.build_cases import samples as samples
from zero_shot_models import word_tokenizer

LAYERS = 2
NAMES = ("cat", "dog", "red bus", "green tree", "house", "boat")
TEXT_WIDTH, IMAGE_WIDTH = 16, 24

Pairs = tuple[Tensor, list[str], Tensor]


def tiny(seed: int = 0, dropout: float = 0.0, **shape: Any) -> Ensemble:
    rates = dict.fromkeys(("projection_dropout", "activation_dropout", "output_dropout"), dropout)
    metadata = Metadata(history=("made",), calibration=Calibration(), metrics={"old": 1.0})
    return noisy(small(**shape, **rates), seed, 0.1, metadata)


def batches(count: int = 48, size: int = 8, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    return build_cases.batches(count, size, seed)


def shuffled(count: int = 48, size: int = 8, seed: int = 1) -> DataLoader[tuple[Tensor, ...]]:
    return build_cases.shuffled(count, size, seed)


def own_batches(count: int = 48, size: int = 8, seed: int = 1) -> BatchLoader:
    """The same samples as `shuffled`, in the library's own batches."""
    return data_batches(list(zip(*samples(count, seed), strict=True)), torch.stack, size, shuffle=True)


class Stopping:
    """Interrupts the run before batch number `fatal`, counted over all epochs; -1 never does."""

    def __init__(self, batches: Any, fatal: int = -1) -> None:
        self.batches, self.fatal, self.read = batches, fatal, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if self.read == self.fatal:
                raise KeyboardInterrupt
            self.read += 1
            yield batch


def same(one: Any, other: Any) -> bool:
    return largest_gap(one, other) == 0.0


def largest_gap(one: Any, other: Any) -> float:
    state = other.state_dict()
    return max((tensor - state[name]).abs().max().item() for name, tensor in one.state_dict().items())


def moved(before: Any, after: Any) -> set[str]:
    state = after.state_dict()
    return {name for name, tensor in before.state_dict().items() if not torch.equal(tensor, state[name])}


def tiny_dual(seed: int = 0, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> he.DualEncoder:
    images = small(classes=0, width=IMAGE_WIDTH, heads=4, head_dim=6, mlp_width=32)
    blocks = {"width": TEXT_WIDTH, "layers": 3, "heads": 4, "head_dim": 4, "norm_first": False}
    words, pooled = {"vocabulary": 60, "positions": 12}, {"pool": "mean", "norm": "none"}
    texts = small("text", 0, text=words, readout=pooled, projection_dropout=dropout, **blocks)
    metadata = Metadata(preprocessing=word_tokenizer(mask=True), history=("made",))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        towers = he.Ensemble(images, Metadata()), he.Ensemble(texts, metadata)
        dual = he.DualEncoder(*towers, he.Projections.fresh(IMAGE_WIDTH, TEXT_WIDTH, TEXT_WIDTH))
        for parameter in dual.parameters():
            if parameter is not dual.logit_scale:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return dual.to(dtype).eval()


def pair_samples(count: int = 24, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Images whose bright channel and rows show the class, `[N, 3, 8, 8]`, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(NAMES), (count,), generator=generator)
    images = torch.randn(count, 3, 8, 8, generator=generator) * 0.3
    images[torch.arange(count), labels % 3, (labels // 3) * 4] += 2.0
    return images, labels


def pairs(count: int = 24, size: int = 8, seed: int = 1, dtype: torch.dtype = torch.float32) -> list[Pairs]:
    images, labels = pair_samples(count, seed)
    texts = [f"a photo of a {NAMES[label]}" for label in labels.tolist()]
    cuts = [slice(start, start + size) for start in range(0, count, size)]
    return [(images[cut].to(dtype), texts[cut], labels[cut]) for cut in cuts]


def pair_loader(count: int = 24, size: int = 8) -> DataLoader[Any]:
    """The same pairs, shuffled by torch's generator."""
    ((images, texts, labels),) = pairs(count, count)
    return DataLoader(list(zip(images, texts, labels, strict=True)), batch_size=size, shuffle=True)
