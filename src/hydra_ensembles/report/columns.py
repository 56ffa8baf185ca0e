"""The columns of a comparison: what they are called, which way is better, how a number is written."""

from dataclasses import dataclass
from typing import Literal

from ..evaluation.evaluation import Evaluation
from ..model.cost import Cost

Direction = Literal["higher", "lower", "neither"]


@dataclass(frozen=True)
class Column:
    """One column of a comparison.

    Attributes:
        key: Name of the number in `Evaluation.numbers`; or `heads`, `parameters`, `multiply_adds`, or a field of
            `Cost`.
        title: Heading.
        group: Heading above several columns; empty for none.
        better: Which way is better.
        digits: Digits after the point.
        scale: Factor before writing: 100 for percent, 1e-6 for millions.
        suffix: Written after the number.
    """

    key: str
    title: str
    group: str = ""
    better: Direction = "neither"
    digits: int = 2
    scale: float = 1.0
    suffix: str = ""

    @property
    def arrow(self) -> str:
        """An arrow to where better is."""
        return {"higher": "↑", "lower": "↓", "neither": ""}[self.better]

    @property
    def heading(self) -> str:
        """Title and arrow."""
        return f"{self.title} {self.arrow}".strip()

    @property
    def long_heading(self) -> str:
        """Group, title and arrow, for formats with one line of headings."""
        return f"{self.group} {self.heading}".strip()

    def write(self, value: float, spread: float | None = None) -> str:
        """A number as the table shows it."""
        text = f"{value * self.scale:.{self.digits}f}"
        if float(text) == 0:
            text = text.removeprefix("-")
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
COST = (
    Column("parameters", "Params (M)", better="lower", scale=1e-6),
    Column("multiply_adds", "MAdds (G)", better="lower", scale=1e-9),
    Column("latency_ratio", "Latency", better="lower", suffix="×"),
)
COLUMNS: tuple[Column, ...] = (HEADS, *CLASSIFICATION, *OOD, *COST)
"""The columns of the paper's tables, and the costs."""

DIVERSITY = (
    Column("mutual_information", "MI", "ID", digits=3),
    Column("disagreement", "DI", "ID", digits=3),
    Column("all.mutual_information", "MI", "OOD", digits=3),
    Column("all.disagreement", "DI", "OOD", digits=3),
)
"""Mutual information and disagreement, in distribution and out of it."""

SELECTIVE = (
    Column("aurc", "AURC", better="lower", digits=4),
    Column("risk@0.80", "Risk at 80 %", better="lower", scale=100),
    Column("risk@0.90", "Risk at 90 %", better="lower", scale=100),
)
"""The error that remains when the most uncertain inputs are given back."""


def set_columns(names: list[str]) -> tuple[Column, ...]:
    """Detection columns of single OOD sets, for a table that takes a mean apart."""
    return tuple(column for name in names for column in _detection(f"ood.{name}", name))


def value_of(column: Column, evaluation: Evaluation, cost: Cost | None) -> float | None:
    """The number a column shows of one evaluation; None where it is not known."""
    numbers = evaluation.numbers()
    if column.key in numbers:
        return numbers[column.key]
    measured = None if cost is None else getattr(cost, column.key, None)
    known = measured if measured is not None else getattr(evaluation.model, column.key, None)
    return float(known) if isinstance(known, int | float) and not isinstance(known, bool) else None
