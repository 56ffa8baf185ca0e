"""The columns of a comparison: the paper's, costs, and abstentions of models with fitted familiarity."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from ..evaluation.evaluation import Evaluation

Direction = Literal["higher", "lower", "neither"]


@dataclass(frozen=True)
class Column:
    """One column of a comparison.

    Attributes:
        key: Name of the number in `Evaluation.numbers`, a field of `Cost`, or `heads`.
        title: Heading.
        group: Heading above several columns; empty for none.
        better: Which direction is better.
        digits: Digits after the point.
        scale: Factor applied before printing: 100 for percent, 1e-6 for millions.
        suffix: Printed after the number.
        ranked: Whether to mark the best; False if the methods are not comparable.
    """

    key: str
    title: str
    group: str = ""
    better: Direction = "neither"
    digits: int = 2
    scale: float = 1.0
    suffix: str = ""
    ranked: bool = True

    @property
    def heading(self) -> str:
        """Title with an arrow in the better direction."""
        return self.title + {"higher": " ↑", "lower": " ↓", "neither": ""}[self.better]

    def number(self, value: float) -> str:
        """Format a number; small nonzero counts are not rounded to zero."""
        text = f"{value * self.scale:.{self.digits}f}"
        if float(text) == 0:
            text = text.removeprefix("-") if self.scale >= 1 or not value else f"{value * self.scale:.1g}"
        return text

    def write(self, value: float, spread: float | None = None) -> str:
        """Format a number, optionally with its spread."""
        text = self.number(value)
        return text + self.suffix if spread is None else f"{text} ± {spread * self.scale:.{self.digits}f}{self.suffix}"


def _detection(mean: str, group: str) -> tuple[Column, ...]:
    return (
        Column(f"{mean}.auroc", "AUROC", group, "higher", scale=100),
        Column(f"{mean}.fpr95", "FPR95", group, "lower", scale=100),
        Column(f"{mean}.aupr", "AUPR", group, "higher", scale=100),
    )


HEADS = Column("heads", "Heads")
CLASSIFICATION = (
    Column("accuracy", "Acc", better="higher", scale=100),
    Column("brier", "Brier", better="lower", digits=3),
    Column("nll", "NLL", better="lower", digits=3),
    Column("ece", "ECE", better="lower", digits=3),
    Column("aece", "aECE", better="lower", digits=3),
)
OOD = (*_detection("near", "Near-OOD"), *_detection("far", "Far-OOD"), *_detection("all", "OOD avg"))
SHIFT = Column("shift.accuracy", "Acc", "Shift avg", "higher", scale=100)
COST = (
    Column("parameters", "Params (M)", better="lower", scale=1e-6),
    Column("multiply_adds", "MAdds (G)", better="lower", scale=1e-9),
    Column("latency_ratio", "Latency", better="lower", suffix="×"),
)
COLUMNS: tuple[Column, ...] = (HEADS, *CLASSIFICATION, *OOD, SHIFT, *COST)
"""The columns of the paper's tables, accuracy under distribution shift, and the costs."""

DIVERSITY = (
    Column("mutual_information", "MI", "ID", digits=3),
    Column("disagreement", "DI", "ID", digits=3),
    Column("all.mutual_information", "MI", "OOD", digits=3),
    Column("all.disagreement", "DI", "OOD", digits=3),
)
"""Mutual information and disagreement, on ID and OOD data."""


def set_columns(names: Sequence[str], fitted: Sequence[str] = ()) -> tuple[Column, ...]:
    """Detection columns of single OOD sets, for a table that breaks down a mean.

    Args:
        names: The sets.
        fitted: Feature scores, such as `mahalanobis`, whose AUROC is shown next to that of the evaluation's score.
    """
    columns: list[Column] = []
    for name in names:
        columns += _detection(f"ood.{name}", name)
        for score in fitted:
            columns.append(Column(f"{score}:ood.{name}.auroc", f"AUROC by {score}", name, "higher", scale=100))
    return tuple(columns)


_MEANS = {"near": "Near-OOD", "far": "Far-OOD", "all": "OOD avg"}


def columns_for(evaluations: Iterable[Evaluation], sets: Sequence[str] = ()) -> tuple[Column, ...]:
    """Default columns for these evaluations: `COLUMNS`, and what familiarity adds.

    If a model has fitted feature scores: their AUROC. If it also abstains by them: the share of the in-distribution
    set that is accepted, and the share of each group that is declined for either reason. These are ranked only if all
    models promise to accept the same share. `sets` are OOD sets to show individually.
    """
    runs = list(evaluations)
    fitted = list(dict.fromkeys(score for run in runs for score in run.fitted if score != run.score))
    titles = {**_MEANS, **{f"ood.{name}": name for name in sets}}
    added: list[Column] = []
    for score, (key, title) in product(fitted, _MEANS.items()):
        added.append(Column(f"{score}:{key}.auroc", title, f"AUROC by {score}", "higher", scale=100))
    if any(run.selective is not None and run.selective.familiarity is not None for run in runs):
        better: Direction = "higher" if len({promise(run) for run in runs} - {None}) == 1 else "neither"
        added.append(Column("selective.accepted", "ID", "Accepted %", scale=100))
        added += (Column(f"{key}.abstained", title, "Declined %", better, scale=100) for key, title in titles.items())
    return (HEADS, *CLASSIFICATION, *OOD, SHIFT, *added, *COST, *set_columns(sets, fitted))


def promise(run: Evaluation) -> tuple[float, int] | None:
    """The share that each threshold of a model promises to accept, and its number of thresholds; None without any."""
    selective, calibration = run.selective, run.model.calibration
    if selective is None or calibration is None:
        return None
    return calibration.accepted_share, (selective.threshold is not None) + (selective.familiarity is not None)
