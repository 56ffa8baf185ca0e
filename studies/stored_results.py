"""What the results of all studies have in common: facts as JSON and member logits, read, written, brought together."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from hydra_ensembles._utils import write_atomically
from hydra_ensembles.errors import DataError

from .compact_logits import CompactSet
from .costs import COSTS
from .evaluating import FACTS, LOGITS
from .logit_files import load_sets, save_sets


@dataclass(frozen=True, eq=False)
class StoredResults:
    """What the tables of a study are made of.

    Attributes:
        facts: Plain data.
        sets: Stored logits by name; the seed comes first.
    """

    FORMAT: ClassVar[str]

    facts: Mapping[str, Any]
    sets: Mapping[str, CompactSet]

    @classmethod
    def load(cls, name: str, folder: Path) -> Self:
        """Read `NAME.json` and `NAME.npz`.

        Raises:
            DataError: One is missing, damaged, or in another format.
        """
        path = folder / f"{name}.json"
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as results of a study: {error}") from error
        if facts.get("format") != cls.FORMAT:
            raise DataError(f"{path} has format {facts.get('format')!r}; this version reads {cls.FORMAT!r}")
        return cls(facts, load_sets(folder / f"{name}.npz"))

    def save(self, tables: Mapping[str, Any], folder: Path) -> None:
        """Write `NAME.npz`, then `NAME.json` with the tables beside the facts."""
        save_sets(folder / f"{self.name}.npz", self.sets, small=True)
        text = json.dumps({**self.facts, **tables}, indent=1, allow_nan=False)
        write_atomically(folder / f"{self.name}.json", (text + "\n").encode())

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


def finished_seeds(study: Path, seeds: Sequence[int]) -> tuple[dict[int, Any], dict[str, CompactSet]]:
    """Facts of every seed in the folder of a study, and the logits of all of them.

    Raises:
        DataError: A seed is not finished.
    """
    facts: dict[int, Any] = {}
    sets: dict[str, CompactSet] = {}
    for seed in seeds:
        folder = study / f"seed-{seed}"
        try:
            facts[seed] = json.loads((folder / f"{FACTS}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"seed {seed} of {study.name} is not finished ({error}); run its stage `evaluate`"
            ) from error
        sets |= {f"{seed}.{key}": one for key, one in load_sets(folder / LOGITS).items()}
    return facts, sets


def measured_costs(study: Path) -> Any:
    """What the stage `cost` wrote into the folder of a study; None where it did not run."""
    costs = study / COSTS
    return json.loads(costs.read_text(encoding="utf-8")) if costs.exists() else None
