"""What a seed has fixed before any test set is opened: heads, temperatures, and the recipe they came from."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..sealed import Sealed


@dataclass(frozen=True)
class Fixed(Sealed):
    """Everything about the methods of one seed that data decided.

    Attributes:
        recipe: Digest of the recipe.
        seed: The seed.
        heads: Heads that each member of each family loses, as text.
        temperatures: Of the methods that are calibrated.
        calibrated_on: Images that temperatures were fitted on.
    """

    KEY = "fixed"
    STAGE = "tune"

    recipe: str
    seed: int
    heads: Mapping[str, tuple[tuple[str, ...], ...]]
    temperatures: Mapping[str, float]
    calibrated_on: int
