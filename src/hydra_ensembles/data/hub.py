"""Data sets of the Hugging Face hub, through the `datasets` library."""

from typing import Any

from .._utils import require
from ..errors import DataError, MissingExtraError
from ..preprocessing import to_rgb
from .tables import nested


class HubTable:
    """One split of a hub data set."""

    def __init__(self, name: str, config: str | None, split: str | None) -> None:
        """Fetch (or find in the cache) the data set.

        Raises:
            DataError: There is no such data set or split.
            MissingExtraError: The `datasets` library is not installed.
        """
        try:
            datasets = require("datasets", extra="hub")
        except MissingExtraError as error:
            raise MissingExtraError(
                f"{name!r} is not a file or folder here, and to read it from the Hugging Face hub {error}"
            ) from error
        self.where = f"hub data set {name!r}" + (f" ({config})" if config else "")
        try:
            loaded = datasets.load_dataset(name, config, split=split)
        except (ValueError, FileNotFoundError, ConnectionError) as error:
            raise DataError(f"{self.where}, split {split!r}, cannot be loaded: {error}") from error
        if split is None:
            splits = sorted(loaded)
            if len(splits) != 1:
                raise DataError(f"{self.where} has the splits {splits}; choose one with split=...")
            split, loaded = splits[0], loaded[splits[0]]
        self.where += f", split {split!r}"
        self._data = loaded
        self.column_names: list[str] = list(loaded.column_names)

    def __len__(self) -> int:
        return len(self._data)

    def column(self, name: str) -> list[Any]:
        """Read a whole column as Python values."""
        top, _, inner = name.partition(".")
        return [nested(value, inner) for value in self._data[top]]

    def cell(self, name: str, row: int) -> Any:
        """Read one cell as a Python value."""
        top, _, inner = name.partition(".")
        return nested(self._data[row][top], inner)

    def image(self, name: str, row: int) -> Any:
        """Read one image, which `datasets` has decoded."""
        image = self.cell(name, row)
        if not hasattr(image, "convert"):
            raise DataError(
                f"row {row} of {self.where} holds a {type(image).__name__} in column {name!r}, not an image; "
                "name the image column with columns=Columns(image=...)"
            )
        return to_rgb(image)

    def class_names(self, name: str) -> tuple[str, ...] | None:
        """Class names from the features of the data set."""
        names = getattr(self._data.features.get(name), "names", None)
        return tuple(names) if names else None
