"""The table of `results/price.json`: what an ensemble brings for its price, four tasks, one setting for all.

The run behind it chose the setting of *Hydra* that the studies of classifiers have (`recipes/classifiers.yaml`). It was
made by the code of its time (`python -m studies price`, commit a138193); its rows are among those of these studies.
"""

from collections.abc import Mapping
from typing import Any

from .findings import printed

NUMBERS = {  # what is reported, and what stands above it
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "aurc": "AURC",
    "auroc_msp": "AUROC, MSP",
    "auroc_mahalanobis": "AUROC, Mahalanobis",
}


def price_table(found: Mapping[str, Any]) -> str:
    """Every task and method: mean over seeds; of Hydra also the difference to Single with its interval."""
    costs, settings = found["costs"], found["recipe"]
    lines = [f"| task | method | cost | {' | '.join(NUMBERS.values())} |", "|---|---|---:|" + "---:|" * len(NUMBERS)]
    for task, rows in found["tables"].items():
        prices = costs["tasks"][task]
        for name, row in rows.items():
            means = [printed(row[key]["mean"], key) for key in NUMBERS]
            lines.append(
                f"| {task} | {name} | {prices.get(name, prices['Single'])['ratio']:.2f}x | {' | '.join(means)} |"
            )
        gains = [(rows["Hydra"][key], key) for key in NUMBERS]
        told = [f"{printed(one['difference'], key, '+')} ± {printed(one['half_width'], key)}" for one, key in gains]
        lines.append(f"| {task} | *Hydra less Single* | | {' | '.join(told)} |")
    counts = {task: len(settings["tasks"][task].get("seeds", settings["seeds"])) for task in found["tables"]}
    seeds = ", ".join(f"{count} on {task}" for task, count in counts.items())
    about = (
        f"Means over seeds ({seeds}); differences are to Single of the same seed, ± the half width of Student's 95 % "
        f"interval over the seeds. Ensembles have {settings['members']} members. Per cent but for NLL; calibrated on "
        f"held-out data. AUROC: the mean over the OOD sets of a task. Cost: a batch of {costs['batch']} on an "
        f"{costs['device']}, bfloat16, against Single compiled. From `results/price.json`."
    )
    return "\n".join([*lines, "", about])
