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
from .tables import TABLES, Facts, Table, not_testable_table, summary_table

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "studies"
FIGURES = ROOT / "docs" / "figures"
RELIABILITY = "study_zero_shot_reliability.svg"
BINS = 15  # of confidence
MARKS = {SINGLE: "s", DEEP: "D", HYDRA: "*", HYDRA_TRUNK: "P"}  # the four to look at; others are dots
COLOURS = {SINGLE: "black", DEEP: "tab:blue", HYDRA: "tab:red", HYDRA_TRUNK: "tab:orange"}


def study_blocks(folder: Path = RESULTS) -> dict[str, Callable[[], str]]:
    """Every block by name: `study_<task>_<table>`, `study_<task>_plot`, `study_summary`, …."""
    blocks: dict[str, Callable[[], str]] = {
        "study_not_testable": partial(not_testable_table, "classifier"),
        "study_zero_shot_not_testable": partial(not_testable_table, "dual"),
        "study_zero_shot_reliability": partial(figure, RELIABILITY, "Confidence against accuracy on unseen tasks"),
        "study_summary": lambda: summary_table([one for one in map(partial(read, folder), CLASSIFIERS) if one]),
    }
    for study in STUDIES:
        for name, table in TABLES["dual" if study == ZERO_SHOT else "classifier"].items():
            blocks[f"study_{task_of(study)}_{name}"] = partial(block, folder, study, table)
        text = "OOD AUROC of every method against its latency, over that of one model"
        blocks[f"study_{task_of(study)}_plot"] = partial(figure, f"study_{task_of(study)}.svg", text)
    return blocks


def task_of(study: str) -> str:
    """The short name of a study's task."""
    return "zero_shot" if study == ZERO_SHOT else study.rpartition("-")[2]


def read(folder: Path, study: str) -> Facts | None:
    """What the results file of a study says; None where it was not run."""
    path = folder / f"{study}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def block(folder: Path, study: str, table: Table) -> str:
    """One table, or a line that says how to get it."""
    facts = read(folder, study)
    return f"*Not measured yet: `python -m studies run {study}`.*" if facts is None else table(facts)


def figure(file: str, text: str) -> str:
    """A figure of the documents, where it was drawn."""
    there = (FIGURES / file).exists()
    return f"![{text}](figures/{file})" if there else "*No figure yet: `python -m studies analyse NAME --figures`.*"


def draw_figures(results: Results, folder: Path = FIGURES) -> list[Path]:
    """The figures of a study: OOD AUROC against cost where that was measured, and reliability of dual encoders."""
    facts, drawn = results.facts, []
    folder.mkdir(parents=True, exist_ok=True)
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
    canvas, axes = _axes(7, 4.2, "latency of a batch, over that of one model", axis)
    muted: Any = pyplot.get_cmap("tab20b")
    for index, (name, cost) in enumerate(facts["costs"]["costs"].items()):
        values = [100 * value for value in facts["rows"][name][metric]]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        place = (cost["latency_ratio"], statistics.mean(values))
        mark, size = MARKS.get(name, "o"), 9 if name in MARKS else 4
        colour = COLOURS.get(name, muted.colors[7 * index % len(muted.colors)])  # neighbours differ in hue
        axes.errorbar(*place, yerr=spread, fmt=mark, color=colour, markersize=size, capsize=2, label=name)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7, frameon=False)
    axes.set_title(f"{facts['study']}: {facts['costs']['device']}, {facts['costs']['dtype']}")
    return _saved(canvas, path)


def _draw_reliability(results: Results, tasks: Sequence[str], path: Path) -> Path:
    """Accuracy in bins of confidence, all unseen tasks that count and all seeds together."""
    canvas, axes = _axes(4.6, 4.2, "confidence", "accuracy")
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    for method in (SINGLE, TEMPERATURE, HYDRA, HYDRA_TEMPERATURE):
        found = [results.columns(method, seed, task, task) for task in tasks for seed in results.seeds]
        confidence, correct = (torch.cat([one[key] for one in found]).double() for key in ("confidence", "correct"))
        bins = (confidence * BINS).long().clamp_max(BINS - 1)
        counts = bins.bincount(minlength=BINS)
        there = counts > 0
        points = [bins.bincount(column, BINS)[there] / counts[there] for column in (confidence, correct)]
        axes.plot(*points, marker=".", label=method)
    axes.legend(fontsize=7, frameon=False)
    return _saved(canvas, path)


def _axes(width: float, height: float, across: str, up: str) -> tuple[Any, Any]:
    matplotlib.rcParams.update({"svg.hashsalt": "studies", "svg.fonttype": "none", "font.size": 9})
    canvas, axes = pyplot.subplots(figsize=(width, height))
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    return canvas, axes


def _saved(canvas: Any, path: Path) -> Path:
    canvas.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(canvas)
    return path
