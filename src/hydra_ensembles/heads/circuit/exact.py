"""The choices of the naive method with a fraction of its work: best-first branch and bound.

The integers of a candidate over the samples evaluated so far bound its result from below, because errors and
discordant pairs only come in. Candidates with the smallest bound are evaluated further, hardest samples first,
until one is complete and no other can still beat it: a bound above its result, or equal with a later address,
ends a candidate without looking at its other samples. Ties are settled as in the naive method, so the choice
is the same; only rounding (see `scores`) stands between the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..._distributed import Ranks
from ..head import Head
from .answers import AnswerTable
from .choice import Choice
from .current import CurrentModel
from .sweep import Sweep

_CHUNKS = 16  # parts in which a candidate is evaluated
_LARGEST_CHUNK = 128
_TOGETHER = {"cuda": 16, "cpu": 4}  # candidates advanced at once, at least
_PAIRS = {"cuda": 1024, "cpu": 32}  # pairs of candidate and sample that are worth a sweep
_TRUST = 0.9  # share of the current model's integer from which on the samples seen say how a candidate will do


@dataclass
class _Progress:
    """How far a candidate has come in the current step."""

    evaluated: int = 0
    errors: int = 0
    discordance: int = 0


class Exact:
    """Branch and bound over the candidates of this rank, in step with the other ranks.

    Args:
        current: The model with all heads chosen so far taken out.
        ranks: The processes the candidates are spread over.
    """

    def __init__(self, current: CurrentModel, ranks: Ranks) -> None:
        self.current, self.ranks = current, ranks
        self.objective = current.objective
        self.chunk = min(-(-self.objective.samples // _CHUNKS), _LARGEST_CHUNK)
        kind = "cuda" if current.device.type == "cuda" else "cpu"
        self.together = max(_TOGETHER[kind], _PAIRS[kind] // self.chunk)
        self.table = AnswerTable(current.candidates, current.samples, self.objective, current.model.ensemble.dtype)
        self.sweep = Sweep(current, self.table)

    @property
    def result(self) -> Choice:
        """The result of the model as it is."""
        return self.current.choice

    def remove(self, head: Head) -> None:
        """Take a head out for good."""
        self.current.remove(head)

    @torch.no_grad()
    def choose(self, candidates: Sequence[Head], known: Choice | None = None) -> Choice:
        """The candidate whose removal leaves the best score.

        Args:
            candidates: The heads to choose from.
            known: One of them with its result, where that is known already.
        """
        self.table.clear()
        unknown = [head for head in candidates if known is None or head != known.head]
        progress = {head: _Progress() for head in unknown if head in self.current.own}
        self._advance(progress, dict.fromkeys(progress, self.chunk))
        while True:
            complete = [self._so_far(head, one) for head, one in progress.items() if self._is_complete(one)]
            waiting = [self._so_far(head, one) for head, one in progress.items() if not self._is_complete(one)]
            everywhere = self.ranks.gather((min(complete, default=None), min(waiting, default=None)))
            best = min((one for one in (known, *(one for one, _ in everywhere)) if one is not None), default=None)
            if best is not None and not any(bound is not None and bound < best for _, bound in everywhere):
                return best
            self._advance(progress, self._next(progress, sorted(waiting), best))

    def _next(
        self, progress: Mapping[Head, _Progress], waiting: Sequence[Choice], best: Choice | None
    ) -> dict[Head, int]:
        """How many more samples to evaluate for which candidates.

        Those with the smallest bounds go on by a chunk. And the one that looks best by its excess over the
        current model on the same samples is evaluated to the end where it promises to be the best so far: a
        good result early ends the others early.
        """
        open_ = [bound for bound in waiting if best is None or bound < best]
        if not open_:
            return {}
        current, amounts = self.current.choice.value, {}
        on_hardest = self.current.value_on_hardest(self.chunk)
        outlooks = []
        for bound in open_:
            seen = on_hardest[progress[bound.head].evaluated]
            if seen >= _TRUST * current:
                outlooks.append((current + bound.value - seen, bound.head))
        if best is not None or not outlooks:
            smallest = open_[: self.together]
            amounts = {bound.head: self.chunk * max(1, self.together // len(smallest)) for bound in smallest}
        if outlooks and (best is None or min(outlooks)[0] < best.value):
            amounts[min(outlooks)[1]] = self.objective.samples
        return amounts

    def _advance(self, progress: Mapping[Head, _Progress], amounts: Mapping[Head, int]) -> None:
        """Evaluate candidates on that many more samples each, in one sweep."""
        if not amounts:
            return
        order = self.current.hardest_first
        numbers = [order[progress[head].evaluated :][:amount] for head, amount in amounts.items()]
        indices = np.array([self.current.index_of[head] for head in amounts], np.int64)
        self.sweep.run(np.repeat(indices, [len(one) for one in numbers]), np.concatenate(numbers))
        for head, one, counts in zip(amounts, numbers, self.table.counts(indices), strict=True):
            state = progress[head]
            state.evaluated += len(one)
            state.errors, state.discordance = counts

    def _so_far(self, head: Head, one: _Progress) -> Choice:
        return Choice(self.objective.value(one.errors, one.discordance), head, one.errors, one.discordance)

    def _is_complete(self, one: _Progress) -> bool:
        return one.evaluated == self.objective.samples
