"""What a user gains: mistakes and OOD images caught at a promised acceptance, over many draws.

A draw splits the labelled images (one half sets temperature and thresholds, the other is measured) and takes half of
each OOD set. All methods see the same draws, so their differences are paired. The spread over halves of one set is
about the standard error of its mean.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..calibrate import fit_calibration
from ..errors import HydraWarning
from ..metrics.conformal import conformal_threshold
from ..metrics.inputs import mean
from ..metrics.probabilities import at_labels, ece_of_confidence
from ..prediction import Prediction
from ..report.table import Cell, Column, Comparison, Row

SINGLE, BRANCHES, DEEP = "Single", "Pruned branches", "Deep Ensemble*"
FAMILIAR = "familiar"  # name of the labelled set
REASONS = ("unsure", "unfamiliar", "both")

COLUMNS = (
    Column("accuracy", "Acc %", better="higher", digits=1, scale=100),
    Column("nll", "NLL", better="lower", digits=3),
    Column("ece", "ECE %", better="lower", digits=1, scale=100),
    *(
        Column(f"{kind}.{reason}", reason, f"{kind.capitalize()} %", "higher", 0, 100)
        for kind, reasons in {"mistakes": ("unsure", "both"), "near": REASONS, "far": REASONS}.items()
        for reason in reasons
    ),
    Column("price", "Price", better="lower", suffix="×"),
)
"""Columns of the demo's table."""


@dataclass(frozen=True, eq=False)
class Answers:
    """A model's answers to a set: member logits `[M, N, C]`, and how unfamiliar each image is, `[N]`."""

    logits: Tensor
    unfamiliar: Tensor

    @property
    def size(self) -> int:
        """Number of images."""
        return self.logits.shape[1]

    @cached_property
    def scores(self) -> tuple[Tensor, Tensor]:
        """How unsure the model is, and how unfamiliar the images are, `[N]` each."""
        return Prediction.from_logits(self.logits).score("msp"), self.unfamiliar

    @classmethod
    def joined(cls, parts: Sequence["Answers"]) -> "Answers":
        """Concatenate the answers to several sets."""
        logits = torch.cat([part.logits for part in parts], dim=1)
        return cls(logits, torch.cat([part.unfamiliar for part in parts]))

    @classmethod
    def stacked(cls, models: Sequence["Answers"]) -> "Answers":
        """Combine the answers of several models as one ensemble; unfamiliarity is the mean over models."""
        unfamiliar = torch.stack([model.unfamiliar for model in models]).mean(dim=0)
        return cls(torch.cat([model.logits for model in models]), unfamiliar)


AnswersBySet = Mapping[str, Answers]  # by the name of the set
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """A number over draws and backbones: mean, standard deviation, and the interval that contains 95 % of values."""

    mean: float
    deviation: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Values) -> "Spread":
        """Summarise values, ignoring NaN."""
        low, high = np.nanquantile(values, (0.025, 0.975))
        return cls(float(np.nanmean(values)), float(np.nanstd(values)), float(low), float(high))


@dataclass(frozen=True)
class DemoMethod:
    """Results of one method; `price` is its multiply-adds divided by those of the single model."""

    backbones: int
    price: float
    numbers: Mapping[str, Spread]


@dataclass(frozen=True)
class Gains:
    """Results of all methods.

    Attributes:
        share: The minimum share of familiar images that every threshold was set to accept.
        draws: Number of draws.
        samples: Number of images of each set; a draw measures half of them.
        methods: Results by method name.
        best: For each number, the methods that no other is significantly better than.
    """

    share: float
    draws: int
    samples: Mapping[str, int]
    methods: Mapping[str, DemoMethod]
    best: Mapping[str, tuple[str, ...]]

    @property
    def table(self) -> Comparison:
        """All methods side by side; bold if no other is significantly better, and some are significantly worse."""

        def cell(name: str, column: Column) -> Cell:
            method, best = self.methods[name], self.best.get(column.key, ())
            if column.key == "price":
                return Cell(column.write(method.price), method.price)
            number = method.numbers.get(column.key)
            if number is None:
                return Cell("–")
            marked = name in best and len(best) < len(self.methods)
            text = column.write(number.mean, number.deviation)
            return Cell(text, number.mean, number.deviation, "best" if marked else "")

        rows = [Row(name, tuple(cell(name, column) for column in COLUMNS)) for name in self.methods]
        runs = ", ".join(f"{name} {method.backbones}" for name, method in self.methods.items())
        sizes = ", ".join(f"{count:,} {name}" for name, count in self.samples.items())
        half = (1 + self.share) / 2
        notes = (
            "Mistakes, Near, Far: the declined share of own mistakes, of images of unknown classes "
            "from the same source, and of another kind of image. Every threshold promises to accept "
            f"{self.share:.0%} of familiar images: on confidence (unsure), on the Mahalanobis distance of features "
            f"(unfamiliar), or {half:.0%} on each (both).",
            f"Mean ± standard deviation over {self.draws} random halves and over backbones ({runs}); bold: no other is "
            f"significantly better, and some are significantly worse (95 %). Images: {sizes}. Price: multiply-adds. "
            "* Models trained from different seeds; of two of them, and of what was built from them, the package has "
            "only stored answers.",
        )
        return Comparison(COLUMNS, tuple(rows), notes)


def gains(
    methods: Mapping[str, Sequence[AnswersBySet]],
    labels: Tensor,
    groups: Mapping[str, Sequence[str]],
    prices: Mapping[str, float],
    *,
    share: float = 0.9,
    draws: int = 20,
) -> Gains:
    """Measure methods on the same draws.

    Args:
        methods: For each method, its answers to every set, once for every backbone it was made from.
        labels: Labels `[N]` of the familiar set.
        groups: Names of the near and far OOD sets.
        prices: Multiply-adds of each method divided by those of the single model.
        share: The share of familiar images that thresholds promise to accept.
        draws: Number of draws.
    """
    values: dict[str, dict[str, Values]] = {}  # by method and number, [backbones, draws]
    measured: dict[str, DemoMethod] = {}
    for name, models in methods.items():
        runs = [[_measured(sets, labels, groups, share, seed) for seed in range(draws)] for sets in models]
        values[name] = _columns(runs)
        spreads = {key: Spread.of(numbers) for key, numbers in values[name].items()}
        measured[name] = DemoMethod(len(models), prices[name], spreads)
    best: dict[str, tuple[str, ...]] = {}
    for column in COLUMNS[:-1]:
        by_method = {name: numbers[column.key] for name, numbers in values.items() if column.key in numbers}
        sign = 1.0 if column.better == "higher" else -1.0
        unbeaten = []
        for name, numbers in by_method.items():  # a single backbone broadcasts against all
            leads = [np.nanquantile(sign * (other - numbers), 0.025) for other in by_method.values()]
            if not any(lead > 0 for lead in leads):
                unbeaten.append(name)
        if by_method:
            best[column.key] = tuple(unbeaten)
    sizes = {name: answers.size for name, answers in next(iter(methods.values()))[0].items()}
    return Gains(share, draws, sizes, measured, best)


def _measured(
    sets: AnswersBySet, labels: Tensor, groups: Mapping[str, Sequence[str]], share: float, seed: int
) -> dict[str, float]:
    """All numbers of one model on one draw."""
    draw = np.random.default_rng(seed)

    def halves(count: int) -> tuple[Tensor, Tensor]:
        order = torch.from_numpy(draw.permutation(count))
        return order[: count // 2], order[count // 2 :]

    familiar = sets[FAMILIAR]
    held_out, test = halves(len(labels))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HydraWarning)  # few images cannot promise a share
        calibration = fit_calibration(familiar.logits[:, held_out], labels[held_out])
    p = calibration.prediction(familiar.logits[:, test])
    wrong = p.label != labels[test]
    alone = [conformal_threshold(score[held_out], share) for score in familiar.scores]
    half = (1.0 + share) / 2  # for two thresholds, so that at least `share` pass both
    both = [conformal_threshold(score[held_out], half) for score in familiar.scores]

    def refused(answers: Answers, rows: Tensor) -> dict[str, Tensor]:
        """Which images are declined, for each of `REASONS`, `[rows]` of bool."""
        unsure, unfamiliar = (score[rows] for score in answers.scores)
        return {
            "unsure": unsure > alone[0],
            "unfamiliar": unfamiliar > alone[1],
            "both": (unsure > both[0]) | (unfamiliar > both[1]),
        }

    declined = refused(familiar, test)
    ood_caught = {name: refused(sets[name], halves(sets[name].size)[0]) for names in groups.values() for name in names}
    numbers = {
        "accuracy": 1.0 - mean(wrong),
        "nll": -mean(at_labels(p.log_probs, labels[test])),
        "ece": ece_of_confidence(p.confidence, ~wrong),
    }
    for reason in REASONS:
        numbers[f"accepted.{reason}"] = 1.0 - mean(declined[reason])
        numbers[f"mistakes.{reason}"] = mean(declined[reason][wrong])  # NaN without a mistake
        caught = {group: np.mean([mean(ood_caught[name][reason]) for name in names]) for group, names in groups.items()}
        numbers |= {f"{group}.{reason}": float(part) for group, part in caught.items()}
        # Familiar images answered right or declined if wrong; OOD images declined: every group has equal weight.
        numbers[f"handled.{reason}"] = float(np.mean([mean(declined[reason] == wrong), *caught.values()]))
    return numbers


def _columns(rows: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, Values]:
    """Transpose numbers `[backbones][draws][key]` to `[key][backbones, draws]`; drops keys that are NaN everywhere."""
    columns = {key: np.array([[draw[key] for draw in model] for model in rows]) for key in rows[0][0]}
    return {key: values for key, values in columns.items() if not np.isnan(values).all()}
