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
from .paper import AVERAGE, ID_TASK, STANDS_FOR, Numbers, claimed, classifier_numbers, zero_shot_numbers
from .results import Columns, Results

Rows = dict[str, dict[str, list[float]]]  # method -> metric -> one number a seed
Floats = npt.NDArray[np.float64]
Claim = dict[str, Any]  # one comparison: methods and metric, the paper's difference, ours with its interval, verdict

CLASSIFICATION = ("accuracy", "brier", "nll", "ece", "aece")
DETECTION: Mapping[str, Callable[[Tensor, Tensor], float]] = {"auroc": auroc, "fpr95": fpr95, "aupr": aupr}
GROUPS = ("near", "far", "all")
UNSEEN, EACH_ID_TASK = "unseen tasks", "each ID task"
DIGITS = 6
RESAMPLES, LEVEL = 300, 0.95
SAME = 2e-4  # numbers made again may differ by this: logits of few classes are stored in float16
SAME_FPR95 = 2e-3  # it jumps by all ID samples that lie between two OOD samples around the threshold


def tables_of(results: Results, resamples: int | None = None) -> dict[str, Any]:
    """Rows, claims, and contrasts (of classifiers) or the tasks left out of means (of dual encoders), as plain data."""
    replicates = Replicates(results, RESAMPLES if resamples is None else resamples)
    rows = all_rows(results)
    if results.classifies:
        return {
            "rows": rows,
            "claims": classifier_claims(results, replicates),
            "contrasts": contrasts(results, replicates),
        }
    counted = counted_tasks(results, rows)
    left_out = [task for task in results.tasks() if not any(task in one for one in counted.values())]
    claims = zero_shot_claims(results, replicates, counted.get("unseen", []))
    return {"rows": rows, "left_out": left_out, "claims": claims}


def require_same(results: Results, made: Mapping[str, Any]) -> None:
    """Hold tables that were made again against the stored ones.

    Raises:
        DataError: Rows, verdicts or anything else in them differ by more than the rounding of stored logits.
    """
    keys = [key for key in ("rows", "contrasts") if key in made]
    gap = max(largest_gap(made[key], results.facts[key]) for key in keys)
    verdicts = [[one["verdict"] for one in claims] for claims in (made["claims"], results.facts["claims"])]
    if gap > 1 or verdicts[0] != verdicts[1] or made.get("left_out") != results.facts.get("left_out"):
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


def all_rows(results: Results) -> Rows:
    """Every number, method by method and seed by seed.

    Of classifiers: `accuracy` and its like, `calibrated.ece`, `all.auroc`, `ood.SET.auroc`, and with the method's own
    score `chosen.…`. Of dual encoders: `task.TASK.accuracy`, `TASK.all.auroc`, `TASK.SET.auroc`, and means over the
    tasks of a domain that count, `unseen.accuracy`.
    """
    rows: Rows = {}
    make = _classifier_numbers if results.classifies else _dual_numbers
    for method in results.methods:
        for seed in results.seeds:
            for metric, value in make(results, method, seed).items():
                rows.setdefault(method, {}).setdefault(metric, []).append(round(value, DIGITS))
    if not results.classifies:
        for domain, tasks in counted_tasks(results, rows).items():
            for row in rows.values():
                for metric in CLASSIFICATION:
                    values = zip(*(row[f"task.{task}.{metric}"] for task in tasks), strict=True)
                    row[f"{domain}.{metric}"] = [round(statistics.mean(one), DIGITS) for one in values]
    return rows


def _classifier_numbers(results: Results, method: str, seed: int) -> dict[str, float]:
    task = results.tasks()[0]
    inside = results.columns(method, seed, task, task)
    found = classification(inside)
    found["aurc"] = aurc(inside["msp"], ~inside["correct"])
    for name in ("mutual_information", "disagreement"):
        found[name] = mean_of(inside[name])
        means = [mean_of(results.columns(method, seed, task, one)[name]) for one in results.outside(task, "all")]
        found[f"all.{name}"] = statistics.mean(means)
    for prefix, score in (("", "msp"), ("chosen.", results.score(method))):
        numbers = detection(results, method, seed, task, score)  # type: ignore[arg-type]
        found |= {
            f"{prefix}{'' if place.partition('.')[0] in GROUPS else 'ood.'}{place}": value
            for place, value in numbers.items()
        }
    calibrated = {name: inside[f"calibrated.{name}"] for name in ("confidence", "correct", "nll", "brier")}
    numbers = classification(calibrated)
    return found | {f"calibrated.{name}": numbers[name] for name in CLASSIFICATION if name != "accuracy"}


def _dual_numbers(results: Results, method: str, seed: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for task in results.tasks():
        numbers = classification(results.columns(method, seed, task, task))
        found |= {f"task.{task}.{name}": value for name, value in numbers.items()}
    for task in results.detections():
        numbers = detection(results, method, seed, task, "msp")
        found |= {f"{task}.{place}": value for place, value in numbers.items()}
    return found


def classification(columns: Columns) -> dict[str, float]:
    """Accuracy, likelihood and calibration from the columns of a test set."""
    confidence, correct = columns["confidence"], columns["correct"]
    return {
        "accuracy": mean_of(correct),
        "brier": mean_of(columns["brier"]),
        "nll": mean_of(columns["nll"]),
        "ece": ece_of_confidence(confidence, correct),
        "aece": adaptive_ece_of_confidence(confidence, correct),
    }


def detection(results: Results, method: str, seed: int, task: str, score: ScoreName) -> dict[str, float]:
    """OOD metrics of every set of a task, `SET.auroc`, and their means, `near.auroc`, `far.auroc` and `all.auroc`."""
    inside = results.columns(method, seed, task, task)[score]
    found: dict[str, float] = {}
    for name in results.outside(task, "near", "far", "apart"):
        outside = results.columns(method, seed, task, name)[score]
        found |= {f"{name}.{key}": metric(inside, outside) for key, metric in DETECTION.items()}
    for group in GROUPS:
        for key in DETECTION:
            found[f"{group}.{key}"] = statistics.mean(found[f"{one}.{key}"] for one in results.outside(task, group))
    return found


def mean_of(column: Tensor) -> float:
    """The mean of a column."""
    return float(column.double().mean())


def counted_tasks(results: Results, rows: Rows) -> dict[str, list[str]]:
    """The tasks of each domain that count in its mean: the single model is several times better than chance there.

    The rule stands in the recipe. Where no task of a domain is left, the domain has no mean.
    """
    least = float(results.facts["recipe"]["least_over_chance"])
    found = {}
    for domain in ("unseen", "seen"):
        tasks = [
            task
            for task in results.tasks(domain)
            if statistics.mean(rows[SINGLE][f"task.{task}.accuracy"]) >= least / results.facts["tasks"][task]["classes"]
        ]
        if tasks:
            found[domain] = tasks
    return found


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
        group, _, name = metric.rpartition(".")
        score = self.results.score(method) if own_score and group else "msp"
        key = (metric, method, str(seed), task, score)
        if key not in self._known:
            self._known[key] = (
                self._detected(name, group, method, seed, task, score)
                if group
                else classification_replicates(metric, self.results.columns(method, seed, task, task), self.resamples)
            )
        return self._known[key]

    def _detected(
        self, metric: str, group: str, method: str, seed: int, task: str, score: ScoreName
    ) -> tuple[float, Floats]:
        """A metric of OOD detection, mean over the sets of a group.

        Of classifiers every set is drawn by itself, of dual encoders all sets of a group together: as the stored
        intervals of either kind were made.
        """
        inside = self.results.columns(method, seed, task, task)[score]
        sets = self.results.outside(task, group)
        outside = [self.results.columns(method, seed, task, one)[score] for one in sets]
        chosen: OodMetric = metric  # type: ignore[assignment]
        together = [[one] for one in outside] if self.results.classifies else [outside]
        parts = [ood_replicates(chosen, inside, one, resamples=self.resamples) for one in together]
        return float(np.mean([value for value, _ in parts])), np.mean([drawn for _, drawn in parts], axis=0)


def classification_replicates(metric: str, columns: Columns, resamples: int) -> tuple[float, Floats]:
    """A metric, and its value on every resample `[R]`; all methods on as many samples share the draws."""
    needed = [columns["confidence"], columns["correct"]] if metric == "ece" else [columns[_COLUMN.get(metric, metric)]]
    measured: Callable[..., float] = ece_of_confidence if metric == "ece" else mean_of
    generator, count = np.random.default_rng(0), len(needed[0])
    draws = (torch.from_numpy(generator.integers(count, size=count)) for _ in range(resamples))
    return measured(*needed), np.array([measured(*(column[rows] for column in needed)) for rows in draws])


_COLUMN = {"accuracy": "correct"}


def classifier_claims(results: Results, replicates: Replicates) -> list[Claim]:
    """Every comparison of the paper, in its setting (its score) and as chosen on half B (each method's own score)."""
    task = STANDS_FOR[results.name]
    numbers, tasks, found = classifier_numbers(task), results.tasks(), []
    for metric, first, second in claimed("classifier", ""):
        if task == "SST-2" and second == DEEP:  # what the paper calls Deep Ensembles there
            second = DEEP_CLASSIFIERS
        paper = numbers[first][metric] - numbers[second][metric]
        for setting in ("paper", "chosen") if first == HYDRA else ("paper",):
            ours = HYDRA_PAPER if first == HYDRA and setting == "paper" else first
            difference = replicates.difference(metric, ours, second, tasks, own_score=setting == "chosen")
            names = {"metric": metric, "first": ours, "second": second, "setting": setting}
            found.append({**names, **judged(paper, difference)})
    return found


def zero_shot_claims(results: Results, replicates: Replicates, unseen: Sequence[str]) -> list[Claim]:
    """Every comparison of the paper, over unseen tasks and for each ID task; what is not there is not testable."""
    scopes: list[tuple[str, str, Sequence[str], Mapping[str, Numbers]]] = [
        (UNSEEN, UNSEEN, unseen, zero_shot_numbers(AVERAGE))
    ]
    there = [task for task in results.detections() if task in ID_TASK]
    scopes += [(EACH_ID_TASK, task, [task], zero_shot_numbers(ID_TASK[task])) for task in there]
    found = []
    for listed, scope, tasks, numbers in scopes:
        for metric, first, second in claimed("dual", listed):
            paper = numbers[first][metric] - numbers[second][metric]
            testable = bool(tasks) and {first, second} <= set(results.methods)
            difference = replicates.difference(metric, first, second, tasks) if testable else None
            names = {"scope": scope, "metric": metric, "first": first, "second": second}
            found.append({**names, **judged(paper, difference)})
    return found


def judged(paper: float, ours: tuple[float, float, float] | None) -> Claim:
    """The paper's difference, first minus second method; ours with its interval; and whether the signs agree."""
    value, low, high = (None, None, None) if ours is None else ours
    found = "not testable" if low is None or high is None else verdict(paper, low, high)
    return {"paper": paper, "ours": value, "low": low, "high": high, "verdict": found}


def verdict(paper: float, low: float, high: float) -> str:
    """Whether an interval lies on the side of the paper's difference; one that holds zero is a tie."""
    if low <= 0.0 <= high:
        return "tie"
    return "reproduced" if (low > 0.0) == (paper > 0.0) and paper != 0.0 else "not reproduced"


def contrasts(results: Results, replicates: Replicates) -> Rows:
    """Hydra (Circ), its trunk and the controls against the methods that matter, each with its own score.

    Returns:
        `contrasts[first][f"{metric} − {second}"] = [difference, low, high]`, mean over seeds.
    """
    controls = [one["name"] for one in results.facts["recipe"].get("controls", ())]
    return {
        first: {
            f"{metric} − {second}": [
                round(value, DIGITS)
                for value in replicates.difference(metric, first, second, results.tasks(), own_score=True)
            ]
            for metric in ("all.auroc", "accuracy", "ece")
            for second in (SINGLE, DEEP, HYDRA)
            if second != first
        }
        for first in (HYDRA, HYDRA_TRUNK, *controls)
    }
