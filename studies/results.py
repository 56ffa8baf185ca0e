"""The results of a study: facts as JSON, and for every sample the columns that any metric can be computed from.

`NAME.npz` holds, by `seed/task/set/column`:

* a task with few classes: member logits of all units, `logits` [S, N, C] in float16, less the largest one of their
  member and sample, which is `peak` [S, N];
* a task with many classes: for every method `[R, N]` its OOD scores and `disagreement`; on the test set `confidence`,
  `correct`, `nll` (of the label), `brier`, the same four after calibration, and the ten largest probabilities,
  `top_probabilities` and `top_classes` [R, N, 10];
* `labels` [N] of test sets.

Results of earlier versions were converted: they have no `peak`, no scores that need it
(`max_logit`, `energy`), no ten largest probabilities, and no columns of half B.
"""

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_ensembles.errors import DataError
from hydra_ensembles.files import read_object, write_atomically, write_json
from hydra_ensembles.metrics import brier_per_sample, nll_per_sample
from hydra_ensembles.prediction import Calibrates, Prediction, ScoreName

FORMAT = "hydra_ensembles.study 2"
FEW_CLASSES = 20
LARGEST = 10
LOWEST = -60000.0  # of a logit in float16
ABSOLUTE: tuple[ScoreName, ...] = ("max_logit", "energy")  # scores that a constant added to all logits changes
HELD_OUT, HELD_OUT_OOD = "half B", "half B, OOD"  # sets that chose settings and temperatures

Array = npt.NDArray[Any]
Columns = Mapping[str, Tensor]
Methods = Mapping[str, Sequence[str]]  # name -> the units whose members are its members


def columns_of(
    logits: Tensor,
    labels: Tensor | None,
    temperature: float | None,
    after: float | None,
    calibrates: Calibrates = "probs",
) -> Columns:
    """What metrics need of each sample, `[N]` each, from logits `[M, N, C]`; without labels, what needs none.

    `temperature` divides the logits; `after` is that of the columns `calibrated.…`, and divides what `calibrates` says
    (`"logits"` in studies of before).
    """
    prediction = Prediction.from_logits(logits, temperature=temperature)
    found = {name: prediction.score(name) for name in get_args(ScoreName)} | {"disagreement": prediction.disagreement}
    if labels is None:
        return found
    found |= _judged(prediction, labels)
    if after is not None:
        calibrated = _judged(Prediction.from_logits(logits, temperature=after, calibrates=calibrates), labels)
        found |= {f"calibrated.{name}": column for name, column in calibrated.items()}
    return found


def _judged(prediction: Prediction, labels: Tensor) -> dict[str, Tensor]:
    return {
        "confidence": prediction.confidence,
        "correct": prediction.label == labels,
        "nll": nll_per_sample(prediction.probs, labels),
        "brier": brier_per_sample(prediction.probs, labels),
    }


def stored_columns(
    units: Mapping[str, Tensor],
    methods: Methods,
    labels: Tensor | None,
    temperatures: Mapping[str, float],
    calibrated: Sequence[str],
) -> dict[str, Array]:
    """The columns to store of what units say, member logits `[m, N, C]` each, about a set; labels only of a test set.

    Temperatures are those of methods, fitted on held-out data; `calibrated` methods answer with theirs.
    """
    found: dict[str, Array] = {} if labels is None else {"labels": labels.numpy()}
    if next(iter(units.values())).shape[-1] <= FEW_CLASSES:
        logits = torch.cat(list(units.values())).float()  # [S, N, C]
        peak = logits.amax(-1)
        relative = (logits - peak[..., None]).clamp_min(LOWEST).half()
        return {"logits": relative.numpy(), "peak": peak.numpy(), **found}
    columns: dict[str, list[Array]] = {}
    all_known = set(methods) <= set(temperatures)  # else no method has columns after calibration
    for method, members in methods.items():
        logits, temperature = torch.cat([units[unit] for unit in members]), temperatures.get(method)
        own = temperature if method in calibrated else None
        made = dict(columns_of(logits, labels, own, temperature if all_known else None))
        if labels is not None:
            largest = Prediction.from_logits(logits, temperature=own).probs.topk(LARGEST)
            made |= {"top_probabilities": largest.values.half(), "top_classes": largest.indices.to(torch.int16)}
        for name, column in made.items():
            columns.setdefault(name, []).append(column.numpy())
    return found | {name: np.stack(parts) for name, parts in columns.items()}


@dataclass(frozen=True, eq=False)
class Results:
    """What the tables of a study are made of."""

    facts: Mapping[str, Any]  # study, kind, seeds, recipe, tasks, units, methods, calibrated, scores, temperatures, …
    arrays: Mapping[str, Array]  # columns by `seed/task/set/column`
    _known: dict[tuple[str, int, str, str], Columns] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, name: str, folder: Path) -> "Results":
        """Read `NAME.json` and `NAME.npz`."""
        path = folder / f"{name}.json"
        try:
            facts = read_object(path)
            if facts.get("format") != FORMAT:
                raise DataError(f"its format is {facts.get('format')!r}, and this version reads {FORMAT!r}")
            return cls(facts, read_arrays(path.with_suffix(".npz")))
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} cannot be read as results of a study: {error}") from error

    def save(self, folder: Path) -> None:
        """Write `NAME.npz`, then `NAME.json`."""
        write_arrays(folder / f"{self.name}.npz", self.arrays)
        write_json(folder / f"{self.name}.json", self.facts)

    @property
    def name(self) -> str:
        return str(self.facts["study"])

    @property
    def seeds(self) -> list[int]:
        return list(self.facts["seeds"])

    @property
    def methods(self) -> Methods:
        """Every method with its units, in the order of the tables."""
        found: Methods = self.facts["methods"]
        return found

    @property
    def classifies(self) -> bool:
        """Whether the study is one of classifiers, with one task; else it is one of dual encoders, with several."""
        return bool(self.facts["kind"] == "classifier")

    def tasks(self, domain: str | None = None) -> list[str]:
        """Names of the tasks, or of those of one domain."""
        return [name for name, one in self.facts["tasks"].items() if domain in (None, one["domain"])]

    def outside(self, task: str, *groups: str) -> list[str]:
        """Names of the OOD sets of a task in some groups; `all` is near and far."""
        wanted = ("near", "far") if groups == ("all",) else groups
        return [name for group in wanted for name in self.facts["tasks"][task].get(group, {})]

    def detections(self) -> list[str]:
        """Names of the tasks that are held against OOD sets."""
        return list(self.facts.get("detections", self.tasks()))

    def score(self, method: str) -> ScoreName:
        """The OOD score of a method that was chosen on held-out data; the maximum probability where none was."""
        chosen: ScoreName = self.facts.get("scores", {}).get(method, "msp")
        return chosen

    def columns(self, method: str, seed: int, task: str, name: str) -> Columns:
        """Columns of a method on a set of a task; the test set has the name of the task."""
        key = (method, seed, task, name)
        if key not in self._known:
            self._known[key] = self._read(*key)
        return self._known[key]

    def _read(self, method: str, seed: int, task: str, name: str) -> Columns:
        place = f"{seed}/{task}/{name}/"
        stored = {key.removeprefix(place): array for key, array in self.arrays.items() if key.startswith(place)}
        if "logits" not in stored:
            row = list(self.methods).index(method)
            return {key: torch.from_numpy(array[row]) for key, array in stored.items() if key != "labels"}
        of_members = [unit for unit, count in self.facts["units"].items() for _ in range(count)]
        rows = [row for unit in self.methods[method] for row, one in enumerate(of_members) if one == unit]
        logits = torch.from_numpy(stored["logits"][rows].astype(np.float32))  # [M, N, C]
        labels = torch.from_numpy(stored["labels"]) if "labels" in stored else None
        temperature = self.facts["temperatures"][str(seed)].get(method)
        own = temperature if method in self.facts["calibrated"] else None
        found = dict(columns_of(logits, labels, own, temperature, self.facts.get("calibrates", "logits")))
        for score in ABSOLUTE:
            del found[score]
            if "peak" in stored:
                whole = logits + torch.from_numpy(stored["peak"][rows])[..., None]
                found[score] = Prediction.from_logits(whole, temperature=own).score(score)
        return found


def read_arrays(path: Path) -> dict[str, Array]:
    """All arrays of an `.npz`."""
    with np.load(path, allow_pickle=False) as stored:
        return {key: stored[key] for key in stored.files}


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """An `.npz` that appears in one piece; the same arrays give the same bytes."""
    stored = io.BytesIO()
    np.savez_compressed(stored, **arrays)  # type: ignore[arg-type]
    write_atomically(path, stored.getvalue())
