"""A tiny dual encoder that reads strings, and pairs it can learn, for the tests of text tuning."""

from collections.abc import Iterator

import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.model.config import (
    EncoderConfig,
    EnsembleConfig,
    PatchStemConfig,
    ReadoutConfig,
    TextStemConfig,
    all_heads,
)
from hydra_ensembles.model.metadata import Metadata
from zero_shot_models import word_tokenizer

NAMES = ("cat", "dog", "red bus", "green tree", "house", "boat")
TEXT_WIDTH, IMAGE_WIDTH = 16, 24

Batch = tuple[Tensor, list[str], Tensor]


def tiny_dual(seed: int = 0, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> he.DualEncoder:
    image = EncoderConfig(width=IMAGE_WIDTH, layers=2, heads=4, head_dim=6, mlp_width=32)
    text = EncoderConfig(
        width=TEXT_WIDTH, layers=3, heads=4, head_dim=4, mlp_width=24, norm_first=False, projection_dropout=dropout
    )
    tokenizer = word_tokenizer(mask=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        towers = (
            he.Ensemble(
                EnsembleConfig(PatchStemConfig((4, 4), (2, 2)), image, ReadoutConfig(), all_heads(image)), Metadata()
            ),
            he.Ensemble(
                EnsembleConfig(
                    TextStemConfig(vocabulary=60, positions=12, embedding_width=TEXT_WIDTH),
                    text,
                    ReadoutConfig(pool="mean", norm="none"),
                    all_heads(text),
                ),
                Metadata(preprocessing=tokenizer, history=("made",)),
            ),
        )
        dual = he.DualEncoder(*towers, he.Projections.fresh(IMAGE_WIDTH, TEXT_WIDTH, TEXT_WIDTH))
        with torch.no_grad():
            for parameter in dual.parameters():
                if parameter is not dual.logit_scale:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return dual.to(dtype).eval()


def samples(count: int = 24, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Images that show their class by where they are bright, `[N, 3, 8, 8]`, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(NAMES), (count,), generator=generator)
    images = torch.randn(count, 3, 8, 8, generator=generator) * 0.3
    images[torch.arange(count), labels % 3, (labels // 3) * 4] += 2.0
    return images, labels


def pairs(count: int = 24, size: int = 8, seed: int = 1, dtype: torch.dtype = torch.float32) -> list[Batch]:
    images, labels = samples(count, seed)
    texts = [f"a photo of a {NAMES[label]}" for label in labels.tolist()]
    return [
        (images[start : start + size].to(dtype), texts[start : start + size], labels[start : start + size])
        for start in range(0, count, size)
    ]


class ShuffledPairs:
    """Batches in an order drawn from torch's generator; ends the run before a given batch, counted over everything."""

    def __init__(self, count: int = 24, size: int = 8, fatal: int = -1) -> None:
        self.images, self.labels = samples(count)
        self.size, self.fatal, self.read = size, fatal, 0

    def __len__(self) -> int:
        return len(self.labels) // self.size

    def __iter__(self) -> Iterator[Batch]:
        for rows in torch.randperm(len(self.labels)).split(self.size):
            if self.read == self.fatal:
                self.end()
            self.read += 1
            labels = self.labels[rows]
            yield self.images[rows], [f"the {NAMES[label]}" for label in labels.tolist()], labels

    def end(self) -> None:
        raise InterruptedError("stopped")


def same(one: he.DualEncoder, other: he.DualEncoder) -> bool:
    state = other.state_dict()
    return all(torch.equal(tensor, state[name]) for name, tensor in one.state_dict().items())


def largest_gap(one: he.DualEncoder, other: he.DualEncoder) -> float:
    state = other.state_dict()
    return max((tensor - state[name]).abs().max().item() for name, tensor in one.state_dict().items())
