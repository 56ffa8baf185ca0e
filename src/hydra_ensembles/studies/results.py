"""The results of a study: seeds brought together, tables made, and made again from what is stored."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import DataError
from ..files import write_atomically
from ..metadata import Calibration
from ..prediction import ScoreName
from ..schema import to_plain
from .choosing import decision_path
from .compact_logits import CompactSet
from .costs import COSTS
from .decision import Decision
from .evaluating import FACTS, LOGITS
from .logit_files import load_sets, save_sets
from .methods import CALIBRATED
from .recipe import StudyRecipe

FORMAT = "hydra_ensembles.study 1"
SAME = 1e-5  # numbers made again may differ by the rounding of another machine


class Stored(Protocol):
    """Results that can be saved."""

    @property
    def name(self) -> str:
        """Name of the study."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Plain data."""
        ...

    @property
    def sets(self) -> Mapping[str, CompactSet]:
        """Stored logits."""
        ...


@dataclass(frozen=True, eq=False)
class StoredStudy:
    """What the tables are made of.

    Attributes:
        facts: Plain data: recipe, decision, seeds, methods, temperatures, sets, costs.
        sets: Stored logits by `seed.set`.
    """

    facts: Mapping[str, Any]
    sets: Mapping[str, CompactSet]

    @classmethod
    def load(cls, name: str, folder: Path) -> "StoredStudy":
        """Read `NAME.json` and `NAME.npz`.

        Raises:
            DataError: One is missing or damaged.
        """
        return cls(*read(name, folder, FORMAT))

    @property
    def name(self) -> str:
        """Name of the study."""
        return str(self.facts["study"])

    @property
    def seeds(self) -> list[int]:
        """Seeds that are there."""
        return list(self.facts["seeds"])

    @property
    def methods(self) -> list[str]:
        """Rows, in order."""
        return list(self.facts["methods"])

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
    name = recipe.name
    decision = Decision.load(decision_path(output, recipe))
    sets: dict[str, CompactSet] = {}
    temperatures, last = {}, {}
    for seed in recipe.seeds:
        folder = output / name / f"seed-{seed}"
        try:
            last = json.loads((folder / f"{FACTS}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"seed {seed} of {name} is not finished ({error}); run its stage `evaluate`") from error
        if last["decision"] != decision.digest:
            raise DataError(
                f"seed {seed} of {name} was evaluated by another decision; delete {folder} and run it again"
            )
        temperatures[str(seed)] = last["temperatures"]
        sets |= {f"{seed}.{key}": one for key, one in load_sets(folder / LOGITS).items()}
    costs = output / name / COSTS
    facts = {
        "format": FORMAT,
        "study": name,
        "seeds": list(recipe.seeds),
        "recipe": to_plain(recipe),
        "decision": {"digest": decision.digest, "decision": to_plain(decision)},
        "temperatures": temperatures,
        **{key: last[key] for key in ("units", "methods", "sets", "samples", "device", "versions")},
        "costs": json.loads(costs.read_text(encoding="utf-8")) if costs.exists() else None,
    }
    return StoredStudy(facts, sets)


def read(name: str, folder: Path, accepted: str) -> tuple[Mapping[str, Any], Mapping[str, CompactSet]]:
    """Facts and stored logits of results in one format.

    Raises:
        DataError: A file is missing, damaged, or in another format.
    """
    path = folder / f"{name}.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as results of a study: {error}") from error
    if facts.get("format") != accepted:
        raise DataError(f"{path} has format {facts.get('format')!r}; this version reads {accepted!r}")
    return facts, load_sets(folder / f"{name}.npz")


def save(study: Stored, tables: Mapping[str, Any], folder: Path) -> None:
    """Write `NAME.npz`, then `NAME.json`."""
    save_sets(folder / f"{study.name}.npz", study.sets, small=True)
    text = json.dumps({**study.facts, **tables}, indent=1, allow_nan=False)
    write_atomically(folder / f"{study.name}.json", (text + "\n").encode())
