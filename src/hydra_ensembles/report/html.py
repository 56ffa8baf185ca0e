"""The report: one self-contained HTML page that runs no script; or its table alone, as CSV or Markdown.

The template `report.html.j2` defines the layout and escapes all values; this module computes the values.
"""

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from .._utils import __version__, library
from ..errors import ConfigError
from ..evaluation.evaluation import Evaluation
from ..files import expanded, write_atomically
from ..model.cost import Cost
from ..model.metadata import ACCEPTS_ALL
from . import figures
from .compare import Column, Comparison, Runs, columns_for, compare, group_runs, to_csv, to_markdown

ONE_TABLE = 12  # maximum number of columns before the results are split into two tables
FIRST_RUNS = "Figures, and the numbers beside them, are of the first run of each method."
SHOWN, THUMBNAIL, LETTERS = 6, 96, 280  # inputs of a shelf of the gallery, longest side of a picture, characters
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
    data: Mapping[str, Any] | None = None,
    allow_mismatch: bool = False,
) -> Path:
    """Write a report: as HTML the main numbers, the comparison and every figure, else the comparison alone.

    Args:
        evaluations: As for `compare`; figures show the first run of each method.
        path: The file to write; `.html`, `.csv` or `.md` chooses the format.
        costs: Rows of `measure_costs`, found by method name.
        title: Heading of the page.
        focus: The method the report is about; the last one, if not given.
        baseline: The method to compare with; the first one, if not given.
        data: Data sets by name (the in-distribution set, OOD sets), in the order in which they were evaluated: shows
            what the method in focus was most and least sure about.
        allow_mismatch: As in `compare`.

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
    comparison = compare(methods, measured.values(), allow_mismatch=allow_mismatch)
    writers = {".csv": to_csv, ".md": to_markdown}
    if file.suffix in writers:
        write_atomically(file, writers[file.suffix](comparison).encode())
        return file
    if file.suffix != ".html":
        raise ConfigError(f"a report is written as .html, .csv or .md, got {file.name}")
    parts = [comparison.columns]
    if len(comparison.columns) > ONE_TABLE:
        parts = [tuple(c for c in comparison.columns if bool(c.group) == grouped) for grouped in (False, True)]
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
            accepts_all=ACCEPTS_ALL,
            colours={name: f"c{index % len(figures.SERIES)}" for index, name in enumerate(methods)},
            tiles=list(_tiles(comparison, methods, focus, baseline)),
            results=[_table(comparison, columns) for columns in parts if columns],
            notes=[*comparison.notes, *further],
            figures=figures,
            runs=runs,
            detection={name: _detection(runs, name) for name in shown.ood},
            shifts=list(dict.fromkeys(name for run in runs.values() for name in run.shift)),
            gallery=[one for name, items in (data or {}).items() for one in _gallery(shown, name, items)],
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
    rows = {row.name: row.cells for row in comparison.rows}
    entries = {entry[0].key: entry for entry in zip(comparison.columns, rows[focus], rows[baseline], strict=True)}
    for kind in ("auroc", "abstained"):
        if f"near.{kind}" in entries or f"far.{kind}" in entries:
            entries.pop(f"all.{kind}", None)
    for key in [key for key in _TILES if key in entries]:
        column, cell, other = entries[key]
        if cell.value is None:
            continue
        outcome, change = "", ""
        if other.value is not None and baseline != focus and column.ranked:
            amount = (cell.value - other.value) * column.scale
            change = f"{amount:+.{column.digits}f}".replace("-", "−") + f" vs {baseline}"
            difference = ours.interval(key, minus=theirs) if single and column.better != "neither" else None
            if difference is not None and 0 not in difference:
                outcome = "better" if (amount > 0) == (column.better == "higher") else "worse"
        interval = ours.intervals.get(key) if len(methods[focus]) == 1 else None
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
        "rows": [(row.name, [row.cells[position] for position in positions]) for row in comparison.rows],
    }


def _detection(runs: Mapping[str, Evaluation], name: str) -> dict[str, Any]:
    """The numbers of one OOD set, for the methods evaluated on it."""
    evaluated = {method: run for method, run in runs.items() if name in run.ood}
    columns = [column for column in columns_for(evaluated.values(), [name]) if f"ood.{name}." in column.key]
    comparison = compare(evaluated, columns=columns, allow_mismatch=True)
    return _table(comparison, comparison.columns)


def _gallery(run: Evaluation, name: str, data: Any) -> Iterator[dict[str, Any]]:
    """Shelves of the inputs of one set that the model was most and least sure about, with its answers."""
    answers = run.sets.get(name) or run.sets.get(f"ood.{name}")
    if answers is None or len(answers) != len(data):
        raise ConfigError(f"data[{name!r}] is not the set that was evaluated; evaluated were {list(run.samples)}")
    order = answers[f"score:{run.score}"].sort(stable=True).indices
    shelves = {"most sure": order, "least sure": order.flip(0)}
    if "accuracy" in answers.columns:
        shelves["most sure, and wrong"] = order[~answers["accuracy"][order]]
    called = dict(enumerate(run.model.class_names))
    for words, rows in shelves.items():
        items = []
        for row in rows[:SHOWN].tolist():
            content, predicted = data[row][0], int(answers["predicted"][row])
            label = int(answers["label"][row]) if "label" in answers.columns else None
            said, right = (None if one is None else called.get(one, f"class {one}") for one in (predicted, label))
            picture = _thumbnail(content) if hasattr(content, "thumbnail") else None
            text = "" if picture else str(content)[:LETTERS]
            about = {"index": row, "confidence": float(answers["confidence"][row]), "said": said, "label": right}
            items.append({**about, "picture": picture, "text": text})
        if items:
            yield {"title": f"{name}: {words}", "items": items}


def _thumbnail(image: Any) -> str:
    """A small copy of a PIL image as a `data:` address."""
    small, buffer = image.convert("RGB"), io.BytesIO()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    small.save(buffer, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
