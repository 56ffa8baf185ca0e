"""Which head to remove next: by trying every one, or by branch and bound."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .._distributed import Ranks
from ..heads.masking import masked
from ..heads.ranking import Head
from ..model.ensemble import Ensemble
from .cache import CachedTower, Work, forward_cost
from .scores import NO_HEAD, CircuitData, Distance, IntArray, Objective, Result, SampleAnswers, Tally, parts

Tell = Callable[[int], None]  # takes the number of candidates of this rank that are decided so far in a step


class Search(ABC):
    """A way to find the head that goes next; `result` is that of the model as it is."""

    tell: Tell = staticmethod(lambda decided: None)

    @abstractmethod
    def choose(self, candidates: Sequence[Head]) -> Result:
        """The candidate whose removal leaves the best score."""

    @abstractmethod
    def remove(self, head: Head) -> None:
        """Take a head out for good."""

    def take(self, candidates: Sequence[Head], audited: bool) -> tuple[Result, int | None]:
        """Choose a candidate and remove it, unless too many errors are left; what is left without it.

        Of an approximate choice that is `audited`, also by how much it misses the best.
        """
        choice = self.choose(candidates)
        if not choice.over:
            self.remove(choice.head)
        return choice, None


@dataclass(eq=False)
class Naive(Search):
    """Evaluates each candidate from the inputs to the logits, on all samples: the reference."""

    model: Ensemble
    samples: CircuitData
    objective: Objective
    ranks: Ranks
    work: Work
    batch_size: int
    off: Sequence[Head]  # removed so far
    distance: Distance | None = field(default=None, kw_only=True)

    @property
    def result(self) -> Result:
        """The result of the model as it is."""
        return self.evaluate(NO_HEAD)

    def choose(self, candidates: Sequence[Head]) -> Result:
        """The candidate whose removal leaves the best score."""
        results: list[Result] = []
        for head in self.ranks.share(candidates):
            results.append(self.evaluate(head))
            self.tell(len(results))
        return min(filter(None, self.ranks.gather(min(results, default=None))))

    def remove(self, head: Head) -> None:
        """Leave a head off from now on."""
        self.off = [*self.off, head]

    @torch.no_grad()
    def evaluate(self, head: Head) -> Result:
        """The result with one more head off."""
        off = [*self.off, *([] if head == NO_HEAD else [head])]
        return Tally(self.samples, self.objective, [head], self.model.dtype).result(self.answers(off))

    def answers(self, off: Sequence[Head]) -> Iterator[tuple[IntArray, SampleAnswers]]:
        """Answers without some heads to all samples in batches, with their numbers."""
        return run_without(self.model, off, self.samples, self.batch_size, self.work, self.distance)


def run_without(
    model: Ensemble,
    off: Sequence[Head],
    samples: CircuitData,
    batch_size: int,
    work: Work,
    distance: Distance | None = None,
) -> Iterator[tuple[IntArray, SampleAnswers]]:
    """Answers of a whole model without some heads to all samples in batches, with their numbers."""
    with masked(model, [Head(head.layer, head.head) for head in off]):
        for group in samples.groups:
            for rows in parts(len(group), batch_size):
                features, logits = (one[0] for one in model.features_and_logits(*group.take(rows)))  # [1, B, …]
                yield group.numbers[rows], SampleAnswers.of(features, logits, distance)
    work["layer_evaluations"] += len(samples.labels) * len(model.config.head_counts)
    work["multiply_adds"] += forward_cost(model, samples)


_CHUNKS = 16  # parts in which a candidate is evaluated
_LARGEST_CHUNK = 128
_TOGETHER = {"cuda": 16, "cpu": 4}  # candidates advanced at once, at least
_PAIRS = {"cuda": 1024, "cpu": 32}  # pairs of candidate and sample that are worth a sweep


class Exact(Search):
    """Branch and bound over the candidates of this rank, in step with the other ranks.

    All candidates see the samples in one order, hardest first. The integers of a candidate on the samples it has seen
    are a lower bound of its result; one whose bound is above a complete result need not go on, and neither need one
    that makes more errors than it may.
    """

    def __init__(self, tower: CachedTower, objective: Objective, ranks: Ranks) -> None:
        self.tower, self.objective, self.ranks = tower, objective, ranks
        dtype, device = tower.model.ensemble.dtype, tower.model.ensemble.device
        self.current = Tally(tower.samples, objective, [NO_HEAD], dtype)  # of the model as it is
        self._answers = Tally(tower.samples, objective, tower.candidates, dtype)
        self._chunk = min(-(-objective.samples // _CHUNKS), _LARGEST_CHUNK)
        kind = "cuda" if device.type == "cuda" else "cpu"
        self._together = max(_TOGETHER[kind], _PAIRS[kind] // self._chunk)
        self.answer()

    @torch.no_grad()
    def answer(self) -> None:
        """Answer all samples anew from the features of the model as it is; no block is run."""
        self.result = self.current.result(self.tower.answers())
        self.hardest_first = self.objective.hardest_first(self.current.wrong[0], self.current.confidence[0])

    def remove(self, head: Head) -> None:
        """Take a head out for good."""
        self.tower.remove(head)
        self.answer()

    @torch.no_grad()
    def choose(self, candidates: Sequence[Head], known: Result | None = None) -> Result:
        """The candidate whose removal leaves the best score; `known` is one whose result is known already."""
        self._answers.clear()
        heads = [head for head in candidates if head in self.tower.of_rank and (known is None or head != known.head)]
        seen = dict.fromkeys(heads, 0)  # samples that each candidate was evaluated on
        bounds: dict[Head, Result] = {}
        self._advance(seen, bounds, dict.fromkeys(heads, self._chunk))
        while True:
            done = {head for head, count in seen.items() if count == self.objective.samples or bounds[head].over}
            complete = [bounds[head] for head in heads if head in done]
            waiting = [bounds[head] for head in heads if head not in done]
            everywhere = self.ranks.gather((min(complete, default=None), min(waiting, default=None)))
            best = min(filter(None, (known, *(result for result, _ in everywhere))), default=None)
            self.tell(len(complete) + sum(best is not None and bound > best for bound in waiting))
            if best is not None and not any(bound is not None and bound < best for _, bound in everywhere):
                return best
            self._advance(seen, bounds, self._next(sorted(waiting), None if best is None or best.over else best))

    def _next(self, waiting: Sequence[Result], best: Result | None) -> dict[Head, int]:
        """How many more samples to evaluate for which candidates, given their bounds, the smallest first.

        The first goes to its end: a good result early ends the others early. Then the smallest bounds go on by chunks.
        """
        if best is None:
            return {bound.head: self.objective.samples for bound in waiting[:1]}
        smallest = [bound for bound in waiting if bound < best][: self._together]
        return {bound.head: self._chunk * max(1, self._together // len(smallest)) for bound in smallest}

    def _advance(self, seen: dict[Head, int], bounds: dict[Head, Result], amounts: Mapping[Head, int]) -> None:
        """Evaluate candidates on that many more samples each, all of them together."""
        if not amounts:
            return
        numbers = [self.hardest_first[seen[head] :][:amount] for head, amount in amounts.items()]
        index = self.tower.index(list(amounts))
        self.tower.run(np.repeat(index, [len(part) for part in numbers]), np.concatenate(numbers), self._answers.record)
        for part, result in zip(numbers, self._answers.results(index), strict=True):
            seen[result.head] += len(part)
            bounds[result.head] = result
