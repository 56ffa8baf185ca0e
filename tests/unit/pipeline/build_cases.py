"""Tiny models and data for the tests of `build`."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hydra_ensembles as he
from checkpoint_models import same_state
from hydra_ensembles.model.metadata import Metadata
from random_ensembles import noisy, small

CLASSES = 3
LAYERS, HEADS = 3, 4
BLOCKS: dict[str, Any] = {"width": 12, "layers": LAYERS, "heads": HEADS, "head_dim": 3, "mlp_width": 16}
TEXT_BATCHES = ((10, 7), (9, 9), (9, 5))  # samples and tokens per batch


def image_model(seed: int = 4, **blocks: Any) -> he.Ensemble:
    metadata = Metadata(source="a test", labels=("red", "green", "blue"), history=("made",))
    return noisy(small(**{**BLOCKS, **blocks}), seed, metadata=metadata)


def text_model(seed: int = 0, words: dict[str, int] | None = None, **blocks: Any) -> he.Ensemble:
    metadata = Metadata(source="a test", labels=("bad", "good"), history=("made",))
    readout = {"hidden": "tanh", "norm": "none"}
    config = small("text", 2, text=words or {"positions": 10}, readout=readout, norm_first=False, **BLOCKS, **blocks)
    return noisy(config, seed, metadata=metadata)


def samples(count: int = 48, seed: int = 1, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Images whose class is the brightest channel; `shift` is added to all."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = torch.randn(count, 3, 8, 8, generator=generator) + shift
    images[torch.arange(count), labels] += 1.0
    return images, labels


def batches(count: int = 24, size: int = 4, seed: int = 1, shift: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    images, labels = samples(count, seed, shift)
    return list(zip(images.split(size), labels.split(size), strict=True))


def shuffled(count: int = 24, size: int = 4, seed: int = 1) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*samples(count, seed)), batch_size=size, shuffle=True)


def text_batches(seed: int = 1) -> list[dict[str, Tensor]]:
    """Batches of different lengths, right-padded."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for count, tokens in TEXT_BATCHES:
        lengths = torch.randint(2, tokens + 1, (count,), generator=generator)
        lengths[0] = tokens
        mask = (torch.arange(tokens) < lengths[:, None]).long()  # [B, T]
        ids = torch.randint(1, 20, (count, tokens), generator=generator) * mask
        labels = torch.randint(2, (count,), generator=generator)
        labels[0], labels[1] = 0, 1
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def sets(**changes: Any) -> dict[str, Any]:
    usual = {"train": batches(40), "id": batches(32, 16, seed=2), "ood": batches(16, 16, seed=3, shift=1.5)}
    return {**usual, "progress": False, **changes}


def text_sets(**changes: Any) -> dict[str, Any]:
    usual = {"train": text_batches(1), "id": text_batches(2), "ood": text_batches(3)}
    return {**usual, "progress": False, **changes}


def recipe(**changes: Any) -> he.Recipe:
    """A short recipe that trains everything but the stem."""
    settings: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.05, "steps": 4, "dropout": 0.1}
    return he.Recipe(**{**settings, "train_groups": ("attention", "mlp", "norms", "readout"), **changes})


def same(one: he.Ensemble, other: he.Ensemble) -> bool:
    return one.config == other.config and one.metadata == other.metadata and same_state(one, other)
