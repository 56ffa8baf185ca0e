"""How the cells of a label column are read: as class numbers or as class names, never both."""

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from .._utils import warn
from ..classes import normalised
from ..errors import DataError
from .dataset import UNLABELLED, LabelArray

MOST_CLASSES = 1 << 20  # larger numbers are ids
ONLY_OOD = "labels='optional', on the command line --ood"  # how to give data without labels
_PLAIN_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]*)?|-?\.[0-9]+")
_OTHER_NUMBER = re.compile(r"-?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|inf(inity)?)", re.IGNORECASE)
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([ T].*)?|[0-9]{2}:[0-9]{2}(:[0-9.]+)?")
_NONE = frozenset(("", "NA", "N/A", "n/a", "#N/A", "#NA", "NaN", "nan", "-NaN", "-nan", "NULL", "null"))  # missing


def numbered(
    values: Sequence[Any],
    as_written: bool,
    declared: tuple[str, ...] | None,
    class_names: Sequence[str] | None,
    required: bool,
    where: str,
) -> tuple[LabelArray, tuple[str, ...]]:
    """Cells as integers, with the class names: those given, else those the table declares, else the labels themselves.

    Whole numbers are used as they are, strings are numbered in the order of the names; an empty cell or NaN is no
    label. In CSV and TSV (`as_written`), labels are whole numbers if all are written so (`7`, `7.0`), else names, such
    as `07` and `true`. If labels are `required`, a row without one raises.
    """
    values = parse_labels(values, where) if as_written else values
    names = tuple(class_names) if class_names is not None else declared
    strings = {value for value in values if isinstance(value, str) and value}
    if strings and names is None:
        names = tuple(sorted(strings))
        if required:
            warn_of_similar_names(names, where)
    if class_names is not None:
        require_unambiguous(values, tuple(class_names), where)
    by_name = {class_name: number for number, class_name in enumerate(names or ())}
    labels = [as_number(value, by_name, f"row {row} of {where}") for row, value in enumerate(values)]
    numbers = np.maximum(np.array(labels, dtype=np.int64), UNLABELLED)
    if required and (numbers < 0).any():
        row = int((numbers < 0).argmax())
        none = f"row {row} of {where} has no label (got {values[row]!r}); {(numbers < 0).sum()} rows have none"
        raise DataError(f"{none}; use another split; only OOD data may lack labels ({ONLY_OOD})")
    if names is None:
        names = tuple(str(label) for label in range(int(numbers.max()) + 1))
    return numbers, names


def naming(role: str) -> str:
    """How to name the column for a role (image, text, text_pair, label), in Python and on the command line."""
    return f"columns=Columns({role}=...), on the command line --column {role}=..."


def parse_labels(written: Sequence[str], where: str) -> list[Any]:
    """Labels of a text table: as numbers (None if missing) if all are plain numbers, else as written.

    Raises for columns of numbers with exponents, or of dates: as names, every distinct value would become a class.
    """
    cells = [cell.strip() for cell in written]
    present = [cell for cell in cells if cell not in _NONE]
    if all(_PLAIN_NUMBER.fullmatch(cell) for cell in present):
        return [None if cell in _NONE else float(cell) if "." in cell else int(cell) for cell in cells]
    for kind in (_OTHER_NUMBER, _TIME):
        if all(kind.fullmatch(cell) for cell in present) and not all(map(str.isdecimal, present)):
            row = next(row for row, cell in enumerate(cells) if cell not in _NONE and not _PLAIN_NUMBER.fullmatch(cell))
            accepted = f"labels must be whole numbers or class names; or name another column: {naming('label')}"
            raise DataError(f"row {row} of {where} has the label {written[row]!r}; {accepted}")
    return list(written)


def warn_of_similar_names(names: Sequence[str], where: str) -> None:
    """Warn if two class names differ only in spelling, or if one is spelled like a missing label."""
    seen: dict[str, str] = {}
    for name in names:
        first = seen.setdefault(normalised(name), name)
        if first != name:
            warn(f"{where} has the classes {first!a} and {name!a}, which count as two; if one is meant, rename one")
            break
    missing = next((name for name in names if name.strip() in _NONE), None)
    if missing is not None:
        warn(f"{where} has a class {missing!r}; if that is a missing label, leave the cell empty, or remove the folder")


def require_unambiguous(values: Sequence[Any], names: tuple[str, ...], where: str) -> None:
    """Raise if whole-number labels could be read both as class names and as class numbers, with different results."""
    numbers = {value for value in values if isinstance(value, int) and not isinstance(value, bool)}
    called = {int(name): number for number, name in enumerate(names) if name.isdecimal()}
    doubtful = next((number for number in sorted(numbers) if called.get(number, number) != number), None)
    if doubtful is not None and numbers <= called.keys():
        two = f"the class called {names[called[doubtful]]!r} or number {doubtful} of class_names"
        raise DataError(f"{where} has the label {doubtful}, which may mean {two}; give names that are not numbers")


def as_number(value: Any, numbers: dict[str, int], where: str) -> int:
    """Convert a label to its class number; raises for one that would have to be rounded."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return UNLABELLED
    if isinstance(value, str) and value in numbers:
        return numbers[value]
    if isinstance(value, int | float | Decimal) and math.isfinite(value) and int(value) == value:
        if abs(int(value)) < MOST_CLASSES:
            return int(value)
        advice = f"classes are counted from 0, to {MOST_CLASSES - 1} at most; or name another column: {naming('label')}"
        raise DataError(f"{where} has the label {value}, an id rather than the number of a class; {advice}")
    accepted = f"whole numbers or class names{f' ({list(numbers)})' if numbers else ''}"
    raise DataError(f"{where} has the label {value!r}; labels must be {accepted}; or name a column: {naming('label')}")
