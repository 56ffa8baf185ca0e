"""The plots of a report, drawn by matplotlib from the columns of evaluations, as SVG."""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._utils import library
from ..evaluation.evaluation import Evaluation
from ..metrics.ood import risk_curve, roc_curve
from ..metrics.probabilities import reliability_bins

SERIES = ("#2563c9", "#d1571b", "#14866d", "#9a3fb5", "#a67c00", "#c62f6b", "#4f7a1a", "#5c6773")  # also in the style
_INK, _SOFT, _RULE, _OVER, _UNDER = "#1c2330", "#6b7482", "#e3e0d8", "#e08a9c", "#a9d5c6"
_BINS = 30  # of a histogram
_POINTS = 160  # maximum number of points of a curve


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


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return buffer.getvalue()


def _address(figure: Any) -> str:
    """A figure as a `data:` address, for the `src` of an image."""
    return "data:image/svg+xml;base64," + base64.b64encode(_svg(figure).encode()).decode()


def reliability(evaluation: Evaluation, series: int) -> str:
    """Accuracy against confidence, with the share of samples per bin below."""
    answers = evaluation.sets[evaluation.id_name]
    bins = reliability_bins(answers["confidence"], answers["accuracy"])
    width, ink = 1 / len(bins.count), SERIES[series % len(SERIES)]
    with _drawn(340, 286, 2, (5, 1)) as (figure, (upper, lower)):
        upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
        for number, (stated, right) in enumerate(zip(bins.confidence.tolist(), bins.accuracy.tolist(), strict=True)):
            if stated == stated:  # an empty bin has NaN
                middle, low = (number + 0.5) * width, min(stated, right)
                upper.bar(middle, low, width * 0.88, color=ink, alpha=0.8)
                upper.bar(middle, abs(stated - right), width * 0.88, low, color=_OVER if stated > right else _UNDER)
                upper.hlines(right, middle - 0.44 * width, middle + 0.44 * width, color=_INK, linewidth=2)
        upper.plot((0, 1), (0, 1), color=_INK, linewidth=1, linestyle="--")
        lower.set(xlim=(0, 1), xlabel="confidence", ylabel="samples", yticks=())
        lower.bar((bins.edges[:-1] + width / 2).tolist(), bins.count.tolist(), width * 0.88, color=ink, alpha=0.55)
        return _address(figure)


def histogram(evaluation: Evaluation, set_name: str) -> str:
    """Distribution of the uncertainty score on ID data and on one OOD set."""
    name = f"score:{evaluation.score}"
    shown = [evaluation.sets[evaluation.id_name][name], evaluation.sets[f"ood.{set_name}"][name]]
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


def roc(methods: Mapping[str, Evaluation], focus: str, set_name: str) -> str:
    """ROC curves of all methods on one OOD set."""
    with _drawn(340, 220) as (figure, (axes,)):
        axes.plot((0, 1), (0, 1), color=_SOFT, linewidth=1, linestyle="--")
        for series, (name, run) in enumerate(methods.items()):
            if (outside := run.sets.get(f"ood.{set_name}")) is not None:
                score = f"score:{run.score}"
                x, y, _ = roc_curve(run.sets[run.id_name][score], outside[score])
                _line(axes, *_thin(x, y), series, name == focus)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="share of ID flagged", ylabel="share of OOD flagged")
        return _address(figure)


def risk_by_coverage(methods: Mapping[str, Evaluation], focus: str) -> str:
    """Error rate among answered inputs, against the share that is answered."""
    top = 1e-3
    with _drawn(446, 270) as (figure, (axes,)):
        for series, (name, run) in enumerate(methods.items()):
            answers = run.sets[run.id_name]
            curve = risk_curve(answers[f"score:{run.score}"], ~answers["accuracy"])
            top = max(top, float(curve.risk[curve.coverage >= 0.1].max()))  # of very few answers the risk is noisy
            _line(axes, *_thin(curve.coverage, curve.risk), series, name == focus)
        axes.set(xlim=(0, 1), ylim=(0, top * 1.08), xlabel="share answered", ylabel="share of wrong answers")
        return _address(figure)


def _line(axes: Any, x: Tensor, y: Tensor, series: int, focus: bool) -> None:
    """One curve; the method in focus is bold and on top."""
    width, opacity, order = (2.6, 1, 4) if focus else (1.5, 0.75, 3)
    axes.plot(x.tolist(), y.tolist(), color=SERIES[series % len(SERIES)], linewidth=width, alpha=opacity, zorder=order)


def _thin(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """At most `_POINTS` points, evenly spaced along the curve, including the first and the last."""
    if len(x) <= _POINTS:
        return x, y
    length = torch.cat([x.new_zeros(1), (x.diff().abs() + y.diff().abs()).cumsum(dim=0)])
    chosen = torch.searchsorted(length, torch.linspace(0, float(length[-1]), _POINTS, dtype=length.dtype)).unique()
    return x[chosen], y[chosen]
