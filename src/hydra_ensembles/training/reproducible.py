"""Knowing data again: a run is continued on the data it was begun with, as far as that shows without reading them."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from .._utils import derive_seed
from ..batches import Batches, borrowed, epoch_of, length_of, parts_of, read_batch
from ..errors import DataError
from ..heads.ranking import tensor_bytes

Content = Callable[[Any, str, int], Mapping[str, Tensor]]
SOME_BATCHES, SOME_ROWS = 8, 64
"""Of the batches of a list and the rows of a tensor: how many are looked at, from the first to the last."""


def content_of(batch: Any, name: str, index: int = 0) -> dict[str, Tensor]:
    """The tensors of a batch by name, labels among them."""
    inputs, labels = read_batch(batch, name, index)
    tensors = {"inputs": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    return tensors if labels is None else {**tensors, "labels": labels}


def fingerprint(batches: Batches, name: str, seed: int, content: Content = content_of) -> str:
    """A short name for a data source, from what can be had without reading an epoch.

    That is its length, the first batch it gives, and of what lies in memory: all labels and row numbers of its data
    set, some rows of a `TensorDataset`, all labels and some batches of a list. Two sources that agree in all of this,
    and differ in items that only reading them would show, have the same name.

    Args:
        batches: The source; it is left as it was.
        name: What to call it in errors.
        seed: Whose order the first batch is the first of.
        content: The tensors of a batch by name, given the batch, the name of the source and its position.

    Raises:
        DataError: The source has no batches, or they cannot be read.
    """
    digest = hashlib.sha256(f"{length_of(batches)}".encode())
    with borrowed(batches), epoch_of(batches, 0, seed, torch.device("cpu")):
        at_hand = dict(_at_hand(batches))
        first = next(iter(batches), None)
    if first is None:
        raise DataError(f"{name} has no batches; check the loader")
    _take_in(digest, content(first, name, 0))
    if _in_memory(batches):
        for index in _spread(len(batches), SOME_BATCHES):
            _take_in(digest, content(batches[index], name, index))
    _take_in(digest, at_hand)
    return digest.hexdigest()[:16]


def data_identity(
    train: Batches, validation: Batches | None, seed: int, content: Content = content_of
) -> dict[str, str | None]:
    """Fingerprints of the data of a run with this seed, for its identity."""
    own = derive_seed(seed, "fingerprint")
    held_out = None if validation is None else fingerprint(validation, "validation", own, content)
    return {"train": fingerprint(train, "train", own, content), "validation": held_out}


def _in_memory(batches: Batches) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether a source is a list and no more; a class made from one may do something when it is read."""
    return type(batches) in (list, tuple)


def _at_hand(batches: Batches) -> Iterator[tuple[str, Tensor]]:
    """What a source holds in memory that tells its items apart, by name."""
    if _in_memory(batches):
        for number, batch in enumerate(batches):
            labels = _as_tensor(_labels(batch))
            if labels is not None:
                yield f"batch {number}", labels
    parts = [inner for part in parts_of(batches) for inner in (part, *_members(part))]
    for number, part in enumerate(parts):
        for attribute in ("labels", "targets", "rows", "indices"):
            values = _as_tensor(getattr(part, attribute, None))
            if values is not None:
                yield f"{attribute} {number}", values
        if isinstance(part, TensorDataset):
            for column, tensor in enumerate(part.tensors):
                rows = tensor if tensor.dim() == 1 else tensor[_spread(len(tensor), SOME_ROWS)]
                yield f"column {number} {column}", rows


def _labels(batch: Any) -> Any:
    """Where the labels of a batch are, if it has any; not checked."""
    if isinstance(batch, Mapping):
        return batch.get("labels", batch.get("label"))
    return batch[-1] if isinstance(batch, list | tuple) and len(batch) > 1 else None


def _members(part: Any) -> Iterable[Any]:
    """The data sets that one of several (a `ConcatDataset`) is made of."""
    members = getattr(part, "datasets", None)
    return members if isinstance(members, list | tuple) else ()


def _as_tensor(values: Any) -> Tensor | None:
    """Numbers or strings in a tensor; None for anything else."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, list | tuple | range) and len(values):
        if isinstance(values[0], str):
            values = np.frombuffer("\x1f".join(map(str, values)).encode(), np.uint8)
        elif not isinstance(values[0], int | float | np.number):
            return None
    if not isinstance(values, np.ndarray | list | tuple | range):
        return None
    try:
        return torch.from_numpy(np.array(values))
    except (TypeError, ValueError):  # objects, lists of different lengths
        return None


def _spread(count: int, some: int) -> list[int]:
    """At most `some` positions out of `count`, evenly from the first to the last."""
    return sorted({round(position) for position in np.linspace(0, max(count - 1, 0), min(count, some)).tolist()})


def _take_in(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor_bytes(tensor))
