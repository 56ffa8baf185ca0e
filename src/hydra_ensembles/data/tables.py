"""Tables with an image or text column and a label column: what Parquet, CSV and the hub have in common."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from ..errors import DataError
from .dataset import UNLABELLED, AnyDataset, ImageDataset, Labels, Text, TextDataset

LabelPolicy = Literal["required", "optional"]


@dataclass(frozen=True)
class Columns:
    """Which columns of a table hold what; a dot reaches into a nested column (`translation.en`).

    A table with the `image` column holds images, any other needs the `text` column; `text_pair` is used
    where it exists.
    """

    image: str = "image"
    text: str = "text"
    text_pair: str = "text_pair"
    label: str = "label"

    def __post_init__(self) -> None:
        """Check that the names are names."""
        for role in ("image", "text", "text_pair", "label"):
            if not getattr(self, role):
                raise DataError(f"the name of the {role} column is empty; leave it out to use {role!r}")


class Table(Protocol):
    """Rows of named columns."""

    where: str
    column_names: list[str]

    def __len__(self) -> int:
        """Count the rows."""
        ...

    def column(self, name: str) -> list[Any]:
        """Read a whole column as Python values."""
        ...

    def cell(self, name: str, row: int) -> Any:
        """Read one cell as a Python value."""
        ...

    def image(self, name: str, row: int) -> Any:
        """Read one cell as an RGB image."""
        ...

    def class_names(self, name: str) -> tuple[str, ...] | None:
        """Names that the table declares for a label column, if it does."""
        ...


class _ImageColumn:
    def __init__(self, table: Table, column: str) -> None:
        self._table, self._column = table, column
        self.place = (table.where, column)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, row: int) -> Any:
        return self._table.image(self._column, row)


class _TextColumns:
    def __init__(self, table: Table, columns: tuple[str, ...]) -> None:
        self._table, self._columns = table, columns
        self.place = (table.where, *columns)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, row: int) -> Text:
        parts = []
        for column in self._columns:
            value = self._table.cell(column, row)
            if not isinstance(value, str):
                raise DataError(
                    f"row {row} of {self._table.where} has no text in column {column!r} (got {value!r}); "
                    "remove the row or fill it"
                )
            parts.append(value)
        return parts[0] if len(parts) == 1 else (parts[0], parts[1])


def dataset_from_table(
    table: Table,
    columns: Columns,
    labels: LabelPolicy,
    class_names: Sequence[str] | None,
    name: str,
) -> AnyDataset:
    """Make a data set of a table.

    Raises:
        DataError: Columns or labels are missing.
    """
    found = table.column_names
    if not len(table):
        raise DataError(f"{table.where} has no rows")
    is_image = _has(found, columns.image)
    if not is_image and not _has(found, columns.text):
        raise DataError(
            f"{table.where} has no column {columns.image!r} or {columns.text!r}; it has {found}. "
            "Name the right ones with columns=Columns(image=..., text=..., label=...)"
        )
    numbers, names = read_labels(table, columns.label, labels, class_names)
    if is_image:
        return ImageDataset(_ImageColumn(table, columns.image), numbers, names, name)
    pair = (columns.text_pair,) if _has(found, columns.text_pair) else ()
    return TextDataset(_TextColumns(table, (columns.text, *pair)), numbers, names, name)


def read_labels(
    table: Table, column: str, policy: LabelPolicy, class_names: Sequence[str] | None
) -> tuple[Labels, tuple[str, ...]]:
    """Read a label column as integers, with the class names.

    Whole numbers are taken as they are, strings are numbered in the order of the class names (sorted, if none are
    given); an empty cell or NaN is no label. Names come from the argument, else from the table, else they are the
    labels themselves.

    Raises:
        DataError: There is no such column, a label is missing, or it is neither a whole number nor a class name.
    """
    if not _has(table.column_names, column):
        if policy == "optional":
            return np.full(len(table), UNLABELLED, dtype=np.int64), tuple(class_names or ())
        raise DataError(
            f"{table.where} has no label column {column!r}; it has {table.column_names}. Name it with "
            "columns=Columns(label=...), or pass labels='optional' if the labels are not needed (OOD data)"
        )
    values = table.column(column)
    names = tuple(class_names) if class_names is not None else table.class_names(column)
    if any(isinstance(value, str) for value in values):
        if names is None:
            names = tuple(sorted({value for value in values if isinstance(value, str)}))
        number = {class_name: index for index, class_name in enumerate(names)}
        values = [_number(value, number, row, table.where) for row, value in enumerate(values)]
    numbers = np.array([_whole(value, row, table.where) for row, value in enumerate(values)], dtype=np.int64)
    if policy == "required" and (numbers < 0).any():
        row = int((numbers < 0).argmax())
        raise DataError(
            f"row {row} of {table.where} has no label (got {values[row]!r}), nor have "
            f"{int((numbers < 0).sum())} rows in all; use another split, or pass labels='optional' if the "
            "labels are not needed (OOD data)"
        )
    numbers = np.maximum(numbers, UNLABELLED)
    if names is None:
        names = tuple(str(label) for label in range(int(numbers.max()) + 1))
    return numbers, names


def nested(value: Any, path: str) -> Any:
    """Follow a dotted path into nested cells; an empty path is the value itself."""
    for part in filter(None, path.split(".")):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _number(value: Any, number: dict[str, int], row: int, where: str) -> int | None:
    if value == "" or _missing(value):
        return None
    if not isinstance(value, str) or value not in number:
        raise DataError(f"row {row} of {where} has the label {value!r}, which is not one of {list(number)}")
    return number[value]


def _whole(value: Any, row: int, where: str) -> int:
    """A label as a number; one that would have to be rounded is refused."""
    if _missing(value):
        return UNLABELLED
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        whole = None
    if whole is None or whole != value:
        raise DataError(
            f"row {row} of {where} has the label {value!r}; labels must be whole numbers or class names: name the "
            "right column with columns=Columns(label=...)"
        )
    return whole


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _has(found: Sequence[str], column: str) -> bool:
    return column.partition(".")[0] in found
