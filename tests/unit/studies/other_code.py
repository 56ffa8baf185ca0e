"""A study's numbers and intervals, recomputed from its stored columns with numpy, scipy and scikit-learn only."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm, rankdata, sem, t
from sklearn import config_context
from sklearn.metrics import auc, average_precision_score, roc_curve

from studies.storing import single_of

Columns = Mapping[str, Any]  # by `set|column`
SCORES = {"": "msp", "entropy:": "entropy", "mahalanobis:": "mahalanobis"}
LEARNED = ("vilu", "neglabel")
_SINGLES: dict[Path, dict[int, dict[str, float]]] = {}  # by study and seed, cached


@config_context(assume_finite=True, skip_parameter_validation=True)
def by_other_code(stored: Columns, own: str, groups: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Every number of a study's tables that follows from columns, by key."""
    columns = {key: one.astype(float) for key, one in stored.items()}
    correct = columns[f"{own}|correct"]
    found = {"accuracy": float(correct.mean()), "aurc": _aurc(columns[f"{own}|msp"], correct)}
    for prefix, doubt in {"": "msp", "calibrated.": "calibrated.doubt"}.items():
        if f"{own}|{doubt}" in columns:
            kept = [key for key in ("nll", "brier") if f"{own}|{prefix}{key}" in columns]
            found |= {f"{prefix}{key}": float(columns[f"{own}|{prefix}{key}"].mean()) for key in kept}
            found[f"{prefix}ece"] = _ece(1 - columns[f"{own}|{doubt}"], correct)
    odds, doubt = columns.get(f"{own}|vilu"), columns[f"{own}|msp"]
    sure = 1 - doubt if odds is None else 1 / (1 + np.exp(odds))  # the row's own confidence
    found |= {"own.ece": _ece(sure, correct), "own.aece": _adaptive_ece(sure, correct)}
    found["own.aurc"] = _aurc(doubt if odds is None else odds, correct)
    every = [name for names in groups.values() for name in names]
    learned = next((name for name in LEARNED if f"{own}|{name}" in columns), "msp")
    areas = {
        score: {name: _auroc(*_sides(columns, own, name, score)) for name in every}
        for score in {*SCORES.values(), learned}
        if f"{own}|{score}" in columns
    }
    for prefix, score in {**SCORES, "own.": learned}.items():
        if score in areas and every:
            for group, names in {**groups, "all": every}.items():
                found[f"{prefix}{group}.auroc"] = float(np.mean([areas[score][name] for name in names]))
    for name in every:
        sides = _sides(columns, own, name, "msp")
        found[f"ood.{name}.auroc"], found[f"ood.{name}.aupr"] = areas["msp"][name], average_precision_score(*sides)
        found |= {f"ood.{name}.fpr95": _false(*sides)} if len(columns[f"{name}|msp"]) >= 1000 else {}
    for group, names in {**groups, "all": every}.items():
        for metric in ("fpr95", "aupr"):
            told = [found[key] for name in names if (key := f"ood.{name}.{metric}") in found]
            found |= {f"{group}.{metric}": float(np.mean(told))} if told else {}
    return found


def _aurc(scores: Any, correct: Any) -> float:
    """Between two distinct scores, mistakes are interpolated linearly in the number of answered samples."""
    rising, answered = np.sort(scores), np.arange(1, len(scores) + 1)
    ends = np.searchsorted(rising, np.unique(rising), side="right")
    mistakes = np.cumsum(1 - correct[np.argsort(scores)])[ends - 1]
    wrong = np.interp(answered, [0, *ends], [0, *mistakes])
    return float(auc(answered / len(scores), wrong / answered) / (1 - 1 / len(scores)))


def _adaptive_ece(confidence: Any, correct: Any) -> float:
    """Tied confidences each count with their share of correct answers."""
    _, places, counts = np.unique(confidence, return_inverse=True, return_counts=True)
    right = (np.bincount(places, correct) / counts)[places]
    parts = np.array_split(np.argsort(confidence), 15)
    return sum(abs(float((confidence[one] - right[one]).sum())) for one in parts) / len(correct)


def _ece(confidence: Any, correct: Any) -> float:
    """15 bins of equal width that include their upper edges."""
    bins = np.digitize(confidence, np.linspace(0, 1, 16)[1:-1], right=True)
    return float(sum(abs((confidence - correct)[bins == one].sum()) for one in range(15)) / len(correct))


def _sides(columns: Columns, own: str, name: str, score: str) -> tuple[Any, Any]:
    inside, outside = columns[f"{own}|{score}"], columns[f"{name}|{score}"]
    return np.repeat([0, 1], [len(inside), len(outside)]), np.concatenate([inside, outside])


def _auroc(labels: Any, scores: Any) -> float:
    """From the mean rank of the OOD samples (Mann-Whitney); ties count half."""
    ranks, outside = rankdata(scores), int(labels.sum())
    return float((ranks[labels == 1].mean() - (outside + 1) / 2) / (len(labels) - outside))


def _false(labels: Any, scores: Any) -> float:
    """False positive rate at the first threshold with a recall of at least 95 %."""
    positive, found, _ = roc_curve(labels, scores, drop_intermediate=False)
    return float(positive[np.argmax(found >= 0.95)])


def on_level(study: Any, row: str, numbers: Callable[[Columns], dict[str, float]]) -> list[dict[str, float]]:
    """Numbers of a row by seed: the gain over the Single of its run, added to Single's mean."""
    if study.folder not in _SINGLES:
        _SINGLES[study.folder] = {seed: numbers(study.columns("Single", seed)) for seed in study.seeds("Single")}
    single = _SINGLES[study.folder]
    keys = {key for one in single.values() for key in one}
    level = {key: float(np.mean([one[key] for one in single.values() if key in one])) for key in keys}
    found = []
    for seed in study.seeds(row):
        later = single_of(study.folder, seed).get(row)
        beside = single[seed] if later is None else numbers(later)
        own = numbers(study.columns(row, seed)).items()
        found.append({key: level[key] + value - beside[key] for key, value in own})
    return found


def gained(study: Any, row: str, key: str, looks: int) -> tuple[float, float]:
    """What a row gains over the Single of its runs, and half its interval: Student's over seeds, DeLong's for AUROC."""
    own, groups = study.facts["inside"], study.facts["groups"]
    names = groups.get(key.partition(".")[0], [name for group in groups.values() for name in group])
    gaps, samples = list[float](), list[dict[str, Any]]()
    for seed in study.seeds(row):
        beside = single_of(study.folder, seed).get(row) or study.columns("Single", seed)
        ours, theirs = (_terms(columns, own, names, key) for columns in (study.columns(row, seed), beside))
        samples.append({name: term - theirs[name] for name, term in ours.items()})
        gaps.append(float(samples[-1][own].mean()))
    means = [np.mean([one[name] for one in samples], axis=0) for name in samples[0]]
    upper = 1 - 0.05 / looks / 2
    seeds = float(t(len(gaps) - 1).ppf(upper) * sem(gaps))
    return float(np.mean(gaps)), float(np.hypot(norm.ppf(upper) * np.sqrt(sum(sem(one) ** 2 for one in means)), seeds))


def _terms(columns: Columns, own: str, names: Sequence[str], key: str) -> dict[str, Any]:
    """A metric's term for every sample, by set; the terms of each set have the metric as their mean."""
    if not key.endswith(".auroc"):
        return {own: columns[f"{own}|{'correct' if key == 'accuracy' else key}"].astype(float)}
    inside, terms = columns[f"{own}|msp"].astype(float), dict[str, Any]()
    for name in names:
        outside = columns[f"{name}|msp"].astype(float)
        ranks = rankdata(np.concatenate([inside, outside]))
        below = (ranks[: len(inside)] - rankdata(inside)) / len(outside)  # share of OOD samples with a lower score
        terms[own] = terms.get(own, 0) + (1 - below) / len(names)
        terms[name] = (ranks[len(inside) :] - rankdata(outside)) / len(inside) / len(names)
    return terms


def price(study: Any, row: str) -> str:
    """Latency relative to Single's, as in tables."""
    cost = study.cost(row)
    return f"{cost['latency_ms'] / study.cost('Single')['latency_ms']:.2f}x" if cost else "–"


def assert_printed(cell: str, values: Sequence[float], key: str) -> None:
    """Check that a table's cell shows the mean of these numbers, or a dash if there are none."""
    if not values:
        assert cell == "–", key
        return
    scale, within = (1, 0.0006) if key.rpartition(".")[2] in ("nll", "brier") else (100, 0.006)
    assert abs(scale * float(np.mean(values)) - float(cell.strip("*"))) < within, (key, cell, values)
