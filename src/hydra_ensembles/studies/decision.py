"""What was chosen on half B, written down before any test set is opened."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError
from ..files import write_atomically
from ..fuse import Fusion
from ..prediction import ScoreName
from ..schema import from_plain, to_plain
from .recipe import digest_of
from .specs import MemberSet


@dataclass(frozen=True)
class Chosen:
    """Settings of one method: its members, what becomes of their MLPs."""

    members: MemberSet
    mlp: Fusion

    @property
    def name(self) -> str:
        """What tables call the setting."""
        return f"{self.members.key}, MLPs {'fused' if self.mlp == 'mean' else 'apart'}"


def rate_name(rate: float) -> str:
    """What tables call MC Dropout at one rate."""
    return f"rate {rate:g}"


@dataclass(frozen=True)
class Candidate:
    """One setting and score as measured on half B, mean over the explored seeds.

    Attributes:
        method: The method it might become, or the method it is.
        model: Name of the setting.
        score: OOD score.
        accuracy: On ID half B.
        auroc: ID against OOD half B.
        value: What was compared: the weighted mean of the two.
        cost: Multiply-adds over those of the single model.
    """

    method: str
    model: str
    score: ScoreName
    accuracy: float
    auroc: float
    value: float
    cost: float | None


@dataclass(frozen=True)
class Decision:
    """Everything that was chosen, and what it was chosen from.

    Attributes:
        recipe: Digest of the recipe.
        seeds: Seeds whose half B was looked at.
        hydra: Hydra (Circ).
        trunk: Hydra (Circ) with a shared trunk.
        dropout: The rate of MC Dropout.
        scores: The OOD score of every method.
        candidates: All that was compared.
    """

    recipe: str
    seeds: tuple[int, ...]
    hydra: Chosen
    trunk: Chosen
    dropout: float
    scores: Mapping[str, ScoreName]
    candidates: tuple[Candidate, ...]

    @property
    def digest(self) -> str:
        """A short name for the decision; stands in the results."""
        return digest_of(to_plain(self))

    def save(self, path: Path) -> None:
        """Write JSON with the digest beside the content."""
        plain = {"digest": self.digest, "decision": to_plain(self)}
        write_atomically(path, (json.dumps(plain, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> "Decision":
        """Read what `save` wrote.

        Raises:
            DataError: There is none, or it was changed since.
        """
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read as a decision ({error}); run the stage `choose` first: test sets are opened "
                "only after everything is chosen"
            ) from error
        decision = from_plain(cls, plain.get("decision"), str(path))
        if decision.digest != plain.get("digest"):
            raise DataError(f"{path} was changed after it was written; delete it and run the stage `choose` again")
        return decision
