"""What a seed has fixed before any test set is opened: heads, temperatures, and the recipe they came from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import DataError
from ...files import write_atomically
from ...schema import from_plain, to_plain
from ..recipe import digest_of


@dataclass(frozen=True)
class Fixed:
    """Everything about the methods of one seed that data decided.

    Attributes:
        recipe: Digest of the recipe.
        seed: The seed.
        heads: Heads that each member of each family loses, as text.
        temperatures: Of the methods that are calibrated.
        calibrated_on: Images that temperatures were fitted on.
    """

    recipe: str
    seed: int
    heads: Mapping[str, tuple[tuple[str, ...], ...]]
    temperatures: Mapping[str, float]
    calibrated_on: int

    @property
    def digest(self) -> str:
        """A short name for all of it; stands in the results."""
        return digest_of(to_plain(self))

    def save(self, path: Path) -> None:
        """Write JSON with the digest beside the content."""
        plain = {"digest": self.digest, "fixed": to_plain(self)}
        write_atomically(path, (json.dumps(plain, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> "Fixed":
        """Read what `save` wrote.

        Raises:
            DataError: There is none, or it was changed since.
        """
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read ({error}); run the stage `tune` first: test sets are opened only after heads "
                "and temperatures are fixed"
            ) from error
        fixed = from_plain(cls, plain.get("fixed"), str(path))
        if fixed.digest != plain.get("digest"):
            raise DataError(f"{path} was changed after it was written; delete it and run the stage `tune` again")
        return fixed
