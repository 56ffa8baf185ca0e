"""Evaluations of made-up methods for tests of tables and reports: quick to make, with every field filled."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles.evaluation.evaluate import evaluate
from hydra_ensembles.evaluation.evaluation import Evaluation, ModelInfo
from hydra_ensembles.model.cost import Cost
from hydra_ensembles.model.metadata import Calibration
from hydra_ensembles.report.compare import Cell, Comparison

CLASSES = 4
CLASS_NAMES = ("ant", "bee", "cat", "dog & <b>fox</b>")
TARGETS = torch.randint(CLASSES, (160,), generator=torch.Generator().manual_seed(0))


def noise(samples: int, members: int, scale: float, seed: int) -> Tensor:
    return scale * torch.randn(members, samples, CLASSES, generator=torch.Generator().manual_seed(seed))


def evaluated(id_logits: Tensor, labels: Tensor, ood: Any = None, shift: Any = None, **about: Any) -> Evaluation:
    """An evaluation of logits `[M, B, C]` that exist already: inputs are the numbers of their rows."""
    parts = list[Tensor]()

    def rows(logits: Tensor) -> Tensor:
        first = sum(one.shape[1] for one in parts)
        parts.append(logits)
        return torch.arange(first, first + logits.shape[1])

    id_data = [(rows(id_logits), labels)]
    nested = ood and isinstance(next(iter(ood.values())), dict)
    groups = {
        group: {name: [rows(one)] for name, one in sets.items()}
        for group, sets in (ood if nested else {"": ood or {}}).items()
    }
    shifted = {name: [(rows(one), targets)] for name, (one, targets) in (shift or {}).items()}
    every = torch.cat(parts, dim=1)
    return evaluate(
        lambda index: every[:, index], id_data, groups if nested else groups[""], shifted, progress=False, **about
    )


@cache
def evaluation(
    name: str = "Single",
    members: int = 1,
    strength: float = 2.0,
    seed: int = 1,
    *,
    ood: bool = True,
    shift: bool = True,
    threshold: float | None = None,
) -> Evaluation:
    logits = noise(len(TARGETS), members, 1.0, seed) + strength * torch.nn.functional.one_hot(TARGETS, CLASSES)
    sets = {
        "near": {"close": noise(90, members, 1.4, seed + 10)},
        "far": {"textures": noise(70, members, 1.0, seed + 11), "digits": noise(80, members, 0.7, seed + 12)},
    }
    counts = {"parameters": 1_000_000 * (1 + members), "multiply_adds": 10**9 * members}
    about = {"source": "made for a test", "history": ("converted", "pruned")}
    found = evaluated(
        logits,
        TARGETS,
        sets if ood else None,
        {"fog": (logits + noise(len(TARGETS), members, 1.0, seed + 13), TARGETS)} if shift else None,
        name=name,
        id_name="own",
        calibration=Calibration(threshold=threshold),
    )
    model = ModelInfo(
        "image", members, CLASSES, CLASS_NAMES, heads="5" if members == 1 else f"3x{members}", **counts, **about
    )
    return replace(found, model=replace(model, calibration=found.model.calibration))


def methods() -> list[Evaluation]:
    """Three methods; the last has everything a report can show."""
    return [
        evaluation("Single"),
        evaluation("Deep Ensemble", members=3, strength=2.4, seed=3),
        evaluation("Hydra", members=3, strength=2.2, seed=2, threshold=0.5),
    ]


def costs() -> list[Cost]:
    rows = {"Single": (2_000_000, 1.0), "Deep Ensemble": (6_000_000, 3.0), "Hydra": (4_000_000, 1.25)}
    return [
        Cost(name, parameters, 10**9, 5 * ratio, ratio, 4, "NVIDIA H200", 20)
        for name, (parameters, ratio) in rows.items()
    ]


def cells(comparison: Comparison, name: str) -> dict[str, Cell]:
    """The row of one method, by column."""
    return {column.key: cell for column, cell in zip(comparison.columns, comparison.rows[name], strict=True)}
