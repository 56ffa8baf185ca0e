"""The table of `results/price.json`: what an ensemble brings for its price, four tasks, one setting for all.

The run behind it chose the setting of *Hydra* that the studies of classifiers have (`recipes/classifiers.yaml`). It was
made by the code of its time (`python -m studies price`, commit a138193); its rows are among those of these studies.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .results import pyplot, save_figure

SINGLE, LONGER, DEEP, SOUP, HYDRA = "Single", "Single, trained twice as long", "Deep Ensemble", "Soup", "Hydra"
NUMBERS = {  # what is reported, by the names of an evaluation
    "accuracy": "accuracy",
    "nll": "nll",
    "ece": "ece",
    "aurc": "aurc",
    "auroc_msp": "all.auroc",
    "auroc_mahalanobis": "mahalanobis:all.auroc",
}


def price_table(found: Mapping[str, Any]) -> str:
    """Every task and method: mean over seeds; of Hydra also the difference to Single with its interval."""
    tables, costs = found["tables"], found["costs"]
    scale = {key: 1.0 if key == "nll" else 100.0 for key in NUMBERS}
    titles = ["accuracy", "NLL", "ECE", "AURC", "AUROC, MSP", "AUROC, Mahalanobis"]
    lines = ["| task | method | cost | " + " | ".join(titles) + " |", "|---|---|---:|" + "---:|" * len(titles)]
    for task, rows in tables.items():
        for name, row in rows.items():
            ratio = costs["tasks"][task].get(name, costs["tasks"][task][SINGLE])["ratio"]
            cells = [f"{scale[key] * row[key]['mean']:.{3 if key == 'nll' else 2}f}" for key in NUMBERS]
            lines.append(f"| {task} | {name} | {ratio:.2f}x | " + " | ".join(cells) + " |")
        row = rows[HYDRA]
        cells = [
            f"{scale[key] * row[key]['difference']:+.{digits}f} ± {scale[key] * row[key]['half_width']:.{digits}f}"
            for key in NUMBERS
            for digits in [3 if key == "nll" else 2]
        ]
        lines.append(f"| {task} | *Hydra less Single* | | " + " | ".join(cells) + " |")
    settings = found["recipe"]
    count, seeds = settings["members"], ", ".join(f"{seeds_of(settings, task)} on {task}" for task in tables)
    about = (
        f"Means over seeds ({seeds}); differences are to Single of the same seed, ± the half width of Student's 95 % "
        f"interval over the seeds. Ensembles have {count} members. Per cent but for NLL; calibrated on held-out data. "
        "AUROC: the mean over the OOD sets of a task. Cost: a batch of "
        f"{costs['batch']} on an {costs['device']}, bfloat16, against Single compiled. From `results/price.json`."
    )
    return "\n".join([*lines, "", about])


def seeds_of(settings: Mapping[str, Any], task: str) -> int:
    """How many seeds a task has in the report."""
    return len(settings["tasks"][task].get("seeds", settings["seeds"]))


def draw(found: Mapping[str, Any], path: Path) -> None:
    """What each method gains over Single in OOD AUROC by the largest probability, against its price; by task."""
    canvas, axes = pyplot().subplots(figsize=(6.4, 3.6))
    colours = dict(zip(found["tables"], ("tab:blue", "tab:orange", "tab:green", "tab:red"), strict=True))
    for task, rows in found["tables"].items():
        costs = found["costs"]["tasks"][task]
        for name, mark in {LONGER: "v", SOUP: "s", HYDRA: "*", DEEP: "D"}.items():
            gain, price = rows[name]["auroc_msp"], costs.get(name, costs[SINGLE])["ratio"]
            place, spread = (price, 100 * gain["difference"]), 100 * gain["half_width"]
            size = 10 if name == HYDRA else 5
            axes.errorbar(*place, yerr=spread, fmt=mark, color=colours[task], markersize=size, capsize=2, alpha=0.85)
    axes.axhline(0, color="0.5", linewidth=1)
    for name, mark in {LONGER: "v", SOUP: "s", HYDRA: "*", DEEP: "D"}.items():
        axes.plot([], [], mark, color="0.4", label=name)
    for task, colour in colours.items():
        axes.plot([], [], "o", color=colour, label=task)
    axes.set(xlabel="price of a batch, over that of Single", ylabel="gain in OOD AUROC (points)")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    save_figure(canvas, path)
