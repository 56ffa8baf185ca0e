"""Metrics from the columns of a method, and their uncertainty over test samples.

Every metric with an interval is, to first order, a mean over samples: it comes with its *influences*, one per sample
and set, whose variance gives that of the metric. For paired comparisons, influences of two methods on the same samples
are subtracted and averaged over seeds before their variance is taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import ndtri, stdtrit  # quantiles; scipy.stats has them too, but takes a second to import

from hydra_ensembles.metrics import aurc
from hydra_ensembles.metrics.probabilities import equal_width_groups, of_all, weighted_adaptive_ece

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Columns = Mapping[str, npt.NDArray[Any]]  # by `set|column`
Groups = Mapping[str, Sequence[str]]  # names of OOD sets by `near` and `far`

BINS = 15
CALIBRATED = "calibrated."  # prefix of metrics after calibration; of their columns, `calibrated_`
LEVEL = 0.95
CONFIDENT = "vilu"  # a score that is minus the log-odds of being right, and so gives a confidence of its own
SCORES = {"": "doubt", **{f"{name}:": name for name in ("entropy", "mahalanobis", CONFIDENT)}}
SPREAD = "mutual_information"  # of members: its mean over a set is reported
SHIFT = "shift"
SEVERITIES = tuple(f"severity {level}" for level in range(1, 6))
FEWEST_SEEDS = 3  # needed to call a difference significant or to judge a claim
FEWEST = 1000  # samples that a set needs for FPR95; rows may ask for fewer
LOWER = ("nll", "brier", "ece", "aece", "aurc", "fpr95")  # metrics where lower is better


@dataclass(frozen=True)
class Number:
    """A metric, and the influences of its samples by set."""

    value: float
    influences: Mapping[str, Floats]

    @staticmethod
    def mean(parts: Sequence["Number"]) -> "Number":
        """The mean of numbers, on the same or different sets."""
        if len(parts) == 1:
            return parts[0]
        joined: dict[str, Floats] = {}
        for part in parts:
            for name, influences in part.influences.items():
                joined[name] = joined[name] + influences if name in joined else influences
        means = {name: influences / len(parts) for name, influences in joined.items()}
        return Number(mean(part.value for part in parts), means)

    def minus(self, other: "Number") -> "Number":
        """The difference of two numbers on the same samples."""
        return Number(
            self.value - other.value, {name: ours - other.influences[name] for name, ours in self.influences.items()}
        )

    @property
    def deviation(self) -> float:
        """The standard deviation due to the sampling of test data."""
        return float(np.sqrt(sum(influences.var(ddof=1) / len(influences) for influences in self.influences.values())))


@dataclass(frozen=True)
class Difference:
    """A mean difference over seeds, and half the width of its interval over seeds and test samples.

    The interval is of `LEVEL` for one look at the test set; for several, it is as wide as a Bonferroni correction says.
    """

    value: float
    half_width: float
    seeds: int

    @classmethod
    def of(cls, ours: Sequence[Number], theirs: Sequence[Number], looks: int = 1) -> "Difference":
        """From numbers of the same seeds; adds both variances, using Student's t over seeds."""
        gaps = [one.minus(other) for one, other in zip(ours, theirs, strict=True)]
        below = 1 - (1 - LEVEL) / looks / 2  # share of the distribution below the interval's upper end
        among_samples = float(ndtri(below)) * Number.mean(gaps).deviation
        among_seeds = 0.0
        count = len(gaps)
        if count > 1:
            among_seeds = float(stdtrit(count - 1, below)) * stdev(gap.value for gap in gaps) / count**0.5
        return cls(mean(gap.value for gap in gaps), float(np.hypot(among_samples, among_seeds)), count)

    @property
    def certain(self) -> bool:
        """Whether the interval excludes zero; False below three seeds, which say little about how seeds vary."""
        return self.seeds >= FEWEST_SEEDS and abs(self.value) > self.half_width

    def verdict(self, key: str) -> str:
        """`better` or `worse` where the difference is certain, otherwise nothing."""
        if not self.certain:
            return ""
        return "better" if (self.value < 0) == (key.rpartition(".")[2] in LOWER) else "worse"


def numbers(columns: Columns, inside: str, groups: Groups) -> dict[str, Number]:
    """Every metric with influences that these columns give: `accuracy`, `calibrated.nll`, `entropy:all.auroc`."""
    raw = {key.removeprefix(f"{inside}|"): column for key, column in columns.items() if key.startswith(f"{inside}|")}
    own = {name: column.astype(np.float64) for name, column in raw.items()}
    by_key = {"accuracy": _mean(own["correct"], inside)}
    for prefix in ("", CALIBRATED):
        column = prefix.replace(".", "_")
        losses = [key for key in ("nll", "brier") if column + key in own]
        by_key |= {f"{prefix}{key}": _mean(own[column + key], inside) for key in losses}
        if f"{column}doubt" in own:
            by_key[f"{prefix}ece"] = _ece(1.0 - own[f"{column}doubt"], own["correct"], inside)
    by_key["aurc"] = _aurc(own["doubt"], 1.0 - own["correct"], inside)
    if CONFIDENT in own:
        by_key[f"{CONFIDENT}:ece"] = _ece(_confidence(own[CONFIDENT]), own["correct"], inside)
        by_key[f"{CONFIDENT}:aurc"] = _aurc(own[CONFIDENT], 1.0 - own["correct"], inside)
    outside = [name for names in groups.values() for name in names]
    for prefix, score in SCORES.items():
        if not outside or any(f"{name}|{score}" not in columns for name in (inside, *outside)):
            continue
        ours, *theirs = _ranked([raw[score], *(columns[f"{name}|{score}"] for name in outside)])
        sets = {name: _auroc(ours, ranked, inside, name) for name, ranked in zip(outside, theirs, strict=True)}
        by_key |= {f"{prefix}ood.{name}.auroc": number for name, number in sets.items()}
        for group, names in {**groups, "all": list(sets)}.items():
            by_key[f"{prefix}{group}.auroc"] = Number.mean([sets[name] for name in names])
    return by_key


def shift_numbers(columns: Columns) -> dict[str, Number]:
    """Metrics on corrupted images: `severity 1.accuracy` and so on, and `shift.accuracy`, their mean.

    Columns are means over the corruptions for each image, as `severity 1|correct`.
    """
    by_key: dict[str, Number] = {}
    for column, metric in (("correct", "accuracy"), ("brier", "brier"), ("nll", "nll")):
        levels = [level for level in SEVERITIES if f"{level}|{column}" in columns]
        means = [_mean(columns[f"{level}|{column}"].astype(np.float64), "corrupted") for level in levels]
        if means:
            by_key |= {f"{level}.{metric}": number for level, number in zip(levels, means, strict=True)}
            by_key[f"{SHIFT}.{metric}"] = Number.mean(means)
    return by_key


def plain_numbers(columns: Columns, inside: str, groups: Groups, fewest: int = FEWEST) -> dict[str, float]:
    """Every metric of one model, including those without influences."""
    known = numbers(columns, inside, groups)
    return {key: number.value for key, number in known.items()} | further_numbers(columns, inside, groups, fewest)


def further_numbers(columns: Columns, inside: str, groups: Groups, fewest: int = FEWEST) -> dict[str, float]:
    """Metrics without influences: adaptive ECE, AUPR, FPR95 of large sets, mutual information.

    AUPR and FPR95 use the largest probability, and also a learned score (`vilu:near.fpr95`) if there is one.
    """
    correct = torch.from_numpy(columns[f"{inside}|correct"])
    sure = {prefix: f"{inside}|{prefix.replace('.', '_')}doubt" for prefix in ("", CALIBRATED)}
    confidences = {key: 1.0 - columns[name].astype(np.float64) for key, name in sure.items() if name in columns}
    if f"{inside}|{CONFIDENT}" in columns:
        confidences[f"{CONFIDENT}:"] = _confidence(columns[f"{inside}|{CONFIDENT}"].astype(np.float64))
    by_key = {
        f"{key}aece": of_all(weighted_adaptive_ece, torch.from_numpy(values), correct)
        for key, values in confidences.items()
    }
    spread = {name: columns.get(f"{name}|{SPREAD}") for names in groups.values() for name in names}
    if (inner := columns.get(f"{inside}|{SPREAD}")) is not None:
        by_key[SPREAD] = float(inner.astype(np.float64).mean())
        means = {name: float(part.astype(np.float64).mean()) for name, part in spread.items() if part is not None}
        by_key |= _by_set_and_group("", SPREAD, means, groups)
    for prefix, score in {"": "doubt", f"{CONFIDENT}:": CONFIDENT}.items():
        if f"{inside}|{score}" in columns:
            by_key |= _detection(columns, inside, groups, prefix, score, fewest)
    return by_key


def _detection(columns: Columns, inside: str, groups: Groups, prefix: str, score: str, fewest: int) -> dict[str, float]:
    """AUPR by a score, and FPR95 of large sets."""
    id_scores = np.sort(columns[f"{inside}|{score}"].astype(np.float64))
    aupr = {}
    fpr95 = {}
    for name in (name for names in groups.values() for name in names):
        ood_scores = np.sort(columns[f"{name}|{score}"].astype(np.float64))
        aupr[name], false = _detected(id_scores, ood_scores)
        if len(ood_scores) >= fewest:
            fpr95[name] = false
    return _by_set_and_group(prefix, "aupr", aupr, groups) | _by_set_and_group(prefix, "fpr95", fpr95, groups)


def _by_set_and_group(prefix: str, metric: str, values: Mapping[str, float], groups: Groups) -> dict[str, float]:
    """A metric for every set that has it, and its means over each group and over all sets."""
    by_key = {f"{prefix}ood.{name}.{metric}": value for name, value in values.items()}
    all_sets = [name for names in groups.values() for name in names]
    for group, names in {**groups, "all": all_sets}.items():
        counted = [values[name] for name in names if name in values]
        by_key |= {f"{prefix}{group}.{metric}": mean(counted)} if counted else {}
    return by_key


def _confidence(odds: Floats) -> Floats:
    """The confidence of a score that is minus the log-odds of being right."""
    return 1.0 / (1.0 + np.exp(odds))


def _detected(inside: Floats, outside: Floats) -> tuple[float, float]:
    """For sorted scores: AUPR by steps, and FPR95 at the first threshold that flags 95 % of the OOD samples."""
    strictest = np.unique(outside)[::-1]
    false, caught = (len(scores) - np.searchsorted(scores, strictest) for scores in (inside, outside))
    steps = np.diff(caught, prepend=0) / len(outside)
    enough = int(np.argmax(100 * caught >= 95 * len(outside)))
    return float((steps * caught / (caught + false)).sum()), float(false[enough] / len(inside))


def _mean(values: Floats, inside: str) -> Number:
    average = float(values.mean())
    return Number(average, {inside: values - average})


def _ece(confidence: Floats, correct: Floats, inside: str) -> Number:
    """ECE over 15 equal-width bins; a sample's influence has the sign of its bin's gap."""
    gaps = correct - confidence
    bins = equal_width_groups(torch.from_numpy(confidence), BINS).numpy()
    signs = np.sign(np.bincount(bins, gaps))[bins]
    value = float((signs * gaps).mean())
    return Number(value, {inside: signs * gaps - value})


def _aurc(scores: Floats, wrong: Floats, inside: str) -> Number:
    """Area under the risk-coverage curve; a sample counts by its own error and by lowering the coverage of others.

    The order of tied scores is arbitrary: each sample gets the mean of its contributions over all tied positions.
    """
    count = len(scores)
    _, run, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    placed = np.repeat(np.arange(len(sizes)), sizes)  # group of tied scores at every position, most confident first
    value = aurc(torch.from_numpy(scores), torch.from_numpy(wrong > 0))
    share = np.arange(1, count + 1) / count
    missed = (np.bincount(run, wrong) / sizes)[placed]
    after = np.cumsum((missed / share)[::-1])[::-1] / count  # errors with at least this score, over their coverage
    covered, after = (np.bincount(placed, terms) / sizes for terms in (np.log(share), after))
    influence = -wrong * covered[run] + wrong.mean() - after[run]
    return Number(value, {inside: influence - influence.mean()})


Whole = npt.NDArray[np.int64]
Ranked = tuple[Whole, Whole]  # rank of every sample; by rank, number of samples below plus number up to it


def _ranked(parts: Sequence[Array]) -> list[Ranked]:
    """Scores of several sets as order-preserving integers with the same ties: float16 by their bits, others by rank."""
    ends = np.cumsum([len(part) for part in parts])[:-1]
    scores = np.concatenate(parts) + np.float16(0)  # merges -0 and +0
    if scores.dtype == np.float16:
        bits = scores.view(np.int16).astype(np.int64)
        ranks = np.where(bits < 0, -(bits & 0x7FFF), bits)
        ranks -= ranks.min()
    else:
        ranks = np.unique(scores, return_inverse=True)[1]
    size = int(ranks.max()) + 1
    counts = [(part, np.bincount(part, minlength=size)) for part in np.split(ranks, ends)]
    return [(part, 2 * np.cumsum(count) - count) for part, count in counts]


def _auroc(inside: Ranked, outside: Ranked, id_name: str, ood_name: str) -> Number:
    """How often an OOD sample has the larger score, ties counting half; with influences of both sets."""
    above = _share_below(outside, inside)  # share of ID samples, for every OOD sample
    value = float(above.mean())
    return Number(value, {id_name: (1.0 - _share_below(inside, outside)) - value, ood_name: above - value})


def _share_below(points: Ranked, values: Ranked) -> Floats:
    """For every point the share of values below it; equal values count half."""
    (positions, _), (ranks, below_and_upto) = points, values
    return below_and_upto[positions] / (2 * len(ranks))
