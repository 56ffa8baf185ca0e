"""What was chosen on half B, written down before any test set is opened."""

from collections.abc import Mapping
from dataclasses import dataclass

from hydra_ensembles.fuse import Fusion
from hydra_ensembles.prediction import ScoreName

from .sealed import Sealed
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
class Decision(Sealed):
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

    KEY = "decision"
    STAGE = "choose"

    recipe: str
    seeds: tuple[int, ...]
    hydra: Chosen
    trunk: Chosen
    dropout: float
    scores: Mapping[str, ScoreName]
    candidates: tuple[Candidate, ...]
