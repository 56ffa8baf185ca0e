"""The method table: families of pruned members, the units whose logits are stored, and every row of the results.

A family is a way to prune: one member or three. Circuits of both towers are stored member by member, so that they
can serve alone, together, and with a temperature; of the other families the mean probabilities are stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Choice = Literal["none", "taylor", "circuits", "more", "image", "random"]


@dataclass(frozen=True)
class Family:
    """Members that belong together.

    Attributes:
        name: Its name in files.
        heads: How their heads are chosen: none lost, by Taylor scores, by circuits of both towers (or with more heads
            lost), by circuits of the image tower, at random.
        members: How many there are.
        tuned: Whether their text sides are trained after pruning.
        apart: Whether logits are stored member by member.
    """

    name: str
    heads: Choice
    members: int = 3
    tuned: bool = False
    apart: bool = False

    @property
    def units(self) -> tuple[str, ...]:
        """What is stored of it."""
        return tuple(f"{self.name}/{index}" for index in range(self.members)) if self.apart else (self.name,)


SINGLE_FAMILY = Family("single", "none", members=1)
TAYLOR_FAMILY = Family("taylor", "taylor", members=1)
BOTH = Family("both", "circuits", apart=True)
MORE = Family("more", "more")
IMAGE = Family("image", "image")
RANDOM = Family("random", "random")
IMAGE_TUNED = Family("image-tuned", "image", tuned=True)
BOTH_TUNED = Family("both-tuned", "circuits", tuned=True)

FAMILIES = (SINGLE_FAMILY, TAYLOR_FAMILY, BOTH, MORE, IMAGE, RANDOM, IMAGE_TUNED, BOTH_TUNED)

SINGLE = "Single"
TEMPERATURE = "Temperature Scaling"
TAYLOR = "Taylor"
CIRC_AVG = "CircAvg"
HYDRA = "Hydra (Circ)"
HYDRA_TEMPERATURE = "Hydra (Circ) + Temperature Scaling"
HYDRA_MORE = "Hydra (Circ), six more heads pruned"
HYDRA_IMAGE = "Hydra (Circ), image tower only"
HYDRA_IMAGE_TUNED = "Hydra (Circ), image tower only, text fine-tuned"
HYDRA_TUNED = "Hydra (Circ), text fine-tuned"
HYDRA_RANDOM = "Hydra (random heads)"
LATER = ("BayesVLM", "ViLU")
"""Baselines of the paper that are not built yet; their rows stay open."""


@dataclass(frozen=True)
class Method:
    """A row: the family it runs, which of its units, whether with a temperature."""

    family: Family
    units: tuple[str, ...]
    calibrated: bool = False


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        SINGLE: Method(SINGLE_FAMILY, SINGLE_FAMILY.units),
        TEMPERATURE: Method(SINGLE_FAMILY, SINGLE_FAMILY.units, calibrated=True),
        TAYLOR: Method(TAYLOR_FAMILY, TAYLOR_FAMILY.units),
        CIRC_AVG: Method(BOTH, BOTH.units[:1]),
        HYDRA_RANDOM: Method(RANDOM, RANDOM.units),
        HYDRA: Method(BOTH, BOTH.units),
        HYDRA_TEMPERATURE: Method(BOTH, BOTH.units, calibrated=True),
        HYDRA_MORE: Method(MORE, MORE.units),
        HYDRA_IMAGE: Method(IMAGE, IMAGE.units),
        HYDRA_IMAGE_TUNED: Method(IMAGE_TUNED, IMAGE_TUNED.units),
        HYDRA_TUNED: Method(BOTH_TUNED, BOTH_TUNED.units),
    }
)
"""Every row, in the order of the tables."""


def methods_of(trains_text: bool) -> dict[str, Method]:
    """The rows of a study; without those whose text sides are trained where there is nothing to train on."""
    return {name: one for name, one in METHODS.items() if trains_text or not one.family.tuned}


def families_of(trains_text: bool) -> list[Family]:
    """The families of a study."""
    return [one for one in FAMILIES if trains_text or not one.tuned]
