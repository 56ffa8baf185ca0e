"""The method table: every row of the results, and the units it is made of. Further baselines are added here."""

from collections.abc import Callable, Mapping
from itertools import accumulate
from types import MappingProxyType

from hydra_ensembles.errors import ConfigError

from .decision import Chosen, Decision
from .recipe import StudyRecipe
from .specs import CLASSIFIERS, backbone, dropout

SINGLE = "Single"
MC_DROPOUT = "MC Dropout"
TEMPERATURE = "Temperature Scaling"
DEEP = "Deep Ensembles"
DEEP_CLASSIFIERS = "Deep Ensembles (classifiers)"
HYDRA = "Hydra (Circ)"
HYDRA_TRUNK = "Hydra (Circ), shared trunk"
HYDRA_PAPER = "Hydra (Circ), paper's setting"
HYDRA_APART = "Hydra (Circ), paper's setting, MLPs apart"
HYDRA_TAYLOR = "Hydra (Taylor)"
HYDRA_RANDOM = "Hydra (random heads)"

Units = tuple[str, ...]


def _backbones(recipe: StudyRecipe) -> Units:
    return tuple(backbone(index) for index in range(recipe.members))


FIXED: Mapping[str, Callable[[StudyRecipe], Units]] = MappingProxyType(
    {
        SINGLE: lambda recipe: (backbone(0),),
        TEMPERATURE: lambda recipe: (backbone(0),),
        DEEP: _backbones,
        DEEP_CLASSIFIERS: lambda recipe: (CLASSIFIERS,) if "classifier" in recipe.trainings else (),
        "Taylor": lambda recipe: (recipe.taylor.member(0),),
        "CircAvg": lambda recipe: (recipe.paper.member(0),),
        "CircAcc": lambda recipe: (recipe.paper.member(1),),
        "CircOOD": lambda recipe: (recipe.paper.member(2),),
        HYDRA_RANDOM: lambda recipe: (recipe.random.fused,),
        HYDRA_TAYLOR: lambda recipe: (recipe.taylor.fused,),
        HYDRA_PAPER: lambda recipe: (recipe.paper.fused,),
        HYDRA_APART: lambda recipe: recipe.paper.members(recipe.members),
    }
)
"""Methods whose settings stand in the recipe; no units where a study does not have the method."""

CHOSEN: Mapping[str, Callable[[Decision], Chosen]] = MappingProxyType(
    {HYDRA: lambda decision: decision.hydra, HYDRA_TRUNK: lambda decision: decision.trunk}
)
"""Methods whose settings were chosen on half B."""

CALIBRATED = frozenset({TEMPERATURE})
"""Methods whose main numbers are those after calibration; for all others they stand beside."""


def fixed_methods(recipe: StudyRecipe) -> dict[str, Units]:
    """The methods of a study that need no decision, with their units."""
    found = {name: units(recipe) for name, units in FIXED.items()}
    taken = sorted({*FIXED, *CHOSEN, MC_DROPOUT} & {one.name for one in recipe.controls})
    if taken:
        raise ConfigError(f"controls are called {taken}, as methods of every study are; give them other names")
    found |= {one.name: one.units(recipe.members) for one in recipe.controls}
    return {name: units for name, units in found.items() if units}


def all_methods(recipe: StudyRecipe, decision: Decision) -> dict[str, Units]:
    """Every method of a study with its units, in the order of the tables."""
    chosen = {name: pick(decision) for name, pick in CHOSEN.items()}
    found = fixed_methods(recipe)
    place = next(index for index, name in enumerate(found) if name == "Taylor")  # pruned models come after it
    items = list(found.items())
    items.insert(place, (MC_DROPOUT, (dropout(decision.dropout),)))
    items += [(name, one.members.units(one.mlp, recipe.members)) for name, one in chosen.items()]
    return dict(items)


def all_units(methods: Mapping[str, Units]) -> list[str]:
    """Every unit once, in the order of the methods."""
    return list(dict.fromkeys(unit for units in methods.values() for unit in units))


def groups_of(methods: Mapping[str, Units], counts: Mapping[str, int]) -> list[int]:
    """How many rows of logits belong together, in their order: those from the first to the last one of a method.

    Args:
        methods: Every method with its units.
        counts: The rows of every unit, in the order of the rows.
    """
    ends = dict(zip(counts, accumulate(counts.values()), strict=True))
    groups: list[tuple[int, int]] = []
    for start, end in sorted(
        (min(ends[unit] - counts[unit] for unit in units), max(ends[unit] for unit in units))
        for units in methods.values()
    ):
        if groups and start < groups[-1][1]:
            start, end = groups[-1][0], max(end, groups[-1][1])
            groups.pop()
        groups.append((start, end))
    return [end - start for start, end in groups]
