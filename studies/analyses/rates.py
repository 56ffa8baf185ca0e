"""Whether Single is well trained: its learning rate and its classifier's, each lower and higher than the study's.

The study's point should beat its neighbours, or be near the best of them, on data that no table shows.
"""

from typing import Any

import hydra_ensembles as he

from ..classifiers import held_out_numbers
from ..seed import Seed
from .analysis import Analysis, Result, asked, by_seed, rows_table
from .drawing import panel, rows_figure

CHOSEN = "the study's"
POINTS = {
    CHOSEN: (0, 0),
    "slower": (-1, 0),
    "faster": (1, 0),
    "classifier slower": (0, -1),
    "classifier faster": (0, 1),
}
"""Exponents of the factor for both rates: of the model, and of the classifier."""


def model(seed: Seed, point: str) -> he.Ensemble:
    """Single at a point, all else unchanged."""
    if point == CHOSEN:
        return seed.base
    factor = float(asked(seed.task, "rates")["factor"])
    usual = seed.training(seed=seed.derived("backbone", 0))
    whole, readout = (factor**step for step in POINTS[point])
    changes = {
        "learning_rate": usual.rates[0] * whole,
        "classifier_rate": usual.classifier_rate * readout / whole,  # relative to the other rate
    }
    training = seed.task.training(seed=usual.seed, **changes)
    return seed.trained(f"single-{point.replace(' ', '-')}-{factor:g}", lambda: seed.fresh(usual.seed), training)


def run(seed: Seed) -> dict[str, Any]:
    """Metrics of Single on half B at every point."""
    by_point = {point: held_out_numbers(seed.task, model(seed, point)) for point in POINTS}
    rows = {point: {key: float(value) for key, value in numbers.items()} for point, numbers in by_point.items()}
    return {"factor": asked(seed.task, "rates")["factor"], "rows": rows}


def table(result: Result) -> str:
    """One row per point."""
    columns = {"accuracy": "Acc ↑", "calibrated.nll": "NLL ↓", "aurc": "AURC ↓", "all.auroc": "AUROC ↑"}
    factor = by_seed(result, "factor")[0]
    note = f"Single on half B and the held-out OOD sets, one rate at a time {factor:g} times lower or higher."
    return rows_table(result, columns, "", "", note=note)


def figure(result: Result) -> Any:
    """Likelihood and OOD AUROC of every point."""
    rows = list(POINTS)
    columns = {"accuracy": "accuracy %", "calibrated.nll": "NLL", "all.auroc": "AUROC %"}
    panels = [panel(result, key, title, rows) for key, title in columns.items()]
    return rows_figure(panels, {row: row for row in rows}, "half B")


ANALYSIS = Analysis("Rates of Single", run, table, figure)
