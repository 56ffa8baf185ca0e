"""A comparison as Markdown, LaTeX, CSV, or a table for the terminal."""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from .._utils import require
from .comparison import Cell, Comparison

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "–": "--",
}


def to_markdown(comparison: Comparison) -> str:
    """A Markdown table: best bold, second best underlined, notes below."""
    lines = [
        _markdown_row(["Method", *(column.long_heading for column in comparison.columns)]),
        "|---|" + "---:|" * len(comparison.columns),
    ]
    for row in comparison.rows:
        lines.append(_markdown_row([row.name]).removesuffix("|") + _markdown_cells(row.cells))
    return "\n".join([*lines, "", *comparison.notes, ""])


def _markdown_row(texts: list[str]) -> str:
    escaped = (text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for text in texts)
    return "| " + " | ".join(escaped) + " |"


def _markdown_cells(cells: tuple[Cell, ...]) -> str:
    marks = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
    return "".join(f"| {marks[cell.rank].format(cell.text)} " for cell in cells) + "|"


def to_latex(comparison: Comparison) -> str:
    """A LaTeX `tabular` for the packages `booktabs`; the notes are comments."""
    columns = comparison.columns
    lines = [f"% {note}" for note in comparison.notes]
    lines += [rf"\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\toprule"]
    if any(column.group for column in columns):
        headings, rules, position = [""], [], 2
        for group, members in groupby(columns, key=lambda column: column.group):
            width = len(list(members))
            headings.append(rf"\multicolumn{{{width}}}{{c}}{{{_latex(group)}}}")
            if group:
                rules.append(rf"\cmidrule(lr){{{position}-{position + width - 1}}}")
            position += width
        lines += [" & ".join(headings) + r" \\", " ".join(rules)]
    lines += [" & ".join(["Method", *(_latex(column.heading) for column in columns)]) + r" \\", r"\midrule"]
    marks = {"best": r"\textbf{%s}", "second": r"\underline{%s}", "": "%s"}
    for row in comparison.rows:
        cells = [marks[cell.rank] % _latex(cell.text) for cell in row.cells]
        lines.append(" & ".join([_latex(row.name), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def to_csv(comparison: Comparison) -> str:
    """Comma-separated values at full precision, under the names of `Evaluation.numbers`.

    A column of standard deviations follows each column in which some method has several runs.
    """
    spread = [any(row.cells[i].spread is not None for row in comparison.rows) for i in range(len(comparison.columns))]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    heading = ["method"]
    for column, has_spread in zip(comparison.columns, spread, strict=True):
        heading += [column.key, f"{column.key}_sd"] if has_spread else [column.key]
    writer.writerow(heading)
    for row in comparison.rows:
        values: list[Any] = [row.name]
        for column, cell, has_spread in zip(comparison.columns, row.cells, spread, strict=True):
            values.append(cell.text if column.key == "heads" else cell.value)
            values += [cell.spread] if has_spread else []
        writer.writerow(values)
    return buffer.getvalue()


def to_rich(comparison: Comparison, title: str | None = None) -> Any:
    """A table for the terminal (for `rich.print`): best bold, second best underlined.

    On a terminal too narrow for all columns the table continues below, headings that belong together together.
    """
    require("rich", extra="report")
    return _Terminal(comparison, title)


@dataclass(frozen=True)
class _Terminal:
    """A comparison that fits itself to the width it is printed in."""

    comparison: Comparison
    title: str | None

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        for number, positions in enumerate(_blocks(self.comparison, options.max_width)):
            yield _rich_table(self.comparison, positions, self.title if number == 0 else None)
        yield require("rich.text", extra="report").Text("\n".join(self.comparison.notes), style="dim")


def _blocks(comparison: Comparison, width: int) -> list[list[int]]:
    """Positions of the columns of each part of the table, so that no part is wider than the terminal."""
    room = width - max(len(row.name) for row in comparison.rows) - 2
    units: list[list[int]] = []
    for _, members in groupby(range(len(comparison.columns)), key=lambda position: comparison.columns[position].group):
        unit = list(members)
        units += [unit] if sum(_width(comparison, one) for one in unit) <= room else [[one] for one in unit]
    blocks: list[list[int]] = [[]]
    used = 0
    for unit in units:
        needed = sum(_width(comparison, position) for position in unit)
        if blocks[-1] and used + needed > room:
            blocks.append([])
            used = 0
        blocks[-1] += unit
        used += needed
    return blocks


def _width(comparison: Comparison, position: int) -> int:
    """Characters a column takes, with the space to the next one."""
    column = comparison.columns[position]
    return 2 + max(len(column.group), len(column.heading), *(len(row.cells[position].text) for row in comparison.rows))


def _rich_table(comparison: Comparison, positions: list[int], title: str | None) -> Any:
    text, box = require("rich.text", extra="report"), require("rich.box", extra="report")
    table = require("rich.table", extra="report").Table(
        title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("Method", no_wrap=True)
    for position in positions:
        column = comparison.columns[position]
        heading = f"{column.group}\n{column.heading}" if column.group else column.heading
        table.add_column(text.Text(heading), justify="right", no_wrap=True, vertical="bottom")
    styles = {"best": "bold green", "second": "underline", "": ""}
    for row in comparison.rows:
        cells = [row.cells[position] for position in positions]
        table.add_row(text.Text(row.name), *(text.Text(cell.text, style=styles[cell.rank]) for cell in cells))
    return table
