"""OOD AUROC against inference cost, one figure a study, and reliability of the zero-shot methods.

Drawn from the files under `results/studies`:

    python benchmarks/study_figures.py
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from study_tables import FIGURES, RELIABILITY, task_of

from hydra_ensembles.metrics.calibration import reliability_bins
from studies.methods import DEEP, HYDRA, HYDRA_TRUNK, SINGLE
from studies.recipe import STUDIES
from studies.zero_shot.methods import HYDRA_TEMPERATURE, TEMPERATURE
from studies.zero_shot.recipe import ZERO_SHOT
from studies.zero_shot.results import StoredZeroShot

RESULTS = Path(__file__).resolve().parents[1] / "results" / "studies"
MARKERS = {SINGLE: "s", DEEP: "D", HYDRA: "*", HYDRA_TRUNK: "P"}  # the four to look at; others are dots
COLOURS = {SINGLE: "black", DEEP: "tab:blue", HYDRA: "tab:red", HYDRA_TRUNK: "tab:orange"}


def draw(facts: Mapping[str, Any], path: Path, metric: str, axis: str) -> None:
    """One point a method: mean over seeds, a bar of one standard deviation."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    muted = pyplot.get_cmap("tab20b").colors
    for index, (name, cost) in enumerate(facts["costs"]["costs"].items()):
        values = [100 * value for value in facts["rows"][name][metric]]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        place = (cost["latency_ratio"], statistics.mean(values))
        mark, size = MARKERS.get(name, "o"), 9 if name in MARKERS else 4
        colour = COLOURS.get(name, muted[7 * index % len(muted)])  # neighbours in the list differ in hue
        axes.errorbar(*place, yerr=spread, fmt=mark, color=colour, markersize=size, capsize=2, label=name)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7, frameon=False)
    axes.set_xlabel("latency of a batch, over that of one model")
    axes.set_ylabel(axis)
    axes.set_title(f"{facts['study']}: {facts['costs']['device']}, {facts['costs']['dtype']}")
    axes.grid(alpha=0.3)
    _save(figure, path)


def draw_reliability(study: StoredZeroShot, path: Path) -> None:
    """Accuracy in bins of confidence, all unseen tasks that count and all seeds together."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(4.6, 4.2))
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    tasks = [name for name in study.tasks("unseen") if name not in study.facts["left_out"]]
    for method in (SINGLE, TEMPERATURE, HYDRA, HYDRA_TEMPERATURE):
        found = [study.on_task(method, seed, task) for task in tasks for seed in study.seeds]
        bins = [reliability_bins(prediction.probs, labels) for prediction, labels in found]
        count = torch.stack([one.count for one in bins])  # [sets, bins]
        total = count.sum(0)
        confidence, accuracy = (
            (torch.stack([getattr(one, name).nan_to_num() for one in bins]) * count).sum(0) / total
            for name in ("confidence", "accuracy")
        )
        there = total > 0
        axes.plot(confidence[there], accuracy[there], marker=".", label=method)
    axes.set_xlabel("confidence")
    axes.set_ylabel("accuracy")
    axes.legend(fontsize=7, frameon=False)
    axes.grid(alpha=0.3)
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "studies", "svg.fonttype": "none", "font.size": 9})
    return pyplot


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    _pyplot().close(figure)
    print(f"wrote {path}")


def main() -> None:
    """Draw what was measured."""
    for study in (*STUDIES, ZERO_SHOT):
        source = RESULTS / f"{study}.json"
        facts: dict[str, Any] = json.loads(source.read_text()) if source.exists() else {"costs": None}
        if facts["costs"] is None:
            print(f"{source} has no costs yet")
            continue
        metric, axis = "chosen.all.auroc", "OOD AUROC (%), mean over sets, score chosen on half B"
        if study == ZERO_SHOT:
            task = next(iter(facts["detections"]))
            metric, axis = f"{task}.all.auroc", f"OOD AUROC (%), {task} as ID, mean over sets"
        draw(facts, FIGURES / f"study_{task_of(study)}.svg", metric, axis)
    if (RESULTS / f"{ZERO_SHOT}.json").exists():
        draw_reliability(StoredZeroShot.load(ZERO_SHOT, RESULTS), FIGURES / RELIABILITY)


if __name__ == "__main__":
    main()
