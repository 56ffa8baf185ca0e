"""What `calibrate` gives to those who have held-out data alone, by how many, and whether its promise holds.

A half of the held-out samples fits the distance, the other half sets its threshold. Beside it the usual way: training
data fit the distance, and all held-out samples set both thresholds. The promise: each lets a share of inputs like
these pass.
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
FITTED_TO = {"half of them": ("s--", THEIRS), "training data": ("o-", OURS)}  # the distance, and how it is drawn
SHARES = {
    "sure": "sure enough",
    "familiar": "familiar enough",
    "accepted": "accepted",
    "accuracy": "Acc of accepted ↑",
    "near": "near OOD refused ↑",
    "far": "far OOD refused ↑",
    "auroc": "AUROC by distance ↑",
}
"""Of the test set; below, the mean over the OOD sets of a group, or over all."""


def run(seed: Seed) -> dict[str, Any]:
    """Numbers of Single and of Hydra by `MODEL|how many held-out samples|what the distance is fitted to`."""
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
    """What a calibrated model does with the reported sets; None of a distance that had too few samples."""
    task = seed.task
    inside = task.inside("report")
    said = answered(task, model, inside)
    passed = said.passed()
    accepted = _accepted(said)
    found: dict[str, float | None] = {
        "sure": _share(passed["unsure"]),
        "familiar": _share(passed["unfamiliar"]),
        "accepted": _share(accepted),
        "accuracy": _share((said.label.cpu() == inside.labels)[accepted.cpu()]),
    }
    distances = []
    for group, sets in task.outside("report").items():
        drawn = (Drawn(samples, asked(task, "samples")) for samples in sets.values())
        outside = [answered(task, model, samples) for samples in drawn]
        found[group] = mean(1 - float(_accepted(one).double().mean()) for one in outside)
        if said.unfamiliarity is not None:
            distances += [auroc(said.score(SCORE), one.score(SCORE)) for one in outside]
    return {**found, "auroc": mean(distances) if distances else None}


def _accepted(said: he.Prediction) -> Tensor:
    assert said.accept is not None  # it is calibrated
    return said.accept


def _share(which: Tensor | None) -> float | None:
    return None if which is None else float(which.double().mean())


def table(result: Result) -> str:
    """One row a model, a number of samples and a distance."""
    lines = [
        [*name.split("|"), *(cell(by_seed(result, "rows", name, column), column, _percent) for column in SHARES)]
        for name in by_seed(result, "rows")[0]
    ]
    promised, familiar = (by_seed(result, key)[0] for key in ("share", "familiar"))
    note = (
        f"In %, of the test set; of OOD sets the mean over a group, or over all. Promised: at least {100 * promised:g} "
        f"sure enough and as many familiar enough. Training data: {familiar} samples. {about(result)}"
    )
    return markdown(["Model", "held-out samples", "distance fitted to", *SHARES.values()], lines, note, align="lrl")


def _percent(value: float, _: str) -> str:
    return fixed(100 * value, 1)


def figure(result: Result) -> Any:
    """What is accepted of the test set and refused of OOD sets, by how many held-out samples there are."""
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
        row[0].set_ylabel(model)
    for field, column in zip(axes[0], columns, strict=True):
        field.set_title(f"{SHARES[column].removesuffix(' ↑')} %", fontsize=9)
    for field in axes[-1]:
        field.set_xlabel("held-out samples")
    legend(drawing, axes[0][0])
    return drawing


ANALYSIS = Analysis("What held-out data alone give", run, table, figure)
