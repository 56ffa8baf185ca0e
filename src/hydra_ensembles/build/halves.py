"""Splitting held-out data in two, sample by sample and by a seed."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batches import Batches, Inputs, iterate
from ..errors import DataError

Batch = tuple[Inputs, Tensor | None]


def read_all(batches: Batches, name: str) -> list[Batch]:
    """All batches, held in memory so that they can be read again and again."""
    return list(iterate(batches, name))


def halves(batches: list[Batch], seed: int, name: str) -> tuple[list[Batch], list[Batch]]:
    """Two disjoint halves of the samples; the first has the odd one.

    A sample stays in the batch it came in (text keeps its padding), so a batch may be cut in two.
    """
    sizes = [_size(inputs) for inputs, _ in batches]
    total = sum(sizes)
    if total < 2:
        raise DataError(f"{name} has {total} samples; splitting it in two needs at least 2")
    order = np.random.Generator(np.random.PCG64(seed)).permutation(total)
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.from_numpy(order[: (total + 1) // 2])] = True
    first: list[Batch] = []
    second: list[Batch] = []
    for (inputs, labels), mask in zip(batches, chosen.split(sizes), strict=True):
        for half, keep in ((first, mask), (second, ~mask)):
            if keep.any():
                half.append((_rows(inputs, keep), None if labels is None else labels[keep]))
    return first, second


def _size(inputs: Inputs) -> int:
    return len(inputs) if isinstance(inputs, Tensor) else len(next(iter(inputs.values())))


def _rows(inputs: Inputs, keep: Tensor) -> Any:
    if isinstance(inputs, Tensor):
        return inputs[keep.to(inputs.device)]
    return {name: tensor[keep.to(tensor.device)] for name, tensor in inputs.items()}
