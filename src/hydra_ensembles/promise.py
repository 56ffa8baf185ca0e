"""A promise on errors: of the answers accepted on new rows like these, at most a share is wrong.

`certify` turns confidences and correctness of held-out rows into a threshold and a `Promise`. It is distribution-free
and holds for any number of rows (selective classification with guaranteed risk, Geifman & El-Yaniv 2017; fixed-sequence
testing, Angelopoulos et al. 2021, *Learn then Test*). The argument, ties included: `docs/promise.md`.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DataError, TooFewSamplesError
from .settings import InnerShare, require

# Where the searches for a threshold begin (a share of the rows), and which part of the permitted failures each one has.
# By simulation: one main search beats equal ones; the two others help where only few, or not the surest, are right.
SEARCHES = ((0.05, 0.05), (0.2, 0.9), (0.5, 0.05))
_ROUND = (1.0, 2.0, 5.0)  # risks that people ask for: these, times a power of ten
_MOST_ROWS = 200_000  # beyond which no need for rows is estimated


@dataclass(frozen=True)
class Promise:
    """What is promised of the accepted answers on new rows like those that certified it.

    It says nothing of other inputs: of another source, another time, or chosen by an adversary.

    Attributes:
        threshold: An answer is accepted if its confidence is at or above it.
        risk: At most this share of the accepted answers is wrong,
        confidence: with this probability over the draw of the rows; None: on average over such draws.
        rows: Rows that certified it.
        accepted_rows: How many of them are accepted.
        errors: How many of the accepted ones are wrong.
        all_errors: How many of all rows are wrong.
        tighter: The next smaller round risk, and about how many rows like these would certify it; None if no number.
        label: The promise is for answers with this label; None: for all.

    Examples:
        >>> promise = he.certify([0.9] * 90 + [0.4] * 10, [True] * 90 + [False] * 10, risk=0.05)
        >>> promise.accepted, promise.errors, promise.rows
        (0.9, 0, 100)
    """

    threshold: float
    risk: float
    confidence: float | None
    rows: int
    accepted_rows: int
    errors: int
    all_errors: int
    tighter: tuple[float, int] | None = None
    label: str | None = None

    @property
    def accepted(self) -> float:
        """The share of the rows that is accepted."""
        return self.accepted_rows / self.rows

    @property
    def accepted_interval(self) -> tuple[float, float]:
        """The 95 % interval of the accepted share of new rows (Clopper-Pearson)."""
        return exact_interval(self.accepted_rows, self.rows)

    @property
    def bound(self) -> float:
        """Upper bound of the error rate at this threshold by itself, at `confidence` (95 % without one)."""
        return upper_bound(self.errors, self.accepted_rows, self.confidence or 0.95)

    @property
    def most(self) -> float:
        """The largest share that any method could accept under this risk: one that declines only wrong answers."""
        return min(1.0, (1.0 - self.all_errors / self.rows) / (1.0 - self.risk))

    def __str__(self) -> str:
        what = "accepted answers" if self.label is None else f"accepted answers {self.label!r}"
        sure = f"with {percent(self.confidence)} confidence" if self.confidence else "on average over calibrations"
        low, high = (f"{100 * end:.1f}" for end in self.accepted_interval)
        rows = f"{self.accepted_rows} of {self.rows} rows accepted ({low} to {high} %), {self.errors} of them wrong"
        return f"of the {what} on inputs like these at most {percent(self.risk)} are wrong, {sure}: {rows}"


def certify(
    confidence: Any,
    correct: Any,
    risk: float = 0.01,
    *,
    level: float | None = 0.95,
    groups: Sequence[Any] | None = None,
    seed: int = 0,
) -> Promise:
    """The lowest threshold found on confidence under which at most a share `risk` of the accepted answers is wrong.

    With probability `level` over the draw of these rows, the promise holds for new rows of the same kind, whatever the
    model and however good its confidences are. The rows must not have been used to train or to choose anything.

    Args:
        confidence: Confidence of each answer, `[n]`: any number that is higher for surer answers; equal ones are
            accepted or declined together.
        correct: Whether each answer is right, `[n]`.
        risk: The promised share.
        level: The probability; None is the weaker rule that holds on average over calibrations: a single one breaks
            it, by a little, almost every other time.
        groups: Group of each row, such as the document of a page: one row of each group, drawn at random by `seed`,
            certifies, and the promise is for a random row of a random group.
        seed: Seed of that draw.

    Raises:
        TooFewSamplesError: Nothing can be promised with these rows; the message says what can, and how many it takes.

    Examples:
        >>> import numpy as np
        >>> draw = np.random.default_rng(0)
        >>> sure = draw.random(5000)
        >>> right = draw.random(5000) < 0.9 + 0.1 * sure
        >>> promise = he.certify(sure, right, risk=0.05)
        >>> promise.accepted > 0.5, promise.errors < 0.05 * promise.accepted_rows
        (True, True)
    """
    risk = require("risk", risk, InnerShare)
    level = None if level is None else require("level", level, InnerShare)
    sure, wrong = _rows(confidence, correct)
    if groups is not None:
        chosen = one_of_each(groups, len(sure), seed)
        sure, wrong = sure[chosen], wrong[chosen]
    curve = Curve.of(sure, wrong)
    count = curve.most(risk, level)
    if not count:
        raise TooFewSamplesError(_too_few(curve, risk, level))
    at = math.floor(math.log10(risk * (1 - 1e-9)))
    next_risk = max(one for step in (at - 1, at) for part in _ROUND if (one := part * 10.0**step) < risk * (1 - 1e-9))
    needed = curve.rows_for(next_risk, level)
    errors, every = int(curve.errors[count - 1]), int(curve.errors[-1])
    found = Promise(curve.threshold(count), risk, level, len(sure), count, errors, every)
    return found if needed is None else replace(found, tighter=(float(f"{next_risk:.1g}"), needed))


@dataclass(frozen=True, eq=False)
class Curve:
    """Errors among the surest rows, and the cuts between rows of different confidence."""

    sure: NDArray[Any]  # [n], falling
    errors: NDArray[np.int64]  # [n], among the k + 1 surest rows
    cut: NDArray[np.int64]  # [n], the last count at or before k + 1 that keeps equal confidences together

    @classmethod
    def of(cls, sure: NDArray[Any], wrong: NDArray[np.bool_]) -> "Curve":
        """The curve of rows in any order."""
        order = np.argsort(-sure, kind="stable")
        falling = sure[order]
        ends = np.append(falling[1:] != falling[:-1], True)  # [n], whether rows k and k + 1 can be told apart
        places = np.where(ends, np.arange(1, len(sure) + 1), 0)
        return cls(falling, np.cumsum(wrong[order]), np.maximum.accumulate(places))

    def most(self, risk: float, level: float | None) -> int:
        """The most rows that may be accepted under a risk; 0 if none."""
        return self.on_average(risk) if level is None else self.certified(risk, 1.0 - level)

    def certified(self, risk: float, delta: float) -> int:
        """The most rows accepted by any of the searches: fixed-sequence tests from few rows to many.

        The exact binomial tail tests "more than `risk` of the answers above this cut are wrong" at the counts where it
        first admits one more error, and at all rows; the first test that fails ends a search. Each search errs with
        at most its part of `delta`.
        """
        rows, best = len(self.errors), 0
        for begin, part in SEARCHES:
            first = first_counts(rows, risk, part * delta)  # of rows, by admitted errors
            counts = np.append(first[first >= begin * rows], rows)
            places = self.cut[counts - 1]  # rows of equal confidence stay together
            admitted = np.searchsorted(first, places, side="right") - 1  # -1: too few rows to test
            fails = (admitted >= 0) & (self.errors[places - 1] > admitted)
            end = int(fails.argmax()) if fails.any() else len(fails)
            best = max(best, int(places[:end][admitted[:end] >= 0].max(initial=0)))
        return best

    def on_average(self, risk: float) -> int:
        """The most rows of which, with one more error, no more than `risk` are wrong."""
        counts = np.arange(1, len(self.errors) + 1)
        fits = (self.errors + 1 <= risk * (counts + 1)) & (self.cut == counts)
        return int(counts[fits].max(initial=0))

    def threshold(self, count: int) -> float:
        """The least confidence above that of the first row that is not accepted, in the dtype of the confidences."""
        if count == len(self.sure):  # everything, also what is less sure than any of these
            return 0.0 if self.sure[-1] >= 0 else float(np.finfo(self.sure.dtype).min)
        return float(np.nextafter(self.sure[count], self.sure.dtype.type(np.inf)))

    def rows_for(self, risk: float, level: float | None) -> int | None:
        """About how many rows with the same share of errors at every confidence would certify a risk; None if none."""
        rows = len(self.errors)
        sizes = [size for step in range(60) if (size := math.ceil(rows * 1.1**step)) <= _MOST_ROWS]
        found = bisect_left(sizes, True, key=lambda size: bool(self._grown(size).most(risk, level)))
        return sizes[found] if found < len(sizes) else None

    def _grown(self, rows: int) -> "Curve":
        """The curve of more rows, with the errors spread alike."""
        counts = np.arange(1, rows + 1)
        ours = np.arange(len(self.errors) + 1) * (rows / len(self.errors))
        errors = np.floor(np.interp(counts, ours, np.append(0, self.errors) * (rows / len(self.errors))) + 1e-9)
        return Curve(-counts.astype(np.float64), errors.astype(np.int64), counts)


@lru_cache(maxsize=1024)
def first_counts(rows: int, risk: float, delta: float) -> NDArray[np.int64]:
    """The least count of rows at which 0, 1, 2, … errors are admitted: P(Binomial(count, risk) <= errors) <= delta."""
    from scipy.special import betainc

    most = math.ceil(rows * risk)  # more are never admitted at delta below one half
    errors = np.arange(most + 1, dtype=np.float64)
    low, high = errors.copy(), np.full(most + 1, float(rows + 1))  # not admitted at low; at high, or never
    while (wide := high - low > 1).any():
        middle = np.where(wide, np.floor((low + high) / 2), high)
        admits = betainc(middle - errors, errors + 1, 1 - risk) <= delta  # the binomial distribution function
        low, high = np.where(wide & ~admits, middle, low), np.where(wide & admits, middle, high)
    counts = high.astype(np.int64)
    counts = counts[counts <= rows]
    counts.setflags(write=False)
    return counts


def upper_bound(errors: int, rows: int, level: float) -> float:
    """Upper bound of an error rate, from `errors` among `rows` (Clopper-Pearson, one-sided)."""
    from scipy.special import betaincinv

    return 1.0 if errors >= rows else float(betaincinv(errors + 1, rows - errors, level))


def exact_interval(hits: int, rows: int, level: float = 0.95) -> tuple[float, float]:
    """Two-sided interval of a share, from `hits` among `rows` (Clopper-Pearson)."""
    half = (1 + level) / 2
    return 1.0 - upper_bound(rows - hits, rows, half), upper_bound(hits, rows, half)


def percent(share: float) -> str:
    """A share in percent, with all its digits: 0.012 is 1.2 %."""
    return f"{100 * share:.4g} %"


def one_of_each(groups: Sequence[Any], rows: int, seed: int) -> NDArray[np.int64]:
    """One row of each group, drawn at random."""
    names = np.asarray(groups)
    if names.shape != (rows,):
        raise DataError(f"groups must name the group of each of the {rows} rows, got {names.shape}")
    shuffled = np.random.default_rng(seed).permutation(rows)
    return np.sort(shuffled[np.unique(names[shuffled], return_index=True)[1]])


def _rows(confidence: Any, correct: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Both as arrays of the same length; floats keep their precision, since thresholds are compared in it."""
    sure, right = (np.asarray(one.detach().cpu() if hasattr(one, "detach") else one) for one in (confidence, correct))
    sure = sure if sure.dtype.kind == "f" else sure.astype(np.float64)
    if sure.ndim != 1 or right.shape != sure.shape or not len(sure):
        raise DataError(f"confidence and correct must be [n], one each per row; got {sure.shape} and {right.shape}")
    if np.isnan(sure).any():
        raise DataError(f"{int(np.isnan(sure).sum())} confidences are NaN; leave these rows out, or mend the model")
    return sure, ~right.astype(bool)


def rows_needed(risk: float, level: float | None) -> int:
    """The least number of rows, all accepted and right, that certify a risk."""
    part = max(part for _, part in SEARCHES)
    return math.ceil(1 / risk) - 1 if level is None else math.ceil(math.log(part * (1.0 - level)) / math.log1p(-risk))


def best_risk(curve: Curve, level: float | None) -> float | None:
    """The smallest risk of two digits that these rows can promise; None from one half."""
    risks = [float(f"{digits}e{power}") for power in (-5, -4, -3, -2) for digits in range(10, 100)]
    risks = [risk for risk in risks if risk < 0.5]
    found = bisect_left(risks, True, key=lambda risk: bool(curve.most(risk, level)))
    return risks[found] if found < len(risks) else None


def _too_few(curve: Curve, risk: float, level: float | None) -> str:
    """What is needed, what there is, and the ways out."""
    rows, wrong, enough = len(curve.errors), int(curve.errors[-1]), curve.rows_for(risk, level)
    how = "on average" if level is None else f"at {percent(level)}"
    can = best_risk(curve, level)
    instead = "nothing can be promised" if can is None else f"{percent(can)} can be promised"
    ways = [f"with these rows {instead}"]
    ways += [] if enough is None else [f"about {enough} rows like them would do"]
    ways += ["confidence=None promises on average"] if level is not None and curve.on_average(risk) else []
    return (
        f"{percent(risk)} {how} needs at least {rows_needed(risk, level)} accepted rows without an error; "
        f"{rows} were given, {wrong} of them wrong: {'; or '.join(ways)}"
    )
