"""The per-sample outputs of a study's models, stored as columns: everything that is reported is made from them.

A file `seed-N.parquet` has one number per sample, as `row|set|column`: the OOD scores `msp` (one minus the largest mean
probability), `entropy` and, for models with features, `mahalanobis`; for the test set `correct`, `nll` and `brier`
before and (`calibrated.…`) after calibration, and `calibrated.doubt`, one minus confidence (before calibration that is
`msp`). Numbers are float16, whose rounding is relative: doubt instead of confidence keeps nearly certain answers
distinct. Of `mutual_information` only the mean is stored, one number per set: no table ranks samples by it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles import Prediction
from hydra_ensembles.batches import move
from hydra_ensembles.calibrate import fit_calibration
from hydra_ensembles.errors import DataError
from hydra_ensembles.metrics import brier_per_sample, nll_per_sample
from hydra_ensembles.prediction import AnyScore

from .measures import CALIBRATED, DOUBT, SPREAD, Array
from .samples import Samples
from .task import Task

SCORES: tuple[AnyScore, ...] = ("msp", "entropy", SPREAD)
SHIFTED = ("correct", "brier", "nll")  # columns for corrupted images
LARGEST = 60000.0  # largest magnitude that is stored


@torch.no_grad()
def answered(task: Task, model: Any, samples: Samples) -> Prediction:
    """Predict on samples, as the model is."""
    batches = (move(inputs, task.device, torch.float32) for inputs, _ in task.batches(samples))
    return Prediction.concat([model.predict(inputs) for inputs in batches])


class Judged:
    """A row's model, with familiarity (if wanted) fitted to training data and its temperature fitted to half A."""

    def __init__(self, task: Task, model: Any, familiar: bool = True) -> None:
        self.task, self.model = task, model
        if isinstance(model, he.Ensemble) and familiar:
            self.model = he.fit_familiarity(model, task.familiar(), "mahalanobis")
        answers = self.answers(task.calibrating)
        self.calibration = fit_calibration(answers.member_logits, task.calibrating.labels)

    def answers(self, samples: Samples) -> Prediction:
        """Predict on samples, without a temperature."""
        return answered(self.task, self.model, samples)

    def columns(self, samples: Samples, labelled: bool) -> dict[str, Tensor]:
        """The columns of a set, `[N]` each."""
        return self.columns_of(self.answers(samples), samples.labels if labelled else None)

    def columns_of(self, answers: Prediction, labels: Tensor | None) -> dict[str, Tensor]:
        """The columns of a prediction, `[N]` each; with labels `[N]`, also its correctness and losses."""
        if labels is None:
            return columns_of(answers)
        after = self.calibration.prediction(answers.member_logits)
        return columns_of(answers, after, labels.to(answers.member_logits.device))


def columns_of(answers: Prediction, after: Prediction | None = None, labels: Tensor | None = None) -> dict[str, Tensor]:
    """The columns of a set's prediction, `[N]` each; with labels, also those after calibration."""
    distances = () if answers.unfamiliarity is None else answers.unfamiliarity.score_names
    columns: dict[str, Tensor] = {name: answers.score(name) for name in (*SCORES, *distances)}
    if labels is not None and after is not None:
        columns |= {"correct": answers.label == labels, **judged(answers, labels)}
        columns |= {f"{CALIBRATED}{name}": column for name, column in judged(after, labels).items()}
        columns[DOUBT[CALIBRATED]] = after.probs.scatter(-1, after.label[:, None], 0.0).sum(dim=-1)
    if not all(bool(column.isfinite().all()) for column in columns.values()):
        raise DataError("a model answered with numbers that are not finite; its training diverged: lower the rate")
    return columns


def judged(answers: Prediction, labels: Tensor) -> dict[str, Tensor]:
    """NLL and Brier score of each sample."""
    return {"nll": nll_per_sample(answers.probs, labels), "brier": brier_per_sample(answers.probs, labels)}


def stored(columns: Mapping[str, Tensor]) -> dict[str, Array]:
    """Columns in the form in which they are stored."""

    def kept(name: str, column: Tensor) -> Tensor:
        if name == SPREAD:
            return column.double().mean(dim=0, keepdim=True)  # [1]
        return column if column.dtype == torch.bool else column.clamp(-LARGEST, LARGEST).half()

    return {name: kept(name, column).cpu().numpy() for name, column in columns.items()}


def under_shift(judge: Judged, path: Path) -> dict[str, Array]:
    """A model's `correct`, `brier` and `nll` on the corrupted test images of a file, before calibration.

    As `severity N|column`, the mean over corruptions for every image; as `NAME|column`, a corruption's mean over the
    images for each severity.
    """
    by_key: dict[str, list[Tensor]] = {}
    for name, severity, samples in judge.task.shifted(path):
        columns = judge.columns(samples, labelled=True)
        for column in SHIFTED:
            values = columns[column].double()
            by_key.setdefault(f"severity {severity}|{column}", []).append(values)
            by_key.setdefault(f"{name}|{column}", []).append(values.mean())
    stacked = {key: torch.stack(parts) for key, parts in by_key.items()}
    return stored({key: values.mean(dim=0) if values.ndim > 1 else values for key, values in stacked.items()})
