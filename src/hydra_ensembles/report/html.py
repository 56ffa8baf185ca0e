"""The HTML report: one file that needs nothing else, neither network nor scripts.

`report.html.j2` says what the page looks like and escapes whatever it is given; here is what it is given.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from .._utils import __version__, require, write_atomically
from ..errors import ConfigError
from ..evaluation.evaluation import Evaluation, GalleryItem
from ..model.config import KeptHeads
from ..model.cost import Cost
from ..model.ensemble import Ensemble
from . import figures
from .compare import CLASSIFICATION, Column, Comparison, Runs, compare, group_runs, set_columns

ONE_TABLE = 12
"""Most columns the results may have before they are shown as two tables."""

STRIPES = 6
"""Most members that get a stripe of their own in a cell of the head map; more are shown as a shade."""

_TILES = {
    "accuracy": "Accuracy",
    "near.auroc": "Near-OOD AUROC",
    "far.auroc": "Far-OOD AUROC",
    "all.auroc": "OOD AUROC",
    "ece": "Calibration error",
    "latency_ratio": "Latency",
}
_GROUPS = {"near": "near", "far": "far", "apart": "reported apart, in no mean", "ungrouped": ""}
_SHELVES = {"sure": "most sure", "wrong": "most sure, and wrong", "unsure": "least sure"}
_DEFINITIONS = (
    "ECE: 15 bins of equal width, L1. aECE: 15 bins of equal count. Brier: summed over classes. NLL: of the mean "
    "probabilities. Near, far and all: unweighted means over sets."
)


def write_report(
    path: str | Path,
    evaluations: Runs,
    *,
    ensemble: Ensemble | None = None,
    costs: Iterable[Cost] | None = None,
    gallery: Sequence[GalleryItem] | None = None,
    title: str | None = None,
    focus: str | None = None,
    baseline: str | None = None,
    allow_mismatch: bool = False,
) -> Path:
    """Write a report: the numbers asked for first, the comparison, and every figure, in one HTML file.

    Args:
        path: Where to.
        evaluations: As `compare` takes them; figures show the first run of each method.
        ensemble: The model in focus, for the head map, where its evaluation does not know the heads.
        costs: Rows of `measure_costs`, found by method name.
        gallery: Inputs to show; those of the evaluation in focus, if not given.
        title: Heading of the page.
        focus: The method the report is about; the last one, if not given.
        baseline: What it is held against; the first one, if not given.
        allow_mismatch: As in `compare`.

    Raises:
        ConfigError: `focus` or `baseline` is not among the methods.
        DataError: The evaluations do not compare.
    """
    page = render_report(
        evaluations,
        ensemble=ensemble,
        costs=costs,
        gallery=gallery,
        title=title,
        focus=focus,
        baseline=baseline,
        allow_mismatch=allow_mismatch,
    )
    write_atomically(Path(path), page.encode())
    return Path(path)


def render_report(
    evaluations: Runs,
    *,
    ensemble: Ensemble | None = None,
    costs: Iterable[Cost] | None = None,
    gallery: Sequence[GalleryItem] | None = None,
    title: str | None = None,
    focus: str | None = None,
    baseline: str | None = None,
    allow_mismatch: bool = False,
) -> str:
    """The report as a string; see `write_report`."""
    methods = group_runs(evaluations)
    for what, name in (("focus", focus), ("baseline", baseline)):
        if name is not None and name not in methods:
            raise ConfigError(f"{what}={name!r} is not among the methods; choose one of {list(methods)}")
    focus, baseline = focus or list(methods)[-1], baseline or next(iter(methods))
    measured = {cost.name: cost for cost in costs or ()}
    comparison = compare(methods, measured.values(), allow_mismatch=allow_mismatch)
    wide = len(comparison.columns) > ONE_TABLE
    parts = [[column for column in comparison.columns if bool(column.group) == grouped] for grouped in (False, True)]
    runs = {name: found[0] for name, found in methods.items()}
    shown = runs[focus]
    heads, per_layer = shown.model.heads, shown.model.heads_per_layer
    if ensemble is not None:
        heads, per_layer = ensemble.heads, ensemble.num_heads
    jinja = require("jinja2", extra="report")
    environment = jinja.Environment(
        loader=jinja.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        title=title or f"How good is {focus}?",
        version=__version__,
        palette=figures.PALETTE,
        focus=focus,
        shown=shown,
        colours={name: figures.colour(index) for index, name in enumerate(methods)},
        tiles=list(_tiles(comparison, shown, focus, baseline, spread=len(methods[focus]) > 1)),
        results=[_table(comparison, columns) for columns in (parts if wide else [comparison.columns]) if columns],
        notes=comparison.notes,
        bars=_costs(runs, measured),
        measured=next(iter(measured.values()), None),
        reliability=[
            (name, one.id, figures.reliability(name, one, index)) for index, (name, one) in enumerate(runs.items())
        ],
        detection=[_detection(runs, focus, name) for name in shown.ood],
        risk=figures.risk_coverage(runs, focus),
        shift=_shift(runs),
        heads=None if heads is None or per_layer is None else _head_map(heads, per_layer, focus),
        agreement=list(_agreement(shown)),
        disagreement=shown.numbers().get("all.disagreement"),
        gallery=list(_gallery(shown.gallery if gallery is None else gallery)),
        class_names=dict(enumerate(shown.model.class_names)),
        facts=_facts(shown, focus),
    )
    return str(page)


def _tiles(
    comparison: Comparison, shown: Evaluation, focus: str, baseline: str, spread: bool
) -> Iterator[dict[str, Any]]:
    """The numbers a reader asks for first, against the baseline."""
    split = comparison.column("near.auroc") or comparison.column("far.auroc")
    for key, title in _TILES.items():
        found = comparison.column(key)
        if found is None or (key == "all.auroc" and split):
            continue
        column, cells = found
        ours, theirs = cells[focus].value, cells[baseline].value
        if ours is None:
            continue
        outcome, change = "", ""
        if theirs is not None and baseline != focus:
            amount = (ours - theirs) * column.scale
            change = f"{amount:+.{column.digits}f} vs {baseline}".replace("-", "−", 1)
            if column.write(ours) != column.write(theirs):
                outcome = "better" if (ours > theirs) == (column.better == "higher") else "worse"
        interval = None if spread else shown.intervals.get(key)
        yield {
            "title": title,
            "number": cells[focus].text + ("\u00a0%" if column.scale == 100 else ""),
            "change": change,
            "outcome": outcome,
            "interval": interval and f"{column.write(interval.low)} to {column.write(interval.high)}",
        }


def _table(comparison: Comparison, columns: Sequence[Column], grouped: bool = True) -> dict[str, Any]:
    """Some columns of a comparison."""
    positions = [comparison.columns.index(column) for column in columns]
    groups = [(group, len(list(members))) for group, members in groupby(columns, key=lambda column: column.group)]
    return {
        "corner": "Method",
        "groups": groups if grouped and any(group for group, _ in groups) else [],
        "headings": [column.heading for column in columns],
        "rows": [(row.name, [row.cells[position] for position in positions]) for row in comparison.rows],
    }


def _costs(runs: Mapping[str, Evaluation], measured: Mapping[str, Cost]) -> dict[str, list[tuple[str, str, float]]]:
    """Name, words and length in percent of each method's bar, for every kind of cost that somebody has."""
    kinds: dict[str, list[tuple[str, str, float]]] = {
        kind: [] for kind in ("Parameters stored", "Multiply-adds per input", "Latency of a batch", "Peak memory")
    }
    parameters, work, latency, memory = kinds.values()
    for name, run in runs.items():
        cost = measured.get(name)
        if stored := (cost.parameters if cost else None) or run.model.parameters:
            parameters.append((name, f"{stored / 1e6:,.2f} M", stored))
        if sums := (cost.multiply_adds if cost else None) or run.model.multiply_adds:
            work.append((name, f"{sums / 1e9:,.2f} G", sums))
        if cost:
            latency.append((name, f"{cost.latency_ms:,.2f} ms · {cost.latency_ratio:.2f}×", cost.latency_ms))
        if cost and cost.peak_memory_bytes is not None:
            memory.append((name, f"{cost.peak_memory_bytes / 2**20:,.0f} MiB", cost.peak_memory_bytes))
    for bars in kinds.values():
        most = max((value for *_, value in bars), default=0) or 1.0
        bars[:] = [(name, words, max(100 * value / most, 1)) for name, words, value in bars]
    return {kind: bars for kind, bars in kinds.items() if bars}


def _detection(runs: Mapping[str, Evaluation], focus: str, name: str) -> dict[str, Any]:
    """Histogram, ROC curves and numbers of one OOD set."""
    shown, result = runs[focus], runs[focus].ood[name]
    known = {method: one for method, one in runs.items() if name in one.ood}
    comparison = compare(known, columns=set_columns([name]), allow_mismatch=True)
    return {
        "name": name,
        "about": ", ".join(filter(None, (_GROUPS[result.group], f"{result.samples:,} samples"))),
        "histogram": figures.histogram(focus, shown, name),
        "roc": figures.roc(runs, focus, name),
        "area": result.detection[shown.score].auroc * 100,
        "table": _table(comparison, comparison.columns, grouped=False),
    }


def _shift(runs: Mapping[str, Evaluation]) -> dict[str, Any] | None:
    """Accuracy and calibration of every method on the sets under distribution shift; None without any."""
    names = list(dict.fromkeys(name for one in runs.values() for name in one.shift))
    columns = [column for column in CLASSIFICATION if column.key in ("accuracy", "ece")]
    numbers = [run.numbers() for run in runs.values()]

    def cell(found: Mapping[str, float], column: Column, name: str) -> dict[str, str]:
        value = found.get(f"shift.{name}.{column.key}")
        return {"text": "–" if value is None else column.write(value), "rank": ""}

    return {
        "corner": "Shift",
        "groups": [(column.heading, len(runs)) for column in columns],
        "headings": list(runs) * len(columns),
        "rows": [(name, [cell(found, column, name) for column in columns for found in numbers]) for name in names],
    } if names else None  # fmt: skip


def _head_map(heads: KeptHeads, per_layer: int, name: str) -> dict[str, Any]:
    """Which members keep which head, `[layer][head]`; heads are given as `[member][layer]`."""
    layers = range(len(heads[0]))
    cells = [
        [[member for member, kept in enumerate(heads) if head in kept[layer]] for head in range(per_layer)]
        for layer in layers
    ]
    kept, total = [sum(len(layer) for layer in member) for member in heads], len(layers) * per_layer
    common = sum(len(keepers) == len(heads) for row in cells for keepers in row)
    listing = ", ".join(f"member {member} keeps {count}" for member, count in enumerate(kept))
    return {
        "cells": cells,
        "members": len(heads),
        "kept": [(figures.colour(member), count) for member, count in enumerate(kept)],
        "striped": len(heads) <= STRIPES,
        "total": total,
        "common": common,
        "label": f"Head map of {name}: {len(layers)} layers of {per_layer} heads, {total} in all; {listing}; {common} "
        "are kept by all.",
    }


def _agreement(run: Evaluation) -> Iterator[dict[str, Any]]:
    """How often two members predict the same class; nothing for one member."""
    tables = {
        f"in distribution ({run.id_name})": run.figures.agreement_id,
        "out of distribution (mean of the sets)": run.figures.agreement_ood,
    }
    for title, table in tables.items():
        if table is None or len(table) < 2:
            continue
        pairs = [table[i][j] for i in range(len(table)) for j in range(i)]
        floor = min(*pairs, 0.99)
        yield {
            "title": title,
            "mean": sum(pairs) / len(pairs),
            "lowest": min(pairs),
            "rows": [[(value, 8 + 82 * (value - floor) / (1 - floor)) for value in row] for row in table],
        }


def _gallery(items: Sequence[GalleryItem]) -> Iterator[tuple[str, list[GalleryItem]]]:
    """The shelves of every set, each with its heading."""
    for name in dict.fromkeys(item.set for item in items):
        for shelf, words in _SHELVES.items():
            found = [item for item in items if (item.set, item.shelf) == (name, shelf)]
            if found:
                yield f"{name}: {words}", found


def _facts(run: Evaluation, focus: str) -> dict[str, str]:
    """How the numbers were made; what is not known is left out."""
    made, model = run.provenance, run.model
    temperature = "" if model.calibration is None else ", ".join(f"{t:.4g}" for t in model.calibration.temperature)
    facts = {
        "Model": f"{focus}: {model.members} member{'s' if model.members > 1 else ''}, {model.classes} classes",
        "Source": model.source,
        "History": " → ".join(model.history),
        "Temperature": "" if temperature == "1" else temperature,
        "Samples": ", ".join(f"{name.removeprefix('ood.')}: {count:,}" for name, count in run.samples.items()),
        "Score": f"{run.score}; OOD is the positive class, higher means more uncertain",
        "Convention": run.convention,
        "Definitions": _DEFINITIONS,
        "Hardware": f"{made.hardware}, {made.dtype}" + (f", {made.processes} processes" if made.processes > 1 else ""),
        "Versions": ", ".join(f"{library} {version}" for library, version in made.versions.items()),
    }
    return {key: value for key, value in facts.items() if value}
