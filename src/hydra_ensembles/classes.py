"""Match the classes of a model with those of a data set: one rule for everything that reads labels."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ._utils import warn
from .batches import Batches, all_parts
from .errors import DataError

_NAMES = ("class_names", "classes", "class_to_idx")  # attributes of data sets
SHOWN = 6  # names shown in an error
_UNNAMED = "if the loader has numbered them already, give list(loader), which carries no names"
_WAYS = "dataset.with_classes(names) for ours, target_transform= for torchvision"


def same_names(names: Sequence[str], labels: Sequence[str]) -> dict[int, int]:
    """Map the index of each class name to the index of the same name in `labels`; names without a match are left out.

    If all names are numbers, 1 matches 001. A label that occurs twice only matches at the same index.
    """
    read = _reading(names, labels)
    wanted, offered = list(map(read, names)), list(map(read, labels))
    counts = Counter(offered)
    numbers = {label: number for number, label in enumerate(offered) if counts[label] == 1}
    by_name = {place: numbers[name] for place, name in enumerate(wanted) if name in numbers}
    in_place = [place for place, (name, label) in enumerate(zip(wanted, offered, strict=False)) if name == label]
    return by_name | {place: place for place in in_place}


def why_not_exclusive(model: object) -> str | None:
    """Why a softmax makes no sense for the answers of a transformers model; None if its config gives no reason."""
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if problem in (None, "single_label_classification"):
        return None
    return (
        f"problem_type is {problem!r}, but the probabilities here are a softmax over mutually exclusive classes; "
        "supported are None and 'single_label_classification'"
    )


def normalised(name: str) -> str:
    """A name normalised for case, surrounding spaces, and the encoding of accents (macOS decomposes them)."""
    return unicodedata.normalize("NFKC", name).strip().casefold()


def _reading(names: Sequence[str], labels: Sequence[str]) -> Callable[[str], str | int]:
    """How to compare names: as numbers if all are, else by `normalised`, unless that makes two names equal."""
    if are_numbers((*names, *labels)):
        return int
    loses = any(len(set(map(normalised, some))) < len(set(some)) for some in (names, labels))
    return str if loses else normalised


def class_numbers(names: Sequence[str], labels: Sequence[str]) -> dict[int, int]:
    """Map the index of each class of a data set to the model's; classes that the model does not have are left out.

    If both have names, names decide. If the names of the set are numbers and the model has no such names, they are the
    model's class indices, whatever their order (0, 1, 10, 2). A model without names takes other names in order.
    """
    shared = same_names(names, labels)
    if not shared and are_numbers(names) and not (labels and are_numbers(labels)):
        return {place: int(name) for place, name in enumerate(names)}
    return shared if labels else {place: place for place in range(len(names))}


def renumbered(sets: Mapping[str, Batches | None], labels: Sequence[str], classes: int | None) -> dict[str, Any]:
    """Labelled sets that are used together, with classes numbered as in the model; `classes` is their number, if known.

    If the model has no names, or different ones, the names of the first set that has some apply to all sets; `train`
    always keeps its own order. Names are read from data sets of ours, of torchvision or of `datasets` inside the
    source; sources without names pass unchecked. Data sets of ours, alone or in a `BatchLoader`, are renumbered by
    name. Other sources in a different order are refused, because their loaders cannot be changed safely.
    """
    result = dict[str, Any](sets)
    references = {"the model": tuple(labels)}  # class names by their owner
    train = sets.get("train")
    if not labels and train is not None:
        references["train"] = class_names_in(train, classes)
    for name, source in sets.items():
        for names in _class_names(source):
            owner, shares = _owner_of(names, references)
            if not shares:
                require_as_many(names, labels, classes, name, _UNNAMED)
            result[name] = _numbered(result[name], names, references[owner], owner, name)
            if not shares and (len(names) == classes or not are_numbers(names)):
                references[name] = names
    return result


def in_model_order(batches: Any, name: str, model: Any) -> Any:
    """One labelled set, called `name` in messages, with classes numbered as in an ensemble; see `renumbered`."""
    return renumbered({name: batches}, model.metadata.labels, model.num_classes)[name]


def _owner_of(names: Sequence[str], references: Mapping[str, Sequence[str]]) -> tuple[str, bool]:
    """Whose class numbers apply, and whether the two share a name: of the first that does, else that has any names."""
    for owner, theirs in references.items():
        if same_names(names, theirs):
            return owner, True
    return next((owner for owner, theirs in references.items() if theirs), "the model"), False


def _numbered(source: Any, names: tuple[str, ...], labels: tuple[str, ...], owner: str, name: str) -> Any:
    """Number the classes of a source like `labels`; raises if the mapping is ambiguous or impossible."""
    numbers = class_numbers(names, labels)
    moved = next((place for place, number in numbers.items() if place != number), None)
    unknown = [names[place] for place in range(min(len(names), len(labels))) if place not in numbers]
    may_be_others = len(names) == len(labels) or name == "train"  # other words for the same, or classes to learn
    if moved is None and (may_be_others or not unknown):
        if labels and not numbers and name != "train":  # for `train`, `warn_of_other_classes` warns
            warn(
                f"no class of {name} ({a_few(names)}) has the same name as one of {owner} ({a_few(labels)}): they are "
                f"assumed to be the same, in this order; if they are not, rename them: {_WAYS}"
            )
        return source
    if moved is not None and not same_names(names, labels):
        renamed = f"dataset.with_classes([str(n) for n in range({max(numbers.values()) + 1})])"
        raise DataError(
            f"class {moved} of {name} is called {names[moved]}, a number that is not its index: if the name counts, "
            f"use {renamed}; if the index, model.with_metadata(labels=dataset.class_names); {_UNNAMED}"
        )
    if hasattr(source, "with_classes"):
        return source.with_classes(labels)
    if moved is None:
        raise _order_error(f"{name} has {a_few(unknown)}, which {owner} does not have", labels)
    place = f"class {numbers[moved]}"
    raise _order_error(f"class {moved} of {name} is {names[moved]!r}, which {owner} has as {place}", labels)


def require_as_many(
    names: Sequence[str], labels: Sequence[str], classes: int | None, name: str, otherwise: str
) -> None:
    """Refuse class names if a model without names has another number of classes; `otherwise` is further advice."""
    if classes is not None and not labels and not are_numbers(names) and len(names) != classes:
        problem = f"{name} has {len(names)} classes ({a_few(names)}), but the model has {classes} without names"
        ways = "model.with_metadata(labels=...), or dataset.with_classes(names)"
        raise DataError(f"{problem}; name them all ({ways}); {otherwise}")


def are_numbers(names: Sequence[str]) -> bool:
    """Whether all names are decimal numbers."""
    return all(name.isdecimal() for name in names)


def a_few(names: Sequence[str]) -> str:
    """The first few names, for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def warn_of_other_classes(batches: Batches, labels: Sequence[str]) -> None:
    """Warn if none of the classes in the training data has the name of one of the model's, which keeps its names."""
    for names in _class_names(batches):
        learned = [name for name in names if not name.isdecimal()]
        if labels and learned and set(map(normalised, learned)).isdisjoint(map(normalised, labels)):
            both = f"train has the classes {', '.join(learned[:4])}, but the model has {', '.join(labels[:4])}"
            warn(f"{both}, and keeps these names; if they are others, give it model.with_metadata(labels=...)")
            return


def class_names_in(batches: Batches, classes: int | None) -> tuple[str, ...]:
    """Names of `classes` classes found inside a source; empty if it has none, or if they are just 0, 1, 2, …."""
    distinct = set(_class_names(batches))
    names = distinct.pop() if len(distinct) == 1 else ()
    places = tuple(map(str, range(len(names))))
    return names if len(set(names)) == len(names) == classes and names != places else ()


def _class_names(batches: Batches | None) -> Iterator[tuple[str, ...]]:
    """Class names, in the order of their numbers, of every data set inside a source that has some."""
    for part in all_parts(batches):
        features = getattr(part, "features", None)  # of the `datasets` library
        columns = features if isinstance(features, Mapping) else {}
        column = columns.get("labels", columns.get("label"))
        given = (*(getattr(part, name, None) for name in _NAMES), getattr(column, "names", None))
        names = next(filter(None, map(_listed, given)), None)
        if names and getattr(part, "target_transform", None) is None:
            yield names


def _listed(names: Any) -> tuple[str, ...]:
    """Class names as a tuple: of a list, an array, or a mapping from each name to its number; else empty."""
    if isinstance(names, Mapping) and sorted(names.values(), key=str) == sorted(range(len(names)), key=str):
        names = sorted(names, key=names.__getitem__)
    names = names.tolist() if hasattr(names, "tolist") else names
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()


def _order_error(what: str, labels: Sequence[str]) -> DataError:
    return DataError(f"{what}; number them in the order {a_few(labels)}: {_WAYS}; {_UNNAMED}")
