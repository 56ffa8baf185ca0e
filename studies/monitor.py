"""Simulation of `Monitor`: how often it alarms without a reason, and how soon with one, after few rows and after many.

Streams run side by side through the functions that the monitor calls. Each stream has calibration rows of its own: the
validity of a test is over calibration and stream together. Scores of a row are two correlated normals (confidence and
familiarity); with `ties`, a third of the confidences are saturated, and equal.
"""

import copy
import csv
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hydra_ensembles import __version__
from hydra_ensembles.metrics.conformal import Bins
from hydra_ensembles.monitor import (
    BLOCK,
    ERRORS,
    JUMP,
    SLOPES,
    TIMES,
    Wealth,
    confidence_sequence,
    error_bets,
    input_bets,
    p_values,
)

from .rows import Rows

RESULTS = Path(__file__).resolve().parents[1] / "results"
LEVEL = 0.001
LIMIT = math.log(3 / LEVEL)  # two scores and one promise share the level
FITTING, AT_ONCE, SATURATED = 200, 320, NormalDist().inv_cdf(1 / 3)
Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, int]], Floats]


def unchanged(draws: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Scores `[streams, 2, rows]` of rows like those of calibration."""
    first, second = draws.standard_normal((2, *shape))
    return np.stack([first, 0.5 * first + math.sqrt(0.75) * second], axis=1)


def mixed(share: float, unsure: float, unfamiliar: float) -> Draw:
    """Scores of a stream of which a share is foreign, moved by standard deviations in both scores."""

    def draw(draws: np.random.Generator, shape: tuple[int, int]) -> Floats:
        moved = np.array([unsure, unfamiliar])[:, None]  # [2, 1]
        return unchanged(draws, shape) + (draws.random((shape[0], 1, shape[1])) < share) * moved

    return draw


CHANGES: dict[str, Draw] = {
    "all rows 0.3 deviations off": mixed(1.0, 0.3, 0.3),
    "all rows 1 deviation off": mixed(1.0, 1.0, 1.0),
    "surer by 0.5 deviations": mixed(1.0, -0.5, 0.0),
    "10 % near (1.5 off)": mixed(0.1, 1.5, 1.5),
    "50 % near (1.5 off)": mixed(0.5, 1.5, 1.5),
    "10 % far (3 off)": mixed(0.1, 1.5, 3.0),
    "50 % far (3 off)": mixed(0.5, 1.5, 3.0),
}


class Inputs:
    """The tests of inputs of many streams."""

    def __init__(self, streams: int, calibration: int, ties: bool, seed: int) -> None:
        self.draws, self.ties, self.shape = np.random.default_rng(seed), ties, (streams, 2)
        fitting = self._scores(unchanged, FITTING)  # [streams, 2, FITTING]
        places = np.arange(1, 100) * FITTING // 100
        self.edges = np.sort(fitting, axis=-1)[..., places]  # equal edges leave bins empty
        self.counts = np.zeros((*self.shape, self.edges.shape[-1] + 1), dtype=np.int64)
        held = self._bins(self._scores(unchanged, calibration))
        for place in np.ndindex(self.shape):
            self.counts[place] = np.bincount(held[place], minlength=self.counts.shape[-1])
        self.counts = self.counts.reshape(2 * streams, -1)
        self.wealth = Wealth.of(2 * streams, len(SLOPES) + len(TIMES), BLOCK, LIMIT, JUMP)

    def _scores(self, kind: Draw, rows: int) -> Floats:
        scores = kind(self.draws, (self.shape[0], rows))
        if self.ties:
            scores[:, 0] = np.maximum(scores[:, 0], SATURATED)
        return scores

    def _bins(self, scores: Floats) -> NDArray[np.int64]:
        found = np.empty(scores.shape, dtype=np.int64)
        for place in np.ndindex(self.shape):
            found[place] = np.searchsorted(self.edges[place], scores[place], side="right")
        return found

    def run(self, kind: Draw, rows: int, until_all: bool = False) -> None:
        """Watch rows; with `until_all`, stop when every stream has alarmed."""
        for start in range(0, rows, AT_ONCE):
            bins = self._bins(self._scores(kind, min(AT_ONCE, rows - start))).reshape(len(self.counts), -1)
            self.wealth.bet(input_bets(p_values(self.counts, bins, self.draws.random(bins.shape))))
            if until_all and (self.of_stream(self.wealth.alarm_row) >= 0).any(1).all():
                break

    def of_stream(self, values: Any) -> Any:
        """What belongs to both scores of each stream, `[streams, 2]`."""
        return values.reshape(self.shape)


def false_alarms(streams: int, rows: int, seed: int) -> Iterator[dict[str, Any]]:
    """Streams without a change, all three tests; the error rate of audited rows is the promised one."""
    audited = {}
    for risk in (0.05, 0.01):
        draws = np.random.default_rng(seed)
        wealth, sums, outside = audits(streams, risk), np.zeros(streams), np.zeros(streams, dtype=bool)
        for start in range(0, rows, AT_ONCE):
            count = min(AT_ONCE, rows - start)
            wrong = (draws.random((streams, count)) < risk).astype(float)
            wealth.bet(error_bets(wrong, risk))
            sums += wrong.sum(-1)
            for place in range(streams):
                low, high = confidence_sequence(float(sums[place]), start + count)
                outside[place] |= not low <= risk <= high
        audited[risk] = wealth.peak
        yield row_of_alarms(f"audit alone, true risk = promised {risk:.0%}", wealth.peak, rows, 1)
        yield {"part": "interval", "cell": f"95 % sequence misses the rate {risk:.0%}", "rows_after": rows,
               "streams": streams, "alarms": int(outside.sum()), "share": float(outside.mean()),
               "allowed": 0.05}  # fmt: skip
    for calibration, ties in ((300, True), (2000, False)):
        peaks = []
        for group in range(0, streams, 500):
            watched = Inputs(min(500, streams - group), calibration, ties, seed + 1000 + group)
            watched.run(unchanged, rows)
            peaks.append(watched.of_stream(watched.wealth.peak).max(1))
        both = np.maximum(np.concatenate(peaks), audited[0.01])
        cell = f"inputs and audit together, {calibration} calibration rows{', ties' * ties}"
        yield row_of_alarms(cell, both, rows, 3)


def row_of_alarms(cell: str, peaks: Floats, rows: int, tests: int) -> dict[str, Any]:
    """How many of the streams ever reached the wealth of an alarm, also at a level of 5 %."""
    alarms = int((peaks >= LIMIT).sum())
    at_5 = float((peaks >= math.log(tests / 0.05)).mean())
    return {"part": "no change", "cell": cell, "rows_after": rows, "streams": len(peaks), "alarms": alarms,
            "share": alarms / len(peaks), "allowed": tests * LEVEL / 3, "share_at_5_percent": at_5}  # fmt: skip


def audits(streams: int, risk: float) -> Wealth:
    """The test of a promise, for many streams."""
    kinds = error_bets(np.zeros((1, 1)), risk).shape[1]
    return Wealth.of(streams, kinds, math.ceil(ERRORS / risk), LIMIT)


def delays(streams: int, before: Sequence[int], seed: int) -> Iterator[dict[str, Any]]:
    """Rows from a change to the alarm, after few and after many unchanged rows."""
    for rows in before:
        aged = Inputs(streams, 2000, False, seed)
        aged.run(unchanged, rows)
        for name, change in CHANGES.items():
            watched = copy.deepcopy(aged)
            watched.run(change, 6400, until_all=True)
            rang = watched.of_stream(watched.wealth.alarm_row)
            alarmed = np.where(rang >= 0, rang, np.iinfo(np.int64).max)
            since = watched.of_stream(watched.wealth.since)[np.arange(streams), alarmed.argmin(-1)]
            yield row_of_delays("inputs", name, rows, alarmed.min(-1) - rows, since - rows, 6400)


def audit_delays(streams: int, before: Sequence[int], seed: int) -> Iterator[dict[str, Any]]:
    """Rows from a doubling of the error rate to the alarm; only a share of the accepted rows is audited."""
    for risk in (0.01, 0.02, 0.05):
        for share in (0.01, 0.05, 0.2):
            for rows in before:
                draws, wealth = np.random.default_rng(seed), audits(streams, risk)
                labels, most = round(rows * share), round(200 / risk)
                for rate, count in ((risk, labels), (2 * risk, most)):
                    for start in range(0, count, AT_ONCE):
                        some = min(AT_ONCE, count - start)
                        wealth.bet(error_bets((draws.random((streams, some)) < rate).astype(float), risk))
                alarmed = np.where(wealth.alarm_row >= 0, wealth.alarm_row, np.iinfo(np.int64).max)
                cell = f"errors {risk:.0%} to {2 * risk:.0%}, {share:.0%} of the rows audited"
                delay, since = ((one - labels) / share for one in (alarmed, wealth.since))
                yield row_of_delays("audit", cell, rows, delay, since, most / share)


def referee_delays(streams: int, seed: int) -> Iterator[dict[str, Any]]:
    """A doubled error rate after 200 labels: our test beside MAPIE's monitoring of a risk, at the same level."""
    from mapie.exchangeability_testing import RiskMonitoring

    draws, risk, before, after = np.random.default_rng(seed), 0.05, 200, 3000
    rates = np.where(np.arange(before + after) < before, risk, 2 * risk)
    wrong = (draws.random((streams, before + after)) < rates).astype(float)
    ours = audits(streams, risk)
    ours.bet(error_bets(wrong, risk))
    delay = np.where(ours.alarm_row >= 0, ours.alarm_row - before, np.iinfo(np.int64).max)
    yield row_of_delays("audit", "errors 5% to 10%, all rows audited", before, delay, ours.since - before, after)
    found = []
    for errors in wrong:
        theirs = RiskMonitoring(risk="accuracy", threshold=risk, test_level=2 * LEVEL / 3, warn=False)  # half is online
        theirs.update(np.ones(len(errors)), 1.0 - errors)
        above = np.flatnonzero(theirs.online_risk_lower_bound_sequence_history > risk)
        found.append(above[0] + 1 - before if len(above) else np.iinfo(np.int64).max)
    yield row_of_delays("audit", "the same by MAPIE's RiskMonitoring", before, np.array(found), delay * 0, after)


def stored_delays(draws_each: int, seed: int, name: str = "vision-cifar100", method: str = "Hydra") -> Iterator[Any]:
    """Real scores of the stored rows of a study, shuffled: foreign rows among known ones, after 1,000 known ones."""
    rows = Rows.read(RESULTS / "rows" / f"{name}.parquet")
    ((inside, groups),) = rows.about["tasks"].items()
    scores = [rows.columns(method, number) for number in rows.runs[method]]
    sets = [(group, one) for group, names in groups.items() for one in names]
    for share in (0.0, 0.1, 0.5):
        for group, foreign in sets if share else [("", inside)]:
            delay, since, most = [], [], 3000 if share < 0.5 else 1500
            for number, columns in enumerate(scores):
                for draw in range(draws_each):
                    draws = np.random.default_rng([seed, number, draw])
                    known, other = (
                        np.stack([columns[f"{inside}|{one}|{score}"] for score in ("doubt", "mahalanobis")])
                        for one in (inside, foreign)
                    )  # [2, n]
                    known, other = (draws.permutation(one, axis=1) for one in (known, other))
                    fitting, held, stream = known[:, :2500], known[:, 2500:5000], known[:, 5000 : 6000 + most]
                    strange = np.flatnonzero(draws.random(most) < share)[: other.shape[1]]
                    stream[:, 1000 + strange] = other[:, : len(strange)]
                    bins = [
                        Bins.of(torch.tensor(one), torch.tensor(two)) for one, two in zip(fitting, held, strict=True)
                    ]
                    found = np.stack(
                        [np.searchsorted(one.edges, now, side="right") for one, now in zip(bins, stream, strict=True)]
                    )
                    counts = np.zeros((2, 100), dtype=np.int64)
                    for count, one in zip(counts, bins, strict=True):
                        count[: len(one.counts)] = one.counts
                    wealth = Wealth.of(2, len(SLOPES) + len(TIMES), BLOCK, LIMIT, JUMP)
                    wealth.bet(input_bets(p_values(counts, found, draws.random(found.shape))))
                    alarms = np.where(wealth.alarm_row >= 0, wealth.alarm_row, np.iinfo(np.int64).max)
                    delay.append(alarms.min() - 1000 * (alarms.min() < np.iinfo(np.int64).max))
                    since.append(wealth.since[alarms.argmin()] - 1000)
            cell = f"{share:.0%} {group} {foreign}" if share else "no change"
            yield row_of_delays(f"stored rows of {name}, {method}", cell, 1000, np.array(delay), np.array(since), most)


def row_of_delays(part: str, cell: str, rows: int, delay: Any, since: Any, most: float) -> dict[str, Any]:
    """Median delay and where the monitor said that the change was, in rows from the change."""
    found = (delay >= 0) & (delay <= most)
    median, late = (float(np.quantile(delay, q, method="lower")) for q in (0.5, 0.9))
    return {"part": part, "cell": cell, "rows_before": rows, "rows_after": round(most), "streams": len(delay),
            "alarms": int(found.sum()), "share": float(found.mean()),
            "median_delay": round(median) if median <= most else "", "delay_90": round(late) if late <= most else "",
            "median_since": round(float(np.median(since[found]))) if found.any() else ""}  # fmt: skip


COLUMNS = "part,cell,rows_before,rows_after,streams,alarms,share,allowed,share_at_5_percent,median_delay,delay_90,"
COLUMNS += "median_since,level,seed,seconds,numpy,hydra_ensembles"


def simulate(path: Path, streams: int = 2000, rows: int = 20_000, aged: int = 60, seed: int = 0) -> None:
    """Write the table; a line is written as soon as it is known."""
    parts = (
        (seed, false_alarms(streams, rows, seed)),
        (seed + 1, audit_delays(aged, (1000, 1_000_000), seed + 1)),
        (seed, referee_delays(aged, seed)),
        (seed + 2, delays(aged, (1000, 1_000_000), seed + 2)),
        (seed, stored_delays(20, seed)),
    )
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS.split(","), lineterminator="\n")
        writer.writeheader()
        about = {"level": LEVEL, "numpy": np.__version__, "hydra_ensembles": __version__}
        for number, part in parts:
            began = time.monotonic()
            for line in part:
                writer.writerow(about | {"seed": number} | line | {"seconds": round(time.monotonic() - began)})
                file.flush()
                print(line, flush=True)
