"""Records that are written down before any test set is opened, each with its digest: nobody changes them unnoticed."""

import json
from pathlib import Path
from typing import ClassVar, Self

from hydra_ensembles._utils import write_atomically
from hydra_ensembles.errors import DataError
from hydra_ensembles.schema import from_plain, to_plain

from .recipe import digest_of


class Sealed:
    """What a frozen dataclass of choices needs to be written, read, and shown to whoever opens test sets."""

    KEY: ClassVar[str]
    """What its content is called in the file."""
    STAGE: ClassVar[str]
    """The stage that writes it."""

    @property
    def digest(self) -> str:
        """A short name for all of it; stands in the results."""
        return digest_of(to_plain(self))

    def save(self, path: Path) -> None:
        """Write JSON with the digest beside the content."""
        plain = {"digest": self.digest, self.KEY: to_plain(self)}
        write_atomically(path, (json.dumps(plain, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            DataError: There is none, or it was changed since.
        """
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read ({error}); run the stage `{cls.STAGE}` first: test sets are opened only after "
                "everything is fixed"
            ) from error
        found = from_plain(cls, plain.get(cls.KEY), str(path))
        if found.digest != plain.get("digest"):
            raise DataError(f"{path} was changed after it was written; delete it and run the stage `{cls.STAGE}` again")
        return found
