"""What `inference.py` measured, as rows of one JSON file that several runs fill together."""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

TEST_SET = 50_000  # images of ImageNet's validation set, as in the paper's whole-test times

Key = tuple[str, str, str, str, int, str, int]


@dataclass(frozen=True)
class Row:
    """One contender at one batch size in one mode. Ratios compare latencies, and below 1 is faster.

    Attributes:
        latency_ms: Median of the rounds; `latency_low_ms` and `latency_high_ms` are the quartiles.
        single_ms: Median of the user's own model, measured in turn with this one, in the same mode.
        ratio_to_single: Of the two.
        ratio_to_ours, ratio_to_pruned, ratio_to_deep: To our single, pruned, and the Deep Ensemble run in turn, by
            way of the user's model, where those rows exist.
        multiply_adds: Of one input, those really done; `limit` is their ratio to the user's model.
        ratio_to_limit: How far the time is from what arithmetic alone would give.
        inputs_per_second: Throughput.
        test_set_s: Time of 50,000 inputs.
        peak_memory_bytes: Weights, and the most that a forward pass needs beside them.
        error: Relative difference to the answers of the model before it was rewritten, compiled or recorded.
    """

    hardware: str
    shape: str
    dtype: str
    mode: str
    batch: int
    contender: str
    members: int
    plan: str
    latency_ms: float
    latency_low_ms: float
    latency_high_ms: float
    single_ms: float
    multiply_adds: int
    limit: float
    parameters: int
    weight_bytes: int
    peak_memory_bytes: int | None
    repeats: int
    seed: int
    error: float | None
    preparation_s: float
    settings: dict[str, str] = field(default_factory=dict)
    ratio_to_single: float = 1.0
    ratio_to_ours: float | None = None
    ratio_to_pruned: float | None = None
    ratio_to_deep: float | None = None
    ratio_to_limit: float = 1.0
    inputs_per_second: float = 0.0
    test_set_s: float = 0.0

    @property
    def key(self) -> Key:
        """What tells rows apart; a new one replaces an old one with the same."""
        return (self.hardware, self.shape, self.dtype, self.mode, self.batch, self.contender, self.members)

    @property
    def cell(self) -> Key:
        """The key without the contender and its members: rows that compare with each other."""
        return (*self.key[:5], "", 0)


def completed(rows: Iterable[Row]) -> list[Row]:
    """The rows with everything that follows from what was measured, in a stable order."""
    rows = sorted(rows, key=lambda row: row.key)
    relative = {row.key: row.latency_ms / row.single_ms for row in rows}

    def to(row: Row, contender: str, members: int) -> float | None:
        other = relative.get((*row.cell[:5], contender, members))
        return None if other is None else relative[row.key] / other

    return [
        replace(
            row,
            ratio_to_single=relative[row.key],
            ratio_to_ours=to(row, "ours", 1),
            ratio_to_pruned=to(row, "pruned", 1),
            ratio_to_deep=to(row, "deep-in-turn", row.members) if row.members > 1 else None,
            ratio_to_limit=relative[row.key] / row.limit,
            inputs_per_second=1e3 * row.batch / row.latency_ms,
            test_set_s=math.ceil(TEST_SET / row.batch) * row.latency_ms / 1e3,
        )
        for row in rows
    ]


class Results:
    """The rows of a file; each new one is written at once, so a run that stops loses nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: dict[Key, Row] = {}
        self.failures: dict[str, str] = {}
        if path is not None and path.exists():
            report = json.loads(path.read_text())
            known = {one.name for one in fields(Row)}
            rows = [Row(**{name: value for name, value in row.items() if name in known}) for row in report["rows"]]
            self.rows = {row.key: row for row in rows}
            self.failures = dict(report.get("failures", {}))

    def add(self, row: Row) -> Row:
        """Put a row in, replacing an older one, and write the file; the row with its ratios."""
        self.rows[row.key] = row
        self.rows = {one.key: one for one in completed(self.rows.values())}
        self.failures.pop(_name(row.key), None)
        self.save()
        return self.rows[row.key]

    def fail(self, key: Key, reason: str) -> None:
        """Remember that something could not be measured, and why."""
        self.failures[_name(key)] = reason
        self.save()

    def save(self) -> None:
        """Write the file in one step."""
        if self.path is None:
            return
        report: dict[str, Any] = {
            "benchmark": "inference",
            "rows": [asdict(row) for row in self.rows.values()],
            "failures": dict(sorted(self.failures.items())),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(partial, self.path)


def _name(key: Key) -> str:
    return "/".join(str(part) for part in key)


HEADER = (
    f"{'contender':<18}{'M':>2} {'mode':<13}{'batch':>5} {'plan':<8}{'ms':>9}{'x single':>9}{'x ours':>8}"
    f"{'x pruned':>9}{'x deep':>8}{'limit':>7}{'x limit':>8}{'inputs/s':>10}{'50k s':>8}{'params M':>9}"
    f"{'peak MB':>9}{'error':>9}"
)


def line(row: Row) -> str:
    """A row of the table that the benchmark prints."""

    def number(value: float | None, width: int, digits: int = 2) -> str:
        return f"{'-' if value is None else f'{value:.{digits}f}':>{width}}"

    memory = None if row.peak_memory_bytes is None else row.peak_memory_bytes / 1e6
    error = "-" if row.error is None else f"{row.error:.0e}"
    return (
        f"{row.contender:<18}{row.members:>2} {row.mode:<13}{row.batch:>5} {row.plan:<8}"
        f"{number(row.latency_ms, 9, 3)}{number(row.ratio_to_single, 9)}{number(row.ratio_to_ours, 8)}"
        f"{number(row.ratio_to_pruned, 9)}{number(row.ratio_to_deep, 8)}{number(row.limit, 7)}"
        f"{number(row.ratio_to_limit, 8)}{number(row.inputs_per_second, 10, 0)}{number(row.test_set_s, 8, 1)}"
        f"{number(row.parameters / 1e6, 9, 1)}{number(memory, 9, 0)}{error:>9}"
    )


def table(rows: Iterable[Row]) -> str:
    """All rows, grouped by hardware, shape and dtype."""
    lines: list[str] = []
    group: tuple[str, ...] = ()
    for row in sorted(rows, key=lambda row: (row.key[:3], row.mode, row.batch, row.members, row.contender)):
        if row.key[:3] != group:
            group = row.key[:3]
            lines += ["", " / ".join(group), HEADER]
        lines.append(line(row))
    return "\n".join(lines)
