"""The HTML report: one file that needs nothing else, neither network nor scripts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from .._utils import __version__, write_atomically
from ..errors import ConfigError
from ..evaluation.evaluation import Evaluation, GalleryItem
from ..model.cost import Cost
from ..model.ensemble import Ensemble
from . import sections
from .compare import Runs, compare, group_runs
from .style import CSS

# Nothing may be loaded from anywhere: styles are in the page, images in data: addresses.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


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
    measured = {cost.name: cost for cost in costs or ()}
    comparison = compare(methods, measured.values(), allow_mismatch=allow_mismatch)
    focus = _chosen("focus", focus, methods, default=list(methods)[-1])
    baseline = _chosen("baseline", baseline, methods, default=next(iter(methods)))
    runs = {name: found[0] for name, found in methods.items()}
    if gallery is not None:
        runs[focus] = replace(runs[focus], gallery=tuple(gallery))
    shown = runs[focus]
    heads, per_layer = shown.model.heads, shown.model.heads_per_layer
    if ensemble is not None:
        heads, per_layer = ensemble.heads, ensemble.num_heads
    body = sections.contents(
        [
            sections.results(comparison, focus),
            sections.costs(runs, measured),
            sections.calibration(runs),
            sections.detection(runs, focus),
            sections.selective(runs, focus),
            sections.shift(runs),
            sections.inside(shown, focus, heads, per_layer),
            sections.gallery(shown, focus),
            sections.provenance(runs, focus),
        ]
    )
    lead = sections.opening(comparison, focus, None if baseline == focus else baseline, runs)
    return _page(title or f"How good is {focus}?", _subtitle(shown, list(methods)), lead, body)


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
    """Write a report: a verdict, the comparison, and every figure, in one HTML file.

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
    path = Path(path)
    write_atomically(path, page.encode())
    return path


def _chosen(what: str, name: str | None, methods: Mapping[str, Sequence[Evaluation]], default: str) -> str:
    if name is None:
        return default
    if name not in methods:
        raise ConfigError(f"{what}={name!r} is not among the methods; choose one of {list(methods)}")
    return name


def _subtitle(evaluation: Evaluation, methods: Sequence[str]) -> str:
    others = f" · {len(methods)} methods" if len(methods) > 1 else ""
    foreign = f" · {len(evaluation.ood)} OOD sets" if evaluation.ood else ""
    return f"{evaluation.id_name} · {evaluation.id.samples:,} samples{foreign}{others}"


def _page(title: str, subtitle: str, lead: str, body: str) -> str:
    lead, body = (part.replace(" %", "&nbsp;%") for part in (lead, body))  # a number keeps its unit on the line
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{CSS}</style>
</head>
<body>
<header>
<p class="eyebrow">Evaluation report</p>
<h1>{escape(title)}</h1>
<p class="meta">{escape(subtitle)}</p>
{lead}
</header>
<main>
{body}
</main>
<footer>Made with hydra-ensembles {escape(__version__)}. This page holds everything it shows and loads nothing.</footer>
</body>
</html>
"""
