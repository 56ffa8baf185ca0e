"""Matching the classes of a model and of a data set: one rule for everything that reads labels."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ._utils import warn
from .batches import Batches, all_parts
from .errors import DataError

SHOWN = 6  # names in an error
_UNNAMED = "where the loader has numbered them already, give list(loader), which has no names"


def same_names(names: Sequence[str], labels: Sequence[str]) -> dict[int, int]:
    """Number of each class of a set among labels of the same name, by its place; one that is not there is left out.

    Where all are numbers, 1 is what the other calls 001. Of a label that occurs twice only its place tells.
    """
    read = _reading(names, labels)
    wanted, offered = list(map(read, names)), list(map(read, labels))
    counts = Counter(offered)
    numbers = {label: number for number, label in enumerate(offered) if counts[label] == 1}
    by_name = {place: numbers[name] for place, name in enumerate(wanted) if name in numbers}
    in_place = [place for place, (name, label) in enumerate(zip(wanted, offered, strict=False)) if name == label]
    return by_name | {place: place for place in in_place}


def why_not_exclusive(model: object) -> str | None:
    """Why a softmax makes no sense of what a model of transformers answers; None where nothing says so."""
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if problem in (None, "single_label_classification"):
        return None
    return (
        f"problem_type is {problem!r}, and the probabilities here are a softmax over classes that exclude each other; "
        "supported are None and 'single_label_classification'"
    )


def spelled(name: str) -> str:
    """A name without regard to capitals, spaces around it, and how its accents are stored (Macs store them apart)."""
    return unicodedata.normalize("NFKC", name).strip().casefold()


def _reading(names: Sequence[str], labels: Sequence[str]) -> Callable[[str], str | int]:
    """How names are compared: as numbers where all are, or as they are `spelled`, unless that makes two of them one."""
    if are_numbers((*names, *labels)):
        return int
    loses = any(len(set(map(spelled, some))) < len(set(some)) for some in (names, labels))
    return str if loses else spelled


def class_numbers(names: Sequence[str], labels: Sequence[str]) -> dict[int, int]:
    """The model's number of each class of a set, by its place; one that the model does not have is left out.

    Where both have names, names decide. A set that has nothing but numbers for a model without such names means these
    numbers, not their places (0, 1, 10, 2); other names for a model without names are taken to be in its order.
    """
    shared = same_names(names, labels)
    if not shared and are_numbers(names) and not (labels and are_numbers(labels)):
        return {place: int(name) for place, name in enumerate(names)}
    return shared if labels else {place: place for place in range(len(names))}


def in_order(sets: Mapping[str, Batches | None], labels: Sequence[str], classes: int | None) -> dict[str, Any]:
    """Labelled sets that are used together, with the classes numbered as the model does; `classes` if that is known.

    For a model without names, or with others, the names of the first set that has some are those of all; what `train`
    teaches is always in the order of its own. Names are those of a data set of ours, of torchvision's or of
    `datasets`, inside the source; without names nothing is known. A data set of ours, alone or in a `BatchLoader`, is
    numbered anew by name. Other sources in another order are refused, for nobody knows what their loaders do.
    """
    ordered = dict[str, Any](sets)
    known = {"the model": tuple(labels)}
    train = sets.get("train")
    if not labels and train is not None:
        known["train"] = class_names_in(train, classes)
    for name, source in sets.items():
        for names in () if source is None else _class_names(source):
            owner = next((owner for owner in known if same_names(names, known[owner])), None)
            if owner is None:
                require_as_many(names, labels, classes, name, _UNNAMED)
            other = owner or next((other for other in known if known[other]), "the model")
            ordered[name] = _numbered(ordered[name], names, known[other], other, name)
            if owner is None and (len(names) == classes or not are_numbers(names)):
                known[name] = names
    return ordered


def _numbered(source: Any, names: tuple[str, ...], labels: tuple[str, ...], owner: str, name: str) -> Any:
    """A source with its classes numbered as those labels are; refused where that is not certain, or not possible."""
    numbers = class_numbers(names, labels)
    moved = next((place for place, number in numbers.items() if place != number), None)
    unknown = [names[place] for place in range(min(len(names), len(labels))) if place not in numbers]
    may_be_others = len(names) == len(labels) or name == "train"  # other words for the same, or what is to be learned
    if moved is None and (may_be_others or not unknown):
        if labels and not numbers and name != "train":  # of which `warn_of_other_classes` tells
            warn(
                f"no class of {name} ({some(names)}) has the name of one of {owner} ({some(labels)}): they are assumed "
                "to be the same, in this order; if they are not, rename them: dataset.with_classes(names) of ours, "
                "target_transform= of torchvision"
            )
        return source
    if moved is not None and not same_names(names, labels):
        raise DataError(
            f"class {moved} of {name} is called {names[moved]}, a number that is not its place, and {owner} does not "
            "say which of the two counts; if the number, take "
            f"dataset.with_classes([str(n) for n in range({max(numbers.values()) + 1})]); if the place, name the "
            f"model's classes so: model.with_metadata(labels=dataset.class_names); {_UNNAMED}"
        )
    if hasattr(source, "with_classes"):
        return source.with_classes(labels)
    what = f"{name} has {some(unknown)}, which {owner} does not have"
    if moved is not None:
        place = f"class {numbers[moved]}: one is then taken for another"
        what = f"class {moved} of {name} is {names[moved]!r}, which {owner} has as {place}"
    raise DataError(
        f"{what}; number them in the order {some(labels)}: "
        f"dataset.with_classes(names) of ours, target_transform= of torchvision; {_UNNAMED}"
    )


def require_as_many(
    names: Sequence[str], labels: Sequence[str], classes: int | None, name: str, otherwise: str
) -> None:
    """Refuse names for a model without names that has more or fewer classes; `otherwise` says what else can be done."""
    if classes is not None and not labels and not are_numbers(names) and len(names) != classes:
        raise DataError(
            f"{name} has {len(names)} classes ({some(names)}), the model {classes} without names; name them all "
            f"(model.with_metadata(labels=...), or dataset.with_classes(names)); {otherwise}"
        )


def are_numbers(names: Sequence[str]) -> bool:
    """Whether names are nothing but numbers."""
    return all(name.isdecimal() for name in names)


def some(names: Sequence[str]) -> str:
    """The first names, for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def warn_of_other_classes(batches: Batches, labels: Sequence[str]) -> None:
    """Say so where none of the classes that a model learns is called as one of its own: it keeps the names it has."""
    for names in _class_names(batches):
        learned = [name for name in names if not name.isdecimal()]
        if labels and learned and set(map(spelled, learned)).isdisjoint(map(spelled, labels)):
            warn(
                f"train has the classes {', '.join(learned[:4])}, and the model {', '.join(labels[:4])}: it learns the "
                "former under the names of the latter. If they are not the same, rename the model's: "
                "model.with_metadata(labels=...)"
            )
            return


def class_names_in(batches: Batches, classes: int | None) -> tuple[str, ...]:
    """Names of so many classes that a source has inside it; empty where it has none, or the numbers of their places."""
    distinct = set(_class_names(batches))
    names = distinct.pop() if len(distinct) == 1 else ()
    places = tuple(map(str, range(len(names))))
    return names if len(set(names)) == len(names) == classes and names != places else ()


def _class_names(batches: Batches) -> Iterator[tuple[str, ...]]:
    """Names of classes, in the order of their numbers, of every data set inside a source that has some."""
    for part in all_parts(batches):
        features = getattr(part, "features", None)  # of `datasets`
        columns = features if isinstance(features, Mapping) else {}
        column = columns.get("labels", columns.get("label"))
        names = getattr(part, "class_names", None) or getattr(part, "classes", None) or getattr(column, "names", None)
        if isinstance(names, list | tuple) and getattr(part, "target_transform", None) is None:
            yield tuple(map(str, names))
