"""What the numbers say, in a paragraph: the gains, the losses and the price, whichever way they fall."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..evaluation.evaluation import Evaluation
from ..metrics.bootstrap import Interval
from .compare import CLASSIFICATION, OOD, Column, Comparison, Row

Outcome = Literal["better", "worse", "level"]

_NAMES = {
    "accuracy": "accuracy",
    "brier": "Brier score",
    "nll": "negative log-likelihood",
    "ece": "calibration error (ECE)",
    "aece": "adaptive calibration error",
    "near.auroc": "near-OOD AUROC",
    "near.fpr95": "near-OOD FPR95",
    "near.aupr": "near-OOD AUPR",
    "far.auroc": "far-OOD AUROC",
    "far.fpr95": "far-OOD FPR95",
    "far.aupr": "far-OOD AUPR",
    "all.auroc": "OOD AUROC",
    "all.fpr95": "OOD FPR95",
    "all.aupr": "OOD AUPR",
}
_HEADLINES = ("accuracy", "near.auroc", "far.auroc", "all.auroc", "ece")


@dataclass(frozen=True)
class Difference:
    """One number of the method in focus against the baseline.

    Attributes:
        column: Which number.
        name: In words.
        ours: Its value.
        theirs: The baseline's.
        outcome: As the table shows it: numbers that are written alike are level.
        clear: Whether the bootstrap intervals of the two do not overlap; None where there are none.
    """

    column: Column
    name: str
    ours: float
    theirs: float
    outcome: Outcome
    clear: bool | None

    @property
    def change(self) -> str:
        """The difference with its sign."""
        amount = (self.ours - self.theirs) * self.column.scale
        return f"{amount:+.{self.column.digits}f}".replace("-", "−")


def differences(comparison: Comparison, focus: str, baseline: str, runs: Mapping[str, Evaluation]) -> list[Difference]:
    """Every ranked number of two methods; the mean over all OOD sets only where it is not split into near and far."""
    ours, theirs = (
        {column.key: cell for column, cell in zip(comparison.columns, row.cells, strict=True)}
        for row in (_row(comparison, focus), _row(comparison, baseline))
    )
    found = []
    for column in _judged(comparison.columns):
        mine, other = ours[column.key], theirs[column.key]
        if mine.value is None or other.value is None:
            continue
        if column.write(mine.value) == column.write(other.value):
            outcome: Outcome = "level"
        else:
            outcome = "better" if (mine.value > other.value) == (column.better == "higher") else "worse"
        intervals = [runs[name].intervals.get(column.key) for name in (focus, baseline)]
        clear = _apart(intervals)
        found.append(Difference(column, _NAMES[column.key], mine.value, other.value, outcome, clear))
    return found


def verdict(comparison: Comparison, focus: str, baseline: str | None, runs: Mapping[str, Evaluation]) -> list[str]:
    """Sentences for the head of the report.

    Args:
        comparison: The table the reader sees below.
        focus: The method the report is about.
        baseline: What it is held against; None where there is one method only.
        runs: One evaluation of each method.
    """
    if baseline is None or baseline == focus:
        return _alone(focus, runs[focus])
    found = differences(comparison, focus, baseline, runs)
    better, worse, level = (_of(found, outcome) for outcome in ("better", "worse", "level"))
    noisy = [one for one in found if one.clear is False and one.outcome != "level"]
    drowned = bool(noisy) and len(noisy) == len(better) + len(worse)
    sentences = [_opening(focus, baseline, len(better), len(worse), len(level), drowned)]
    if better:
        sentences.append("Better: " + _listing(better) + ".")
    if worse:
        sentences.append("Worse: " + _listing(worse) + ".")
    if drowned:
        sentences.append("The 95 % intervals of all of them overlap: more data would be needed to tell the two apart.")
    elif noisy:
        clear = len(better) + len(worse) - len(noisy)
        sentences.append(
            f"{clear} of these {len(better) + len(worse)} differences {'is' if clear == 1 else 'are'} larger "
            "than the sampling noise (95 % intervals that do not overlap)."
        )
    return sentences + _price(comparison, focus, baseline) + _rivals(comparison, focus, baseline)


def _opening(focus: str, baseline: str, better: int, worse: int, level: int, drowned: bool) -> str:
    total = better + worse + level
    if not total:
        return f"{focus} and {baseline} have no number in common."
    if better == total:
        return f"{focus} is better than {baseline} on all {total} numbers measured."
    if worse == total:
        return f"{focus} is worse than {baseline} on all {total} numbers measured: it does not pay on this suite."
    if level == total:
        return f"{focus} and {baseline} are level on all {total} numbers measured."
    counts = f"better on {better}, worse on {worse}" + (f", level on {level}" if level else "")
    balance = "ahead of" if better > 2 * worse else "behind" if worse > 2 * better else "a mixed result against"
    noise = ", but within the sampling noise" if drowned else ""
    return f"Of {total} numbers measured, {focus} is {counts}: {balance} {baseline}{noise}."


def _listing(found: Sequence[Difference]) -> str:
    """Differences in words, those a reader asks for first in front, at most three written out."""
    order = sorted(found, key=lambda one: _HEADLINES.index(one.column.key) if one.column.key in _HEADLINES else 99)
    shown = [f"{one.name} {_with_unit(one.column, one.ours)} ({one.change})" for one in order[:3]]
    rest = len(order) - len(shown)
    return ", ".join(shown) + (f", and {rest} more" if rest else "")


def _with_unit(column: Column, value: float) -> str:
    return column.write(value) + (" %" if column.scale == 100 else "")


def _price(comparison: Comparison, focus: str, baseline: str) -> list[str]:
    found = []
    for key, words in (("parameters", "the parameters"), ("multiply_adds", "the multiply-adds")):
        mine, other = (_number(comparison, name, key) for name in (focus, baseline))
        if mine and other:
            found.append(f"{mine / other:.2f}× {words}")
    mine, other = (_number(comparison, name, "latency_ratio") for name in (focus, baseline))
    if mine and other:
        found.append(f"{mine / other:.2f}× the time of a batch")
    return [f"The price: {', '.join(found)}."] if found else []


def _rivals(comparison: Comparison, focus: str, baseline: str) -> list[str]:
    """The best method on accuracy and detection, where it is neither the focus nor the baseline."""
    found: dict[str, list[str]] = {}
    for column in _judged(comparison.columns):
        if column.key not in _HEADLINES[:-1]:
            continue
        position = comparison.columns.index(column)
        best = [row for row in comparison.rows if row.cells[position].rank == "best"]
        if best and not {row.name for row in best} & {focus, baseline}:
            found.setdefault(best[0].name, []).append(f"{_NAMES[column.key]} ({best[0].cells[position].text})")
    listing = [f"{name} is ahead of both on {' and '.join(words)}" for name, words in found.items()]
    return ["; ".join(listing) + "."] if listing else []


def _alone(name: str, evaluation: Evaluation) -> list[str]:
    result = evaluation.id
    sentences = [
        f"{name} answers {result.accuracy * 100:.1f} % of {result.samples:,} inputs of {evaluation.id_name} correctly.",
        f"Its stated confidence is off by {result.ece * 100:.1f} points on average (ECE {result.ece:.3f}).",
    ]
    means = {mean: by_score[evaluation.score] for mean, by_score in evaluation.means.items()}
    names = [mean for mean in means if mean != "all"] or list(means)
    if names:
        shares = " and ".join(
            f"{means[mean].auroc * 100:.1f} % of the time for {'OOD' if mean == 'all' else mean + '-OOD'} inputs"
            for mean in names
        )
        sentences.append(f"It is more uncertain about a foreign input than about one of its own {shares} (AUROC).")
    risk = result.risk_at_coverage["0.80"]
    sentences.append(f"Allowed to decline the fifth it is least sure about, it errs on {risk * 100:.1f} % of the rest.")
    return sentences


def _judged(columns: Sequence[Column]) -> list[Column]:
    keys = {column.key for column in columns}
    split = {"near.auroc", "far.auroc"} & keys
    wanted = [column.key for column in (*CLASSIFICATION, *OOD) if not (split and column.key.startswith("all."))]
    return [column for column in columns if column.key in wanted]


def _row(comparison: Comparison, name: str) -> Row:
    return next(row for row in comparison.rows if row.name == name)


def _number(comparison: Comparison, name: str, key: str) -> float | None:
    cells = zip(comparison.columns, _row(comparison, name).cells, strict=True)
    return next((cell.value for column, cell in cells if column.key == key), None)


def _of(found: Sequence[Difference], outcome: str) -> list[Difference]:
    return [one for one in found if one.outcome == outcome]


def _apart(intervals: Sequence[Interval | None]) -> bool | None:
    first, second = intervals
    if first is None or second is None:
        return None
    return first.high < second.low or second.high < first.low
