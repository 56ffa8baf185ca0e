"""A table of methods and metrics, with the best marked: as Markdown, LaTeX, CSV, or for a terminal."""

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal, TypeVar

from .._utils import require
from .columns import Column

T = TypeVar("T")
Rank = Literal["best", "second", ""]


@dataclass(frozen=True)
class Cell:
    """One number of a comparison.

    Attributes:
        text: As shown; a dash if there is no number.
        value: The number; the mean over several runs.
        spread: Standard deviation over the runs; None for one run.
        rank: Whether it is the best or second best of its column; numbers that look equal share a rank.
    """

    text: str
    value: float | None = None
    spread: float | None = None
    rank: Rank = ""


@dataclass(frozen=True)
class Row:
    """One method."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, repr=False)
class Comparison:
    """A table of methods and metrics; printed it is Markdown, `to_latex`, `to_csv` and `to_rich` write it otherwise.

    Attributes:
        columns: Columns that at least one method has a number for.
        rows: Methods, in the order given.
        notes: What a reader must know: the sets, the score, the convention, the number of runs.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

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


_LATEX = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
    | {"±": r"$\pm$", "×": r"$\times$", "↑": r"$\uparrow$", "↓": r"$\downarrow$"}
)


def to_markdown(comparison: Comparison) -> str:
    """A Markdown table: best bold, second best underlined, notes below; names are escaped.

    Args:
        comparison: Of `compare`.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> from hydra_ensembles.report import to_markdown
        >>> batches = [(torch.randn(7, 3, 64, 64), torch.arange(7))]
        >>> table = he.compare({"whole": he.evaluate(load_backbone(), batches, progress=False)})
        >>> to_markdown(table).splitlines()[0].startswith("| Method |")
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
    """Escape text for Markdown: no HTML, emphasis, links (also bare addresses), code or table cells."""
    shown = re.sub(r"[\\`*\[\]|!]|\b_|_\b", r"\\\g<0>", escape(_one_line(text), quote=False))
    return re.sub(r"[~$@]|(?<=http):|(?<=https):|(?<=www)\.", lambda match: f"&#{ord(match[0])};", shown)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def to_latex(comparison: Comparison) -> str:
    """A LaTeX `tabular` for the package `booktabs`; the notes become comments."""
    columns = comparison.columns
    lines = [f"% {_one_line(note)}" for note in comparison.notes]
    lines += [rf"\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\toprule"]
    if any(column.group for column in columns):
        headings, rules, last = [""], [], 1
        for group, members in itertools.groupby(columns, key=lambda column: column.group):
            first, last = last + 1, last + len(list(members))
            headings.append(rf"\multicolumn{{{last - first + 1}}}{{c}}{{{group.translate(_LATEX)}}}")
            rules += [rf"\cmidrule(lr){{{first}-{last}}}"] if group else []
        lines += [" & ".join(headings) + r" \\", " ".join(rules)]
    lines += [" & ".join(["Method", *(column.heading.translate(_LATEX) for column in columns)]) + r" \\", r"\midrule"]
    marks = {"best": r"\textbf{%s}", "second": r"\underline{%s}", "": "%s"}
    for row in comparison.rows:
        cells = [marks[cell.rank] % cell.text.translate(_LATEX) for cell in row.cells]
        lines.append(" & ".join([_one_line(row.name).translate(_LATEX), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


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
    """CSV text with a header; an apostrophe before text that a spreadsheet would run as a formula."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(map(_no_formula, names))
    writer.writerows([_no_formula(row.get(name, "")) for name in names] for row in rows)
    return buffer.getvalue()


def _no_formula(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def to_rich(comparison: Comparison, title: str | None = None) -> Any:
    """A table for the terminal (for `rich.print`): best bold, second best underlined.

    On a terminal too narrow for all columns the table continues below.
    """
    require("rich", extra="report")
    return _Terminal(comparison, title)


@dataclass(frozen=True)
class _Terminal:
    """A comparison that adapts to the width of the console."""

    comparison: Comparison
    title: str | None

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        text, box, table = (require(f"rich.{name}", extra="report") for name in ("text", "box", "table"))
        styles = {"best": "bold green", "second": "underline", "": ""}
        for number, positions in enumerate(self._blocks(options.max_width)):
            title = self.title if number == 0 else None
            part = table.Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
            part.add_column("Method", no_wrap=True)
            for column in (self.comparison.columns[position] for position in positions):
                heading = f"{column.group}\n{column.heading}" if column.group else column.heading
                part.add_column(text.Text(heading), justify="right", no_wrap=True, vertical="bottom")
            for row in self.comparison.rows:
                cells = [row.cells[position] for position in positions]
                part.add_row(text.Text(row.name), *(text.Text(cell.text, style=styles[cell.rank]) for cell in cells))
            yield part
        yield text.Text("\n".join(self.comparison.notes), style="dim")

    def _blocks(self, width: int) -> list[list[int]]:
        """Column positions of each part of the table, so that no part is wider than the terminal."""
        rows = self.comparison.rows
        blocks: list[list[int]] = []
        room = 0
        for position, column in enumerate(self.comparison.columns):
            needed = 2 + max(len(column.group), len(column.heading), *(len(row.cells[position].text) for row in rows))
            if not blocks or needed > room:
                blocks.append([])
                room = width - max(len(name) for name in ("Method", *(row.name for row in rows))) - 2
            blocks[-1].append(position)
            room -= needed
        return blocks
