"""Every comparison the paper makes in its zero-shot part, held against ours: the sign, by a paired bootstrap."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hydra_ensembles.metrics.bootstrap import ood_replicates
from hydra_ensembles.metrics.ood import OodMetric

from ..claims import LEVEL, Floats, classification_replicates, verdict
from ..rows import Rows
from .methods import (
    CIRC_AVG,
    HYDRA,
    HYDRA_IMAGE,
    HYDRA_IMAGE_TUNED,
    HYDRA_MORE,
    HYDRA_TEMPERATURE,
    SINGLE,
    TAYLOR,
    TEMPERATURE,
)
from .paper import AVERAGE, COLUMN_OF, DETECTED
from .results import StoredZeroShot
from .rows import counted_tasks

Verdict = Literal["reproduced", "not reproduced", "tie", "not testable"]

CLASSIFIED: tuple[tuple[str, str, str], ...] = (
    ("accuracy", HYDRA, SINGLE),
    ("accuracy", HYDRA, CIRC_AVG),
    ("accuracy", CIRC_AVG, TAYLOR),
    ("accuracy", TAYLOR, SINGLE),
    ("brier", CIRC_AVG, TAYLOR),
    ("nll", HYDRA, SINGLE),
    ("nll", HYDRA, TEMPERATURE),
    ("nll", HYDRA_TEMPERATURE, HYDRA),
    ("nll", CIRC_AVG, TAYLOR),
    ("ece", HYDRA, SINGLE),
    ("ece", HYDRA, TEMPERATURE),
    ("ece", HYDRA, CIRC_AVG),
    ("ece", CIRC_AVG, SINGLE),
    ("ece", CIRC_AVG, TAYLOR),
    ("ece", TAYLOR, SINGLE),
    ("accuracy", HYDRA, HYDRA_IMAGE),
    ("nll", HYDRA, HYDRA_IMAGE),
    ("ece", HYDRA, HYDRA_IMAGE),
    ("accuracy", HYDRA_IMAGE_TUNED, HYDRA_IMAGE),
    ("nll", HYDRA_IMAGE_TUNED, HYDRA_IMAGE),
    ("ece", HYDRA_IMAGE_TUNED, HYDRA_IMAGE),
    ("ece", HYDRA_MORE, HYDRA),
)
"""Means over tasks: metric, first method, second method; the claimed sign is that of the paper's own numbers."""

COMPARED: tuple[tuple[str, str, str], ...] = (
    ("all.auroc", HYDRA, SINGLE),
    ("all.fpr95", HYDRA, SINGLE),
    ("all.aupr", HYDRA, SINGLE),
    ("near.auroc", HYDRA, SINGLE),
    ("far.auroc", HYDRA, SINGLE),
    ("all.auroc", CIRC_AVG, SINGLE),
    ("all.auroc", TAYLOR, SINGLE),
    ("all.auroc", HYDRA, TAYLOR),
    ("all.auroc", HYDRA, CIRC_AVG),
    ("all.auroc", HYDRA, HYDRA_IMAGE),
    ("all.auroc", HYDRA_IMAGE_TUNED, HYDRA_IMAGE),
    ("near.aupr", HYDRA_MORE, HYDRA),
)
"""OOD detection, for each ID task."""

UNSEEN = "unseen tasks"


@dataclass(frozen=True)
class ZeroShotClaim:
    """One comparison.

    Attributes:
        scope: `unseen tasks`, or the ID task.
        metric: Metric.
        first, second: Methods.
        paper: The paper's difference, first minus second.
        ours: Our difference, mean over seeds; None where it cannot be tested.
        low, high: Its bootstrap interval.
        verdict: Whether our sign is the paper's; an interval that holds zero is a tie.
    """

    scope: str
    metric: str
    first: str
    second: str
    paper: float
    ours: float | None
    low: float | None
    high: float | None
    verdict: Verdict


def zero_shot_claims(study: StoredZeroShot, rows: Rows, resamples: int) -> list[ZeroShotClaim]:
    """Every comparison; one whose methods or tasks are not there is not testable."""
    replicates = _Replicates(study, counted_tasks(study, rows).get("unseen", []), resamples)
    found = [_claim(replicates, UNSEEN, *one, AVERAGE) for one in CLASSIFIED]
    for task in study.detections:
        if task in COLUMN_OF:
            found += [_claim(replicates, task, *one, DETECTED[COLUMN_OF[task]]) for one in COMPARED]
    return found


def _claim(
    replicates: "_Replicates",
    scope: str,
    metric: str,
    first: str,
    second: str,
    numbers: Mapping[str, Mapping[str, float]],
) -> ZeroShotClaim:
    paper = numbers[first][metric] - numbers[second][metric]
    there = {first, second} <= set(replicates.study.methods) and (scope != UNSEEN or bool(replicates.tasks))
    if not there:
        return ZeroShotClaim(scope, metric, first, second, paper, None, None, None, "not testable")
    value, low, high = replicates.difference(scope, metric, first, second)
    return ZeroShotClaim(scope, metric, first, second, paper, value, low, high, verdict(paper, low, high))


class _Replicates:
    """Bootstrap replicates of any metric of any method, made once; all methods and seeds share the draws."""

    def __init__(self, study: StoredZeroShot, tasks: list[str], resamples: int) -> None:
        self.study, self.tasks, self.resamples = study, tasks, resamples
        self._known: dict[tuple[str, str, str, int], tuple[float, Floats]] = {}

    def difference(self, scope: str, metric: str, first: str, second: str) -> tuple[float, float, float]:
        """First minus second, mean over seeds, with its interval."""
        values, replicates = [], []
        for seed in self.study.seeds:
            ours, theirs = (self._of(scope, metric, method, seed) for method in (first, second))
            values.append(ours[0] - theirs[0])
            replicates.append(ours[1] - theirs[1])
        low, high = np.quantile(np.mean(replicates, axis=0), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(np.mean(values)), float(low), float(high)

    def _of(self, scope: str, metric: str, method: str, seed: int) -> tuple[float, Floats]:
        if scope != UNSEEN:
            return self._once((scope, metric, method, seed), lambda: self._detection(scope, metric, method, seed))
        parts = [
            self._once((task, metric, method, seed), lambda task=task: self._classification(task, metric, method, seed))  # type: ignore[misc]
            for task in self.tasks
        ]
        return float(np.mean([value for value, _ in parts])), np.mean([drawn for _, drawn in parts], axis=0)

    def _once(self, key: tuple[str, str, str, int], make: Callable[[], tuple[float, Floats]]) -> tuple[float, Floats]:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _classification(self, task: str, metric: str, method: str, seed: int) -> tuple[float, Floats]:
        return classification_replicates(metric, *self.study.on_task(method, seed, task), self.resamples)

    def _detection(self, task: str, metric: str, method: str, seed: int) -> tuple[float, Floats]:
        group, _, name = metric.rpartition(".")
        chosen: OodMetric = name  # type: ignore[assignment]
        inside = self.study.on_task(method, seed, task)[0].score("msp")
        outside = [
            self.study.on_outside(method, seed, task, one).score("msp") for one in self.study.outside(task, group)
        ]
        return ood_replicates(chosen, inside, outside, resamples=self.resamples)
