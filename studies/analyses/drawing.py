"""Drawing of analyses: one panel per metric, one row per method, the paper's numbers as open marks.

Figures use only the stored file. Colours are those of Okabe and Ito, which colour-blind readers can distinguish; marks
differ too. Figures are as wide as a page of the documentation, 700 pixels, on white.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from ..paper import SHARES
from ..results import pyplot
from .analysis import Result, by_seed, paper

WIDTH = 7.3  # inches, at 96 pixels each
OURS, THEIRS, GREY, DARK, GREEN = "#0072b2", "#d55e00", "#8a8f98", "#3d434c", "#009e73"
COLOURS = {  # by how heads were chosen
    "Taylor": THEIRS,
    "CircAvg": OURS,
    "CircAcc": "#e69f00",
    "CircOOD": GREEN,
    "random": GREY,
    "whole": DARK,
}
SMALL = 8  # points: of ticks and legends
DASHES = (0, (4, 3))


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel: a metric of every row by seed, the paper's, and a reference value."""

    title: str
    ours: Mapping[str, Sequence[float | None]]  # None if a seed has no value
    paper: Mapping[str, float] = dataclasses.field(default_factory=dict)
    line: float | None = None


def stored(result: Result, column: str, rows: Sequence[str]) -> dict[str, list[float | None]]:
    """A metric of rows by seed; shares in per cent, as in tables."""
    scale = 100 if column.rpartition(".")[2] in SHARES else 1
    by_row = {row: by_seed(result, "rows", row, column) for row in rows}
    return {row: [None if value is None else scale * value for value in values] for row, values in by_row.items()}


def printed(table: str, task: str, column: str, rows: Sequence[str]) -> dict[str, float]:
    """The paper's numbers for these rows; if it prints a mean and a deviation, the mean."""
    theirs = paper(table, task)
    return {row: float(theirs[row][column].split(" ")[0]) for row in rows if column in theirs.get(row, {})}


def panel(result: Result, column: str, title: str, rows: Sequence[str], table: str = "", task: str = "") -> Panel:
    """One metric of the rows of an analysis, with the paper's from a table."""
    return Panel(title, stored(result, column, rows), printed(table, task, column, rows))


def gains(full: Panel, title: str, base: str) -> Panel:
    """A panel minus one of its rows, ours by seed and the paper's, so that tasks of different levels share a scale."""
    ours = {
        row: [
            None if value is None or less is None else value - less
            for value, less in zip(values, full.ours[base], strict=True)
        ]
        for row, values in full.ours.items()
        if row != base
    }
    theirs = {row: value - full.paper[base] for row, value in full.paper.items() if row != base and base in full.paper}
    return Panel(title, ours, theirs, line=0.0)


def means(panel: Panel) -> dict[str, float]:
    """The mean over seeds of every row that has the metric."""
    present = {row: [value for value in values if value is not None] for row, values in panel.ours.items()}
    return {row: mean(values) for row, values in present.items() if values}


def fields(rows: int, columns: int, height: float, **settings: Any) -> tuple[Any, Any]:
    """A page-wide figure with a grid of panels, each `height` inches high."""
    drawing, axes = pyplot().subplots(
        rows, columns, figsize=(WIDTH, rows * height), squeeze=False, layout="constrained", **settings
    )
    for field in axes.flat:
        field.grid(color="#e3e6ea", linewidth=0.7)
        field.set_axisbelow(True)
        field.tick_params(labelsize=SMALL, color=GREY)
    return drawing, axes


def rows_figure(panels: Sequence[Panel], names: Mapping[str, str], ours: str, theirs: str = "", line: str = "") -> Any:
    """Panels side by side with one line per row, and a legend; `names` maps rows to their labels."""
    drawing, axes = fields(1, len(panels), 0.9 + 0.33 * len(names), sharey=True)
    several = any(len(values) > 1 for panel in panels for values in panel.ours.values())
    middle = [means(panel) for panel in panels]
    for field, panel, averages in zip(axes[0], panels, middle, strict=True):
        if panel.line is not None:
            field.axvline(panel.line, color=DARK, linewidth=1, linestyle=DASHES)
        for height, row in enumerate(names):
            values = [value for value in panel.ours.get(row, ()) if value is not None]
            if len(values) > 1:
                field.plot(values, [height] * len(values), "|", color=OURS, markersize=8, alpha=0.6)
            if row in averages:
                field.plot(averages[row], height, "o", color=OURS, markersize=6)
            if row in panel.paper:
                field.plot(panel.paper[row], height, "D", color=THEIRS, markerfacecolor="none", markersize=6)
        field.set_title(panel.title)
        field.margins(x=0.12)
    axes[0][0].set_yticks(range(len(names)), list(names.values()))
    axes[0][0].set_ylim(len(names) - 0.5, -0.5)  # the first on top
    marks: list[tuple[str, str, dict[str, Any]]] = [("o", ours, {})]
    marks += [("|", "its seeds", {"markersize": 8})] if several else []
    marks += [("D", theirs, {"color": THEIRS, "markerfacecolor": "none"})] if any(p.paper for p in panels) else []
    handles = [
        pyplot().Line2D([], [], **{"marker": mark, "color": OURS, "linestyle": "", "label": label, **more})
        for mark, label, more in marks
    ]
    if line:
        handles.append(pyplot().Line2D([], [], color=DARK, linewidth=1, linestyle=DASHES, label=line))
    drawing.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=SMALL, frameon=False)
    return drawing


def legend(drawing: Any, *axes: Any) -> None:
    """One legend for several panels, each label once, below the figure."""
    marks = {label: handle for field in axes for handle, label in zip(*field.get_legend_handles_labels(), strict=True)}
    style: dict[str, Any] = {"loc": "outside lower center", "ncols": len(marks), "fontsize": SMALL, "frameon": False}
    drawing.legend(marks.values(), marks.keys(), **style)


def cloud(field: Any, points: Sequence[Sequence[float]], colour: str, label: str) -> None:
    """Many points as one line of dots: separate markers would make the file ten times as large."""
    x, y = ([value for point in points for value in (point[axis], point[axis], float("nan"))] for axis in (0, 1))
    (line,) = field.plot(x, y, color=colour, linewidth=3, solid_capstyle="round", alpha=0.75, label=label)
    line.get_path().should_simplify = False  # would drop lines without a length
