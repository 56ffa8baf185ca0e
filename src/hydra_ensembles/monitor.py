"""Watching a calibrated model in use: are the inputs still those of calibration, is the promise still kept?

Every test here is a bet that has even odds or worse while nothing has changed. By Ville's inequality its wealth ever
exceeds 1 / a with probability at most a, however long the stream is and however often one looks.

* Inputs: the p-value of each row is its rank, by bins, among the held-out rows and all rows before it, ties broken at
  random. Of unchanged rows these are independent and uniform (Vovk et al. 2005). The bets are the Simple Jumper (Vovk
  et al. 2021) over a few densities of p-values.
* Promise: of audited rows, bets that the error rate is some multiple of the promised one (Waudby-Smith & Ramdas 2023).

A bettor that has lost for a month is deaf, so a fresh one starts every block with a share 1 / (j (j + 1)) of the
capital, and old ones are forfeited. The level is split over the tests, because two scores of the same rows have wealths
whose mean need not be fair; each by itself is.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ._utils import library, warn
from .batches import a_few
from .errors import CheckpointError, ConfigError, DataError
from .files import expanded, read_object, write_json
from .model.metadata import Calibration
from .prediction import NEVER, REASONS, Prediction, Threshold, reaches
from .settings import InnerShare, PositiveShare, Seed, Whole, require, to_plain

Floats = NDArray[np.float64]
OnAlarm = Literal["decline", "stricter"]

BLOCK = 1000  # rows after which a fresh bettor starts on inputs; on audits, those in which ten errors are promised
ERRORS = 10
KEPT = 8  # bettors that play at a time; older ones are forfeited
JUMP = 0.001  # share of a bettor's capital that is spread anew over its bets after each row
SLOPES = (-1.6, -0.6, 0.0, 0.6, 1.6)  # densities 1 + slope (p - 1/2): scores have risen or fallen as a whole
TAIL, TIMES = 0.05, (3.0, 8.0)  # densities that say: the highest scores have become so many times more frequent
RATIOS = (1.5, 2.0, 4.0, 8.0, 16.0)  # error rates bet upon, as multiples of the promised one
FORMAT = "hydra_ensembles monitor 2"
_AT_ONCE = 32  # rows after which capitals are scaled, so that none overflows
_ALARM = REASONS.index("alarm")


def p_values(counts: NDArray[np.int64], bins: NDArray[np.int64], uniform: Floats) -> Floats:
    """P-values `[X, n]` of rows in `bins`, each ranked among `counts` `[X, K]`, the rows before it, and itself.

    Small for high scores; `uniform` breaks the ties within a bin. The rows are added to `counts`.
    """
    p, streams = np.empty(bins.shape), np.arange(len(bins))[:, None]
    for start in range(0, bins.shape[1], _AT_ONCE):
        here = bins[:, start : start + _AT_ONCE]  # [X, b]
        before = np.tri(here.shape[1], k=-1, dtype=bool)  # [b, b]
        higher = np.flip(np.flip(counts, 1).cumsum(1), 1) - counts  # [X, K], in higher bins
        above = higher[streams, here] + ((here[:, None] > here[..., None]) & before).sum(2)
        equal = counts[streams, here] + ((here[:, None] == here[..., None]) & before).sum(2)
        known = counts.sum(1, keepdims=True) + np.arange(1, here.shape[1] + 1)
        some = slice(start, start + _AT_ONCE)
        p[:, some] = (above + uniform[:, some] * (equal + 1)) / known
        np.add.at(counts, (streams, here), 1)
    return p


def input_bets(p: Floats) -> Floats:
    """What one unit becomes in each bet on p-values `[X, n]`: `[n, E, X]`, of uniform ones 1 on average."""
    linear = [1.0 + slope * (p.T - 0.5) for slope in SLOPES]
    tails = [np.where(p.T < TAIL, times, (1.0 - times * TAIL) / (1.0 - TAIL)) for times in TIMES]
    return np.stack([*linear, *tails], axis=1)


def error_bets(wrong: Floats, risk: float) -> Floats:
    """What one unit becomes in each bet on errors `[X, n]` in [0, 1]: `[n, E, X]`, fair if their mean is `risk`.

    Of a plain 0 or 1 it is the likelihood ratio of a higher error rate to the promised one.
    """
    ratios = np.array([ratio for ratio in RATIOS if ratio * risk < 0.95] or [0.95 / risk])
    return 1.0 + ((ratios - 1.0) / (1.0 - risk))[:, None] * (wrong.T[:, None] - risk)


@dataclass
class Wealth:
    """Bettors on X streams of the same length.

    Attributes:
        block: Rows after which a fresh bettor starts; `KEPT` are there, in slots used in turn.
        limit: The log wealth that is an alarm.
        jump: Share of each bettor's capital that is spread anew over its E bets after each row.
        capital: `[KEPT, E, X]`, relative to `log`.
        log: `[KEPT, X]`, of each bettor's wealth, for one unit at its start.
        low: `[KEPT, X]`, the lowest it was, and `low_row`, after how many rows.
        total: `[X]`, log wealth of all of them with what is not staked yet, and `peak`, the highest it was.
        alarm_row: `[X]`, after how many rows the limit was first reached, -1 if never.
        since: `[X]`, rows before the change, as the winning bettor saw it.
    """

    block: int
    limit: float
    jump: float
    capital: Floats
    log: Floats
    low: Floats
    low_row: NDArray[np.int64]
    total: Floats
    peak: Floats
    alarm_row: NDArray[np.int64]
    since: NDArray[np.int64]
    rows: int = 0

    @classmethod
    def of(cls, streams: int, bets: int, block: int, limit: float, jump: float = 0.0) -> "Wealth":
        """All before the first row."""
        slots, never = np.zeros((KEPT, streams)), np.full(streams, -1, dtype=np.int64)
        arrays = np.zeros((KEPT, bets, streams)), slots, slots.copy(), slots.astype(np.int64)
        return cls(block, limit, jump, *arrays, np.zeros(streams), np.zeros(streams), never, never.copy())

    def bet(self, factors: Floats) -> None:
        """Bet on rows: what one unit in each bet becomes, `[n, E, X]`."""
        done = 0
        while done < len(factors):
            place = self.rows % self.block
            if not place:  # a fresh bettor takes the place of the oldest
                slot = (self.rows // self.block) % KEPT
                self.capital[slot] = 1.0 / self.capital.shape[1]
                self.log[slot] = self.low[slot] = 0.0
                self.low_row[slot] = self.rows
            some = factors[done : done + min(_AT_ONCE, self.block - place)]
            self._play(some)
            done += len(some)

    def _play(self, factors: Floats) -> None:
        """Rows of one block, few enough that no capital overflows."""
        count, bets, streams = factors.shape
        spread = (1.0 - self.jump) * np.eye(bets) + self.jump / bets  # [E, E]
        capitals, capital = np.empty((count, *self.capital.shape)), self.capital
        for row in range(count):
            capital = (spread @ capital if self.jump else capital) * factors[row]
            capitals[row] = capital
        sums = capitals.sum(2)  # [n, KEPT, X]
        with np.errstate(divide="ignore"):  # empty slots have nothing
            path = np.log(sums) + self.log
        played = sums[-1] > 0
        self.capital = capital / np.where(played, sums[-1], 1.0)[:, None]
        self.log = np.where(played, path[-1], 0.0)
        lowest = path.min(0)
        deeper = np.isfinite(lowest) & (lowest < self.low)
        self.low_row = np.where(deeper, self.rows + 1 + path.argmin(0), self.low_row)
        self.low = np.where(deeper, lowest, self.low)
        blocks = self.rows // self.block + 1
        number = np.maximum(blocks - (blocks - 1 - np.arange(KEPT)) % KEPT, 1)  # of the block in each slot
        staked = path - np.log(number * (number + 1.0))[:, None]
        most = staked.max(1)  # [n, X]
        wealth = np.exp(staked - most[:, None]).sum(1) + np.exp(-math.log(blocks + 1) - most)  # with what is not staked
        totals = np.log(wealth) + most
        reached = totals >= self.limit
        new = reached.any(0) & (self.alarm_row < 0)
        if new.any():
            first, each = reached.argmax(0), np.arange(streams)
            winner = staked[first, :, each].argmax(1)  # [X]
            self.alarm_row = np.where(new, self.rows + 1 + first, self.alarm_row)
            self.since = np.where(new, self.low_row[winner, each], self.since)
        self.total, self.peak = totals[-1], np.maximum(self.peak, totals.max(0))
        self.rows += count


class Rate(NamedTuple):
    """The error rate of the answers accepted lately, from those of them that were audited.

    `low` to `high` is a 95 % confidence sequence: while the rate stays as it is, the interval covers it at all times
    since its first row, with 95 % probability, however often one looks.
    """

    rate: float
    low: float
    high: float
    rows: int


def confidence_sequence(hits: float, rows: int, level: float = 0.95) -> tuple[float, float]:
    """Anytime-valid interval of the mean of rows in [0, 1] that sum to `hits` (mixture of likelihoods, Robbins 1970).

    A rate is left out once the Beta(1/2, 1/2) mixture of likelihoods is 1 / (1 - level) times that of the rate.
    """
    from scipy.optimize import brentq
    from scipy.special import betaln, xlog1py, xlogy

    misses = rows - hits
    least = betaln(hits + 0.5, misses + 0.5) + math.log((1.0 - level) / math.pi)

    def kept(rate: float) -> float:  # above zero
        return float(xlogy(hits, rate) + xlog1py(misses, -rate) - least)

    low = brentq(kept, sys.float_info.min, hits / rows) if hits else 0.0
    high = brentq(kept, hits / rows, 1.0 - sys.float_info.epsilon) if misses else 1.0
    return low, high


@dataclass
class Audit:
    """The test of one promise, of all accepted answers or of those with one label.

    Attributes:
        risk: The error rate that is promised, times the least probability of being asked.
        label: Index of the label; None for all.
        wealth: Of the bets on errors.
        before: Rows and errors of the block before, and `now`, of this one.
    """

    risk: float
    label: int | None
    wealth: Wealth
    before: tuple[int, float] = (0, 0.0)
    now: tuple[int, float] = (0, 0.0)

    @classmethod
    def of(cls, risk: float, label: int | None, limit: float) -> "Audit":
        """Before the first row; an alarm at this log wealth."""
        bets = error_bets(np.zeros((1, 1)), risk).shape[1]
        return cls(risk, label, Wealth.of(1, bets, math.ceil(ERRORS / risk), limit))

    def add(self, errors: Floats) -> None:
        """Bet on rows that were wrong or right, `[n]`."""
        self.wealth.bet(error_bets(errors[None], self.risk))
        self.now = self.now[0] + len(errors), self.now[1] + float(errors.sum())
        if self.now[0] >= self.wealth.block:
            self.before, self.now = self.now, (0, 0.0)

    def rate(self, asked: float) -> Rate | None:
        """The error rate of the last one to two blocks, whose errors are weighted by `asked`; None without rows."""
        rows, errors = self.before[0] + self.now[0], self.before[1] + self.now[1]
        if not rows:
            return None
        low, high = confidence_sequence(errors, rows)
        return Rate(errors / rows / asked, low / asked, min(1.0, high / asked), rows)


class Monitor:
    """Two sequential tests of a calibrated model in use, with one alarm: inputs have changed, or the promise is broken.

    The chance that it ever alarms although nothing has changed is at most `level`, over the draw of the calibration
    rows and the whole stream, with ties, however long it runs. It keeps no rows: its memory is constant.

    * `update` looks at the familiarity and the confidence of every row that is answered: are they still spread as
      those of the held-out rows? It needs no labels.
    * `audit` looks at accepted rows whose right label has become known: is the error rate above the promised risk? The
      rows must be a random sample of the accepted ones, not those of which someone complained. After `share=` there
      is no promise, and nothing to audit.

    Attributes:
        rows: Rows seen by `update`.
        audited: Accepted rows seen by `audit`.

    Examples:
        >>> safe = he.calibrate(base, batches, share=0.9, familiarity=None)
        >>> watch = he.Monitor(safe)
        >>> p = watch.update(safe.predict(torch.randn(32, 3, 64, 64)))
        >>> watch.rows, watch.alarm
        (32, False)
    """

    def __init__(
        self,
        model: Any,
        level: float = 0.001,
        *,
        workers: int = 1,
        asked: float = 1.0,
        on_alarm: OnAlarm | None = None,
        seed: int = 0,
    ) -> None:
        """Watch a model that `calibrate` returned.

        Args:
            model: An ensemble or a cascade.
            level: Largest probability of a false alarm, ever.
            workers: How many processes watch a part of the stream each, with a monitor and a `seed` of their own: each
                tests at `level / workers`. Their wealths must not be multiplied.
            asked: If rows are audited with unequal probabilities, the least of them; 1 for a plain random sample.
            on_alarm: What becomes of predictions that pass through `update` from the alarm on: `"decline"` declines
                all, `"stricter"` all below the next stricter point of a calibration with several, of each label its
                own (all where there is none, with a warning); with the reason `"alarm"`. None leaves them as they are.
            seed: Seed by which ties are broken.
        """
        calibration = getattr(getattr(model, "metadata", None), "calibration", None)
        if calibration is None or not calibration.watched:
            told = "give what he.calibrate returned for one right class"
            raise ConfigError(f"the model has no calibration to compare with; {told}")
        self.identity: str = calibration.identity
        self.level = require("level", level, InnerShare)
        self.workers = require("workers", workers, Whole)
        self.asked = require("asked", asked, PositiveShare)
        fitted = model.metadata.familiarity
        names_of = {"confidence": "score", "familiarity": "" if fitted is None else fitted.settings.scores[0]}
        self.columns: dict[str, str] = {name: names_of[name] for name in calibration.watched}
        self.decide(model, on_alarm)
        self._edges = {name: np.array(bins.edges) for name, bins in calibration.watched.items()}
        self._counts = np.zeros((len(self._edges), 1 + max(map(len, self._edges.values()))), dtype=np.int64)  # [S, K]
        for row, bins in zip(self._counts, calibration.watched.values(), strict=True):
            row[: len(bins.counts)] = bins.counts
        limit = math.log((len(self._edges) + len(calibration.in_force)) * self.workers / self.level)
        self._inputs = Wealth.of(len(self._edges), len(SLOPES) + len(TIMES), BLOCK, limit, JUMP)
        self._audits = dict[str, Audit]()
        for one in calibration.in_force:
            label = None if one.label is None else model.class_names.index(one.label)
            name = "promise" if one.label is None else f"promise of {one.label}"
            self._audits[name] = Audit.of(one.risk * self.asked, label, limit)
        self._history: list[list[float]] = [[0, *self.wealth.values()]]  # rows, and the log wealth of each test
        self._generator = np.random.default_rng(require("seed", seed, Seed))

    def decide(self, model: Any, on_alarm: OnAlarm | None) -> None:
        """Choose anew what becomes of predictions from an alarm on; `model` is the one that it watches."""
        self.on_alarm = require("on_alarm", on_alarm, OnAlarm | None)
        calibration = model.metadata.calibration
        self._after = stricter(calibration, model.class_names) if on_alarm == "stricter" else NEVER  # the threshold

    # --- what it watches ----------------------------------------------------------------------------------

    def update(self, prediction: Prediction) -> Prediction:
        """Watch the inputs of a prediction, all its rows in their order; returns it, declined after an alarm."""
        self._require_own(prediction.calibration)
        scores = {"confidence": prediction.score()}
        if prediction.unfamiliarity is not None:
            scores["familiarity"] = prediction.score(prediction.unfamiliarity.score_names[0])
        self.update_scores(scores)
        if not self.alarm or self.on_alarm is None:
            return prediction
        passes = reaches(self._after, prediction.certainty, prediction.label)
        forced = torch.zeros_like(prediction.label) if prediction.forced is None else prediction.forced
        return replace(prediction, forced=torch.where(passes, forced, _ALARM))

    def update_scores(self, scores: Mapping[str, Any]) -> None:
        """The same from columns of answers, whose names are the values of `columns`, by the names of the tests."""
        found = np.stack(
            [np.searchsorted(edges, _array(scores[name]), side="right") for name, edges in self._edges.items()]
        )
        uniform = self._generator.random(found.shape[::-1]).T  # [S, B]; the draws of a row stay together
        self._inputs.bet(input_bets(p_values(self._counts, found, uniform)))
        self._note()

    def audit(self, prediction: Prediction, labels: Any, asked: Any = None) -> None:
        """Compare accepted answers with the right labels of a random sample of them; declined rows do not count.

        Args:
            prediction: Answers of some rows, as `predict` or `update` returned them.
            labels: Index of the right class of each row, `[B]`; -1 where it is unknown.
            asked: If `Monitor(asked=…)` was given: the probability with which each row was asked for its label, `[B]`,
                or one for all. Then all accepted rows are given, also those that were not asked.
        """
        self._require_own(prediction.calibration)
        if prediction.forced is not None:  # what the alarm declined was accepted by the promise
            forced = torch.where(prediction.forced == _ALARM, 0, prediction.forced)
            prediction = replace(prediction, forced=forced)
        if len(labels) and int(max(labels)) >= prediction.classes:
            raise DataError(f"labels run up to {int(max(labels))}, but there are {prediction.classes} classes")
        self.audit_labels(prediction.label, labels, prediction.accept, asked)

    def audit_labels(self, given: Any, labels: Any, accepted: Any, asked: Any = None) -> None:
        """The same from columns of answers: the labels given, the right ones, and whether each was accepted, `[B]`."""
        if not self._audits:
            raise ConfigError("the calibration promises a share, not a risk: there is nothing to audit")
        given, truth = _array(given), _array(labels)
        if truth.shape != given.shape or truth.dtype.kind not in "iu" or (truth < -1).any():
            raise DataError(f"labels must be {len(given)} class indices, or -1; got {truth.dtype} {list(truth.shape)}")
        counted = _array(accepted).astype(bool)
        wrong = ((truth >= 0) & (truth != given)).astype(np.float64)
        if self.asked == 1.0:
            if asked is not None:
                raise ConfigError("unequal probabilities need Monitor(asked=…), the least of them, from the start")
            counted = counted & (truth >= 0)
        else:
            if asked is None:
                raise ConfigError("asked is missing: give the probability with which each row was asked for its label")
            odds = np.broadcast_to(_array(asked).astype(np.float64), truth.shape)
            if not ((odds >= self.asked) & (odds <= 1))[counted].all():
                raise DataError(
                    f"probabilities run from {odds.min():.4g} to {odds.max():.4g}; asked is {self.asked:.4g}"
                )
            wrong = wrong * self.asked / odds
        for test in self._audits.values():
            test.add(wrong[counted if test.label is None else counted & (given == test.label)])
        self._note()

    # --- what it says ---------------------------------------------------------------------------------------

    @property
    def alarm(self) -> bool:
        """Whether any test has alarmed; it stays so: calibrate again, and start a new monitor."""
        return bool(self.why)

    @property
    def why(self) -> tuple[str, ...]:
        """The tests that have alarmed: `"familiarity"`, `"confidence"`, `"promise"` (or `"promise of LABEL"`)."""
        return tuple(name for name, row, _ in self._states() if row >= 0)

    @property
    def since(self) -> int | None:
        """About how many rows had come before the change: of `update` if the inputs alarmed, else of `audit`."""
        found = [(name in self._audits, since) for name, row, since in self._states() if row >= 0]
        return min(found)[1] if found else None

    @property
    def rows(self) -> int:
        """Rows seen by `update`."""
        return self._inputs.rows

    @property
    def audited(self) -> int:
        """Accepted rows seen by `audit`, over all promises."""
        return sum(test.wealth.rows for test in self._audits.values())

    @property
    def wealth(self) -> dict[str, float]:
        """Log wealth of each test: 0 at the start; an alarm at `limit`."""
        inputs = dict(zip(self._edges, self._inputs.total.tolist(), strict=True))
        return inputs | {name: float(test.wealth.total[0]) for name, test in self._audits.items()}

    @property
    def limit(self) -> float:
        """The log wealth at which a test alarms."""
        return self._inputs.limit

    @property
    def error_rate(self) -> Rate | dict[str, Rate] | None:
        """The current error rate with its interval, or one by label under `risk={…}`; None before the first audit.

        Of the last one to two blocks, those in which ten errors are promised (1,000 audited rows at 1 %).
        """
        rates = {name.removeprefix("promise of "): test.rate(self.asked) for name, test in self._audits.items()}
        found = {name: rate for name, rate in rates.items() if rate is not None}
        return found.get("promise") if "promise" in self._audits else found or None

    def summary(self) -> dict[str, Any]:
        """All of it as plain values, for a log or a server."""
        found = self.error_rate
        by_label = {name: one._asdict() for name, one in found.items()} if isinstance(found, dict) else None
        return {
            "alarm": self.alarm,
            "why": list(self.why),
            "since": self.since,
            "rows": self.rows,
            "audited": self.audited,
            "error_rate": found._asdict() if isinstance(found, Rate) else by_label,
            "log_wealth": self.wealth,
            "alarm_at": self.limit,
        }

    def __repr__(self) -> str:
        said = f"alarm: {', '.join(self.why)} since row {self.since}" if self.alarm else "no alarm"
        return f"Monitor({said}; {self.rows} rows, {self.audited} audited, level {self.level:g})"

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the log wealth of each test over the rows seen, and the line of alarm; returns matplotlib's figure."""
        library("matplotlib", extra="report")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes = figure.subplots()
        columns = np.array([*self._history, [self.rows, *self.wealth.values()]]).T  # [1 + tests, points]
        for name, values in zip(self.wealth, columns[1:], strict=True):
            axes.plot(columns[0], values / math.log(10), label=name)
        axes.axhline(self.limit / math.log(10), color="black", linestyle="--", label="alarm")
        axes.set(xlabel="rows", ylabel="evidence (log10 of the wealth)")
        axes.legend()
        if path is not None:
            figure.savefig(expanded(path))
        return figure

    # --- saving ---------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write its state as JSON, atomically; `load` goes on from there as if nothing had happened."""
        plain = to_plain({**vars(self), "_generator": self._generator.bit_generator.state})
        write_json(expanded(path), {"format": FORMAT, **plain})

    @classmethod
    def load(cls, path: str | Path, model: Any = None) -> "Monitor":
        """Read a saved monitor; with `model`, refuse it if it watched another one."""
        plain = read_object(expanded(path))
        if plain.pop("format", None) != FORMAT:
            raise CheckpointError(f"{path} is no monitor of this version; give another place, and start a new one")
        monitor = cls.__new__(cls)
        vars(monitor).update(plain)
        monitor._edges = {name: np.array(edges) for name, edges in plain["_edges"].items()}
        monitor._counts = np.array(plain["_counts"])
        monitor._inputs = _wealth(plain["_inputs"])
        audits = plain["_audits"].items()
        monitor._audits = {name: Audit(**{**test, "wealth": _wealth(test["wealth"])}) for name, test in audits}
        monitor._generator = np.random.default_rng()
        monitor._generator.bit_generator.state = plain["_generator"]
        if model is not None and model.metadata.calibration.identity != monitor.identity:
            raise CheckpointError(f"{path} watched another calibration; start a new monitor for this one")
        return monitor

    # --- inside -----------------------------------------------------------------------------------------------

    def _states(self) -> list[tuple[str, int, int]]:
        """Name, row of the alarm and row of the change of each test."""
        inputs = zip(self._edges, self._inputs.alarm_row.tolist(), self._inputs.since.tolist(), strict=True)
        audits = [(name, test.wealth) for name, test in self._audits.items()]
        return [*inputs, *((name, int(one.alarm_row[0]), int(one.since[0])) for name, one in audits)]

    def _require_own(self, calibration: str) -> None:
        if calibration != self.identity:
            got = f"calibration {calibration}" if calibration else "no calibration"
            raise DataError(f"the prediction has {got}, the monitor watches {self.identity}: make one for each model")

    def _note(self) -> None:
        """One more point of the plot, once a hundredth more rows have come: a thousand points for a million rows."""
        if self.rows > 1.01 * self._history[-1][0]:
            self._history.append([self.rows, *self.wealth.values()])


def stricter(calibration: Calibration, labels: Sequence[str]) -> Threshold:
    """Thresholds of the next smaller certified risks, `NEVER` where there is none; a warning names these."""
    found = dict[str | None, float]()
    for one in calibration.in_force:
        points = [other for other in calibration.promises if other.label == one.label and other.risk < one.risk]
        if points:
            found[one.label] = max(points, key=lambda other: other.risk).threshold
    ends = [one.label for one in calibration.in_force if one.label not in found]
    if ends or not calibration.in_force:
        whose = "answers" if set(ends) <= {None} else f"answers {a_few([str(label) for label in ends])}"
        warn(f"there is no smaller risk to go to: an alarm declines all {whose}; he.calibrate(..., risk=[0.01, 0.005])")
    return found[None] if None in found else tuple(found.get(label, NEVER) for label in labels)


def _array(values: Any) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _wealth(plain: Mapping[str, Any]) -> Wealth:
    read: Any = {name: np.array(value) if isinstance(value, list) else value for name, value in plain.items()}
    return Wealth(**read)
