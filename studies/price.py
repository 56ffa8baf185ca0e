"""The table of `results/price.json`: what an ensemble brings for its price, four tasks, one setting for all.

The run behind it chose the setting of *Hydra* that the studies of classifiers have (`recipes/classifiers.yaml`). It was
made by the code of its time (`python -m studies price`, commit a138193); its rows are among those of these studies.
"""

from collections.abc import Mapping
from typing import Any

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
