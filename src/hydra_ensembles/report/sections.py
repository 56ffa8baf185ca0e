"""The sections of a report, each a piece of HTML; everything that came from outside is escaped here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

from ..evaluation.evaluation import Evaluation
from ..model.config import KeptHeads
from ..model.cost import Cost
from . import diagrams, plots
from .compare import CLASSIFICATION, Column, Comparison, compare, set_columns
from .gallery_html import gallery_html
from .svg import colour
from .tables_html import comparison_table, plain_table
from .verdict import differences, verdict

ONE_TABLE = 12
"""Most columns the results may have before they are shown as two tables."""


def section(title: str, how: str, *content: str) -> str:
    """A headed section; `how` says in a sentence how to read what follows."""
    return f'<section><h2>{escape(title)}</h2><p class="how">{escape(how)}</p>{"".join(content)}</section>'


def opening(comparison: Comparison, focus: str, baseline: str | None, runs: Mapping[str, Evaluation]) -> str:
    """The verdict and the numbers a reader asks for first."""
    first, *rest = verdict(comparison, focus, baseline, runs)
    words = f'<p class="lead">{escape(first)} <span>{escape(" ".join(rest))}</span></p>'
    return words + _tiles(comparison, focus, baseline, runs)


def _tiles(comparison: Comparison, focus: str, baseline: str | None, runs: Mapping[str, Evaluation]) -> str:
    shown = {
        "accuracy": "Accuracy",
        "near.auroc": "Near-OOD AUROC",
        "far.auroc": "Far-OOD AUROC",
        "all.auroc": "OOD AUROC",
        "ece": "Calibration error",
        "latency_ratio": "Latency",
    }
    row = next(row for row in comparison.rows if row.name == focus)
    cells = {column.key: (column, cell) for column, cell in zip(comparison.columns, row.cells, strict=True)}
    if "near.auroc" in cells or "far.auroc" in cells:
        cells.pop("all.auroc", None)
    against = {} if baseline is None else {d.column.key: d for d in differences(comparison, focus, baseline, runs)}
    tiles = []
    for key, title in shown.items():
        if key not in cells or cells[key][1].value is None:
            continue
        column, cell = cells[key]
        unit = " %" if column.scale == 100 else ""
        change = ""
        if key in against:
            one = against[key]
            change = f'<span class="delta {one.outcome}">{one.change} vs {escape(str(baseline))}</span>'
        elif baseline is not None:
            other = next(row for row in comparison.rows if row.name == baseline).cells[comparison.columns.index(column)]
            change = f'<span class="delta">{escape(baseline)}: {escape(other.text)}</span>'
        tiles.append(
            f'<li><span class="what">{title}</span><span class="number">{escape(cell.text)}{unit}</span>{change}</li>'
        )
    return f'<ul class="tiles">{"".join(tiles)}</ul>'


def results(comparison: Comparison, focus: str) -> str:
    """The comparison table."""
    how = "Best in bold, second best underlined; arrows point to where better is. Numbers written alike share a mark."
    grouped = [column for column in comparison.columns if column.group]
    plain = [column for column in comparison.columns if not column.group]
    parts = [list(comparison.columns)] if len(comparison.columns) <= ONE_TABLE else [plain, grouped]
    titles = ("Comparison of methods", "Comparison of methods: OOD detection")
    tables = "".join(
        comparison_table(comparison, focus, part, label) for part, label in zip(parts, titles, strict=False) if part
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in comparison.notes)
    return section("Results", how, f'<div class="stack">{tables}</div>', notes)


def costs(methods: Mapping[str, Evaluation], measured: Mapping[str, Cost]) -> str:
    """What each method costs."""
    figures = diagrams.cost_figures(methods, measured)
    if not figures:
        return ""
    how = "What each method stores, computes and takes; shorter bars are cheaper."
    layout = "grid" if len(figures) == 3 else "two"
    note = ""
    if measured:
        one = next(iter(measured.values()))
        note = (
            f'<p class="note">Latency: median of {one.repeats} runs of a batch of {one.batch} on {escape(one.device)}, '
            "all methods taking turns in one run.</p>"
        )
    return section("Cost", how, f'<div class="{layout}">{"".join(figures)}</div>', note)


def calibration(methods: Mapping[str, Evaluation]) -> str:
    """Reliability diagrams."""
    how = (
        "A model that says 80 % should be right 80 % of the time. The short line is how often it is right; red above "
        "it is confidence it does not deserve, green below it is confidence it could afford."
    )
    figures = [plots.reliability(name, one, index) for index, (name, one) in enumerate(methods.items())]
    return section("Can its confidence be trusted?", how, f'<div class="grid">{"".join(figures)}</div>')


def detection(methods: Mapping[str, Evaluation], focus: str) -> str:
    """Score histograms and ROC curves of every OOD set."""
    evaluation = methods[focus]
    if not evaluation.ood:
        return ""
    how = (
        f"First, how uncertain {focus} is about its own data and about a foreign set: the less the two overlap, the "
        "better. Then the share of foreign inputs caught as more of its own are flagged: the nearer the upper left "
        "corner, the better. Beside them, the numbers of that set by itself."
    )
    words = {"near": "near", "far": "far", "apart": "reported apart, in no mean", "ungrouped": ""}
    parts = [legend(methods, focus)]
    for name, result in evaluation.ood.items():
        extra = ", ".join(part for part in (words[result.group], f"{result.samples:,} samples") if part)
        parts.append(f'<h3>{escape(name)} <span class="meta">({extra})</span></h3>')
        figures = plots.histogram(focus, evaluation, name) + plots.roc(methods, focus, name)
        parts.append(f'<div class="grid">{figures}{_set_table(methods, focus, name)}</div>')
    return section("Does it notice foreign inputs?", how, *parts)


def _set_table(methods: Mapping[str, Evaluation], focus: str, name: str) -> str:
    """The numbers of all methods on one OOD set."""
    known = {method: one for method, one in methods.items() if name in one.ood}
    comparison = compare(known, columns=set_columns([name]), allow_mismatch=True)
    plain = [replace(column, group="") for column in comparison.columns]
    return comparison_table(replace(comparison, columns=tuple(plain)), focus, plain, f"Detection on {name}")


def selective(methods: Mapping[str, Evaluation], focus: str) -> str:
    """Risk against coverage, and what the calibrated threshold does."""
    how = (
        "Each curve shows how many answers are wrong when only the share the model is most certain about is answered: "
        "lower is better, and a good uncertainty makes the curve fall towards the left."
    )
    evaluation, words = methods[focus], ""
    chosen = evaluation.selective
    if chosen is not None:
        risk = "" if chosen.risk is None else f" and errs on {chosen.risk * 100:.2f} % of what it answers"
        refused = [
            f"{result.abstained * 100:.0f} % of {name}"
            for name, result in evaluation.ood.items()
            if result.abstained is not None
        ]
        declined = f" It declines {', '.join(refused)}." if refused else ""
        words = (
            f'<p class="note">With its calibrated threshold ({escape(chosen.score)} ≤ {chosen.threshold:.4g}) '
            f"{escape(focus)} answers {chosen.accepted * 100:.1f} % of {escape(evaluation.id_name)}{risk}."
            f"{escape(declined)}</p>"
        )
    return section(
        "What if it may decline to answer?", how, legend(methods, focus), plots.risk_coverage(methods, focus), words
    )


def shift(methods: Mapping[str, Evaluation]) -> str:
    """Accuracy and calibration on sets under distribution shift."""
    names = list(dict.fromkeys(name for one in methods.values() for name in one.shift))
    if not names:
        return ""
    columns = [column for column in CLASSIFICATION if column.key in ("accuracy", "ece")]
    numbers = {method: evaluation.numbers() for method, evaluation in methods.items()}
    rows = [
        (name, [_written(numbers[method], f"shift.{name}.{c.key}", c) for c in columns for method in methods])
        for name in names
    ]
    groups = [(column.heading, len(methods)) for column in columns]
    table = plain_table("Under distribution shift", groups, list(methods) * len(columns), rows, corner="Shift")
    how = "The same task on worse inputs: accuracy should fall slowly, and confidence should fall with it."
    return section("Does it know when conditions get worse?", how, table)


def inside(evaluation: Evaluation, name: str, heads: KeptHeads | None, heads_per_layer: int | None) -> str:
    """Head map and member agreement."""
    parts = []
    if heads is not None and heads_per_layer is not None:
        parts.append(f"<div><h3>Head map</h3>{diagrams.head_map(heads, heads_per_layer, name)}</div>")
    figures = evaluation.figures
    if len(figures.agreement_id) > 1:
        tables = [diagrams.agreement(figures.agreement_id, f"in distribution ({evaluation.id_name})", name)]
        if figures.agreement_ood is not None:
            tables.append(diagrams.agreement(figures.agreement_ood, "out of distribution (mean of the sets)", name))
        result = evaluation.id
        outside = evaluation.numbers().get("all.disagreement")
        beyond = "" if outside is None else f", {outside * 100:.1f} % of the time out of distribution"
        note = (
            f'<p class="note">Two members differ {result.disagreement * 100:.1f} % of the time in distribution{beyond}.'
            " Members that agree on known inputs and differ on foreign ones are what makes an ensemble useful.</p>"
        )
        parts.append(
            f'<div class="grow"><h3>Member agreement (%)</h3><div class="row">{"".join(tables)}</div>{note}</div>'
        )
    if not parts:
        return ""
    how = (
        "Rows are layers, columns are heads; a coloured stripe says that a member keeps the head. The matrices show "
        "how often two members predict the same class."
    )
    return section("Inside the ensemble", how, f'<div class="row">{"".join(parts)}</div>')


def gallery(evaluation: Evaluation, name: str) -> str:
    """Inputs it was most and least sure about."""
    if not evaluation.gallery:
        return ""
    how = f"The inputs {name} was most and least sure about, with what it said; foreign inputs have no right answer."
    return section("What it was sure about, and what not", how, gallery_html(evaluation))


def provenance(methods: Mapping[str, Evaluation], focus: str) -> str:
    """How the numbers were made."""
    evaluation = methods[focus]
    made, model = evaluation.provenance, evaluation.model
    temperature = None if model.calibration is None else ", ".join(f"{t:.4g}" for t in model.calibration.temperature)
    samples = ", ".join(f"{name.removeprefix('ood.')}: {count:,}" for name, count in evaluation.samples.items())
    facts = {
        "Model": f"{focus}: {model.members} member{'s' if model.members > 1 else ''}, {model.classes} classes",
        "Source": model.source,
        "History": " → ".join(model.history),
        "Temperature": temperature if temperature not in (None, "1") else "",
        "Samples": samples,
        "Score": f"{evaluation.score}; OOD is the positive class, higher means more uncertain",
        "Convention": evaluation.convention,
        "Definitions": "ECE: 15 bins of equal width, L1. aECE: 15 bins of equal count. Brier: summed over classes. "
        "NLL: of the mean probabilities. Near, far and all: unweighted means over sets.",
        "Hardware": f"{made.hardware}, {made.dtype}" + (f", {made.processes} processes" if made.processes > 1 else ""),
        "Versions": ", ".join(f"{library} {version}" for library, version in made.versions.items()),
    }
    listing = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items() if value)
    return f"<section><h2>How this was measured</h2><dl>{listing}</dl></section>"


def legend(methods: Mapping[str, Evaluation], focus: str) -> str:
    """Which colour is which method."""
    chips = []
    for index, name in enumerate(methods):
        words = f"<b>{escape(name)}</b>" if name == focus else escape(name)
        chips.append(f'<li><i class="key" style="background:{colour(index)}"></i>{words}</li>')
    return f'<ul class="chips">{"".join(chips)}</ul>' if len(methods) > 1 else ""


def _written(numbers: Mapping[str, float], key: str, column: Column) -> str:
    return column.write(numbers[key]) if key in numbers else "–"


def contents(parts: Sequence[str]) -> str:
    """The sections one after another, empty ones left out."""
    return "\n".join(part for part in parts if part)
