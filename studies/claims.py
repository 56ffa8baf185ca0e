"""Every comparison the paper makes, held against ours: the sign of the difference, by a paired bootstrap."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_ensembles.metrics.bootstrap import ood_replicates
from hydra_ensembles.metrics.calibration import brier_per_sample, ece_of_confidence, nll_per_sample, top_label
from hydra_ensembles.metrics.ood import OodMetric
from hydra_ensembles.prediction import Prediction, ScoreName

from .methods import DEEP, DEEP_CLASSIFIERS, HYDRA, HYDRA_PAPER, HYDRA_TAYLOR, SINGLE
from .paper import COLUMN_OF, PAPER
from .results import StoredStudy

Verdict = Literal["reproduced", "not reproduced", "tie"]
Floats = npt.NDArray[np.float64]

RESAMPLES = 300
LEVEL = 0.95
LOWER_IS_BETTER = ("nll", "brier", "ece", "aece", "fpr95")

COMPARISONS: tuple[tuple[str, str, str], ...] = (
    ("all.auroc", HYDRA, SINGLE),
    ("all.auroc", HYDRA, DEEP),
    ("all.fpr95", HYDRA, DEEP),
    ("all.aupr", HYDRA, DEEP),
    ("near.auroc", HYDRA, DEEP),
    ("far.auroc", HYDRA, DEEP),
    ("all.auroc", HYDRA, "MC Dropout"),
    ("all.auroc", HYDRA, "CircAvg"),
    ("all.auroc", HYDRA, HYDRA_TAYLOR),
    ("all.auroc", HYDRA_TAYLOR, SINGLE),
    ("all.auroc", "CircAvg", SINGLE),
    ("all.auroc", "CircAvg", "Taylor"),
    ("all.auroc", "Taylor", SINGLE),
    ("accuracy", HYDRA, SINGLE),
    ("accuracy", HYDRA, DEEP),
    ("nll", HYDRA, SINGLE),
    ("nll", "Taylor", SINGLE),
    ("ece", HYDRA, SINGLE),
    ("ece", "Taylor", SINGLE),
)
"""Metric, first method, second method; the claimed sign is that of the paper's own numbers."""


@dataclass(frozen=True)
class Claim:
    """One comparison.

    Attributes:
        metric: Metric.
        first, second: Methods.
        setting: Our Hydra (Circ): in the paper's setting, or as chosen on half B.
        paper: The paper's difference, first minus second.
        ours: Our difference, mean over seeds.
        low, high: Its bootstrap interval.
        verdict: Whether our sign is the paper's; an interval that holds zero is a tie.
    """

    metric: str
    first: str
    second: str
    setting: Literal["paper", "chosen"]
    paper: float
    ours: float
    low: float
    high: float
    verdict: Verdict


def study_claims(study: StoredStudy, replicates: "Replicates") -> list[Claim]:
    """Every comparison, in the paper's setting (its score) and as chosen on half B (each method's own score)."""
    column = COLUMN_OF[study.name]
    found = []
    for metric, first, second in COMPARISONS:
        if column == "SST-2":  # what the paper calls Deep Ensembles there
            second = DEEP_CLASSIFIERS if second == DEEP else second
        paper = PAPER[column][first][metric] - PAPER[column][second][metric]
        settings: tuple[Literal["paper", "chosen"], ...] = ("paper", "chosen") if first == HYDRA else ("paper",)
        for setting in settings:
            ours = HYDRA_PAPER if first == HYDRA and setting == "paper" else first
            value, low, high = replicates.difference(metric, ours, second, own_score=setting == "chosen")
            found.append(Claim(metric, ours, second, setting, paper, value, low, high, verdict(paper, low, high)))
    return found


def verdict(paper: float, low: float, high: float) -> Verdict:
    """Whether an interval lies on the side of the paper's difference."""
    if low <= 0.0 <= high:
        return "tie"
    return "reproduced" if (low > 0.0) == (paper > 0.0) and paper != 0.0 else "not reproduced"


class Replicates:
    """Bootstrap replicates of any metric of any method, made once; all methods share the draws."""

    def __init__(self, study: StoredStudy, resamples: int | None = None) -> None:
        self.study, self.resamples = study, RESAMPLES if resamples is None else resamples
        self._known: dict[tuple[str, str, int, str], tuple[float, Floats]] = {}

    def difference(self, metric: str, first: str, second: str, own_score: bool) -> tuple[float, float, float]:
        """First minus second, mean over seeds, with its interval."""
        values, replicates = [], []
        for seed in self.study.seeds:
            ours = self._of(metric, first, seed, self.study.score(first) if own_score else "msp")
            theirs = self._of(metric, second, seed, self.study.score(second) if own_score else "msp")
            values.append(ours[0] - theirs[0])
            replicates.append(ours[1] - theirs[1])
        low, high = np.quantile(np.mean(replicates, axis=0), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(np.mean(values)), float(low), float(high)

    def _of(self, metric: str, method: str, seed: int, score: ScoreName) -> tuple[float, Floats]:
        """A metric of the ID set, or the mean of one over the OOD sets of a group, and its replicates."""
        group, _, name = metric.rpartition(".")
        if not group:
            return self._once((metric, method, seed, ""), lambda: self._classification(metric, method, seed))
        sets = self.study.groups(*(("near", "far") if group == "all" else (group,)))
        parts = [
            self._once(
                (f"{name} {score}", method, seed, one),
                lambda one=one: self._detection(name, one, method, seed, score),  # type: ignore[misc]
            )
            for one in sets
        ]
        return float(np.mean([value for value, _ in parts])), np.mean([drawn for _, drawn in parts], axis=0)

    def _once(self, key: tuple[str, str, int, str], make: Callable[[], tuple[float, Floats]]) -> tuple[float, Floats]:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _predict(self, method: str, seed: int, name: str) -> Prediction:
        calibration = self.study.calibration(method, seed)
        temperature = None if calibration is None else calibration.temperature[0]
        return Prediction.from_logits(self.study.logits(method, seed, name), temperature=temperature)

    def _detection(self, metric: str, name: str, method: str, seed: int, score: ScoreName) -> tuple[float, Floats]:
        inside = self._predict(method, seed, self.study.groups("id")[0]).score(score)
        outside = self._predict(method, seed, name).score(score)
        chosen: OodMetric = metric  # type: ignore[assignment]
        return ood_replicates(chosen, inside, outside, resamples=self.resamples)

    def _classification(self, metric: str, method: str, seed: int) -> tuple[float, Floats]:
        prediction = self._predict(method, seed, self.study.groups("id")[0])
        return classification_replicates(metric, prediction, self.study.labels(seed), self.resamples)


def classification_replicates(
    metric: str, prediction: Prediction, labels: Tensor, resamples: int
) -> tuple[float, Floats]:
    """A metric, and its value on every resample `[R]`; all predictions for as many samples share the draws."""
    columns, measured = _per_sample(metric, prediction, labels)
    generator = np.random.default_rng(0)
    count = len(columns[0])
    draws = (torch.from_numpy(generator.integers(count, size=count)) for _ in range(resamples))
    return measured(*columns), np.array([measured(*(column[rows] for column in columns)) for rows in draws])


def _per_sample(metric: str, prediction: Prediction, labels: Tensor) -> tuple[list[Tensor], Callable[..., float]]:
    """What a metric needs of each sample, and the metric of drawn samples."""
    if metric == "ece":
        confidence, correct = top_label(prediction.probs, labels)
        return [confidence, correct], ece_of_confidence
    columns = {
        "accuracy": lambda: (prediction.label == labels).double(),
        "nll": lambda: nll_per_sample(prediction.probs, labels),
        "brier": lambda: brier_per_sample(prediction.probs, labels),
    }
    return [columns[metric]()], lambda column: float(column.mean())
