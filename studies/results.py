"""The results of a study: seeds brought together, tables made, and made again from what is stored."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hydra_ensembles.errors import DataError
from hydra_ensembles.model.metadata import Calibration
from hydra_ensembles.prediction import ScoreName
from hydra_ensembles.schema import to_plain

from .choosing import decision_path
from .decision import Decision
from .methods import CALIBRATED
from .recipe import StudyRecipe
from .stored_results import StoredResults, finished_seeds, measured_costs


@dataclass(frozen=True, eq=False)
class StoredStudy(StoredResults):
    """A study of classifiers. Facts: recipe, decision, seeds, methods, temperatures, sets, costs.

    Logits are stored by `seed.set`.
    """

    FORMAT = "hydra_ensembles.study 1"

    def groups(self, *wanted: str) -> list[str]:
        """Names of the sets in some groups."""
        return [name for name, one in self.facts["sets"].items() if one["group"] in wanted]

    def logits(self, method: str, seed: int, name: str) -> Tensor:
        """Member logits `[M, B, C]` of a method on a set."""
        rows, at = {}, 0
        for unit, count in self.facts["units"].items():
            rows[unit] = range(at, at + count)
            at += count
        wanted = [row for unit in self.facts["methods"][method] for row in rows[unit]]
        return self.sets[f"{seed}.{name}"].logits(wanted)

    def labels(self, seed: int) -> Tensor:
        """Labels of the ID test set."""
        labels = self.sets[f"{seed}.{self.groups('id')[0]}"].labels
        assert labels is not None
        return torch.from_numpy(labels)

    def temperature(self, method: str, seed: int) -> float:
        """The temperature of a method, fitted on half B."""
        return float(self.facts["temperatures"][str(seed)][method])

    def calibration(self, method: str, seed: int) -> Calibration | None:
        """The calibration that belongs to a method's main numbers; None for most."""
        return Calibration((self.temperature(method, seed),)) if method in CALIBRATED else None

    def score(self, method: str) -> ScoreName:
        """The OOD score chosen on half B."""
        chosen: ScoreName = self.facts["decision"]["decision"]["scores"][method]
        return chosen


def bring_together(recipe: StudyRecipe, output: Path) -> StoredStudy:
    """The seeds of a run folder as one study.

    Raises:
        DataError: A seed of the recipe is not finished, or was evaluated by another decision.
    """
    study = output / recipe.name
    decision = Decision.load(decision_path(output, recipe))
    found, sets = finished_seeds(study, recipe.seeds)
    for seed, one in found.items():
        if one["decision"] != decision.digest:
            raise DataError(
                f"seed {seed} of {recipe.name} was evaluated by another decision; delete {study / f'seed-{seed}'} and "
                "run it again"
            )
    last = found[recipe.seeds[-1]]
    facts = {
        "format": StoredStudy.FORMAT,
        "study": recipe.name,
        "seeds": list(recipe.seeds),
        "recipe": to_plain(recipe),
        "decision": {"digest": decision.digest, "decision": to_plain(decision)},
        "temperatures": {str(seed): one["temperatures"] for seed, one in found.items()},
        **{key: last[key] for key in ("units", "methods", "sets", "samples", "device", "versions")},
        "costs": measured_costs(study),
    }
    return StoredStudy(facts, sets)
