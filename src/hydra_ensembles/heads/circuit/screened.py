"""Choosing among the few candidates that a gradient finds promising. Approximate.

A gradient pass predicts a smooth value for every candidate; those with the smallest are evaluated, and the one
with the smallest smooth value, now of its real log-odds, is chosen. Smooth values foresee which samples are
about to change sides, where integers tie: after many steps this is worth more than an error less now.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..head import Head
from .current import CurrentModel
from .distributed import Ranks
from .gradients import predicted_values
from .smooth import SmoothTable
from .sweep import Sweep


class Screen:
    """Predicts, and evaluates the most promising.

    Args:
        current: The model with all heads chosen so far taken out.
        ranks: The processes the candidates are spread over.
        size: Candidates to evaluate.
    """

    def __init__(self, current: CurrentModel, ranks: Ranks, size: int) -> None:
        self.current, self.ranks, self.size = current, ranks, size
        dtype = current.model.ensemble.dtype
        self.table = SmoothTable(current.candidates, current.samples, current.objective, dtype)
        self.sweep = Sweep(current, self.table)

    @torch.no_grad()
    def choose(self, candidates: Sequence[Head]) -> Head:
        """The best of the most promising candidates."""
        promising = self.ranks.from_first(self.shortlist(candidates))
        own = [head for head in promising if head in self.current.own]
        values: list[float] = []
        if own:
            indices = np.array([self.current.index_of[head] for head in own], np.int64)
            samples = self.current.objective.samples
            self.sweep.run(np.repeat(indices, samples), np.tile(np.arange(samples), len(own)))
            values = self.table.smooth_values(indices)
        _, head = self.ranks.smallest(min(zip(values, own, strict=True), default=None))
        return head

    def shortlist(self, candidates: Sequence[Head]) -> list[Head]:
        """The most promising candidates, first layer first."""
        if len(candidates) <= self.size:
            return list(candidates)
        best = sorted(zip(predicted_values(self.current, candidates), candidates, strict=True))[: self.size]
        return sorted(head for _, head in best)
