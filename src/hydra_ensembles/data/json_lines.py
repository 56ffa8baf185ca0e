"""Texts in JSON Lines files: one object a line."""

import json
from pathlib import Path
from typing import Any

from ..errors import DataError
from .tables import nested

JSON_LINES = (".jsonl", ".ndjson")


class JsonLinesTable:
    """A file with one JSON object a line, in UTF-8; its columns are the fields of all lines together."""

    def __init__(self, file: Path) -> None:
        """Read the file.

        Raises:
            DataError: A line is not a JSON object.
        """
        self.where = str(file)
        self._rows: list[dict[str, Any]] = []
        try:
            # not splitlines(): it also cuts at U+2028 and its like, which strings may hold
            lines = file.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file} cannot be read as JSON lines in UTF-8: {error}") from error
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"line {number} of {file} is not JSON ({error}); each line must be an object"
                ) from error
            if not isinstance(row, dict):
                raise DataError(f"line {number} of {file} is a {type(row).__name__}; each line must be an object")
            self._rows.append(row)
        self.column_names: list[str] = list(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> list[Any]:
        """Read a whole column as Python values; None where a line lacks it."""
        return [self.cell(name, row) for row in range(len(self))]

    def cell(self, name: str, row: int) -> Any:
        """Read one cell as a Python value."""
        top, _, inner = name.partition(".")
        return nested(self._rows[row].get(top), inner)

    def image(self, name: str, row: int) -> Any:
        """Refuse: these files hold no images."""
        raise DataError(f"{self.where} holds no images in column {name!r} (row {row}); use Parquet or a folder")

    def class_names(self, name: str) -> tuple[str, ...] | None:
        """Give nothing: these files declare no class names."""
        return None


def json_lines_splits(folder: Path) -> dict[str, list[Path]]:
    """Find the splits in a folder: `<split>.jsonl`."""
    return {file.stem: [file] for file in sorted(folder.iterdir()) if file.suffix.lower() in JSON_LINES}
