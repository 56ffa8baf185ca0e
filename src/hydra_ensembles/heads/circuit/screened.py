"""Choosing among the candidates that are expected to be good. Approximate.

What a head does to every sample is remembered from the last time it was measured, and predicted by a gradient
before. So the integers of all candidates can be estimated without running anything; only those that come out
best are measured, until one that was measured in this step is ahead of all others. Measurements run the harder
half of the samples first, and what is remembered stands in for the rest; the head about to be chosen is measured
on all.

Errors are few, so for the accuracy an estimate that is off by one is off by much; but for the same reason branch
and bound settles most candidates on a handful of samples. There nothing is estimated and no candidate is left out:
branch and bound decides, in the fast products of a GPU.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..head import Head
from .effects import Effects
from .exact import Exact
from .gradients import predict_effects
from .precision import fast_products
from .samples import IntArray
from .sweep import Sweep

AFRESH = 8  # steps after which all that is remembered is forgotten; a resumed run repeats at most as many
PREDICT_EVERY = 2  # steps after which a gradient corrects what is remembered
_HARD = 0.5  # share of the samples, hardest first, on which a candidate is measured or predicted again
_ROUNDS = 3  # in which the candidates of a step are measured, at most


class FastErrors:
    """Chooses by errors alone: branch and bound over all candidates in fast products.

    Args:
        exact: Branch and bound on the model with all heads chosen so far taken out.
    """

    def __init__(self, exact: Exact) -> None:
        self.exact = exact

    def choose(self, candidates: Sequence[Head]) -> Head:
        """The candidate with the fewest errors, as far as fast products tell."""
        with fast_products(self.exact.current.device):
            return self.exact.choose(candidates).head


class Screen:
    """Estimates all candidates and measures the most promising ones.

    Args:
        exact: What knows the model with all heads chosen so far taken out.
        size: Candidates to measure in a step, at most; twice as many where nothing is remembered.
        step: Greedy steps taken so far; a multiple of `AFRESH`.
    """

    def __init__(self, exact: Exact, size: int, step: int) -> None:
        self.current, self.ranks = exact.current, exact.ranks
        self.size, self.step = size, step
        self.effects = Effects(self.current)
        self.sweep = Sweep(self.current, self.effects)

    def choose(self, candidates: Sequence[Head]) -> Head:
        """The best of the promising candidates, as far as the estimates go."""
        afresh, predict = self.step % AFRESH == 0, self.step % PREDICT_EVERY == 0
        self.step += 1
        size = min(len(candidates), 2 * self.size if afresh else self.size)
        with torch.no_grad(), fast_products(self.current.device):
            if afresh:
                self.effects.forget()
            if predict:
                predict_effects(self.effects, candidates, self._hardest(1.0 if afresh else _HARD))
            return self._first_measured(candidates, most=size, least=size if afresh else 1)

    def _ordered(self, candidates: Sequence[Head]) -> list[Head]:
        """Candidates by estimate, best first; the same on all ranks."""
        return self.ranks.from_first(self.effects.best_first(candidates))

    def _first_measured(self, candidates: Sequence[Head], most: int, least: int) -> Head:
        """The first candidate that is ahead of all others and was measured in this step."""
        half, whole = self._hardest(_HARD), self._hardest(1.0)
        together = self.size if least == most else math.ceil(self.size / _ROUNDS)
        measured: set[Head] = set()  # on the harder half
        finished: set[Head] = set()  # on all samples
        while True:
            ordered = self._ordered(candidates)
            if len(measured) < least or (ordered[0] not in measured and len(measured) < most):
                promising = [head for head in ordered if head not in measured]
                chosen = promising[: min(together, most - len(measured))]
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
