"""Local Parquet files in the layout of Hugging Face data sets, read with pyarrow and Pillow alone."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._utils import require
from ..errors import DataError
from .images import decode_image, read_image
from .tables import nested

_SHARD = re.compile(r"^(?P<split>.+?)-\d{5}-of-\d{5}(-[0-9a-f]+)?$")


class ParquetTable:
    """One split: a file, or its shards in order.

    The table is held in memory as it is stored (compressed images stay compressed); items are decoded when
    they are read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the files.

        Raises:
            DataError: A file is not Parquet, or the shards do not have the same columns.
        """
        parquet = require("pyarrow.parquet", extra="data")
        arrow = require("pyarrow", extra="data")
        self.where = str(files[0]) if len(files) == 1 else f"{files[0]} (and {len(files) - 1} more shards)"
        self._folder = files[0].parent
        try:
            self._table = arrow.concat_tables([parquet.read_table(file) for file in files])
        except (arrow.ArrowInvalid, OSError) as error:
            raise DataError(f"{self.where} cannot be read as Parquet: {error}") from error
        self.column_names: list[str] = list(self._table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def column(self, name: str) -> list[Any]:
        """Read a whole column as Python values."""
        top, _, inner = name.partition(".")
        return [nested(value, inner) for value in self._table.column(top).to_pylist()]

    def cell(self, name: str, row: int) -> Any:
        """Read one cell as a Python value."""
        top, _, inner = name.partition(".")
        return nested(self._table.column(top)[row].as_py(), inner)

    def image(self, name: str, row: int) -> Any:
        """Decode one cell: `{bytes, path}`, or plain bytes."""
        cell = self.cell(name, row)
        where = f"row {row} of {self.where}"
        content, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if isinstance(content, bytes):
            return decode_image(content, where)
        if path:
            return read_image(self._folder / path, f"{where} ({path})")
        raise DataError(f"{where} has no image in column {name!r}; remove the row or fill it")

    def class_names(self, name: str) -> tuple[str, ...] | None:
        """Class names from the Hugging Face metadata of the schema."""
        metadata = (self._table.schema.metadata or {}).get(b"huggingface")
        if metadata is None:
            return None
        feature: Any = json.loads(metadata).get("info", {}).get("features", {})
        for part in name.split("."):
            feature = feature.get(part, {}) if isinstance(feature, dict) else {}
        names = feature.get("names") if isinstance(feature, dict) else None
        return tuple(names) if names else None


def parquet_splits(folder: Path) -> dict[str, list[Path]]:
    """Find the splits in a folder: `<split>.parquet`, or shards, here or in `data/` below."""
    splits: dict[str, list[Path]] = {}
    for place in (folder, folder / "data"):
        for file in sorted(place.glob("*.parquet")):
            shard = _SHARD.match(file.stem)
            splits.setdefault(shard["split"] if shard else file.stem, []).append(file)
        if splits:
            break
    return splits
