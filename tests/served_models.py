"""Small ensembles as they are served: images, texts and zero-shot, trunk and uneven heads, calibrated or not."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch

import hydra_ensembles as he
from architectures_clip import DUAL_CASES
from checkpoint_models import RAGGED, ensemble, hydra, metadata_for, text
from hydra_ensembles.model.config import EnsembleConfig, Sharing
from hydra_ensembles.model.ensemble import Ensemble
from zero_shot_models import NAMES, dual_of

SCORES = ("mahalanobis++", "relative_mahalanobis", "knn")
HEADS = tuple(((0, 1), *member[1:]) for member in RAGGED)  # the same in the layer of a trunk, uneven after it


def trunk_text() -> EnsembleConfig:
    """Three members that read texts, over a stem and a layer in common."""
    return replace(text(), heads=HEADS, sharing=Sharing(stem=True, mlp=True), trunk=1)


def inputs_for(one: Ensemble, size: int, seed: int = 0, tokens: int = 6) -> dict[str, torch.Tensor]:
    """Random inputs by name, preprocessed; texts are padded, all but the first."""
    generator, stem = torch.Generator().manual_seed(seed), one.config.stem
    if one.kind == "image":
        return {"pixel_values": torch.randn(size, stem.channels, *stem.image_size, generator=generator)}
    lengths = torch.randint(1, tokens + 1, (size, 1), generator=generator)
    lengths[0] = tokens
    return {
        "input_ids": torch.randint(1, stem.vocabulary, (size, tokens), generator=generator),
        "attention_mask": (torch.arange(tokens)[None] < lengths).long(),
        "token_type_ids": torch.randint(0, 2, (size, tokens), generator=generator),
    }


def _labelled(one: Ensemble, count: int, seed: int) -> list[Any]:
    inputs, labels = inputs_for(one, count, seed), torch.arange(count) % one.num_classes
    if one.kind == "image":
        inputs["pixel_values"] += labels[:, None, None, None]
    return [(inputs, labels)]


@cache
def served(name: str) -> Ensemble:
    """`image`, `text` or `zero-shot` with everything fitted, or the same with `, bare` and nothing."""
    kind, _, bare = name.partition(", ")
    if kind == "zero-shot":
        towers = [dual_of(DUAL_CASES[0]), dual_of(DUAL_CASES[0])]
        found = he.fuse([he.zero_shot(one, NAMES) for one in towers])
    else:
        config = hydra() if kind == "image" else trunk_text()
        found = ensemble(config, metadata=replace(metadata_for(config), calibration=None))
    if bare:
        return found
    found = he.fit_familiarity(found, _labelled(found, 120, 1), SCORES)
    return he.calibrate(found, _labelled(found, 80, 2), share=0.7)
