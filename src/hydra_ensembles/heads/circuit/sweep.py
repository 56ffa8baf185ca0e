"""Evaluating many candidates on many samples in one walk through the layers."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .base_activations import GroupActivations
from .current import CurrentTower
from .samples import IntArray, parts


class Recorder(Protocol):
    """What takes the answers."""

    def record(self, candidates: IntArray, numbers: IntArray, logits: Tensor) -> None:
        """Take in logits `[P, C]` of pairs of candidate and sample."""


class Sweep:
    """Runs pairs of candidate and sample, each from the latest point at which its activations are known.

    A pair joins the walk in one of two ways: at the block of its candidate, where it branches off the current
    model (whose attention is computed once for all candidates of the layer); or at a later block whose input
    was carried over. From there on it is one more row of the batch.

    Args:
        current: The current model and its activations.
        table: Takes the answers.
    """

    def __init__(self, current: CurrentTower, table: Recorder) -> None:
        self.current, self.table = current, table
        self.model, self.samples = current.model, current.samples
        self.layer_of: IntArray = np.array([head.layer for head in current.candidates], np.int64)
        self.head_of: IntArray = np.array([head.head for head in current.candidates], np.int64)

    def run(self, candidates: IntArray, numbers: IntArray) -> None:
        """Evaluate pairs, given by candidate and sample number, and record the answers."""
        group_of, row_of = self.samples.group_of[numbers], self.samples.row_of[numbers]
        for index in np.unique(group_of):
            chosen = (group_of == index).nonzero()[0]
            chosen = chosen[np.argsort(row_of[chosen], kind="stable")]  # candidates of a sample stay together
            for part in parts(len(chosen), self.current.batch_size):
                pairs = chosen[part]
                self._walk(index, candidates[pairs], numbers[pairs], row_of[pairs])

    def _walk(self, index: int, candidates: IntArray, numbers: IntArray, rows: IntArray) -> None:
        base, carried, last = self.current.base[index], self.current.carried[index], self.model.layers
        known = carried.deepest(candidates, rows)
        branches = known <= self.layer_of[candidates]
        joins = np.where(branches, self.layer_of[candidates] + 1, known)  # level at which a pair joins
        order = np.lexsort((self.head_of[candidates], branches, joins))
        candidates, numbers, rows = candidates[order], numbers[order], rows[order]
        branches, joins = branches[order], joins[order]
        device_rows = torch.from_numpy(rows).to(base.levels[0].device, non_blocking=True)
        mask = base.mask(device_rows)

        x: Tensor | None = None
        active = 0  # pairs that have joined; they come first
        for level in range(int(joins[0]), last + 1):
            pieces: list[Tensor] = []
            if x is not None:
                pieces.append(self.model.block(level - 1, x, None if mask is None else mask[:active]))
            joined = int(np.searchsorted(joins, level, side="right"))
            resumed = active + int(np.count_nonzero(~branches[active:joined]))
            if resumed > active:
                pieces.append(carried.load(level, candidates[active:resumed], rows[active:resumed]))
            if joined > resumed:
                pieces.append(self._branch(base, level - 1, candidates[resumed:joined], rows[resumed:joined]))
            x = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
            if level < last:
                carried.save(level, candidates[:active], rows[:active], x[:, :active])
                carried.save(level, candidates[resumed:joined], rows[resumed:joined], x[:, resumed:joined])
            active = joined
        assert x is not None
        ids = None if base.ids is None else base.ids.index_select(0, device_rows)
        self.table.record(candidates, numbers, self.model.logits(x, mask, ids))

    def _branch(self, base: GroupActivations, layer: int, candidates: IntArray, rows: IntArray) -> Tensor:
        """Outputs of a block for pairs of this layer, sorted by head, each without its head: `[1, P, T', d]`."""
        distinct, inverse = np.unique(rows, return_inverse=True)
        heads, starts = np.unique(self.head_of[candidates], return_index=True)
        ends = [*starts[1:], len(candidates)]
        runs = [(int(head), slice(int(a), int(b))) for head, a, b in zip(heads, starts, ends, strict=True)]
        inputs, inputs_of = (
            torch.from_numpy(index).to(base.levels[0].device, non_blocking=True) for index in (distinct, inverse)
        )
        return self.model.without_heads(layer, base.at(layer, inputs), base.mask(inputs), inputs_of, runs)
