"""Simulation of `Monitor`: how often it alarms without a reason, and how soon with one, after few rows and after many.

Streams run side by side through the functions that the monitor calls. Each stream has calibration rows of its own: the
validity of a test is over calibration and stream together. Scores of a row are two correlated normals (confidence and
familiarity); with `ties`, a third of the confidences are saturated, and equal. Beside them stored rows of real models.

A cell of the table is a task of its own, kept in a folder when it is done: a stopped run resumes.
"""

import copy
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import timm
import torch
from numpy.typing import NDArray

import hydra_ensembles as he
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
from hydra_ensembles.store import Store

from .corruptions import SEVERITIES
from .rows import Rows
from .tables import write_csv

RESULTS = Path(__file__).resolve().parents[1] / "results"
LEVEL = 0.001
LIMIT = math.log(3 / LEVEL)  # two scores and one promise share the level
FITTING, AT_ONCE, SATURATED = 200, 320, NormalDist().inv_cdf(1 / 3)
STREAMS, ROWS, CHANGED = 2000, 20_000, 60
TABLE = "monitor_simulation.csv"
GROUP = 100  # unchanged streams that are simulated at once
AGES = (1000, 1_000_000)  # unchanged rows before a change
NEVER = np.iinfo(np.int64).max  # the delay of a stream that did not alarm
STORED, METHOD = "vision-cifar100", "Hydra"  # real rows, with foreign ones
CORRUPTED = "cifar100-frozen"  # with corrupted ones
Floats = NDArray[np.float64]
Line = dict[str, Any]
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


# --- no change -------------------------------------------------------------------------------------------------------

RISKS = (0.05, 0.01)
CALIBRATIONS = ((300, True), (2000, False))  # calibration rows, and whether there are ties


def unchanged_streams(streams: int, rows: int, seed: int) -> dict[str, list[float]]:
    """The highest wealth each stream ever had, by test; and whether its error rate ever left the interval."""
    peaks: dict[str, list[float]] = {}
    for risk in RISKS:
        draws, wealth = np.random.default_rng(seed), audits(streams, risk)
        sums, outside = np.zeros(streams), np.zeros(streams, dtype=bool)
        for start in range(0, rows, AT_ONCE):
            count = min(AT_ONCE, rows - start)
            wrong = (draws.random((streams, count)) < risk).astype(float)
            wealth.bet(error_bets(wrong, risk))
            sums += wrong.sum(-1)
            for place in range(streams):
                low, high = confidence_sequence(float(sums[place]), start + count)
                outside[place] |= not low <= risk <= high
        peaks[f"audit {risk}"], peaks[f"interval {risk}"] = wealth.peak.tolist(), outside.astype(float).tolist()
    for calibration, ties in CALIBRATIONS:
        watched = Inputs(streams, calibration, ties, seed + 1)
        watched.run(unchanged, rows)
        peaks[f"inputs {calibration}"] = watched.of_stream(watched.wealth.peak).max(1).tolist()
    return peaks


def rows_of_alarms(groups: list[dict[str, list[float]]], rows: int) -> Iterator[Line]:
    """Lines of the table from groups of unchanged streams: how many ever reached the wealth of an alarm."""
    peaks = {name: np.concatenate([group[name] for group in groups]) for name in groups[0]}

    def line(cell: str, of: Floats, tests: int) -> Line:
        alarms = int((of >= LIMIT).sum())
        at_5 = float((of >= math.log(tests / 0.05)).mean())
        return {"part": "no change", "cell": cell, "rows_after": rows, "streams": len(of), "alarms": alarms,
                "share": alarms / len(of), "allowed": tests * LEVEL / 3, "share_at_5_percent": at_5}  # fmt: skip

    for risk in RISKS:
        missed = peaks[f"interval {risk}"]
        yield line(f"audit alone, true risk = promised {risk:.0%}", peaks[f"audit {risk}"], 1)
        yield {"part": "interval", "cell": f"95 % sequence misses the rate {risk:.0%}", "rows_after": rows,
               "streams": len(missed), "alarms": int(missed.sum()), "share": float(missed.mean()),
               "allowed": 0.05}  # fmt: skip
    for calibration, ties in CALIBRATIONS:
        both = np.maximum(peaks[f"inputs {calibration}"], peaks["audit 0.01"])
        yield line(f"inputs and audit together, {calibration} calibration rows{', ties' * ties}", both, 3)


def audits(streams: int, risk: float) -> Wealth:
    """The test of a promise, for many streams."""
    kinds = error_bets(np.zeros((1, 1)), risk).shape[1]
    return Wealth.of(streams, kinds, math.ceil(ERRORS / risk), LIMIT)


# --- a change --------------------------------------------------------------------------------------------------------


def changed_inputs(streams: int, rows: int, seed: int) -> list[Line]:
    """Rows from each change of the inputs to the alarm, after `rows` unchanged ones."""
    aged, found = Inputs(streams, 2000, False, seed), []
    aged.run(unchanged, rows)
    for name, change in CHANGES.items():
        watched = copy.deepcopy(aged)
        watched.run(change, 6400, until_all=True)
        alarmed = alarms_of(watched.of_stream(watched.wealth.alarm_row))
        since = watched.of_stream(watched.wealth.since)[np.arange(streams), alarmed.argmin(-1)]
        found.append(row_of_delays("inputs", name, rows, alarmed.min(-1), since, 6400))
    return found


def doubled_errors(streams: int, risk: float, share: float, rows: int, seed: int) -> list[Line]:
    """Rows from a doubling of the error rate to the alarm; only a share of the accepted rows is audited."""
    draws, wealth = np.random.default_rng(seed), audits(streams, risk)
    labels, most = round(rows * share), round(200 / risk)
    for rate, count in ((risk, labels), (2 * risk, most)):
        for start in range(0, count, AT_ONCE):
            some = min(AT_ONCE, count - start)
            wealth.bet(error_bets((draws.random((streams, some)) < rate).astype(float), risk))
    cell = f"errors {risk:.0%} to {2 * risk:.0%}, {share:.0%} of the rows audited"
    alarmed, since = alarms_of(wealth.alarm_row), wealth.since
    return [row_of_delays("audit", cell, rows, alarmed, since, most, labels, share)]


def beside_mapie(streams: int, seed: int) -> list[Line]:
    """A doubled error rate after 200 labels: our test beside MAPIE's monitoring of a risk, at the same level."""
    from mapie.exchangeability_testing import RiskMonitoring

    draws, risk, before, after = np.random.default_rng(seed), 0.05, 200, 3000
    rates = np.where(np.arange(before + after) < before, risk, 2 * risk)
    wrong = (draws.random((streams, before + after)) < rates).astype(float)
    ours = audits(streams, risk)
    ours.bet(error_bets(wrong, risk))
    cell, alarmed = "errors 5% to 10%, all rows audited", alarms_of(ours.alarm_row)
    found = []
    for errors in wrong:
        theirs = RiskMonitoring(risk="accuracy", threshold=risk, test_level=2 * LEVEL / 3, warn=False)  # half is online
        theirs.update(np.ones(len(errors)), 1.0 - errors)
        above = np.flatnonzero(theirs.online_risk_lower_bound_sequence_history > risk)
        found.append(above[0] + 1 if len(above) else NEVER)
    says = row_of_delays("audit", "the same by MAPIE's RiskMonitoring", before, np.array(found), ours.since, after)
    return [row_of_delays("audit", cell, before, alarmed, ours.since, after), says | {"median_since": ""}]


# --- stored rows -----------------------------------------------------------------------------------------------------


def real_delay(scores: Floats, fitting: int, held: int, draws: np.random.Generator) -> tuple[int, int]:
    """When a monitor alarms on scores `[2, n]`, of which the first rows are those of calibration, and since when."""
    counts, found = np.zeros((2, 100), dtype=np.int64), []
    for count, one in zip(counts, scores, strict=True):
        bins = Bins.of(torch.tensor(one[:fitting]), torch.tensor(one[fitting : fitting + held]))
        count[: len(bins.counts)] = bins.counts
        found.append(np.searchsorted(bins.edges, one[fitting + held :], side="right"))
    wealth = Wealth.of(2, len(SLOPES) + len(TIMES), BLOCK, LIMIT, JUMP)
    places = np.stack(found)
    wealth.bet(input_bets(p_values(counts, places, draws.random(places.shape))))
    alarms = alarms_of(wealth.alarm_row)
    return int(alarms.min()), int(wealth.since[alarms.argmin()])


def among(known: Floats, other: Floats, share: float, rows: int, draws: np.random.Generator) -> Floats:
    """Shuffled known rows `[2, n]`; among the last ones, `rows`, a share is of another kind, each at most once."""
    stream, other = (draws.permutation(one, axis=1).astype(np.float64) for one in (known, other))
    strange = len(stream[0]) - rows + np.flatnonzero(draws.random(rows) < share)[: other.shape[1]]
    stream[:, strange] = other[:, : len(strange)]
    return stream


def foreign_rows(group: str, foreign: str, share: float, each: int, seed: int) -> list[Line]:
    """Foreign rows of a study among its test rows, after 1,000 of these; one stream has rows of one seed."""
    rows = Rows.read(RESULTS / "rows" / f"{STORED}.parquet")
    inside, most, found = next(iter(rows.about["tasks"])), 1500 if share == 0.5 else 3000, []
    for number in rows.runs[METHOD]:
        known, other = (scores_of(rows, METHOD, number, f"{inside}|{one}") for one in (inside, foreign or inside))
        for draw in range(each):
            draws = np.random.default_rng([seed, number, draw])
            stream = among(known[:, draws.permutation(known.shape[1])[: 6000 + most]], other, share, most, draws)
            found.append(real_delay(stream, 2500, 2500, draws))
    cell = f"{share:.0%} {group} {foreign}" if foreign else "no change"
    alarmed, since = np.array(found).T
    return [row_of_delays(f"stored rows of {STORED}, {METHOD}", cell, 1000, alarmed, since, most)]


def corrupted_rows(severity: int, share: float, streams: int, seed: int) -> list[Line]:
    """Corrupted images among others, after 500 unchanged ones; each row has any of the fifteen corruptions."""
    rows = Rows.read(RESULTS / "rows" / f"{CORRUPTED}.parquet")
    ((inside, groups),) = rows.about["tasks"].items()
    names = [name for name in groups["shift"] if name.endswith(f" {severity}")]
    known = scores_of(rows, "Single", 0, f"{inside}|{inside}")
    other = np.concatenate([scores_of(rows, "Single", 0, f"{inside}|{name}") for name in names], axis=1)
    most, found = known.shape[1] - 2100, []
    for draw in range(streams):
        draws = np.random.default_rng([seed, severity, draw])
        found.append(real_delay(among(known, other, share, most, draws), 800, 800, draws))
    cell = f"{share:.0%} corrupted, severity {severity}" if share else "no change"
    alarmed, since = np.array(found).T
    return [row_of_delays(f"stored rows of {CORRUPTED}", cell, 500, alarmed, since, most)]


def scores_of(rows: Rows, method: str, seed: int, place: str) -> Floats:
    """Both scores that a monitor watches, `[2, n]`."""
    columns = rows.columns(method, seed)
    return np.stack([columns[f"{place}|{score}"] for score in ("doubt", "mahalanobis")])


def overhead() -> list[Line]:
    """Processor time of `update` over that of `predict`: ViT-Tiny, 32 images of 224 pixels, one thread."""
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(0)
    batches = [(torch.randn(50, 3, 224, 224, generator=draws), torch.arange(50) % 10) for _ in range(5)]
    model = he.calibrate(
        he.convert(timm.create_model("vit_tiny_patch16_224", num_classes=10).eval()), batches, share=0.9
    )
    watch, inputs, ratios = he.Monitor(model), torch.randn(32, 3, 224, 224, generator=draws), []
    for _ in range(9):
        times = [time.process_time()]
        answers = model.predict(inputs)
        times.append(time.process_time())
        watch.update(answers)
        ratios.append((time.process_time() - times[1]) / (times[1] - times[0]))
    cell = "update over predict, ViT-Tiny, batch 32, CPU"
    return [{"part": "price", "cell": cell, "share": float(np.median(ratios)), "allowed": 0.01}]


# --- the table -------------------------------------------------------------------------------------------------------


def alarms_of(rows: Any) -> Any:
    """After how many rows each test alarmed."""
    return np.where(rows >= 0, rows, NEVER)


def row_of_delays(
    part: str, cell: str, before: int, alarmed: Any, since: Any, most: int, labels: int | None = None, share: float = 1
) -> Line:
    """Median delay and where the monitor said that the change was, in rows from the change.

    Of an audit `labels` came before it, and only a share of the rows is audited.
    """
    begin = before if labels is None else labels
    delay, since = (np.where(alarmed < NEVER, one - begin, NEVER) / share for one in (alarmed, since))
    found = (delay >= 0) & (delay <= most / share)
    median, late = (float(np.quantile(delay, q, method="lower")) for q in (0.5, 0.9))
    told = [round(one) if one <= most / share else "" for one in (median, late)]
    return {"part": part, "cell": cell, "rows_before": before, "rows_after": round(most / share), "streams": len(delay),
            "alarms": int(found.sum()), "share": float(found.mean()), "median_delay": told[0], "delay_90": told[1],
            "median_since": round(float(np.median(since[found]))) if found.any() else ""}  # fmt: skip


COLUMNS = "part,cell,rows_before,rows_after,streams,alarms,share,allowed,share_at_5_percent,median_delay,delay_90,"
COLUMNS += "median_since,level,seed,seconds,numpy,hydra_ensembles"


def cells_of(streams: int, rows: int, aged: int, seed: int) -> dict[str, Callable[[], Any]]:
    """The cells of the table by name, the longest first."""
    cells: dict[str, Callable[[], Any]] = {}
    for age in reversed(AGES):
        cells[f"inputs-{age}"] = partial(changed_inputs, aged, age, seed + 2)
    for start in range(0, streams, GROUP):
        cells[f"unchanged-{start}"] = partial(unchanged_streams, min(GROUP, streams - start), rows, seed + 1000 + start)
    for risk in (0.01, 0.02, 0.05):
        for share in (0.01, 0.05, 0.2):
            for age in AGES:
                cells[f"audit-{risk}-{share}-{age}"] = partial(doubled_errors, aged, risk, share, age, seed + 1)
    cells["overhead"] = overhead
    cells["mapie"] = partial(beside_mapie, aged, seed)
    ((_, groups),) = Rows.read(RESULTS / "rows" / f"{STORED}.parquet").about["tasks"].items()
    sets = [(group, one, share) for share in (0.1, 0.5) for group, names in groups.items() for one in names]
    for group, one, share in [("", "", 0.0), *sets]:
        cells[f"foreign-{share}-{one}"] = partial(foreign_rows, group, one, share, max(1, aged // 3), seed)
    for share in (0.1, 0.5, 1.0):
        for level in SEVERITIES:
            cells[f"corrupted-{share}-{level}"] = partial(corrupted_rows, level, share, aged, seed)
    cells["corrupted-0"] = partial(corrupted_rows, 1, 0.0, aged, seed)
    return cells


def timed(cell: tuple[str, Callable[[], Any]]) -> tuple[str, dict[str, Any]]:
    """Compute a cell."""
    began = time.monotonic()
    return cell[0], {"found": cell[1](), "seconds": round(time.monotonic() - began)}


def simulate(
    path: Path,
    work: Path,
    streams: int = STREAMS,
    rows: int = ROWS,
    aged: int = CHANGED,
    seed: int = 0,
    processes: int = 1,
) -> None:
    """Write the table; `work` keeps the cells that are done."""
    cells = cells_of(streams, rows, aged, seed)
    identity = {"streams": streams, "rows": rows, "aged": aged, "seed": seed, "hydra_ensembles": __version__}
    with Store(work, identity, "a simulation of monitors") as store:
        todo = [(name, cell) for name, cell in cells.items() if not store.has(name)]
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            for name, result in pool.imap_unordered(timed, todo):
                store.step(name, lambda result=result: result)  # type: ignore[misc]
                print(f"{name}: {result['seconds']} s", flush=True)
        done: dict[str, dict[str, Any]] = {name: store.step(name, dict) for name in cells}
    unchanged = [one for name, one in done.items() if name.startswith("unchanged")]
    lines = [
        line | {"seconds": sum(one["seconds"] for one in unchanged)}
        for line in rows_of_alarms([one["found"] for one in unchanged], rows)
    ]
    for name, one in done.items():
        if not name.startswith("unchanged"):
            lines += [line | {"seconds": one["seconds"]} for line in one["found"]]
    about = {"level": LEVEL, "seed": seed, "numpy": np.__version__, "hydra_ensembles": __version__}
    names = COLUMNS.split(",")
    write_csv(path, [names, *([(about | line).get(name, "") for name in names] for line in lines)])
