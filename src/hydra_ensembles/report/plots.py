"""The plots of a report: reliability, score histograms, ROC, risk against coverage."""

from collections.abc import Mapping
from html import escape

from ..evaluation.evaluation import Evaluation
from .svg import Frame, axes, baseline, colour, figure, line, percent_ticks, rectangle, round_ticks, steps, text

_QUARTERS = percent_ticks((0, 0.25, 0.5, 0.75, 1))


def reliability(name: str, evaluation: Evaluation, series: int) -> str:
    """Accuracy against confidence, with the share of the samples in each bin below."""
    bins = evaluation.figures.reliability
    count, total = len(bins.count), sum(bins.count)
    frame = Frame((0, 1), (0, 1), height=190)
    strip = Frame((0, 1), (0, max(bins.count) or 1), top=frame.top + frame.height + 46, height=34)
    ink = colour(series)
    parts = [axes(frame, _QUARTERS, _QUARTERS, "confidence (%)", "accuracy (%)")]
    width = frame.width / count
    for index, (samples, stated, right) in enumerate(zip(bins.count, bins.confidence, bins.accuracy, strict=True)):
        left = frame.px(index / count) + 1
        tall = strip.top + strip.height - strip.py(samples)
        parts.append(rectangle(left, strip.py(samples), width - 2, tall, f"fill:{ink};opacity:.55"))
        if stated is None or right is None:
            continue
        base, low, high = frame.top + frame.height, *sorted((stated, right))
        parts.append(rectangle(left, frame.py(low), width - 2, base - frame.py(low), f"fill:{ink};opacity:.8"))
        gap = "var(--over)" if stated > right else "var(--under)"
        parts.append(rectangle(left, frame.py(high), width - 2, frame.py(low) - frame.py(high), f"fill:{gap}"))
        parts.append(rectangle(left, frame.py(right) - 1, width - 2, 2, "fill:var(--ink)"))
    parts.append(line(frame, (0, 1), (0, 1), "stroke:var(--ink);stroke-width:1.2;stroke-dasharray:4 4;opacity:.7"))
    parts.append(text(frame.left + 4, strip.top + 9, "samples", anchor="start"))
    parts.append(baseline(strip))
    result = evaluation.id
    label = (
        f"Reliability diagram of {name} on {evaluation.id_name}: expected calibration error {result.ece:.3f}, "
        f"adaptive {result.aece:.3f}, over {total} samples."
    )
    caption = f"<b>{escape(name)}</b> · ECE {result.ece:.3f} · aECE {result.aece:.3f}"
    return figure("".join(parts), 340, strip.top + strip.height + 4, label, caption, "reliability")


def histogram(name: str, evaluation: Evaluation, set_name: str) -> str:
    """How the uncertainty score is distributed in distribution and on one OOD set."""
    figures, result = evaluation.figures, evaluation.ood[set_name]
    edges = figures.score_edges
    inside = [count / max(sum(figures.id_scores), 1) for count in figures.id_scores]
    outside = [count / max(sum(figures.ood_scores[set_name]), 1) for count in figures.ood_scores[set_name]]
    top = max(*inside, *outside) or 1.0
    frame = Frame((edges[0], edges[-1]), (0, top * 1.06), height=170)
    ticks = [(value, f"{value:g}") for value in round_ticks(edges[0], edges[-1])]
    shares = percent_ticks(round_ticks(0, top, 3))
    parts = [axes(frame, ticks, shares, f"uncertainty ({evaluation.score})", "share (%)")]
    for heights, ink in ((inside, "var(--id)"), (outside, "var(--ood)")):
        parts.append(steps(frame, edges, heights, f"fill:{ink};fill-opacity:.28;stroke:{ink};stroke-width:1.5"))
    detection = result.detection[evaluation.score]
    label = (
        f"Histogram of the {evaluation.score} score of {name}, in distribution against {set_name} "
        f"({result.group}): AUROC {detection.auroc * 100:.1f} percent."
    )
    caption = (
        f'<i class="key" style="background:var(--id)"></i>{escape(evaluation.id_name)} '
        f'<i class="key" style="background:var(--ood)"></i>{escape(set_name)}'
    )
    return figure("".join(parts), 340, frame.top + frame.height + 38, label, caption, "histogram")


def roc(methods: Mapping[str, Evaluation], focus: str, set_name: str) -> str:
    """ROC curves of all methods on one OOD set."""
    frame = Frame((0, 1), (0, 1), height=170)
    parts = [axes(frame, _QUARTERS, _QUARTERS, "ID flagged (%)", "OOD flagged (%)")]
    parts.append(line(frame, (0, 1), (0, 1), "stroke:var(--muted);stroke-dasharray:4 4;stroke-width:1;opacity:.7"))
    words = []
    for index, (name, evaluation) in _focus_last(methods, focus):
        curve = evaluation.figures.roc.get(set_name)
        if curve is None:
            continue
        parts.append(line(frame, curve.x, curve.y, _stroke(index, name == focus)))
        words.append(f"{name} {evaluation.ood[set_name].detection[evaluation.score].auroc * 100:.1f}")
    label = f"ROC curves on {set_name}. AUROC in percent: {', '.join(sorted(words))}."
    best = methods[focus].ood[set_name].detection[methods[focus].score]
    caption = f"ROC · area under the curve of {escape(focus)}: {best.auroc * 100:.1f} %"
    return figure("".join(parts), 340, frame.top + frame.height + 38, label, caption, "roc")


def risk_coverage(methods: Mapping[str, Evaluation], focus: str) -> str:
    """Error among the answered inputs, against the share that is answered."""
    curves = {name: evaluation.figures.risk_coverage for name, evaluation in methods.items()}
    # the first few answered samples make any risk look wild; the scale follows what comes after them
    settled = [y for curve in curves.values() for x, y in zip(curve.x, curve.y, strict=True) if x >= 0.1]
    top = max([*settled, 1e-3]) * 1.08
    frame = Frame((0, 1), (0, top), width=390, height=220)
    ticks = [(value, f"{value * 100:g}") for value in round_ticks(0, top, 4)]
    parts = [axes(frame, percent_ticks((0, 0.2, 0.4, 0.6, 0.8, 1)), ticks, "answered (%)", "wrong answers (%)")]
    words = []
    for index, (name, evaluation) in _focus_last(methods, focus):
        curve = curves[name]
        parts.append(line(frame, curve.x, [min(y, top) for y in curve.y], _stroke(index, name == focus)))
        words.append(f"{name} {evaluation.id.risk_at_coverage['0.80'] * 100:.2f}")
    label = (
        f"Risk-coverage curves on {methods[focus].id_name}. Wrong answers in percent when 80 percent of the inputs "
        f"are answered: {', '.join(words)}."
    )
    return figure("".join(parts), 446, frame.top + frame.height + 38, label, css="risk", largest=640)


def _focus_last(methods: Mapping[str, Evaluation], focus: str) -> list[tuple[int, tuple[str, Evaluation]]]:
    """Methods with their colour numbers, the one in focus at the end, so that it is drawn on top."""
    return sorted(enumerate(methods.items()), key=lambda entry: entry[1][0] == focus)


def _stroke(series: int, strong: bool) -> str:
    width, opacity = (2.6, 1) if strong else (1.5, 0.75)
    return f"stroke:{colour(series)};stroke-width:{width};opacity:{opacity};stroke-linejoin:round"
