"""What `he.calibrate` achieves with held-out data alone, by number of samples, and whether its promise holds.

With held-out data alone, half of the samples fit the distance and the other half set its threshold. This is compared
with the usual way: training data fit the distance, and all held-out samples set both thresholds. The promise is that
each threshold lets at least a given share of inputs like the held-out samples pass.
"""

from statistics import mean
from typing import Any, Literal

from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles.metrics import auroc

from ..evidence import answered
from ..results import fixed, markdown
from ..rows import HYDRA, ROWS, SINGLE
from ..seed import Seed
from ..task import Drawn
from .analysis import Analysis, Result, about, asked, by_seed, cell
from .drawing import OURS, THEIRS, fields, legend

SCORE: Literal["mahalanobis"] = "mahalanobis"
FITTED_TO = {"half of them": ("s--", THEIRS), "training data": ("o-", OURS)}  # fits the distance: how it is drawn
SHARES = {
    "sure": "sure enough",
    "familiar": "familiar enough",
    "accepted": "accepted",
    "accuracy": "Acc of accepted ↑",
    "near": "near OOD declined ↑",
    "far": "far OOD declined ↑",
    "auroc": "AUROC by distance ↑",
}
"""Columns of the table: shares of the test set, then means over the OOD sets of a group, or over all of them."""


def run(seed: Seed) -> dict[str, Any]:
    """Measure Single and Hydra; keys are `MODEL|number of held-out samples|what the distance is fitted to`."""
    task = seed.task
    chosen = asked(task, "abstaining")
    most = len(task.calibrating)
    rows: dict[str, Any] = {}
    for name in (SINGLE, HYDRA):
        model = ROWS[name].model(seed, name)
        starts = (model, he.fit_familiarity(model, task.familiar(), SCORE))
        for count in (*(count for count in chosen["counts"] if count < most), most):
            held_out = task.batches(Drawn(task.calibrating, count))
            for kind, start in zip(FITTED_TO, starts, strict=True):
                rows[f"{name}|{count}|{kind}"] = shares(seed, he.calibrate(start, held_out, share=chosen["share"]))
    return {"share": chosen["share"], "familiar": min(task.settings["familiar"], len(task.train)), "rows": rows}


def shares(seed: Seed, model: he.Ensemble) -> dict[str, float | None]:
    """Evaluate a calibrated model on the reported sets; None where too few samples were there to fit a distance."""
    task = seed.task
    inside = task.inside("report")
    prediction = answered(task, model, inside)
    passed = prediction.passed()
    accepted = _accepted(prediction)
    found: dict[str, float | None] = {
        "sure": _share(passed["unsure"]),
        "familiar": _share(passed["unfamiliar"]),
        "accepted": _share(accepted),
        "accuracy": _share((prediction.label.cpu() == inside.labels)[accepted.cpu()]),
    }
    distances = []
    for group, sets in task.outside("report").items():
        drawn = (Drawn(samples, asked(task, "samples")) for samples in sets.values())
        outside = [answered(task, model, samples) for samples in drawn]
        found[group] = mean(1 - float(_accepted(one).double().mean()) for one in outside)
        if prediction.unfamiliarity is not None:
            distances += [auroc(prediction.score(SCORE), one.score(SCORE)) for one in outside]
    return {**found, "auroc": mean(distances) if distances else None}


def _accepted(prediction: he.Prediction) -> Tensor:
    assert prediction.accept is not None  # the model is calibrated
    return prediction.accept


def _share(which: Tensor | None) -> float | None:
    return None if which is None else float(which.double().mean())


def table(result: Result) -> str:
    """Make a table with one row for each model, number of samples and way to fit the distance."""
    lines = [
        [*name.split("|"), *(cell(by_seed(result, "rows", name, column), column, _percent) for column in SHARES)]
        for name in by_seed(result, "rows")[0]
    ]
    promised, familiar = (by_seed(result, key)[0] for key in ("share", "familiar"))
    note = (
        f"In % of the test set; for OOD sets the mean over a group, or over all. Promised: at least {100 * promised:g} "
        f"sure enough and as many familiar enough. Training data: {familiar} samples. {about(result)}"
    )
    return markdown(["Model", "held-out samples", "distance fitted to", *SHARES.values()], lines, note, align="lrl")


def _percent(value: float, _: str) -> str:
    return fixed(100 * value, 1)


def figure(result: Result) -> Any:
    """Draw what is accepted of the test set and declined of OOD sets against the number of held-out samples."""
    names = [name.split("|") for name in by_seed(result, "rows")[0]]
    columns = ("accepted", "near", "far", "auroc")
    models = list(dict.fromkeys(model for model, _, _ in names))
    drawing, axes = fields(len(models), len(columns), 1.9, sharex=True, sharey="col")
    for row, model in zip(axes, models, strict=True):
        for field, column in zip(row, columns, strict=True):
            for kind, (style, colour) in FITTED_TO.items():
                counts = [int(count) for one, count, of in names if (one, of) == (model, kind)]
                values = [by_seed(result, "rows", f"{model}|{count}|{kind}", column) for count in counts]
                points = [
                    (count, 100 * mean(there))
                    for count, seeds in zip(counts, values, strict=True)
                    if (there := [value for value in seeds if value is not None])
                ]
                field.plot(*zip(*points, strict=True), style, color=colour, markersize=4, label=f"distance: {kind}")
            field.set_xscale("log")
            field.set_xticks(counts, list(map(str, counts)), fontsize=7)
            field.minorticks_off()
        row[0].set_ylabel(model)
    for field, column in zip(axes[0], columns, strict=True):
        field.set_title(f"{SHARES[column].removesuffix(' ↑')} %", fontsize=9)
    for field in axes[-1]:
        field.set_xlabel("held-out samples")
    legend(drawing, axes[0][0])
    return drawing


ANALYSIS = Analysis("Abstaining with held-out data alone", run, table, figure)
