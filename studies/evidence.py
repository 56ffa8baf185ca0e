"""What a model of a study says about every sample, kept as columns: whatever is reported is made from them.

A file `seed-N.parquet` has, by `row|set|column` and one number a sample: the OOD scores `msp` (one minus the largest
mean probability), `entropy` and, where features have a distance, `mahalanobis`; of the test set `correct`, `nll` and
`brier` before and (`calibrated.…`) after calibration, and `calibrated.doubt`, one minus confidence (before calibration
that is `msp`). Numbers are in float16, whose rounding is relative: doubt instead of confidence, so that answers that
are nearly sure differ. Of `mutual_information` there is the mean alone, one number a set: no table ranks samples by it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles import Prediction
from hydra_ensembles.batches import move
from hydra_ensembles.errors import DataError
from hydra_ensembles.metrics import brier_per_sample, nll_per_sample
from hydra_ensembles.prediction import AnyScore

from .measures import SPREAD, Array
from .samples import Samples
from .task import Task

SCORES: tuple[AnyScore, ...] = ("msp", "entropy", SPREAD)
SHIFTED = ("correct", "brier", "nll")  # columns of corrupted images
LARGEST = 60000.0  # of float16


class Judged:
    """A model of a row, with its familiarity (where wanted) fitted to training data and its temperature to half A."""

    def __init__(self, task: Task, model: Any, familiar: bool = True) -> None:
        self.task, self.model = task, model
        if isinstance(model, he.Ensemble) and familiar:
            self.model = he.fit_familiarity(model, task.familiar(), "mahalanobis")
        held = self.answers(task.calibrating)
        fit = he.fit_calibration(held.member_logits, task.calibrating.labels.to(held.member_logits.device))
        self.calibration = fit.calibration

    @torch.no_grad()
    def answers(self, samples: Samples) -> Prediction:
        """What it says about samples, without a temperature."""
        parts = []
        for inputs, _ in self.task.batches(samples):
            parts.append(self.model.predict(move(inputs, self.task.device, torch.float32)))
        return Prediction.concat(parts)

    def columns(self, samples: Samples, labelled: bool) -> dict[str, Tensor]:
        """The columns of a set, `[N]` each."""
        return self.columns_of(self.answers(samples), samples.labels if labelled else None)

    def columns_of(self, said: Prediction, labels: Tensor | None) -> dict[str, Tensor]:
        """The columns of what was said about samples, `[N]` each; with labels `[N]`, whether it is right too."""
        if labels is None:
            return columns_of(said)
        after = self.calibration.prediction(said.member_logits)
        return columns_of(said, after, labels.to(said.member_logits.device))


def columns_of(said: Prediction, after: Prediction | None = None, labels: Tensor | None = None) -> dict[str, Tensor]:
    """The columns of what is said about a set, `[N]` each; with labels, also of what is said after calibration."""
    known = () if said.unfamiliarity is None else said.unfamiliarity.score_names
    found: dict[str, Tensor] = {name: said.score(name) for name in (*SCORES, *known)}
    if labels is not None and after is not None:
        found |= {"correct": said.label == labels, **judged(said, labels)}
        found |= {f"calibrated.{name}": one for name, one in judged(after, labels).items()}
        found["calibrated.doubt"] = after.probs.scatter(-1, after.label[:, None], 0.0).sum(dim=-1)
    if not all(bool(one.isfinite().all()) for one in found.values()):
        raise DataError("a model answered with numbers that are not finite; its training diverged: lower the rate")
    return found


def judged(said: Prediction, labels: Tensor) -> dict[str, Tensor]:
    """How likely the labels are to answers."""
    return {"nll": nll_per_sample(said.probs, labels), "brier": brier_per_sample(said.probs, labels)}


def stored(columns: Mapping[str, Tensor]) -> dict[str, Array]:
    """Columns as they are kept."""

    def kept(name: str, one: Tensor) -> Tensor:
        if name == SPREAD:
            return one.double().mean(dim=0, keepdim=True)  # [1]
        return one if one.dtype == torch.bool else one.clamp(-LARGEST, LARGEST).half()

    return {name: kept(name, one).cpu().numpy() for name, one in columns.items()}


def under_shift(judge: Judged, place: Path) -> dict[str, Array]:
    """What a model says about corrupted test images of a file: `correct`, `brier` and `nll`, before calibration.

    By `severity N|column`, of every image the mean over the corruptions; by `NAME|column`, of a corruption the means
    over the images, severity by severity.
    """
    each: dict[str, list[Tensor]] = {}
    for name, severity, samples in judge.task.shifted(place):
        found = judge.columns(samples, labelled=True)
        for column in SHIFTED:
            one = found[column].double()
            each.setdefault(f"severity {severity}|{column}", []).append(one)
            each.setdefault(f"{name}|{column}", []).append(one.mean())
    whole = {key: torch.stack(parts) for key, parts in each.items()}
    return stored({key: one.mean(dim=0) if one.ndim > 1 else one for key, one in whole.items()})
