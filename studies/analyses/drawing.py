"""How analyses are drawn: a field for each number, a row for each method, the paper's numbers as open marks.

What is drawn comes from the stored file alone. Colours are those of Okabe and Ito, which the colour-blind tell apart;
marks differ too. Figures are as wide as a page of the documentation, 700 pixels, on white.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from ..paper import SHARES
from ..results import pyplot
from .analysis import Found, by_seed, paper

WIDTH = 7.3  # inches, at 96 pixels each
OURS, THEIRS, GREY, DARK, GREEN = "#0072b2", "#d55e00", "#8a8f98", "#3d434c", "#009e73"
COLOURS = {  # of who chose heads
    "Taylor": THEIRS,
    "CircAvg": OURS,
    "CircAcc": "#e69f00",
    "CircOOD": GREEN,
    "random": GREY,
    "whole": DARK,
}
SMALL = 8  # points: of ticks and legends
DASHES = (0, (4, 3))


@dataclass(frozen=True)
class Panel:
    """One field: a number of every row, by seed; the paper's; and a value to hold them against."""

    title: str
    ours: Mapping[str, Sequence[float | None]]  # None where a seed has none
    paper: Mapping[str, float] = field(default_factory=dict)
    line: float | None = None


def stored(found: Found, column: str, rows: Sequence[str]) -> dict[str, list[float | None]]:
    """A number of rows, by seed; shares in percent, as tables show them."""
    scale = 100 if column.rpartition(".")[2] in SHARES else 1
    every = {row: by_seed(found, "rows", row, column) for row in rows}
    return {row: [None if one is None else scale * one for one in values] for row, values in every.items()}


def printed(table: str, task: str, column: str, rows: Sequence[str]) -> dict[str, float]:
    """What the paper prints for these rows; of a mean and its deviation the mean."""
    there = paper(table, task)
    return {row: float(there[row][column].split(" ")[0]) for row in rows if column in there.get(row, {})}


def panel(found: Found, column: str, title: str, rows: Sequence[str], table: str = "", task: str = "") -> Panel:
    """One number of the rows of an analysis, and the paper's in a table."""
    return Panel(title, stored(found, column, rows), printed(table, task, column, rows))


def gains(one: Panel, title: str, base: str) -> Panel:
    """A field less one of its rows, ours seed by seed and the paper's: tasks of different levels on one scale."""
    ours = {
        row: [
            None if value is None or less is None else value - less
            for value, less in zip(values, one.ours[base], strict=True)
        ]
        for row, values in one.ours.items()
        if row != base
    }
    theirs = {row: value - one.paper[base] for row, value in one.paper.items() if row != base and base in one.paper}
    return Panel(title, ours, theirs, line=0.0)


def means(one: Panel) -> dict[str, float]:
    """Of every row that has the number, the mean over the seeds."""
    known = {row: [value for value in values if value is not None] for row, values in one.ours.items()}
    return {row: mean(values) for row, values in known.items() if values}


def fields(rows: int, columns: int, height: float, **settings: Any) -> tuple[Any, Any]:
    """A figure of the width of a page with so many fields, each so many inches high."""
    drawing, axes = pyplot().subplots(
        rows, columns, figsize=(WIDTH, rows * height), squeeze=False, layout="constrained", **settings
    )
    for one in axes.flat:
        one.grid(color="#e3e6ea", linewidth=0.7)
        one.set_axisbelow(True)
        one.tick_params(labelsize=SMALL, color=GREY)
    return drawing, axes


def rows_figure(panels: Sequence[Panel], names: Mapping[str, str], here: str, there: str = "", line: str = "") -> Any:
    """Fields side by side with the rows one below the other, and what the marks are; `names` are the rows as shown."""
    drawing, axes = fields(1, len(panels), 0.9 + 0.33 * len(names), sharey=True)
    several = any(len(values) > 1 for one in panels for values in one.ours.values())
    middle = [means(one) for one in panels]
    for place, one, known in zip(axes[0], panels, middle, strict=True):
        if one.line is not None:
            place.axvline(one.line, color=DARK, linewidth=1, linestyle=DASHES)
        for height, row in enumerate(names):
            values = [value for value in one.ours.get(row, ()) if value is not None]
            if len(values) > 1:
                place.plot(values, [height] * len(values), "|", color=OURS, markersize=8, alpha=0.6)
            if row in known:
                place.plot(known[row], height, "o", color=OURS, markersize=6)
            if row in one.paper:
                place.plot(one.paper[row], height, "D", color=THEIRS, markerfacecolor="none", markersize=6)
        place.set_title(one.title)
        place.margins(x=0.12)
    axes[0][0].set_yticks(range(len(names)), list(names.values()))
    axes[0][0].set_ylim(len(names) - 0.5, -0.5)  # the first on top
    marks: list[tuple[str, str, dict[str, Any]]] = [("o", here, {})]
    marks += [("|", "its seeds", {"markersize": 8})] if several else []
    marks += [("D", there, {"color": THEIRS, "markerfacecolor": "none"})] if any(one.paper for one in panels) else []
    handles = [
        pyplot().Line2D([], [], **{"marker": mark, "color": OURS, "linestyle": "", "label": label, **more})
        for mark, label, more in marks
    ]
    if line:
        handles.append(pyplot().Line2D([], [], color=DARK, linewidth=1, linestyle=DASHES, label=line))
    drawing.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=SMALL, frameon=False)
    return drawing


def legend(drawing: Any, *places: Any) -> None:
    """What the curves of fields are, each once, below the whole figure."""
    found = {label: handle for one in places for handle, label in zip(*one.get_legend_handles_labels(), strict=True)}
    where: dict[str, Any] = {"loc": "outside lower center", "ncols": len(found), "fontsize": SMALL, "frameon": False}
    drawing.legend(found.values(), found.keys(), **where)


def cloud(place: Any, points: Sequence[Sequence[float]], colour: str, label: str) -> None:
    """Many points as one line of dots: a mark for each would make a file ten times as large."""
    x, y = ([value for one in points for value in (one[axis], one[axis], float("nan"))] for axis in (0, 1))
    (line,) = place.plot(x, y, color=colour, linewidth=3, solid_capstyle="round", alpha=0.75, label=label)
    line.get_path().should_simplify = False  # would leave out lines without a length
