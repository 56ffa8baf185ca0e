"""Predictions as rows, and the forms in which they are written."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..prediction import Prediction

WIDE = 160
"""Width of a table for the terminal that goes to a file."""
LONGEST = 60  # characters of an input that a table shows


class OutputFormat(StrEnum):
    """How predictions are written."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"


@dataclass(frozen=True)
class Row:
    """The answer for one input.

    Attributes:
        input: The file or the text.
        label: Name of the most probable class; its number where the model has no names.
        confidence: Its probability.
        epistemic: Mutual information of label and member, in nats: how much the members differ.
        entropy: Total uncertainty, in nats.
        disagreement: Share of pairs of members with different labels.
        score: What the threshold is held against; above it, the answer is to be abstained from.
        verdict: `accept` or `abstain`; None where no threshold is known.
    """

    input: str
    label: str
    confidence: float
    epistemic: float
    entropy: float
    disagreement: float
    score: float
    verdict: Literal["accept", "abstain"] | None


def rows_of(names: Sequence[str], prediction: Prediction) -> list[Row]:
    """One row an input."""
    known = prediction.class_names
    labels = [str(label) if known is None else known[label] for label in prediction.label.tolist()]
    columns = (
        tensor.tolist()
        for tensor in (
            prediction.confidence,
            prediction.epistemic,
            prediction.entropy,
            prediction.disagreement,
            prediction.score(),
        )
    )
    accepted = [None] * len(names) if prediction.accept is None else prediction.accept.tolist()
    verdicts: list[Literal["accept", "abstain"] | None] = [
        None if accept is None else ("accept" if accept else "abstain") for accept in accepted
    ]
    return [Row(*values) for values in zip(names, labels, *columns, verdicts, strict=True)]


def write_rows(rows: Sequence[Row], format: OutputFormat, *, to_file: bool) -> str:
    """All rows as text."""
    if format is OutputFormat.JSON:
        return json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n"
    if format is OutputFormat.JSONL:
        return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
    if format is OutputFormat.CSV:
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, [one.name for one in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
        return buffer.getvalue()
    console = Console(width=WIDE if to_file else None)
    with console.capture() as captured:
        console.print(_table(rows))
    return captured.get()


def _table(rows: Sequence[Row]) -> Table:
    decided = any(row.verdict is not None for row in rows)
    table = Table(box=SIMPLE, padding=(0, 1), collapse_padding=True)
    table.add_column("input", overflow="fold")
    table.add_column("label", overflow="fold")
    for heading in ("confidence", "epistemic", "entropy", "disagree"):
        table.add_column(heading, justify="right", no_wrap=True)
    if decided:
        table.add_column("verdict", no_wrap=True)
    for row in rows:
        numbers = (row.confidence, row.epistemic, row.entropy, row.disagreement)
        verdict = [row.verdict or ""] if decided else []
        table.add_row(
            escape(_short(row.input)), escape(row.label), *(f"{number:.4f}" for number in numbers), *verdict,
            style="yellow" if row.verdict == "abstain" else None,
        )  # fmt: skip
    return table


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"…{text[-LONGEST:]}" if "/" in text else f"{text[:LONGEST]}…"
