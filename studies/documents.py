"""What the documents show of the studies: blocks of docs/results.md, and figures drawn from the results."""

import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch

from .methods import DEEP, HYDRA, HYDRA_TEMPERATURE, HYDRA_TRUNK, SINGLE, TEMPERATURE
from .recipe import CLASSIFIERS, STUDIES, ZERO_SHOT
from .results import Results
from .tables import TABLES, Facts, Table, not_testable_table, ratio, shown

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "studies"
FIGURES = ROOT / "docs" / "figures"
RELIABILITY = "study_zero_shot_reliability.svg"
BINS = 15  # of confidence

MARKERS = {SINGLE: "s", DEEP: "D", HYDRA: "*", HYDRA_TRUNK: "P"}  # the four to look at; others are dots
COLOURS = {SINGLE: "black", DEEP: "tab:blue", HYDRA: "tab:red", HYDRA_TRUNK: "tab:orange"}
SUMMARY = (SINGLE, DEEP, HYDRA, HYDRA_TRUNK)
TRIAL_LEAVES_OUT = (TEMPERATURE, "MC Dropout", "Taylor", "CircAvg", "CircAcc", "CircOOD")
STORED = ("accuracy", "auroc", "fpr95", "ece", "nll")


def study_blocks(folder: Path = RESULTS) -> dict[str, Callable[[], str]]:
    """Every block by name: `study_<task>_<table>`, `study_<task>_plot`, `study_summary`, ….

    Args:
        folder: Results of the studies; files of other runs lie beside it.
    """
    trials, above = folder.parent / "trials", folder.parent
    blocks: dict[str, Callable[[], str]] = {
        "study_not_testable": partial(not_testable_table, "classifier"),
        "study_zero_shot_not_testable": partial(not_testable_table, "dual"),
        "study_zero_shot_reliability": partial(figure, RELIABILITY, "Confidence against accuracy on unseen tasks"),
        "study_summary": partial(summary, folder),
        "study_rates": partial(rates, above / "backbone_rates.json"),
        "study_cifar10_before": partial(trial, trials / "vision-cifar10-second-run.json"),
        "study_tinyimagenet_by_class": partial(trial, trials / "vision-tinyimagenet-by-class.json"),
        "study_stored": partial(stored, above / "stored_logits.json"),
    }
    for study in STUDIES:
        task = task_of(study)
        for name, table in TABLES["dual" if study == ZERO_SHOT else "classifier"].items():
            blocks[f"study_{task}_{name}"] = partial(block, folder, study, table)
        text = "OOD AUROC of every method against its latency, over that of one model"
        blocks[f"study_{task}_plot"] = partial(figure, f"study_{task}.svg", text)
    return blocks


def task_of(study: str) -> str:
    """The short name of a study's task."""
    return "zero_shot" if study == ZERO_SHOT else study.rpartition("-")[2]


def not_measured(command: str) -> str:
    """What stands where a results file is missing."""
    return f"*Not measured yet: `{command}`.*"


def block(folder: Path, study: str, table: Table) -> str:
    """One table, or a line that says how to get it."""
    path = folder / f"{study}.json"
    return table(_read(path)) if path.exists() else not_measured(f"python -m studies run {study}")


def figure(file: str, text: str) -> str:
    """A figure of the documents, where it was drawn."""
    if not (FIGURES / file).exists():
        return "*No figure yet: `python -m studies analyse NAME --figures`.*"
    return f"![{text}](figures/{file})"


def summary(folder: Path) -> str:
    """The headline rows of the studies of classifiers that were measured."""
    rows = []
    for path in (folder / f"{study}.json" for study in CLASSIFIERS):
        facts = _read(path) if path.exists() else {"rows": {}}
        for method in SUMMARY if facts["rows"] else ():
            row = facts["rows"][method]
            cells = [shown(row[metric], metric) for metric in ("accuracy", "chosen.all.auroc", "calibrated.ece")]
            rows.append(f"| {path.stem} | {method} | {' | '.join(cells)} | {ratio(facts, method)} |")
    if not rows:
        return not_measured(f"python -m studies run {CLASSIFIERS[0]}")
    head = ["| study | method | accuracy | OOD AUROC | ECE, calibrated | latency |", "|---|---|---:|---:|---:|---:|"]
    note = (
        "Mean and deviation over seeds; OOD AUROC with each method's own score, mean over all OOD sets; latency on a "
        "GPU, over that of the single model. From `results/studies/`."
    )
    return "\n".join([*head, *rows, "", note])


def rates(path: Path) -> str:
    """How the vision backbones could have been trained, on half B."""
    lines = [
        "| study | rate | classifier's rate | epochs | accuracy | OOD AUROC |  |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for study, one in _read(path).items():
        for row in one["rows"]:
            chosen = all(row[name] == value for name, value in one["chosen"].items())
            lines.append(
                f"| {study} | {row['learning_rate']:g} | {row['learning_rate'] * row['classifier_rate']:g} "
                f"| {row['epochs']} | {100 * row['accuracy']:.2f} | {100 * row['auroc']:.2f} "
                f"| {'**chosen**' if chosen else ''} |"
            )
    return "\n".join([*lines, "", "One training each, on half B. From `results/backbone_rates.json`."])


def trial(path: Path) -> str:
    """A run of a study that is not its result: rows without the single pruned models."""
    facts = _read(path)
    lines = [
        "| method | accuracy | AUROC, maximum probability | own score | AUROC, own score | cost |",
        "|---|---:|---:|---|---:|---:|",
    ]
    for method, row in facts["rows"].items():
        if method not in TRIAL_LEAVES_OUT:
            right, by_msp, by_own = (shown(row[key], key) for key in ("accuracy", "all.auroc", "chosen.all.auroc"))
            score = facts["decision"]["decision"]["scores"][method].replace("_", " ")
            lines.append(f"| {method} | {right} | {by_msp} | {score} | {by_own} | {ratio(facts, method)} |")
    note = f"{facts['device']}, seeds {facts['seeds']}. From `results/trials/{path.name}`, without stored logits."
    return "\n".join([*lines, "", note])


def stored(path: Path) -> str:
    """The largest differences between tables from full logits and from those that the first version stored."""
    lines = ["| study | " + " | ".join(STORED) + " |", "|---|" + "---:|" * len(STORED)]
    for study, one in _read(path).items():
        gaps = [one["largest"][metric]["difference"] * (1 if metric == "nll" else 100) for metric in STORED]
        cells = [f"{gap:.3f}" if metric == "nll" else f"{gap:.2f}" for metric, gap in zip(STORED, gaps, strict=True)]
        lines.append(f"| {study} | " + " | ".join(cells) + " |")
    note = (
        "Largest over all methods and sets of one seed, in points (NLL: as it is). From `results/stored_logits.json`."
    )
    return "\n".join([*lines, "", note])


def draw_figures(results: Results, folder: Path = FIGURES) -> list[Path]:
    """The figures of a study: OOD AUROC against cost where that was measured, and reliability of dual encoders."""
    facts, drawn = results.facts, []
    if facts["costs"] is not None:
        metric, axis = "chosen.all.auroc", "OOD AUROC (%), mean over sets, score chosen on half B"
        if not results.classifies:
            task = results.detections()[0]
            metric, axis = f"{task}.all.auroc", f"OOD AUROC (%), {task} as ID, mean over sets"
        drawn.append(_draw_costs(facts, folder / f"study_{task_of(results.name)}.svg", metric, axis))
    unseen = [] if results.classifies else [one for one in results.tasks("unseen") if one not in facts["left_out"]]
    if unseen:
        drawn.append(_draw_reliability(results, unseen, folder / RELIABILITY))
    return drawn


def _draw_costs(facts: Facts, path: Path, metric: str, axis: str) -> Path:
    """One point a method: mean over seeds, a bar of one standard deviation."""
    canvas, axes = _axes(7, 4.2)
    muted: Any = pyplot.get_cmap("tab20b")
    for index, (name, cost) in enumerate(facts["costs"]["costs"].items()):
        values = [100 * value for value in facts["rows"][name][metric]]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        place = (cost["latency_ratio"], statistics.mean(values))
        mark, size = MARKERS.get(name, "o"), 9 if name in MARKERS else 4
        colour = COLOURS.get(name, muted.colors[7 * index % len(muted.colors)])  # neighbours differ in hue
        axes.errorbar(*place, yerr=spread, fmt=mark, color=colour, markersize=size, capsize=2, label=name)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7, frameon=False)
    axes.set_xlabel("latency of a batch, over that of one model")
    axes.set_ylabel(axis)
    axes.set_title(f"{facts['study']}: {facts['costs']['device']}, {facts['costs']['dtype']}")
    return _saved(canvas, axes, path)


def _draw_reliability(results: Results, tasks: Sequence[str], path: Path) -> Path:
    """Accuracy in bins of confidence, all unseen tasks that count and all seeds together."""
    canvas, axes = _axes(4.6, 4.2)
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    for method in (SINGLE, TEMPERATURE, HYDRA, HYDRA_TEMPERATURE):
        found = [results.columns(method, seed, task, task) for task in tasks for seed in results.seeds]
        confidence, correct = (torch.cat([one[key] for one in found]).double() for key in ("confidence", "correct"))
        bins = (confidence * BINS).long().clamp_max(BINS - 1)
        counts = bins.bincount(minlength=BINS)
        there = counts > 0
        points = [bins.bincount(column, BINS)[there] / counts[there] for column in (confidence, correct)]
        axes.plot(*points, marker=".", label=method)
    axes.set_xlabel("confidence")
    axes.set_ylabel("accuracy")
    axes.legend(fontsize=7, frameon=False)
    return _saved(canvas, axes, path)


def _axes(width: float, height: float) -> tuple[Any, Any]:
    matplotlib.rcParams.update({"svg.hashsalt": "studies", "svg.fonttype": "none", "font.size": 9})
    return pyplot.subplots(figsize=(width, height))


def _saved(canvas: Any, axes: Any, path: Path) -> Path:
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(canvas)
    return path


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
