"""The report: one self-contained HTML page that runs no script; or its table alone, as CSV or Markdown.

The template `report.html.j2` defines the layout and escapes all values; this module computes the values, and matplotlib
draws the figures from the columns of evaluations, as SVG.
"""

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._utils import __version__, library
from ..errors import ConfigError
from ..evaluation.evaluation import Evaluation
from ..files import expanded, write_atomically
from ..metrics.ood import risk_coverage
from ..metrics.probabilities import BINS, equal_width_groups
from ..model.cost import Cost
from .compare import Column, Comparison, Runs, columns_for, compare, group_runs, to_csv, to_markdown

FIRST_RUNS = "Figures, and the numbers beside them, are of the first run of each method."
SERIES = ("#2563c9", "#d1571b", "#14866d", "#9a3fb5", "#a67c00", "#c62f6b", "#4f7a1a", "#5c6773")  # also in the style
_INK, _SOFT, _RULE, _OVER, _UNDER = "#1c2330", "#6b7482", "#e3e0d8", "#e08a9c", "#a9d5c6"
_BINS = 30  # of a histogram
_TILES = {
    "accuracy": "Accuracy",
    "near.auroc": "Near-OOD AUROC",
    "far.auroc": "Far-OOD AUROC",
    "all.auroc": "OOD AUROC",
    "near.abstained": "Near-OOD declined",
    "far.abstained": "Far-OOD declined",
    "all.abstained": "OOD declined",
    "ece": "Calibration error",
    "latency_ratio": "Latency",
}


def write_report(
    evaluations: Runs,
    path: str | Path,
    *,
    costs: Iterable[Cost] | None = None,
    title: str | None = None,
    focus: str | None = None,
    baseline: str | None = None,
) -> Path:
    """Write a report: as HTML the main numbers, the comparison and every figure, else the comparison alone.

    Args:
        evaluations: As for `compare`; figures show the first run of each method.
        path: The file to write; `.html`, `.csv` or `.md` chooses the format.
        costs: Rows of `measure_costs`, found by method name.
        title: Heading of the page.
        focus: The method the report is about; the last one, if not given.
        baseline: The method to compare with; the first one, if not given.

    Raises:
        ConfigError: `focus` or `baseline` is not among the methods, or the format is not known.
        DataError: The evaluations do not compare.

    Examples:
        >>> found = he.evaluate(base, batches, name="Single", progress=False)
        >>> he.write_report([found], "report.html", title="Mine").name
        'report.html'
    """
    file = expanded(path)
    methods = group_runs(evaluations)
    for setting, name in (("focus", focus), ("baseline", baseline)):
        if name is not None and name not in methods:
            raise ConfigError(f"{setting}={name!r} is not among the methods; choose one of {list(methods)}")
    focus, baseline = focus or list(methods)[-1], baseline or next(iter(methods))
    measured = {cost.name: cost for cost in costs or ()}
    comparison = compare(methods, measured.values())
    writers = {".csv": to_csv, ".md": to_markdown}
    if file.suffix in writers:
        write_atomically(file, writers[file.suffix](comparison).encode())
        return file
    if file.suffix != ".html":
        raise ConfigError(f"a report is written as .html, .csv or .md, got {file.name}")
    parts = [[one for one in comparison.columns if bool(one.group) == grouped] for grouped in (False, True)]
    runs = {name: group[0] for name, group in methods.items()}
    further = [FIRST_RUNS] if any(len(group) > 1 for group in methods.values()) else []
    for cost in [*measured.values()][:1]:
        further.append(f"Latency: median of {cost.repeats} runs of a batch of {cost.batch} on {cost.device}, by turns.")
    shown = runs[focus]
    jinja = library("jinja2", extra="report")
    loader = jinja.FileSystemLoader(Path(__file__).parent)
    strict = {"autoescape": True, "undefined": jinja.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    page = (
        jinja.Environment(loader=loader, **strict)
        .get_template("report.html.j2")
        .render(
            version=__version__,
            title=title or f"How good is {focus}?",
            focus=focus,
            shown=shown,
            numbers={name: run.numbers() for name, run in runs.items()},
            colours={name: f"c{index % len(SERIES)}" for index, name in enumerate(methods)},
            tiles=list(_tiles(comparison, methods, focus, baseline)),
            results=[_table(comparison, columns) for columns in parts if columns],
            notes=[*comparison.notes, *further],
            figures={one.__name__: one for one in (reliability, histogram, risk_by_coverage)},
            runs=runs,
            detection={name: _detection(runs, name) for name in shown.foreign},
            shifted=[name for name, one in shown.sets.items() if one.group == "shift"],
        )
    )
    write_atomically(file, page.encode())
    return file


def _tiles(
    comparison: Comparison, methods: Mapping[str, Sequence[Evaluation]], focus: str, baseline: str
) -> Iterator[dict[str, Any]]:
    """The main numbers, with the change against the baseline: better or worse if its paired interval excludes zero."""
    ours, theirs = methods[focus][0], methods[baseline][0]
    single = len(methods[focus]) == len(methods[baseline]) == 1
    cells = zip(comparison.columns, comparison.rows[focus], comparison.rows[baseline], strict=True)
    entries = {entry[0].key: entry for entry in cells}
    for kind in ("auroc", "abstained"):
        if f"near.{kind}" in entries or f"far.{kind}" in entries:
            entries.pop(f"all.{kind}", None)
    for key in [key for key in _TILES if key in entries]:
        column, cell, other = entries[key]
        if cell.value is None:
            continue
        outcome, change = "", ""
        if other.value is not None and baseline != focus and (column.better != "neither" or key.endswith("abstained")):
            amount = (cell.value - other.value) * column.scale
            change = f"{amount:+.{column.digits}f}".replace("-", "−") + f" vs {baseline}"
            difference = ours.interval(key, minus=theirs) if single and column.better != "neither" else None
            if difference is not None and 0 not in difference:
                outcome = "better" if (amount > 0) == (column.better == "higher") else "worse"
        interval = ours.interval(key) if len(methods[focus]) == 1 else None
        wide = interval is not None and interval.low < interval.high  # else all samples have one value: uninformative
        yield {
            "title": _TILES[key],
            "number": cell.text + ("\u00a0%" if column.scale == 100 else ""),
            "change": change,
            "outcome": outcome,
            "interval": f"{column.write(interval.low)} to {column.write(interval.high)}" if interval and wide else "",
        }


def _table(comparison: Comparison, columns: Sequence[Column]) -> dict[str, Any]:
    """Some columns of a comparison, as data for a template."""
    positions = [comparison.columns.index(column) for column in columns]
    groups = [(group, len(list(members))) for group, members in groupby(columns, key=lambda column: column.group)]
    return {
        "groups": groups if any(group for group, _ in groups) else [],
        "headings": [column.heading for column in columns],
        "rows": [(name, [cells[position] for position in positions]) for name, cells in comparison.rows.items()],
    }


def _detection(runs: Mapping[str, Evaluation], name: str) -> dict[str, Any]:
    """The numbers of one OOD set, `ood.NAME`."""
    columns = [column for column in columns_for(runs.values(), [name]) if f"{name}." in column.key]
    comparison = compare(runs, columns=columns)
    return _table(comparison, comparison.columns)


# --- figures ------------------------------------------------------------------------------------------------


@contextmanager
def _drawn(width: float, height: float, rows: int = 1, ratios: Sequence[float] | None = None) -> Iterator[Any]:
    """A figure with plots below each other, in matplotlib's default style whatever the user's is; text stays text."""
    matplotlib = library("matplotlib", extra="report")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        text = {"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9, "text.parse_math": False}
        axes = {"axes.edgecolor": _SOFT, "axes.grid": True, "axes.axisbelow": True, "grid.color": _RULE}
        matplotlib.rcParams.update({**text, **axes, "axes.spines.top": False, "axes.spines.right": False})
        size = (width / 72, height / 72)
        figure = library("matplotlib.figure", extra="report").Figure(figsize=size)
        figure.subplots_adjust(
            left=48 / width, right=1 - 8 / width, bottom=40 / height, top=1 - 12 / height, hspace=0.35
        )
        yield figure, figure.subplots(rows, squeeze=False, height_ratios=ratios)[:, 0]


def _address(figure: Any) -> str:
    """A figure as a `data:` address, for the `src` of an image."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def reliability(evaluation: Evaluation, series: int) -> str:
    """Accuracy against confidence, with the share of samples per bin below."""
    answers = evaluation.sets[evaluation.id_name]
    confidence, right = answers["confidence"].double(), answers["accuracy"].double()
    groups = equal_width_groups(confidence, BINS).clamp(max=BINS - 1)  # as `ece`; certainty is in the last bin
    counts, *sums = (groups.bincount(weights, BINS) for weights in (None, confidence, right))
    means = zip(*((each / counts).tolist() for each in sums), strict=True)
    width, ink = 1 / BINS, SERIES[series % len(SERIES)]
    with _drawn(340, 286, 2, (5, 1)) as (figure, (upper, lower)):
        upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
        for number, (stated, right) in enumerate(means):
            if stated == stated:  # an empty bin has NaN
                middle, low = (number + 0.5) * width, min(stated, right)
                upper.bar(middle, low, width * 0.88, color=ink, alpha=0.8)
                upper.bar(middle, abs(stated - right), width * 0.88, low, color=_OVER if stated > right else _UNDER)
                upper.hlines(right, middle - 0.44 * width, middle + 0.44 * width, color=_INK, linewidth=2)
        upper.plot((0, 1), (0, 1), color=_INK, linewidth=1, linestyle="--")
        lower.set(xlim=(0, 1), xlabel="confidence", ylabel="samples", yticks=())
        lower.bar(
            [(number + 0.5) * width for number in range(BINS)], counts.tolist(), width * 0.88, color=ink, alpha=0.55
        )
        return _address(figure)


def histogram(evaluation: Evaluation, set_name: str) -> str:
    """Distribution of the uncertainty score on ID data and on one OOD set."""
    name = f"score:{evaluation.score}"
    shown = [evaluation.sets[evaluation.id_name][name], evaluation.sets[set_name][name]]
    every = [one[name] for one in evaluation.sets.values() if one.group != "shift"]
    low, high = np.quantile(torch.cat(every).double().numpy(), (0.001, 0.999))  # scores outside count in the end bins
    edges = np.linspace(low, high, _BINS + 1) if high - low > 1e-12 * abs(high) else np.array([low - 0.5, low + 0.5])
    with _drawn(340, 220) as (figure, (axes,)):
        for scores, ink in zip(shown, SERIES, strict=False):
            counts, _ = np.histogram(scores.double().numpy().clip(edges[0], edges[-1]), edges)
            axes.stairs(counts / len(scores), edges, fill=True, color=ink, alpha=0.28)
            axes.stairs(counts / len(scores), edges, color=ink, linewidth=1.5)
        axes.set(xlim=(edges[0], edges[-1]), ylim=(0, None), xlabel=f"uncertainty ({evaluation.score})", ylabel="share")
        return _address(figure)


def risk_by_coverage(methods: Mapping[str, Evaluation], focus: str) -> str:
    """Error rate among answered inputs, against the share that is answered."""
    top = 1e-3
    with _drawn(446, 270) as (figure, (axes,)):
        for series, (name, run) in enumerate(methods.items()):
            answers = run.sets[run.id_name]
            curve = risk_coverage(answers[f"score:{run.score}"], ~answers["accuracy"])
            top = max(top, float(curve.risk[curve.coverage >= 0.1].max()))  # of very few answers the risk is noisy
            _line(axes, curve.coverage, curve.risk, series, name == focus)
            for kept in [*run.promises.values()][:1]:  # certified: the dot lies below its promised risk
                for one in kept:
                    colour = SERIES[series % len(SERIES)]
                    axes.plot(one.share, one.rate, "o", color=colour, markersize=5, zorder=5)
                    axes.plot([0, one.share], [one.promise.risk] * 2, ":", color=colour, linewidth=1, zorder=2)
        axes.set(xlim=(0, 1), ylim=(0, top * 1.08), xlabel="share answered", ylabel="share of wrong answers")
        return _address(figure)


def _line(axes: Any, x: Tensor, y: Tensor, series: int, focus: bool) -> None:
    """One curve; the method in focus is bold and on top."""
    width, opacity, order = (2.6, 1, 4) if focus else (1.5, 0.75, 3)
    axes.plot(x.tolist(), y.tolist(), color=SERIES[series % len(SERIES)], linewidth=width, alpha=opacity, zorder=order)
