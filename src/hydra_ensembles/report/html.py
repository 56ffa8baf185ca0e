"""Self-contained HTML pages: the report, which runs no script, and the head atlas.

The templates `report.html.j2` and `atlas.html.j2` define the layout and escape all values; this module computes the
values.
"""

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from .._utils import __version__, few_digits, require
from ..arguments import checked
from ..errors import ConfigError
from ..evaluation.atlas import Atlas
from ..evaluation.evaluation import Evaluation
from ..files import expanded, write_atomically
from ..metrics.bootstrap import Interval
from ..model.cost import Cost
from ..model.metadata import ACCEPTS_ALL
from . import figures
from .columns import Column, columns_for
from .compare import Runs, compare, cost_of, group_runs
from .table import Comparison

ONE_TABLE = 12  # maximum number of columns before the results are split into two tables
FIRST_RUNS = "Figures, and the numbers beside them, are of the first run of each method."
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
_COSTS = {  # heading: key of the number, unit, size of the unit
    "Parameters stored": ("parameters", "M", 1e6),
    "Multiply-adds per input": ("multiply_adds", "G", 1e9),
    "Latency of a batch": ("latency_ms", "ms", 1),
    "Peak memory": ("peak_memory_bytes", "MiB", 2**20),
}


@checked
def write_report(
    path: str | Path,
    evaluations: Runs,
    *,
    costs: Iterable[Cost] | None = None,
    title: str | None = None,
    focus: str | None = None,
    baseline: str | None = None,
    lead: Sequence[str] = (),
    summary: Comparison | None = None,
    allow_mismatch: bool = False,
) -> Path:
    """Write a report in one HTML file: the main numbers, the comparison, and every figure.

    Args:
        path: The file to write.
        evaluations: As for `compare`; figures show the first run of each method.
        costs: Rows of `measure_costs`, found by method name.
        title: Heading of the page.
        focus: The method the report is about; the last one, if not given.
        baseline: The method to compare with; the first one, if not given.
        lead: Sentences at the start of the page.
        summary: A table before the others.
        allow_mismatch: As in `compare`.

    Raises:
        ConfigError: `focus` or `baseline` is not among the methods.
        DataError: The evaluations do not compare.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> base = load_backbone()  # a small vision transformer: one member, 6 layers of 6 heads, 7 classes
        >>> batches = [(torch.randn(7, 3, 64, 64), torch.arange(7)) for _ in range(2)]  # or a DataLoader
        >>> found = he.evaluate(base, batches, name="Single", progress=False)
        >>> he.write_report("report.html", [found], title="Mine").name
        'report.html'
    """
    methods = group_runs(evaluations)
    for setting, name in (("focus", focus), ("baseline", baseline)):
        if name is not None and name not in methods:
            raise ConfigError(f"{setting}={name!r} is not among the methods; choose one of {list(methods)}")
    focus = focus or list(methods)[-1]
    baseline = baseline or next(iter(methods))
    measured = {cost.name: cost for cost in (() if costs is None else costs)}
    comparison = compare(methods, measured.values(), allow_mismatch=allow_mismatch)
    parts = [comparison.columns]
    if len(comparison.columns) > ONE_TABLE:
        parts = [tuple(c for c in comparison.columns if bool(c.group) == grouped) for grouped in (False, True)]
    runs = {name: group[0] for name, group in methods.items()}
    shown = runs[focus]
    return _write_page(
        expanded(path),
        "report.html.j2",
        title=title or f"How good is {focus}?",
        focus=focus,
        shown=shown,
        accepts_all=ACCEPTS_ALL,
        colours={name: figures.colour(index) for index, name in enumerate(methods)},
        tiles=list(_tiles(comparison, methods, focus, baseline)),
        lead=list(lead),
        summary=None if summary is None else _table(summary, summary.columns),
        summary_notes=() if summary is None else summary.notes,
        results=[_table(comparison, columns) for columns in parts if columns],
        notes=(*comparison.notes, *((FIRST_RUNS,) if any(len(group) > 1 for group in methods.values()) else ())),
        bars=_costs(runs, measured),
        measured=next(iter(measured.values()), None),
        figures=figures,
        runs=runs,
        detection={name: _detection(runs, name) for name in shown.ood},
        shifts=list(dict.fromkeys(name for run in runs.values() for name in run.shift)),
        heads=_head_map(shown),
        disagreement=shown.numbers().get("all.disagreement"),
        class_names=dict(enumerate(shown.model.class_names)),
    )


@checked
def write_atlas(path: str | Path, atlas: Atlas, *, title: str | None = None) -> Path:
    """Write a head atlas as one HTML file: a map of all heads, with the numbers and inputs of each.

    The page loads nothing else. Its only script, allowed by its digest, handles keys and shows one head at a time;
    without it, links lead to the heads, and the map still switches between measures.

    Args:
        path: The file to write.
        atlas: The result of `atlas` or `Atlas.load`.
        title: Heading of the page.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> base = load_backbone()  # a small vision transformer: one member, 6 layers of 6 heads, 7 classes
        >>> batches = [(torch.randn(7, 3, 64, 64), torch.arange(7)) for _ in range(2)]  # or a DataLoader
        >>> found = he.atlas(base, batches, layers=[5], inputs=0, progress=False)
        >>> he.write_atlas("atlas.html", found).name
        'atlas.html'
    """
    kept: Sequence[Any] = atlas.model.heads or ((),)
    costs = [atlas.cost(head) for head in atlas.heads]
    return _write_page(
        expanded(path),
        "atlas.html.j2",
        title=title or f"What are the heads of {atlas.name} for?",
        atlas=atlas,
        whole=atlas.whole.numbers,
        costs=costs,
        most={name: max((abs(cost[name]) for cost in costs), default=0.0) for name in atlas.whole.numbers},
        place={(head.layer, head.head): index for index, head in enumerate(atlas.heads)},
        layers=len(kept[0]),
        columns=max(atlas.model.heads_per_layer or 0, atlas.model.pooling_heads),
        colours=[figures.colour(member) for member in range(atlas.model.members)],
        pictures={index for index, x in enumerate(atlas.inputs) if x.kind == "image" and _PICTURE.fullmatch(x.content)},
        class_names=dict(enumerate(atlas.model.class_names)),
    )


_PICTURE = re.compile(r"data:image/(jpeg|png);base64,[A-Za-z0-9+/=]+")


@cache
def _templates(jinja: Any) -> Any:
    """The Jinja environment; templates are read and compiled once."""
    loader = jinja.FileSystemLoader(Path(__file__).parent)
    environment = jinja.Environment(
        loader=loader, autoescape=True, undefined=jinja.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["sha256"] = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return environment


def _write_page(path: Path, template: str, **values: Any) -> Path:
    """Render a template to a file."""
    page = _templates(require("jinja2", extra="report")).get_template(template)
    write_atomically(path, str(page.render(version=__version__, **values)).encode())
    return path


def _tiles(
    comparison: Comparison, methods: Mapping[str, Sequence[Evaluation]], focus: str, baseline: str
) -> Iterator[dict[str, Any]]:
    """The main numbers, with the change against the baseline; better or worse only if the difference is significant.

    Both have sampling error. How correlated these are is unknown here, so they are treated as independent, which is
    conservative.
    """
    intervals = {name: {} if len(runs) > 1 else runs[0].intervals for name, runs in methods.items()}
    rows = {row.name: row.cells for row in comparison.rows}
    entries = {entry[0].key: entry for entry in zip(comparison.columns, rows[focus], rows[baseline], strict=True)}
    for kind in ("auroc", "abstained"):
        if f"near.{kind}" in entries or f"far.{kind}" in entries:
            entries.pop(f"all.{kind}", None)
    for key in [key for key in _TILES if key in entries]:
        column, cell, other = entries[key]
        if cell.value is None:
            continue
        interval, theirs = intervals[focus].get(key), intervals[baseline].get(key)
        if interval is not None and interval.low == interval.high:
            interval = None  # all samples have the same value, for example all correct: uninformative
        outcome, change = "", ""
        if other.value is not None and baseline != focus and column.ranked:
            amount = (cell.value - other.value) * column.scale
            change = f"{amount:+.{column.digits}f}".replace("-", "−") + f" vs {baseline}"
            chance = math.hypot(_room(interval, up=amount < 0), _room(theirs, up=amount > 0))  # towards each other
            beyond_chance = interval is not None and abs(cell.value - other.value) > chance
            shown_alike = column.write(cell.value) == column.write(other.value)
            if column.better != "neither" and beyond_chance and not shown_alike:
                outcome = "better" if (amount > 0) == (column.better == "higher") else "worse"
        yield {
            "title": _TILES[key],
            "number": cell.text + ("\u00a0%" if column.scale == 100 else ""),
            "change": change,
            "outcome": outcome,
            "interval": interval and f"{column.write(interval.low)} to {column.write(interval.high)}",
        }


def _room(interval: Interval | None, up: bool) -> float:
    """Distance from the value to the upper or lower end of its interval; 0 without an interval."""
    if interval is None:
        return 0.0
    return interval.high - interval.value if up else interval.value - interval.low


def _table(comparison: Comparison, columns: Sequence[Column]) -> dict[str, Any]:
    """Some columns of a comparison, as data for a template."""
    positions = [comparison.columns.index(column) for column in columns]
    groups = [(group, len(list(members))) for group, members in groupby(columns, key=lambda column: column.group)]
    return {
        "groups": groups if any(group for group, _ in groups) else [],
        "headings": [column.heading for column in columns],
        "rows": [(row.name, [row.cells[position] for position in positions]) for row in comparison.rows],
    }


def _costs(runs: Mapping[str, Evaluation], measured: Mapping[str, Cost]) -> dict[str, list[tuple[str, str, float]]]:
    """Name, text and length in percent of each method's bar, for every cost that is known for some method."""
    kinds = {}
    for heading, (key, unit, size) in _COSTS.items():
        values = {name: cost_of(run, measured.get(name), key) for name, run in runs.items()}
        costs = {name: value / size for name, value in values.items() if value}
        if costs:
            most = max(costs.values())
            words = {name: f"{few_digits(cost)} {unit}" for name, cost in costs.items()}
            kinds[heading] = [(name, words[name], max(100 * cost / most, 1)) for name, cost in costs.items()]
    return kinds


def _detection(runs: Mapping[str, Evaluation], name: str) -> dict[str, Any]:
    """The numbers of one OOD set, for the methods evaluated on it."""
    evaluated = {method: run for method, run in runs.items() if name in run.ood}
    columns = [column for column in columns_for(evaluated.values(), [name]) if f"ood.{name}." in column.key]
    comparison = compare(evaluated, columns=columns, allow_mismatch=True)
    return _table(comparison, comparison.columns)


def _head_map(run: Evaluation) -> dict[str, Any] | None:
    """Which members keep which head, `[layer][head]`; the evaluation has `[member][layer]`."""
    heads, per_layer, pooling = run.model.heads, run.model.heads_per_layer, run.model.pooling_heads
    if heads is None or per_layer is None:
        return None
    counts = [per_layer] * (len(heads[0]) - bool(pooling)) + ([pooling] if pooling else [])
    cells = []
    for layer, count in enumerate(counts):
        kept_by = [[member for member, layers in enumerate(heads) if head in layers[layer]] for head in range(count)]
        cells.append(kept_by)
    return {
        "cells": cells,
        "kept": [(figures.colour(member), sum(map(len, layers))) for member, layers in enumerate(heads)],
        "total": sum(counts),
        "common": sum(len(keepers) == len(heads) for row in cells for keepers in row),
    }
