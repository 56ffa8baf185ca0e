"""What a demo leaves behind as numbers, and the table it shows."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..model.cost import Cost
from ..report.compare import Column, Comparison, compare
from ..schema import to_plain
from .methods import DEEP, Row
from .settings import DemoSettings

COLUMNS = (
    Column("accuracy", "Acc %", better="higher", digits=1, scale=100),
    Column("ece", "ECE", better="lower", digits=3),
    Column("near.auroc", "AUROC", "Near-OOD", "higher", digits=1, scale=100),
    Column("near.fpr95", "FPR95", "Near-OOD", "lower", digits=1, scale=100),
    Column("mutual_information:near.auroc", "by MI", "Near-OOD", "higher", digits=1, scale=100),
    Column("far.auroc", "AUROC", "Far-OOD", "higher", digits=1, scale=100),
    Column("parameters", "Params M", better="lower", scale=1e-6),
    Column("latency_ratio", "Time", better="lower", suffix="×"),
)
"""What the demo's table shows."""


def table(rows: Mapping[str, Row], costs: tuple[Cost, ...], settings: DemoSettings) -> Comparison:
    """All methods side by side, with what a reader must know to judge them."""
    shown = compare({name: row.evaluation for name, row in rows.items()}, costs, COLUMNS)
    notes = (
        *shown.notes,
        f"Circuits: {settings.method}, on {settings.ranking_images} ID + {settings.ranking_images} OOD validation "
        f"images (PermanentCrop); {settings.prune} of 36 heads pruned per member, none in the {settings.shared_layers} "
        "layers that all members share; no fine-tuning, no temperature.",
        'AUROC and FPR95 by maximum softmax probability; "by MI": the same AUROC by mutual information between '
        "members, which a single model does not have.",
        f"{DEEP}: stored logits of three backbones trained from different seeds; its time is that of a stack of three "
        f"models. Time: a batch of {settings.latency_batch} images, against Single.",
    )
    return Comparison(shown.columns, shown.rows, notes)


def results(
    rows: Mapping[str, Row],
    costs: tuple[Cost, ...],
    settings: DemoSettings,
    samples: Mapping[str, int],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Every number of a run as plain data; what differs from run to run is under `measured` alone."""
    first = next(iter(rows.values())).evaluation
    return {
        "settings": to_plain(settings),
        "versions": dict(first.provenance.versions),
        "hardware": first.provenance.hardware,
        "samples": dict(samples),
        "score": first.score,
        "convention": first.convention,
        "methods": {
            name: {
                "members": row.model.num_members,
                "heads_kept": [[len(layer) for layer in member] for member in row.model.heads],
                "parameters": row.evaluation.model.parameters,
                "multiply_adds": row.evaluation.model.multiply_adds,
                "threshold": None if row.evaluation.selective is None else row.evaluation.selective.threshold,
                "history": list(row.model.metadata.history),
                "numbers": row.evaluation.numbers(),
                "intervals": {key: [one.low, one.high] for key, one in row.evaluation.intervals.items()},
            }
            for name, row in rows.items()
        },
        "measured": {"seconds": dict(seconds), "costs": [asdict(cost) for cost in costs]},
    }
