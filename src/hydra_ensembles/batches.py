"""Reading batches the way users have them: pairs, or mappings with labels."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import DataError

Inputs = Tensor | dict[str, Tensor]
Batches = Iterable[Any]


def read_batch(batch: Any, name: str = "data", index: int = 0) -> tuple[Inputs, Tensor | None]:
    """Split one batch into inputs and labels (None when there are none).

    Accepted are `(inputs, labels)`, a mapping with or without `labels`, and a bare tensor of inputs.
    """
    where = f"batch {index} of {name}"
    labels: Any = None
    if isinstance(batch, Mapping):
        inputs: Any = {str(key): value for key, value in batch.items() if key not in ("labels", "label")}
        labels = batch.get("labels", batch.get("label"))
        if not inputs:
            raise DataError(f"{where} is a mapping without inputs; keys: {sorted(batch)}")
    elif isinstance(batch, list | tuple) and len(batch) == 2:
        inputs, labels = batch
        inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    elif isinstance(batch, Tensor):
        inputs = batch
    else:
        raise DataError(
            f"{where} is a {type(batch).__name__}; expected (inputs, labels), a mapping with 'labels', or a tensor"
        )
    if labels is not None:
        labels = torch.as_tensor(labels)
        if labels.dim() != 1 or labels.is_floating_point():
            raise DataError(f"labels in {where} must be whole numbers [B], got {labels.dtype} {list(labels.shape)}")
        size = len(inputs) if isinstance(inputs, Tensor) else len(next(iter(inputs.values())))
        if len(labels) != size:
            raise DataError(f"{where} has {size} inputs and {len(labels)} labels")
    return inputs, labels


def iterate(batches: Batches, name: str = "data") -> Iterator[tuple[Inputs, Tensor | None]]:
    """Read all batches; an empty source is an error that names it."""
    empty = True
    for index, batch in enumerate(batches):
        empty = False
        yield read_batch(batch, name, index)
    if empty:
        raise DataError(f"{name} has no batches; check the loader, or that it was not consumed before")


def move(inputs: Inputs, device: torch.device, dtype: torch.dtype | None = None) -> Inputs:
    """Inputs on a device; floating-point ones also in `dtype`."""

    def one(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)

    return one(inputs) if isinstance(inputs, Tensor) else {name: one(tensor) for name, tensor in inputs.items()}


def require_labels(labels: Tensor | None, classes: int, name: str = "data", index: int = 0) -> Tensor:
    """Labels that exist and fit the number of classes, or an error that names the batch."""
    if labels is None:
        raise DataError(f"batch {index} of {name} has no labels; this call needs (inputs, labels)")
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            f"batch {index} of {name} has labels from {int(labels.min())} to {int(labels.max())}; "
            f"the model has {classes} classes (0 to {classes - 1})"
        )
    return labels.long()
