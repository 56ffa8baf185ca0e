"""Bringing the classes of a data set into the order of a model's logits."""

from collections.abc import Sequence

import numpy as np

from ..data.dataset import ImageDataset, TextDataset
from ..errors import DataError
from ..model.ensemble import Ensemble
from .nearest import did_you_mean

AnyDataset = ImageDataset | TextDataset
SHOWN = 6  # names in an error


def labelled_as(data: AnyDataset, model: Ensemble, *, by_position: bool = False) -> AnyDataset:
    """The data set with its classes numbered as the model's logits.

    Where both name their classes, names decide, and the data may have fewer classes. Where the model has no names,
    or the data only numbers, numbers decide.

    Args:
        data: A labelled set.
        model: The model that answers.
        by_position: Let numbers decide even if names are known.

    Raises:
        DataError: The classes do not fit, or the set has fewer than two of them.
    """
    present = np.unique(data.labels).tolist()
    if len(present) < 2:
        raise DataError(
            f"{data.name} has samples of {len(present)} class; at least two classes are needed: check that it has a "
            "folder for each class, or the right label column"
        )
    names, labels = data.class_names, model.metadata.labels
    if by_position or names == labels:
        _require_range(data, model, max(present))
        return data
    if labels and not (_are_numbers(names) and set(names).isdisjoint(labels)):
        return _by_name(data, labels, present)
    if _are_numbers(names):
        return _by_number(data, model, present)
    if len(names) != model.num_classes:
        raise DataError(
            f"{data.name} has {len(names)} classes ({_some(names)}), the model {model.num_classes} without names; give "
            "their names with --labels FILE (one a line), or, if the classes are the first ones, --by-position"
        )
    return data


def with_labels_of(model: Ensemble, data: AnyDataset) -> Ensemble:
    """The model, with the class names of the data where it has none and the numbers of classes agree."""
    names = data.class_names
    if model.metadata.labels or len(names) != model.num_classes or _are_numbers(names):
        return model
    return model.with_metadata(labels=names)


def _by_name(data: AnyDataset, labels: Sequence[str], present: Sequence[int]) -> AnyDataset:
    number = {label: index for index, label in enumerate(labels)}
    names = [data.class_names[index] for index in present]
    unknown = [name for name in names if name not in number]
    if unknown:
        raise DataError(
            f"{data.name} has the classes {_some(unknown)}, which the model does not have (it has {_some(labels)})"
            f"{did_you_mean(unknown[0], labels)}; rename them, or use --by-position if they are in the model's order"
        )
    return data.relabel({index: number[data.class_names[index]] for index in present}, labels)


def _by_number(data: AnyDataset, model: Ensemble, present: Sequence[int]) -> AnyDataset:
    """Classes that are called 0, 1, 10, 2: their names are the numbers, not their order."""
    number = {index: int(data.class_names[index]) if data.class_names else index for index in present}
    _require_range(data, model, max(number.values()))
    return data.relabel(number, [str(index) for index in range(model.num_classes)])


def _require_range(data: AnyDataset, model: Ensemble, largest: int) -> None:
    if largest >= model.num_classes:
        raise DataError(
            f"{data.name} has labels up to {largest}, but the model has {model.num_classes} classes (0 to "
            f"{model.num_classes - 1}); give the data the model was trained for"
        )


def _are_numbers(names: Sequence[str]) -> bool:
    return all(name.isdecimal() for name in names)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
