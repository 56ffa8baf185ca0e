"""Texts in CSV and TSV files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._utils import require
from ..errors import DataError

DELIMITERS = {".csv": ",", ".tsv": "\t"}


class DelimitedTable:
    """A CSV or TSV file with a header line, in UTF-8.

    CSV fields may be quoted and may then hold commas and line breaks. TSV fields are never quoted, so that a
    lone quotation mark in a sentence (as in the GLUE files) is just a character.
    """

    def __init__(self, file: Path, texts: Sequence[str] = ()) -> None:
        """Read the file.

        Args:
            file: The file.
            texts: Columns to take letter by letter, so that `007` stays what it is; those that do not exist are
                ignored. In the others numbers are recognised.

        Raises:
            DataError: The file is not a well-formed table.
        """
        arrow = require("pyarrow", extra="data")
        csv = require("pyarrow.csv", extra="data")
        delimiter = DELIMITERS[file.suffix.lower()]
        quoted = delimiter == ","
        self.where = str(file)
        try:
            self._table = csv.read_csv(
                file,
                # One block, so that a long text cannot straddle two.
                read_options=csv.ReadOptions(block_size=max(1 << 20, file.stat().st_size + 1)),
                parse_options=csv.ParseOptions(
                    delimiter=delimiter, quote_char='"' if quoted else False, newlines_in_values=quoted
                ),
                convert_options=csv.ConvertOptions(
                    strings_can_be_null=False, column_types={name: arrow.string() for name in texts}
                ),
            )
        except (arrow.ArrowInvalid, OSError) as error:
            raise DataError(f"{file} cannot be read as a table with a header line: {error}") from error
        self.column_names: list[str] = list(self._table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def column(self, name: str) -> list[Any]:
        """Read a whole column as Python values."""
        return list(self._table.column(name).to_pylist())

    def cell(self, name: str, row: int) -> Any:
        """Read one cell as a Python value."""
        return self._table.column(name)[row].as_py()

    def image(self, name: str, row: int) -> Any:
        """Refuse: these files hold no images."""
        raise DataError(f"{self.where} holds no images in column {name!r} (row {row}); use Parquet or a folder")

    def class_names(self, name: str) -> tuple[str, ...] | None:
        """Give nothing: these files declare no class names."""
        return None


def delimited_splits(folder: Path) -> dict[str, list[Path]]:
    """Find the splits in a folder: `<split>.csv` or `<split>.tsv`."""
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in DELIMITERS)
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(file.stem, []).append(file)
    twice = {split: files for split, files in splits.items() if len(files) > 1}
    if twice:
        raise DataError(f"{folder} holds splits both as CSV and as TSV: {sorted(twice)}; give the file instead")
    return splits
