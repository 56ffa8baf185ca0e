"""The one table writer: methods and metrics, with the best marked, as Markdown, CSV, or for a terminal."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from .._utils import require

T = TypeVar("T")
Rank = Literal["best", "second", ""]
Direction = Literal["higher", "lower", "neither"]


@dataclass(frozen=True)
class Column:
    """One column of a comparison."""

    key: str  # name of the number in `Evaluation.numbers`, a field of `Cost`, or `heads`
    title: str  # heading
    group: str = ""  # heading above several columns
    better: Direction = "neither"
    digits: int = 2  # after the point
    scale: float = 1.0  # factor applied before printing: 100 for percent, 1e-6 for millions
    suffix: str = ""  # printed after the number
    ranked: bool = True  # whether to mark the best; False if the methods are not comparable

    @property
    def heading(self) -> str:
        """Title with an arrow in the better direction."""
        return self.title + {"higher": " ↑", "lower": " ↓", "neither": ""}[self.better]

    def number(self, value: float) -> str:
        """Format a number; small counts are not rounded to zero."""
        text = f"{value * self.scale:.{self.digits}f}"
        return f"{value * self.scale:.1g}" if value and self.scale < 1 and float(text) == 0 else text

    def write(self, value: float, spread: float | None = None) -> str:
        """Format a number, optionally with its spread."""
        text = self.number(value)
        return text + self.suffix if spread is None else f"{text} ± {spread * self.scale:.{self.digits}f}{self.suffix}"


@dataclass(frozen=True)
class Cell:
    """One number of a comparison."""

    text: str  # as shown; a dash if there is no number
    value: float | None = None  # the number; the mean over several runs
    spread: float | None = None  # standard deviation over the runs; None for one run
    rank: Rank = ""  # the best or second best of its column; numbers that look equal share a rank


@dataclass(frozen=True)
class Row:
    """One method."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, repr=False)
class Comparison:
    """A table of methods and metrics; printed it is Markdown, `to_csv` and `to_rich` write it otherwise."""

    columns: tuple[Column, ...]  # that at least one method has a number for
    rows: tuple[Row, ...]  # methods, in the order given
    notes: tuple[str, ...]  # what a reader must know: the sets, the score, the convention, the number of runs

    def __repr__(self) -> str:
        return f"Comparison({', '.join(row.name for row in self.rows)}: {len(self.columns)} columns)"

    def __str__(self) -> str:
        return to_markdown(self)

    _repr_markdown_ = __str__  # for notebooks


def tabulated(
    columns: Sequence[Column], rows: Mapping[str, T], cell: Callable[[Column, T], Cell], notes: tuple[str, ...]
) -> Comparison:
    """Make a table of `cell(column, row)` with ranks; columns without any number are left out."""
    shown: list[tuple[Column, list[Cell]]] = []  # each column with its cells from top to bottom
    for column in columns:
        cells = [cell(column, row) for row in rows.values()]
        if any(number.text != "–" for number in cells):
            shown.append((column, rank_cells(cells, column)))
    lines = tuple(Row(name, tuple(cells[index] for _, cells in shown)) for index, name in enumerate(rows))
    return Comparison(tuple(column for column, _ in shown), lines, notes)


def rank_cells(cells: list[Cell], column: Column) -> list[Cell]:
    """Mark the best of the displayed numbers and, of three or more, the second best; nothing if all are equal."""
    shown = [None if cell.value is None else float(column.number(cell.value)) for cell in cells]
    distinct = sorted({value for value in shown if value is not None}, reverse=column.better == "higher")
    if column.better == "neither" or not column.ranked or len(distinct) < 2:
        return cells
    ranks: dict[float, Rank] = {distinct[0]: "best"}
    if len(cells) > 2:
        ranks[distinct[1]] = "second"
    return [
        cell if value is None else replace(cell, rank=ranks.get(value, ""))
        for cell, value in zip(cells, shown, strict=True)
    ]


def to_markdown(comparison: Comparison) -> str:
    """A Markdown table: best bold, second best underlined, notes below.

    Examples:
        >>> table = he.compare({"whole": he.evaluate(base, batches, progress=False)})
        >>> str(table).splitlines()[0].startswith("| Method |")
        True
    """
    marks = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
    headings = ["Method", *(f"{column.group} {column.heading}".strip() for column in comparison.columns)]
    lines = [[_markdown(heading) for heading in headings], ["---", *["---:"] * len(comparison.columns)]]
    for row in comparison.rows:
        lines.append([_markdown(row.name), *(marks[cell.rank].format(_markdown(cell.text)) for cell in row.cells)])
    table = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([*table, "", *map(_markdown, comparison.notes), ""])


def _markdown(text: str) -> str:
    """Text as a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def to_csv(comparison: Comparison) -> str:
    """Comma-separated values at full precision, under the names of `Evaluation.numbers`.

    A column of standard deviations follows each column in which some method has several runs.
    """
    rows: list[dict[str, Any]] = []
    for row in comparison.rows:
        rows.append({"method": row.name})
        for column, cell in zip(comparison.columns, row.cells, strict=True):
            rows[-1][column.key] = cell.text if column.key == "heads" else cell.value
            if cell.spread is not None:
                rows[-1][f"{column.key}_sd"] = cell.spread
    names = [f"{column.key}{end}" for column in comparison.columns for end in ("", "_sd")]
    return csv_text(rows, ["method", *(name for name in names if any(name in row for row in rows))])


def csv_text(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> str:
    """CSV text with a header."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def to_rich(comparison: Comparison, title: str | None = None) -> Any:
    """A table for the terminal (for `rich.print`): best bold, second best underlined; with few methods on its side."""
    rich = {name: require(f"rich.{name}", extra="report") for name in ("text", "box", "table", "console")}
    styles = {"best": "bold green", "second": "underline", "": ""}
    columns, rows = comparison.columns, comparison.rows
    titles = [f"{column.group} {column.heading}".strip() for column in columns]
    cells = [[rich["text"].Text(cell.text, style=styles[cell.rank]) for cell in row.cells] for row in rows]
    on_its_side = len(columns) > len(rows)
    headings, lines = [row.name for row in rows], dict(zip(titles, zip(*cells, strict=True), strict=True))
    if not on_its_side:
        headings, lines = titles, {row.name: line for row, line in zip(rows, cells, strict=True)}  # type: ignore[misc]
    table = rich["table"].Table(title=title, box=rich["box"].SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("" if on_its_side else "Method", overflow="fold")
    for heading in headings:
        table.add_column(rich["text"].Text(heading), justify="right", overflow="fold", vertical="bottom")
    for name, line in lines.items():
        table.add_row(rich["text"].Text(name), *line)
    return rich["console"].Group(table, rich["text"].Text("\n".join(comparison.notes), style="dim"))
