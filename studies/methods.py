"""The method tables: every row of the results, and the units it is made of. Further baselines are added here.

A unit is something that is run over the data by itself. Methods are put together from units, so that a member that
serves several methods is trained and run once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hydra_ensembles.errors import ConfigError
from hydra_ensembles.fuse import Fusion
from hydra_ensembles.prediction import ScoreName

from .recipe import ClassifierRecipe, MemberSet

SINGLE = "Single"
TEMPERATURE = "Temperature Scaling"
MC_DROPOUT = "MC Dropout"
DEEP = "Deep Ensembles"
DEEP_CLASSIFIERS = "Deep Ensembles (classifiers)"
TAYLOR = "Taylor"
CIRC_AVG = "CircAvg"
HYDRA = "Hydra (Circ)"
HYDRA_TRUNK = "Hydra (Circ), shared trunk"
HYDRA_PAPER = "Hydra (Circ), paper's setting"
HYDRA_APART = "Hydra (Circ), paper's setting, MLPs apart"
HYDRA_TAYLOR = "Hydra (Taylor)"
HYDRA_RANDOM = "Hydra (random heads)"
HYDRA_TEMPERATURE = "Hydra (Circ) + Temperature Scaling"
CALIBRATED = (TEMPERATURE, HYDRA_TEMPERATURE)  # their main numbers are those after calibration; others' stand beside
AVERAGED, CLASSIFIERS = "averaged", "classifiers"  # units: backbones with averaged MLPs; classifiers on one backbone

Units = tuple[str, ...]


def all_units(methods: Mapping[str, Units]) -> list[str]:
    """Every unit once, in the order of the methods."""
    return list(dict.fromkeys(unit for units in methods.values() for unit in units))


# --- classifiers -----------------------------------------------------------------------------------------------------


def backbone(index: int) -> str:
    """The unit of a fine-tuned backbone."""
    return f"backbone/{index}"


def dropout(rate: float) -> str:
    """The unit of MC Dropout at one rate."""
    return f"dropout/{rate:g}"


def rate_name(rate: float) -> str:
    """What tables call MC Dropout at one rate."""
    return f"rate {rate:g}"


@dataclass(frozen=True)
class Chosen:
    """Settings of one method: its members, what becomes of their MLPs."""

    members: MemberSet
    mlp: Fusion

    @property
    def name(self) -> str:
        """What tables call the setting."""
        return f"{self.members.key}, MLPs {'fused' if self.mlp == 'mean' else 'apart'}"


@dataclass(frozen=True)
class Candidate:
    """One setting and score as measured on half B, mean over the explored seeds."""

    method: str  # that it might become, or is
    model: str  # name of the setting
    score: ScoreName
    accuracy: float  # on ID half B
    auroc: float  # ID against OOD half B
    value: float  # what was compared: the mean of the two
    cost: float | None  # multiply-adds over those of the single model


@dataclass(frozen=True)
class Decision:
    """What was chosen on half B, and what it was chosen from; sealed before any test set of a classifier is opened."""

    recipe: str  # digest
    seeds: tuple[int, ...]  # whose half B was looked at
    hydra: Chosen
    trunk: Chosen
    dropout: float  # rate
    scores: Mapping[str, ScoreName]  # of every method, for OOD
    candidates: tuple[Candidate, ...]  # all that was compared


def fixed_methods(recipe: ClassifierRecipe) -> dict[str, Units]:
    """The methods of a study of classifiers that need no decision, with their units."""
    count, paper = recipe.members, recipe.paper
    found: dict[str, Units] = {
        SINGLE: (backbone(0),),
        TEMPERATURE: (backbone(0),),
        DEEP: tuple(backbone(index) for index in range(count)),
        DEEP_CLASSIFIERS: (CLASSIFIERS,) if "classifier" in recipe.trainings else (),
        TAYLOR: (recipe.taylor.member(0),),
        CIRC_AVG: (paper.member(0),),
        "CircAcc": (paper.member(1),),
        "CircOOD": (paper.member(2),),
        HYDRA_RANDOM: recipe.random.units("mean", count),
        HYDRA_TAYLOR: recipe.taylor.units("mean", count),
        HYDRA_PAPER: paper.units("mean", count),
        HYDRA_APART: paper.units("separate", count),
    }
    taken = sorted({*found, HYDRA, HYDRA_TRUNK, MC_DROPOUT} & {one.name for one in recipe.controls})
    if taken:
        raise ConfigError(f"controls are called {taken}, as methods of every study are; give them other names")
    for one in recipe.controls:
        found[one.name] = (AVERAGED,) if one.members is None else one.members.units(one.mlp, count)
    return {name: units for name, units in found.items() if units}


def all_methods(recipe: ClassifierRecipe, decision: Decision) -> dict[str, Units]:
    """Every method of a study of classifiers with its units, in the order of the tables."""
    found = fixed_methods(recipe)
    before = list(found)[: list(found).index(TAYLOR)]  # MC Dropout stands before the pruned models
    return {
        **{name: found.pop(name) for name in before},
        MC_DROPOUT: (dropout(decision.dropout),),
        **found,
        HYDRA: decision.hydra.members.units(decision.hydra.mlp, recipe.members),
        HYDRA_TRUNK: decision.trunk.members.units(decision.trunk.mlp, recipe.members),
    }
