"""The plots of a report, drawn by matplotlib as SVG; its colours become CSS variables of the page."""

import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

from .._utils import require
from ..evaluation.evaluation import Curve, Evaluation

_NAMES = ("ink", "soft", "muted", "rule", "over", "under", *(f"c{series}" for series in range(8)))
_INK = {name: f"#fe{index:02x}dc" for index, name in enumerate(_NAMES)}
"""Placeholder colour for each CSS variable while matplotlib draws."""

_LIGHT = {"ink": "#1c2330", "soft": "#475467", "muted": "#6b7482", "rule": "#e3e0d8", "c0": "#2563c9", "c1": "#d1571b"}
"""The colours of a standalone figure: the page's light theme."""

_LEFT, _RIGHT, _TOP = 44, 12, 12  # margins of a plot, in figure units (about pixels on a phone)
_QUARTERS = (0, 0.25, 0.5, 0.75, 1)
Fronts = Mapping[str, tuple[Mapping[str, float], Sequence[str]]]  # by title: values by name, and names on the front


@contextmanager
def _plain_matplotlib() -> Iterator[None]:
    """Default matplotlib settings, whatever the user's are; text stays text, also with dollar signs."""
    matplotlib = require("matplotlib", extra="report")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        text = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "text.parse_math": False}
        matplotlib.rcParams.update(text)
        yield


def colour(index: int) -> str:
    """Name of the CSS variable for a series."""
    return f"c{index % 8}"


@_plain_matplotlib()
def reliability(name: str, evaluation: Evaluation, series: int) -> str:
    """Accuracy against confidence, with the share of samples per bin below."""
    bins, result = evaluation.figures.reliability, evaluation.id
    width = 1 / len(bins.count)
    ink = _INK[colour(series)]
    figure = _figure(340, 286)
    axes = _axes(figure, 190, "confidence (%)", "accuracy (%)", percent="xy")
    axes.set(xlim=(0, 1), ylim=(0, 1), xticks=_QUARTERS, yticks=_QUARTERS)
    middles = [(index + 0.5) * width for index in range(len(bins.count))]
    for middle, stated, right in zip(middles, bins.confidence, bins.accuracy, strict=True):
        if stated is not None and right is not None:
            gap = _INK["over" if stated > right else "under"]
            axes.bar(middle, min(stated, right), width * 0.88, color=ink, alpha=0.8)
            axes.bar(middle, abs(stated - right), width * 0.88, bottom=min(stated, right), color=gap)
            axes.hlines(right, middle - 0.44 * width, middle + 0.44 * width, color=_INK["ink"], linewidth=2)
    axes.plot((0, 1), (0, 1), color=_INK["ink"], linewidth=1.2, linestyle=(0, (4, 4)), alpha=0.7)
    strip = _axes(figure, 34, "", "", top=_TOP + 190 + 46)
    strip.grid(visible=False)
    strip.set(xlim=(0, 1), ylim=(0, max(bins.count) or 1), xticks=(), yticks=())
    strip.bar(middles, bins.count, width * 0.88, color=ink, alpha=0.55)
    strip.text(0.012, 0.75, "samples", transform=strip.transAxes, fontsize=10.5, color=_INK["muted"])
    label = f"Reliability diagram of {name} on {evaluation.id_name}: expected calibration error {result.ece:.3f}, "
    return _svg(figure, f"{label}adaptive {result.aece:.3f}, over {result.samples} samples.")


@_plain_matplotlib()
def histogram(name: str, evaluation: Evaluation, set_name: str) -> str:
    """Distribution of the uncertainty score on ID data and on one OOD set."""
    figures = evaluation.figures
    result = evaluation.ood[set_name]
    figure = _figure(340, 220)
    axes = _axes(figure, 170, f"uncertainty ({evaluation.score})", "share (%)", percent="y")
    for counts, ink in ((figures.id_scores, _INK["c0"]), (figures.ood_scores[set_name], _INK["c1"])):
        shares = [count / max(sum(counts), 1) for count in counts]
        axes.stairs(shares, figures.score_edges, fill=True, color=ink, alpha=0.28)
        axes.stairs(shares, figures.score_edges, color=ink, linewidth=1.5)
    axes.set(xlim=(figures.score_edges[0], figures.score_edges[-1]), ylim=(0, None))
    axes.locator_params(nbins=5, steps=[1, 2, 2.5, 5, 10])
    label = f"Histogram of the {evaluation.score} score of {name}, in distribution against {set_name} ({result.group})"
    return _svg(figure, f"{label}: AUROC {result.detection[evaluation.score].auroc * 100:.1f} percent.")


@_plain_matplotlib()
def roc(methods: Mapping[str, Evaluation], focus: str, set_name: str) -> str:
    """ROC curves of all methods on one OOD set."""
    figure = _figure(340, 220)
    axes = _axes(figure, 170, "ID flagged (%)", "OOD flagged (%)", percent="xy")
    axes.set(xlim=(0, 1), ylim=(0, 1), xticks=_QUARTERS, yticks=_QUARTERS)
    axes.plot((0, 1), (0, 1), color=_INK["muted"], linewidth=1, linestyle=(0, (4, 4)), alpha=0.7)
    _lines(axes, {name: run.figures.roc.get(set_name) for name, run in methods.items()}, focus)
    results = {name: run.ood[set_name].detection[run.score] for name, run in methods.items() if set_name in run.ood}
    listing = ", ".join(f"{name} {result.auroc * 100:.1f}" for name, result in results.items())
    return _svg(figure, f"ROC curves on {set_name}. AUROC in percent: {listing}.")


@_plain_matplotlib()
def risk_by_coverage(methods: Mapping[str, Evaluation], focus: str) -> str:
    """Error rate among answered inputs, against the share that is answered."""
    curves = {name: run.figures.risk_coverage for name, run in methods.items()}
    # with very few answers the risk is noisy; the scale ignores coverage below 10 %
    settled = [y for curve in curves.values() for x, y in zip(curve.x, curve.y, strict=True) if x >= 0.1]
    top = max([*settled, 1e-3]) * 1.08
    figure = _figure(446, 270)
    axes = _axes(figure, 220, "answered (%)", "wrong answers (%)", percent="xy")
    axes.set(xlim=(0, 1), ylim=(0, top), xticks=(0, 0.2, 0.4, 0.6, 0.8, 1))
    axes.locator_params("y", nbins=5, steps=[1, 2, 2.5, 5, 10])
    _lines(axes, {name: Curve(curve.x, tuple(min(y, top) for y in curve.y)) for name, curve in curves.items()}, focus)
    listing = ", ".join(f"{name} {run.id.risk_at_coverage['0.80'] * 100:.2f}" for name, run in methods.items())
    label = f"Risk-coverage curves on {methods[focus].id_name}. Wrong answers in percent when 80 percent of the inputs "
    return _svg(figure, f"{label}are answered: {listing}.")


@_plain_matplotlib()
def draw_fronts(prices: Mapping[str, float], fronts: Fronts, *, chosen: str, given: str, limit: float) -> str:
    """Price against each value, one plot below the other, with the front as a line; a standalone SVG file."""
    height, labels = 190, []
    figure = _figure(446, (height + 62) * len(fronts))
    for number, (title, (values, names)) in enumerate(fronts.items()):
        last = number == len(fronts) - 1
        axes = _axes(figure, height, "price" if last else "", title, top=_TOP + number * (height + 50))
        axes.axvline(limit, color=_INK["muted"], linewidth=1, linestyle=(0, (4, 4)))
        line = sorted((prices[name], values[name]) for name in names)
        axes.plot(*zip(*line, strict=True), color=_INK["c0"], linewidth=1.5, drawstyle="steps-post", alpha=0.6)
        for name, price in prices.items():
            ink, size = (_INK["c1"], 60) if name == chosen else (_INK["c0" if name in names else "muted"], 28)
            axes.scatter([price], [values[name]], s=size, color=ink, zorder=4)
        for name in dict.fromkeys((given, chosen)):
            point = (prices[name], values[name])
            axes.annotate(name, point, (8, 7), textcoords="offset points", fontsize=10.5, color=_INK["ink"])
        axes.margins(x=0.12, y=0.18)
        axes.xaxis.set_major_formatter(lambda price, _: f"{price:g}×")
        axes.locator_params(nbins=6, steps=[1, 2, 2.5, 5, 10])
        labels.append(f"{title}: " + ", ".join(f"{name} {values[name]:.3g} at {prices[name]:.2f}" for name in names))
    label = f"Price against quality of {len(prices)} candidates. Fronts, {'; '.join(labels)}. Chosen: {chosen}."
    svg = _svg(figure, label)
    for name, colour_ in _LIGHT.items():
        svg = svg.replace(f"var(--{name})", colour_)
    head, drawing = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).split(">", 1)
    return f'{head}><rect width="100%" height="100%" fill="#ffffff" />{drawing}'  # white background, for dark pages


def _figure(width: float, height: float) -> Any:
    return require("matplotlib.figure", extra="report").Figure(figsize=(width / 72, height / 72), dpi=72)


def _axes(figure: Any, height: float, x_label: str, y_label: str, *, percent: str = "", top: float = _TOP) -> Any:
    """Axes as wide as the figure; `percent` names the axes that show shares in percent."""
    whole_width, whole_height = (72 * inches for inches in figure.get_size_inches())
    bottom = 1 - (top + height) / whole_height
    width = (whole_width - _LEFT - _RIGHT) / whole_width
    axes = figure.add_axes((_LEFT / whole_width, bottom, width, height / whole_height))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_INK["muted"])
    axes.grid(axis="y", color=_INK["rule"], linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=10.5, labelcolor=_INK["muted"])
    axes.set_xlabel(x_label, fontsize=11, color=_INK["soft"])
    figure.text(11 / whole_width, bottom + height / whole_height / 2, y_label, rotation=90, ha="center", va="center",
                fontsize=11, color=_INK["soft"])  # fmt: skip
    for name in percent:
        getattr(axes, f"{name}axis").set_major_formatter(lambda share, _: f"{share * 100:g}")
    return axes


def _lines(axes: Any, curves: Mapping[str, Curve | None], focus: str) -> None:
    """One curve per method; the one in focus is bold and on top."""
    for index, (name, curve) in enumerate(curves.items()):
        if curve is not None:
            width, opacity, order = (2.6, 1, 4) if name == focus else (1.5, 0.75, 3)
            axes.plot(curve.x, curve.y, color=_INK[colour(index)], linewidth=width, alpha=opacity, zorder=order)


def _svg(figure: Any, label: str) -> str:
    """The figure as an inline SVG element: text stays text, colours are CSS variables, without references."""
    for artist in figure.findobj():
        artist.set_clip_on(False)
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    root = ElementTree.fromstring(buffer.getvalue())
    shapes = {element.get("id"): element.get("d", "") for element in root.iter() if element.get("d")}
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib.pop("id", None)
        if element.tag == "use":  # a marker: replace the reference with the path itself
            move = f"translate({element.attrib['x']} {element.attrib['y']})"
            style = element.get("style", "")
            shape = next(value for name, value in element.items() if name.endswith("href")).removeprefix("#")
            element.tag = "path"
            element.attrib = {"d": shapes[shape], "transform": move, "style": style}
        for name, value in element.items():  # round coordinates to 0.01 pixels; numbers in text are unchanged
            element.attrib[name] = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", value)
    for parent in list(root.iter()):
        for definitions in parent.findall("defs"):
            parent.remove(definitions)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img"}
    text = ElementTree.tostring(root, "unicode")
    for name, ink in _INK.items():
        text = text.replace(ink, f"var(--{name})")
    head, drawing = text.split(">", 1)  # added last, so that no name in the label is replaced
    words = html.escape(label)
    return f'{head} aria-label="{words}"><title>{words}</title>{drawing}'
