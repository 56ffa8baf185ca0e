"""The table of the embedded demo, from `results/demo.json`, for the README."""

import json
from pathlib import Path
from typing import Any

from hydra_ensembles.demo.run import COLUMNS
from hydra_ensembles.report.compare import Column


def demo_table(path: Path) -> str:
    """All methods of one run of the demo; the best number of each column is bold."""
    data = json.loads(path.read_text())
    costs = {cost["name"]: cost for cost in data["measured"]["costs"]}
    values = {
        name: [_value(column, found, costs[name]) for column in COLUMNS] for name, found in data["methods"].items()
    }
    written = {
        name: ["–" if value is None else column.write(value) for column, value in zip(COLUMNS, row, strict=True)]
        for name, row in values.items()
    }
    best = [_best(column, [row[index] for row in values.values()]) for index, column in enumerate(COLUMNS)]
    lines = [
        "| method | " + " | ".join(column.long_heading for column in COLUMNS) + " |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    for name, texts in written.items():
        cells = [f"**{text}**" if text == top else text for text, top in zip(texts, best, strict=True)]
        lines.append(f"| {name.replace('*', chr(92) + '*')} | " + " | ".join(cells) + " |")
    settings, samples = data["settings"], data["samples"]
    return "\n".join(
        [
            *lines,
            "",
            f"{samples['test']} test images of seven EuroSAT classes; near-OOD: {samples['AnnualCrop']} AnnualCrop and "
            f"{samples['River']} River, two classes the model does not know; far-OOD: {samples['FashionMNIST']} "
            f"Fashion-MNIST. Circuits: {settings['method']}, {samples['circuit_id']} ID and "
            f"{samples['circuit_ood']} OOD validation images, {settings['prune']} of 36 heads pruned per member, none "
            f"in the first {settings['shared_layers']} of 6 layers, which the members share; no fine-tuning. "
            "OOD score: maximum softmax probability (*by MI*: mutual information). \\* Stored logits of "
            "three models trained from different seeds; its time is that of a stack of three models. Time: a batch of "
            f"{settings['latency_batch']} on {data['hardware']}, against Single. From `results/{path.name}`.",
        ]
    )


def _value(column: Column, found: dict[str, Any], cost: dict[str, Any]) -> float | None:
    """The number of a column; None for one that a method does not have."""
    for place in (found["numbers"], cost, found):
        if column.key in place:
            return float(place[column.key])
    return None


def _best(column: Column, found: list[float | None]) -> str | None:
    """How the best number is written; None where all are written alike."""
    values = [value for value in found if value is not None]
    if len({column.write(value) for value in values}) < 2:
        return None
    return column.write(max(values) if column.better == "higher" else min(values))
