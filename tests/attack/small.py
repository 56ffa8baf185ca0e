"""Small models and data for bad inputs, kills and writers; cached per process, never modified."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import hydra_ensembles as he
from unit.pipeline import build_cases
from unit.pipeline.build_cases import image_model, text_model
from unit.pipeline.build_cases import recipe as recipe
from unit.training.training_cases import NAMES as NAMES
from unit.training.training_cases import tiny_dual
from zero_shot_models import word_tokenizer

VOCABULARY, TOKENS, LONGEST = 60, 6, 12
WORDS = {"vocabulary": VOCABULARY, "positions": LONGEST, "segments": 2}

Batch = tuple[Any, Tensor]
dual = cache(tiny_dual)


@cache
def model(kind: str = "image", seed: int = 4, dropout: float = 0.0) -> he.Ensemble:
    """A classifier with one member, class names and preprocessing."""
    if kind == "text":
        reading = he.TextPreprocessing(LONGEST, segments=True, tokenizer=word_tokenizer().tokenizer)
        return text_model(seed, WORDS, projection_dropout=dropout).with_metadata(preprocessing=reading)
    looking = he.ImagePreprocessing((8, 8), mean=(0.5,) * 3, std=(0.5,) * 3)
    return image_model(seed, projection_dropout=dropout).with_metadata(preprocessing=looking)


@cache
def hydra(kind: str = "image", dropout: float = 0.0) -> he.Ensemble:
    """Two members of one model with different heads, calibrated."""
    base = model(kind, dropout=dropout)
    fused = he.fuse([he.prune(base, [(0, 1), (2, 2)]), he.prune(base, [(1, 0), (2, 3)])])
    return he.calibrate(fused, batches(kind, seed=9))


def samples(kind: str, count: int, seed: int = 1, shift: float = 0.0) -> Batch:
    """Inputs of a kind, texts right-padded, and labels; `shift` is added to images and changes the words of texts."""
    if kind == "image":
        return build_cases.samples(count, seed, shift)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, TOKENS + 1, (count, 1), generator=generator)
    mask = (torch.arange(TOKENS)[None] < lengths).long()  # [B, T]
    low = VOCABULARY // 2 if shift else 1
    ids = torch.randint(low, low + VOCABULARY // 2 - 1, (count, TOKENS), generator=generator) * mask
    segments = (torch.arange(TOKENS)[None] >= 2).long() * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}, torch.arange(count) % 2


def rows(inputs: Any, index: Any) -> Any:
    return inputs[index] if isinstance(inputs, Tensor) else {key: value[index] for key, value in inputs.items()}


def batches(kind: str = "image", count: int = 24, size: int = 4, seed: int = 1, shift: float = 0.0) -> list[Batch]:
    inputs, labels = samples(kind, count, seed, shift)
    cuts = [slice(start, start + size) for start in range(0, count, size)]
    return [(rows(inputs, cut), labels[cut]) for cut in cuts]


def shuffled(kind: str, count: int = 12, size: int = 4, seed: int = 1) -> DataLoader[int]:
    """Samples in batches, reshuffled by torch's generator on every pass."""
    inputs, labels = samples(kind, count, seed)
    return DataLoader(range(count), size, shuffle=True, collate_fn=lambda at: (rows(inputs, at), labels[at]))  # type: ignore[arg-type]
