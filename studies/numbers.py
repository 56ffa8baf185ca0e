"""Every number of a study from its stored columns: rows, claims and contrasts."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_ensembles.errors import DataError
from hydra_ensembles.metrics import OodMetric, adaptive_ece_of_confidence, aupr, aurc, auroc, ece_of_confidence, fpr95
from hydra_ensembles.metrics.bootstrap import ood_replicates
from hydra_ensembles.prediction import ScoreName

from .methods import DEEP, DEEP_CLASSIFIERS, HYDRA, HYDRA_PAPER, HYDRA_TRUNK, SINGLE
from .paper import STANDS_FOR, claimed, paper_numbers
from .results import Columns, Results

Rows = dict[str, dict[str, list[float]]]  # method -> metric -> one number a seed
Floats = npt.NDArray[np.float64]
Claim = dict[str, Any]  # one comparison: methods and metric, the paper's difference, ours with its interval, verdict

CLASSIFICATION = ("accuracy", "brier", "nll", "ece", "aece")
DETECTION: Mapping[OodMetric, Callable[[Tensor, Tensor], float]] = {"auroc": auroc, "fpr95": fpr95, "aupr": aupr}
GROUPS = ("near", "far", "all")
DIGITS = 6
RESAMPLES, LEVEL = 300, 0.95
SAME = 2e-4  # numbers made again may differ by this: logits of few classes are stored in float16
SAME_FPR95 = 2e-3  # it jumps by all ID samples that lie between two OOD samples around the threshold


def tables_of(results: Results, resamples: int | None = None) -> dict[str, Any]:
    """Rows, claims and contrasts, as plain data."""
    replicates = Replicates(results, RESAMPLES if resamples is None else resamples)
    claims = all_claims(results, replicates)
    return {"rows": all_rows(results), "claims": claims, "contrasts": contrasts(results, replicates)}


def require_same(results: Results, made: Mapping[str, Any]) -> None:
    """Refuse tables, made again, that differ from the stored ones by more than the rounding of stored logits."""
    stored = results.facts
    gap = max(largest_gap(made[key], stored.get(key, {})) for key in ("rows", "contrasts") if key in made)
    verdicts = [[one["verdict"] for one in claims] for claims in (made["claims"], stored["claims"])]
    if gap > 1 or verdicts[0] != verdicts[1]:
        raise DataError(
            f"the tables of {results.name} come out different from its stored columns (by up to {gap:.2g} times what "
            "rounding explains); its files do not belong together, or metrics changed: `analyse --store` stores them"
        )


def largest_gap(first: Rows, second: Mapping[str, Mapping[str, Sequence[float]]]) -> float:
    """How far two sets of rows are apart, over what rounding explains; infinite where their entries differ."""
    if {method: set(row) for method, row in first.items()} != {method: set(row) for method, row in second.items()}:
        return float("inf")
    gaps = [
        abs(one - other) / (SAME_FPR95 if metric.endswith("fpr95") else SAME)
        for method, row in first.items()
        for metric, values in row.items()
        for one, other in zip(values, second[method][metric], strict=True)
    ]
    return max(gaps, default=0.0)


# --- rows ------------------------------------------------------------------------------------------------------------


def all_rows(results: Results) -> Rows:
    """Every number, method by method and seed by seed.

    They are `accuracy` and its like, `calibrated.ece`, `all.auroc`, `ood.SET.auroc`; with the own score, `chosen.…`.
    """
    rows: Rows = {}
    for method in results.methods:
        for seed in results.seeds:
            for metric, value in _classifier_numbers(results, method, seed).items():
                rows.setdefault(method, {}).setdefault(metric, []).append(round(value, DIGITS))
    return rows


def _classifier_numbers(results: Results, method: str, seed: int) -> dict[str, float]:
    task = results.tasks()[0]
    inside = results.columns(method, seed, task, task)
    found = classification(inside) | {"aurc": aurc(inside["msp"], ~inside["correct"])}
    for name in ("mutual_information", "disagreement"):
        found[name] = mean_of(inside[name])
        means = [mean_of(results.columns(method, seed, task, one)[name]) for one in results.outside(task, "all")]
        found[f"all.{name}"] = statistics.mean(means)
    scores: dict[str, ScoreName] = {"": "msp", "chosen.": results.score(method)}
    for prefix, score in scores.items():
        for place, value in detection(results, method, seed, task, score).items():
            found[f"{prefix}{'' if place.partition('.')[0] in GROUPS else 'ood.'}{place}"] = value
    numbers = classification(inside, "calibrated.")
    return found | {f"calibrated.{name}": numbers[name] for name in CLASSIFICATION if name != "accuracy"}


def mean_of(column: Tensor) -> float:
    """The mean of a column."""
    return float(column.double().mean())


def classification(columns: Columns, prefix: str = "") -> dict[str, float]:
    """Accuracy, likelihood and calibration from the columns of a test set that have a prefix."""
    confidence, correct = columns[f"{prefix}confidence"], columns[f"{prefix}correct"]
    means = {name: mean_of(columns[f"{prefix}{name}"]) for name in ("brier", "nll")}
    calibration = {"ece": ece_of_confidence, "aece": adaptive_ece_of_confidence}
    errors = {name: measured(confidence, correct) for name, measured in calibration.items()}
    return {"accuracy": mean_of(correct), **means, **errors}


def detection(results: Results, method: str, seed: int, task: str, score: ScoreName) -> dict[str, float]:
    """OOD metrics of every set of a task, `SET.auroc`, and their means, `near.auroc`, `far.auroc` and `all.auroc`."""
    inside = results.columns(method, seed, task, task)[score]
    found: dict[str, float] = {}
    for name in results.outside(task, "near", "far", "apart"):
        outside = results.columns(method, seed, task, name)[score]
        found |= {f"{name}.{key}": metric(inside, outside) for key, metric in DETECTION.items()}
    means = {
        f"{group}.{key}": statistics.mean(found[f"{one}.{key}"] for one in results.outside(task, group))
        for group in GROUPS
        for key in DETECTION
    }
    return found | means


# --- differences and their intervals ---------------------------------------------------------------------------------


class Replicates:
    """Bootstrap replicates of any metric of any method, made once; all methods and seeds share the draws."""

    def __init__(self, results: Results, resamples: int = RESAMPLES) -> None:
        self.results, self.resamples = results, resamples
        self._known: dict[tuple[str, ...], tuple[float, Floats]] = {}

    def difference(
        self, metric: str, first: str, second: str, tasks: Sequence[str], own_score: bool = False
    ) -> tuple[float, float, float]:
        """First minus second method, mean over seeds and tasks, with its interval."""
        values, replicates = [], []
        for seed in self.results.seeds:
            for task in tasks:
                ours, theirs = (self._of(metric, method, seed, task, own_score) for method in (first, second))
                values.append(ours[0] - theirs[0])
                replicates.append(ours[1] - theirs[1])
        low, high = np.quantile(np.mean(replicates, axis=0), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(np.mean(values)), float(low), float(high)

    def _of(self, metric: str, method: str, seed: int, task: str, own_score: bool) -> tuple[float, Floats]:
        group = metric.rpartition(".")[0]
        score = self.results.score(method) if own_score and group else "msp"
        key = (metric, method, str(seed), task, score)
        if key not in self._known:
            make = self._detected if group else self._classified
            self._known[key] = make(metric, method, seed, task, score)
        return self._known[key]

    def _classified(self, metric: str, method: str, seed: int, task: str, _: ScoreName) -> tuple[float, Floats]:
        """A metric of the test set, and its value on every resample `[R]`; as many samples share the draws."""
        columns = self.results.columns(method, seed, task, task)
        names = {"ece": ("confidence", "correct"), "accuracy": ("correct",)}.get(metric, (metric,))
        measured: Callable[..., float] = ece_of_confidence if metric == "ece" else mean_of
        needed = [columns[name] for name in names]
        generator, count = np.random.default_rng(0), len(needed[0])
        draws = (torch.from_numpy(generator.integers(count, size=count)) for _ in range(self.resamples))
        return measured(*needed), np.array([measured(*(column[rows] for column in needed)) for rows in draws])

    def _detected(self, metric: str, method: str, seed: int, task: str, score: ScoreName) -> tuple[float, Floats]:
        """A metric of OOD detection, mean over the sets of a group, every set drawn by itself."""
        group, _, name = metric.rpartition(".")
        inside, *outside = (
            self.results.columns(method, seed, task, one)[score] for one in (task, *self.results.outside(task, group))
        )
        chosen: OodMetric = name  # type: ignore[assignment]
        parts = [ood_replicates(chosen, inside, [one], resamples=self.resamples) for one in outside]
        return float(np.mean([value for value, _ in parts])), np.mean([drawn for _, drawn in parts], axis=0)


def all_claims(results: Results, replicates: Replicates) -> list[Claim]:
    """Every comparison that the paper makes, with its difference, ours with an interval, and whether the signs agree.

    In the paper's setting (its score), and of Hydra as chosen on half B too (each method's own score). What is not
    there is not testable.
    """
    found, column = list[Claim](), STANDS_FOR[results.name]
    numbers = paper_numbers("classifier", column)
    for metric, first, second in claimed("classifier", ""):
        if column == "SST-2" and second == DEEP:  # what the paper calls Deep Ensembles there
            second = DEEP_CLASSIFIERS
        paper = numbers[first][metric] - numbers[second][metric]
        for setting in ("paper", "chosen") if first == HYDRA else ("paper",):
            ours = HYDRA_PAPER if first == HYDRA and setting == "paper" else first
            value, low, high, sign = None, None, None, "not testable"
            if {ours, second} <= set(results.methods):
                value, low, high = replicates.difference(metric, ours, second, results.tasks(), setting == "chosen")
                sign = verdict(paper, low, high)
            names = {"setting": setting, "metric": metric, "first": ours, "second": second}
            found.append({**names, "paper": paper, "ours": value, "low": low, "high": high, "verdict": sign})
    return found


def verdict(paper: float, low: float, high: float) -> str:
    """Whether an interval lies on the side of the paper's difference; one that holds zero is a tie."""
    if low <= 0.0 <= high:
        return "tie"
    return "reproduced" if (low > 0.0) == (paper > 0.0) and paper != 0.0 else "not reproduced"


def contrasts(results: Results, replicates: Replicates) -> Rows:
    """Hydra (Circ), its trunk and the controls against the methods that matter, each with its own score.

    By first method and `METRIC − SECOND`: difference, low and high end, mean over seeds.
    """
    controls = [one["name"] for one in results.facts["recipe"].get("controls", ())]
    found: Rows = {}
    for first in (HYDRA, HYDRA_TRUNK, *controls):
        for metric in ("all.auroc", "accuracy", "ece"):
            for second in (one for one in (SINGLE, DEEP, HYDRA) if one != first):
                difference = replicates.difference(metric, first, second, results.tasks(), own_score=True)
                found.setdefault(first, {})[f"{metric} − {second}"] = [round(value, DIGITS) for value in difference]
    return found
