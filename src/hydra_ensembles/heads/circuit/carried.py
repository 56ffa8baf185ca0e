"""Activations of candidates, carried over from one greedy step to the next.

Switching a head of layer l off changes nothing below it. So after a step that removes a head of layer r, what
a candidate of a lower layer had computed up to the input of block r is still right, and its next evaluation
starts there. Room is limited: it is handed out in slots of one sample, and what does not fit is computed again.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .samples import IntArray


class CarriedActivations:
    """Slots for (candidate, level, sample), level l being the input of block l, for one group of samples.

    Args:
        layer_of: `[K]`, layer of each candidate; -1 for candidates that are not evaluated here.
        rows: Samples in the group.
        layers: Blocks of the model.
        token_shape: Tokens of a sample, and their width.
        capacity: Slots there is room for.
        dtype: Dtype of the activations.
        device: Where they lie.
    """

    def __init__(
        self,
        layer_of: IntArray,
        rows: int,
        layers: int,
        token_shape: tuple[int, int],
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        candidates = layer_of[layer_of >= 0]
        below = [int((candidates < level).sum()) for level in range(layers)]  # candidates that reach a level
        self.levels = frozenset(worthwhile_levels(below, capacity // max(rows, 1)))
        needed = rows * sum(below[level] for level in self.levels)
        self._pool = torch.empty(min(capacity, needed), *token_shape, dtype=dtype, device=device)
        self._free = np.arange(len(self._pool), dtype=np.int64)[::-1].copy()
        self._slot = np.full((len(layer_of), layers, rows), -1, np.int64)
        self._deepest = np.zeros((len(layer_of), rows), np.int64)

    def deepest(self, candidates: IntArray, rows: IntArray) -> IntArray:
        """The highest level held for each pair; 0 where there is none."""
        return self._deepest[candidates, rows]

    def load(self, level: int, candidates: IntArray, rows: IntArray) -> Tensor:
        """Activations of pairs that are held at a level, `[1, P, T, d]`."""
        slots = torch.from_numpy(self._slot[candidates, level, rows]).to(self._pool.device, non_blocking=True)
        return self._pool.index_select(0, slots)[None]

    def save(self, level: int, candidates: IntArray, rows: IntArray, x: Tensor) -> None:
        """Hold the activations `[1, P, T, d]` of pairs at a level, as many of them as there is room for."""
        if level not in self.levels:
            return
        count = min(len(candidates), len(self._free))
        if not count:
            return
        slots, self._free = self._free[-count:], self._free[:-count]
        candidates, rows = candidates[:count], rows[:count]
        self._slot[candidates, level, rows] = slots
        self._deepest[candidates, rows] = level
        self._pool.index_copy_(0, torch.from_numpy(slots).to(self._pool.device, non_blocking=True), x[0, :count])

    def holds_all(self, candidate: int, level: int) -> bool:
        """Whether a candidate's activations at a level are held for every sample."""
        return bool((self._slot[candidate, level] >= 0).all())

    def forget_candidate(self, candidate: int) -> None:
        """Give the room of a candidate back."""
        self._release(np.s_[candidate : candidate + 1])
        self._deepest[candidate] = 0

    def forget_above(self, level: int) -> None:
        """Give back what lies above a level; what lies at it or below is still right."""
        if len(self._free) == len(self._pool):
            return  # nothing is held
        self._release(np.s_[:, level + 1 :])
        held = self._slot[:, : level + 1] >= 0  # [K, levels, rows]
        highest = level - held[:, ::-1].argmax(1)  # of those that hold anything
        self._deepest = np.where(held.any(1), highest, 0)

    def _release(self, where: slice | tuple[slice, ...]) -> None:
        slots = self._slot[where]
        self._free = np.concatenate([self._free, slots[slots >= 0]])
        self._slot[where] = -1


def worthwhile_levels(below: Sequence[int], capacity: int) -> list[int]:
    """Levels to hold so that the next step saves most blocks, within a number of slots for each sample.

    The head removed next may lie in any layer r, and saves each candidate of a lower layer the blocks up to
    the highest level held that is at most r. Levels are added greedily by the blocks they save for each slot.

    Args:
        below: For each level, how many candidates lie in a layer below it (and would be held there).
        capacity: Slots for each sample.
    """
    layers = len(below)
    chosen: list[int] = []

    def saved(levels: list[int]) -> int:
        total = 0
        for removed in range(layers):
            best = max((level for level in levels if level <= removed), default=0)
            total += sum(below[level] for level in range(1, best + 1))  # a candidate of layer l skips l … best-1
        return total

    while True:
        used, before = sum(below[level] for level in chosen), saved(chosen)
        gains = [
            ((saved([*chosen, level]) - before) / below[level], level)
            for level in range(1, layers)
            if level not in chosen and 0 < below[level] <= capacity - used
        ]
        gain, level = max(gains, default=(0.0, 0))
        if gain <= 0:
            return sorted(chosen)
        chosen.append(level)
