"""Choosing among the few candidates that are expected to be good. Approximate.

What a head does to every sample is remembered from the last time it was measured, and predicted by a gradient
before. So the integers of all candidates can be estimated without running anything; only those that come out
best are measured, until one that was measured in this step is ahead of all others. A measurement first leaves
the easier samples out, and what is remembered stands in for them. They are run for the head that is about to be
chosen: the hardest samples alone make every head look dispensable, because they can hardly get worse.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..head import Head
from .current import CurrentModel
from .distributed import Ranks
from .effects import Effects
from .gradients import predict_effects
from .precision import fast_products
from .samples import IntArray
from .sweep import Sweep

AFRESH = 8  # steps after which all that is remembered is forgotten; a resumed run repeats at most as many
PREDICT_EVERY = 2  # steps after which a gradient corrects what is remembered
_HARD = 0.5  # share of the samples, hardest first, on which a candidate is measured or predicted again
_TOGETHER = 3  # candidates measured at once


class Screen:
    """Estimates all candidates and measures the most promising ones.

    Args:
        current: The model with all heads chosen so far taken out.
        ranks: The processes the candidates are spread over.
        size: Candidates to measure in a step, at most; twice as many where nothing is remembered.
        step: Greedy steps taken so far; a multiple of `AFRESH`.
    """

    def __init__(self, current: CurrentModel, ranks: Ranks, size: int, step: int) -> None:
        self.current, self.ranks, self.size, self.step = current, ranks, size, step
        self.effects = Effects(current)
        self.sweep = Sweep(current, self.effects)

    def choose(self, candidates: Sequence[Head]) -> Head:
        """The best of the promising candidates, as far as the estimates go."""
        afresh, predict = self.step % AFRESH == 0, self.step % PREDICT_EVERY == 0
        self.step += 1
        most = min(len(candidates), 2 * self.size if afresh else self.size)
        least = most if afresh else 1
        half, whole = self._hardest(_HARD), self._hardest(1.0)
        measured: set[Head] = set()  # on the harder half
        finished: set[Head] = set()  # on all samples
        with torch.no_grad(), fast_products(self.current.device):
            if afresh:
                self.effects.forget()
            if predict:
                predict_effects(self.effects, candidates, whole if afresh else half)
            while True:
                ordered = self.ranks.from_first(self.effects.best_first(candidates))
                promising = [head for head in ordered if head not in measured]
                if len(measured) < least or (ordered[0] not in measured and len(measured) < most):
                    chosen = promising[: min(self.size if afresh else _TOGETHER, most - len(measured))]
                    self._measure(chosen, half)
                    measured.update(chosen)
                    continue
                best = next(head for head in ordered if head in measured)
                if best in finished:
                    return best
                self._measure([best], whole[len(half) :])
                finished.add(best)

    def _measure(self, heads: Sequence[Head], numbers: IntArray) -> None:
        """Run candidates on some samples, each on one of the ranks, and tell all ranks."""
        rows = [self.current.index_of[head] for head in heads]
        own = self.ranks.share(rows)
        if own:
            self.sweep.run(np.repeat(np.array(own, np.int64), len(numbers)), np.tile(numbers, len(own)))
        if self.ranks.size > 1:
            for theirs, known in self.ranks.gather((own, self.effects.read(own))):
                self.effects.write(theirs, known)

    def _hardest(self, share: float) -> IntArray:
        """Numbers of a share of the samples, the hardest ones."""
        return self.current.hardest_first[: math.ceil(share * self.current.objective.samples)]
