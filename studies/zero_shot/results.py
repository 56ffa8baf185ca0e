"""The results of a zero-shot study: seeds brought together, and everything that tables read off them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hydra_ensembles.errors import DataError
from hydra_ensembles.prediction import Prediction
from hydra_ensembles.schema import to_plain

from ..stored_results import StoredResults, finished_seeds, measured_costs
from .evaluating import OOD, TASK
from .recipe import ZeroShotRecipe

SAME_IN_ALL = ("units", "methods", "model", "sets", "tasks", "detections", "device", "versions", "calibrated_on")


@dataclass(frozen=True, eq=False)
class StoredZeroShot(StoredResults):
    """A zero-shot study. Facts: recipe, seeds, methods, temperatures, tasks, detections, costs.

    Logits are stored by `seed.task.NAME` and `seed.ood.TASK.NAME`.
    """

    FORMAT = "hydra_ensembles.zero_shot_study 1"

    def tasks(self, domain: str | None = None) -> list[str]:
        """Names of the tasks, of one domain."""
        return [name for name, one in self.facts["tasks"].items() if domain in (None, one["domain"])]

    @property
    def detections(self) -> list[str]:
        """Names of the tasks held against OOD sets."""
        return list(self.facts["detections"])

    def outside(self, task: str, group: str) -> list[str]:
        """Names of the OOD sets of a task: `near`, `far` or `all`."""
        found = self.facts["detections"][task]
        return [name for one in ("near", "far") if group in (one, "all") for name in found[one]]

    def on_task(self, method: str, seed: int, task: str) -> tuple[Prediction, Tensor]:
        """What a method says about the images of a task, and their labels."""
        labels = self.sets[f"{seed}.{TASK}.{task}"].labels
        assert labels is not None
        return self._predict(method, seed, f"{TASK}.{task}"), torch.from_numpy(labels)

    def on_outside(self, method: str, seed: int, task: str, name: str) -> Prediction:
        """What a method says about the images of an OOD set, as images of a task."""
        return self._predict(method, seed, f"{OOD}.{task}.{name}")

    def _predict(self, method: str, seed: int, key: str) -> Prediction:
        rows = [list(self.facts["units"]).index(unit) for unit in self.facts["methods"][method]]
        temperature = self.facts["temperatures"][str(seed)].get(method)
        return Prediction.from_logits(self.sets[f"{seed}.{key}"].logits(rows), temperature=temperature)


def bring_together(recipe: ZeroShotRecipe, output: Path) -> StoredZeroShot:
    """The seeds of a run folder as one study.

    Raises:
        DataError: A seed of the recipe is not finished, or the seeds do not belong together.
    """
    study = output / recipe.name
    found, sets = finished_seeds(study, recipe.seeds)
    first = found[recipe.seeds[0]]
    differ = [key for key in SAME_IN_ALL if any(one[key] != first[key] for one in found.values())]
    if differ:
        raise DataError(f"the seeds of {recipe.name} differ in {differ}; run them again with the same data and machine")
    facts = {
        "format": StoredZeroShot.FORMAT,
        "study": recipe.name,
        "seeds": list(recipe.seeds),
        "recipe": to_plain(recipe),
        **{key: first[key] for key in SAME_IN_ALL},
        **{
            key: {str(seed): one[key] for seed, one in found.items()}
            for key in ("fixed", "heads", "temperatures", "circuits")
        },
        "costs": measured_costs(study),
    }
    return StoredZeroShot(facts, sets)
