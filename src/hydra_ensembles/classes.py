"""Match the classes of a model with those of data sets: one rule for everything that reads labels.

Names decide. A set whose classes all have a name among the model's is numbered as the model is; a set without names, or
a model without any, is taken as it is numbered; anything else is refused, because guessing would mix up classes.
"""

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .batches import Batches, all_parts
from .errors import DataError

_NAMES = ("class_names", "classes", "class_to_idx")  # attributes of data sets
_WAYS = "dataset.with_classes(names) for ours, target_transform= for torchvision, model.with_metadata(labels=names)"


def renumbered(sets: Mapping[str, Batches | None], labels: Sequence[str], classes: int | None) -> dict[str, Any]:
    """Labelled sets that are used together, with classes numbered as in the model; `classes` is their number, if known.

    If the model has no names, those of the first set that has some apply to all. Names are read from data sets of ours,
    of torchvision or of `datasets` inside a source. Data sets of ours, alone or in a `BatchLoader`, are renumbered;
    loaders of other libraries in another order are refused.
    """
    owner, reference = "the model", tuple(labels)
    result = dict[str, Any](sets)
    for name, source in sets.items():
        for names in class_names_of(source):
            if not reference:
                if classes is not None and len(names) != classes:
                    problem = f"{name} has {len(names)} classes ({a_few(names)}), but the model has {classes}"
                    raise DataError(f"{problem} without names; name them all: {_WAYS}")
                if all(map(str.isdecimal, names)):  # folders sort as 0, 1, 10, 2
                    raise DataError(f"{name} has the classes {a_few(names)}, not in their places; order them: {_WAYS}")
                owner, reference = name, names
            result[name] = _numbered(result[name], names, reference, owner, name)
    return result


def in_model_order(batches: Any, name: str, model: Any) -> Any:
    """One labelled set, called `name` in messages, with classes numbered as in an ensemble; see `renumbered`."""
    return renumbered({name: batches}, model.metadata.labels, model.num_classes)[name]


def _numbered(source: Any, names: tuple[str, ...], reference: tuple[str, ...], owner: str, name: str) -> Any:
    """A source with its classes numbered as in the reference; raises if they are not all there, or it cannot be."""
    numbers = same_names(names, reference)
    if len(numbers) < len(names):
        unknown = [one for place, one in enumerate(names) if place not in numbers]
        raise DataError(f"{name} has the classes {a_few(unknown)}, which {owner} ({a_few(reference)}) lacks: {_WAYS}")
    moved = next((place for place, number in numbers.items() if place != number), None)
    if moved is None:
        return source
    if hasattr(source, "with_classes"):
        return source.with_classes(reference)
    where = f"class {moved} of {name} is {names[moved]!r}, which {owner} has as class {numbers[moved]}"
    raise DataError(f"{where}; number them in the order {a_few(reference)}: {_WAYS}")


def same_names(names: Sequence[str], labels: Sequence[str]) -> dict[int, int]:
    """Map the place of each class name to that of the same name in `labels`; names without a match are left out.

    Case, surrounding spaces and the encoding of accents do not matter, unless two names differ in nothing else. A label
    that occurs twice only matches in the same place.
    """
    alike = [[normalised(name) for name in some] for some in (names, labels)]
    loses = any(len({*read}) < len({*some}) for read, some in zip(alike, (names, labels), strict=True))
    ours, theirs = (list(names), list(labels)) if loses else alike
    found = {place: theirs.index(name) for place, name in enumerate(ours) if theirs.count(name) == 1}
    return found | {place: place for place, both in enumerate(zip(ours, theirs, strict=False)) if both[0] == both[1]}


def normalised(name: str) -> str:
    """A name normalised for case, surrounding spaces, and the encoding of accents (macOS decomposes them)."""
    return unicodedata.normalize("NFKC", name).strip().casefold()


def class_names_in(batches: Batches, classes: int | None) -> tuple[str, ...]:
    """The names of `classes` classes that a source has; empty if it has none, or several different ones."""
    distinct = {*class_names_of(batches)}
    names = distinct.pop() if len(distinct) == 1 else ()
    return names if len({*names}) == len(names) == classes else ()


def class_names_of(batches: Batches | None) -> Iterator[tuple[str, ...]]:
    """Class names, in the order of their numbers, of every data set inside a source that has some.

    Numbers in their places (0, 1, 2) are no names; in other places (0, 1, 10, 2) they are refused where they matter.
    """
    for part in all_parts(batches):
        features = getattr(part, "features", None)  # of the `datasets` library
        columns = features if isinstance(features, Mapping) else {}
        column = columns.get("labels", columns.get("label"))
        given = (*(getattr(part, name, None) for name in _NAMES), getattr(column, "names", None))
        names = next(filter(None, map(_listed, given)), ())
        if names and names != tuple(map(str, range(len(names)))) and getattr(part, "target_transform", None) is None:
            yield names


def _listed(names: Any) -> tuple[str, ...]:
    """Class names as a tuple: of a list, an array, or a mapping from each name to its number; else empty."""
    if isinstance(names, Mapping) and sorted(names.values(), key=str) == sorted(range(len(names)), key=str):
        names = sorted(names, key=names.__getitem__)
    names = names.tolist() if hasattr(names, "tolist") else names
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()


def a_few(names: Sequence[str]) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def why_not_exclusive(model: object) -> str | None:
    """Why a softmax makes no sense for the answers of a transformers model; None if its config gives no reason."""
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if problem in (None, "single_label_classification"):
        return None
    return f"problem_type is {problem!r}, but the probabilities here are a softmax over mutually exclusive classes"
