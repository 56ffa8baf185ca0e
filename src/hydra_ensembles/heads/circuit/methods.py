"""The three methods behind one face: choose, check the choice, remove."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...ensemble import Ensemble
from ..head import Head
from .choice import Choice
from .current import CurrentModel
from .distributed import Ranks
from .exact import Exact
from .naive import Naive
from .samples import Samples
from .scores import Objective
from .screened import shortlist
from .settings import CircuitSettings
from .work import Work
from .working_model import WorkingModel, working_copy


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What an evaluation needs: a private copy of the model, the data, the aim, and means."""

    model: Ensemble
    samples: Samples
    objective: Objective
    ranks: Ranks
    work: Work
    batch_size: int
    memory_budget: int | None

    def naive(self, off: Sequence[Head]) -> Naive:
        """The reference, with heads off, on a copy of its own."""
        copy = working_copy(self.model, self.model.dtype, self.model.device)
        return Naive(copy, self.samples, self.objective, self.ranks, self.work, self.batch_size, off)

    def exact(self, candidates: Sequence[Head], off: Sequence[Head]) -> Exact:
        """Branch and bound, with heads off."""
        model = WorkingModel(working_copy(self.model, self.model.dtype, self.model.device), self.work)
        for head in off:
            model.drop(head)
        current = CurrentModel(
            model,
            self.samples,
            self.objective,
            candidates,
            self.ranks,
            self.batch_size,
            self.memory_budget,
        )
        return Exact(current, self.ranks, self.batch_size)


class GreedyMethod(Protocol):
    """A way to find the best candidate of each greedy step."""

    def start(self) -> Choice:
        """The result of the model as it is."""

    def choose(self, candidates: Sequence[Head]) -> Choice:
        """The candidate to remove."""

    def audited(self, candidates: Sequence[Head]) -> tuple[Choice, int]:
        """The candidate to remove, and by how many units the method's own choice misses the reference."""

    def remove(self, head: Head) -> None:
        """Leave a head off from now on."""


class NaiveMethod:
    """The reference itself."""

    def __init__(self, naive: Naive) -> None:
        self.naive = naive

    def start(self) -> Choice:
        """The result of the model as it is."""
        return self.naive.evaluate(None)

    def choose(self, candidates: Sequence[Head]) -> Choice:
        """The best candidate."""
        return self.naive.choose(candidates)

    def audited(self, candidates: Sequence[Head]) -> tuple[Choice, int]:
        """The best candidate; there is nothing to check it against."""
        return self.choose(candidates), 0

    def remove(self, head: Head) -> None:
        """Leave a head off from now on."""
        self.naive.remove(head)


class ExactMethod:
    """Branch and bound, audited by the naive method."""

    def __init__(self, exact: Exact, referee: Naive | None) -> None:
        self.exact, self.referee = exact, referee

    def start(self) -> Choice:
        """The result of the model as it is."""
        return self.exact.current.choice

    def choose(self, candidates: Sequence[Head]) -> Choice:
        """The best candidate."""
        return self.exact.choose(candidates)

    def audited(self, candidates: Sequence[Head]) -> tuple[Choice, int]:
        """The best candidate, and how far it is from the best by the naive method's own count."""
        choice = self.choose(candidates)
        if self.referee is None:
            return choice, 0
        return choice, self.referee.evaluate(choice.head).value - self.referee.choose(candidates).value

    def remove(self, head: Head) -> None:
        """Leave a head off from now on."""
        self.exact.current.remove(head)
        if self.referee is not None:
            self.referee.remove(head)


class ScreenedMethod:
    """Branch and bound over the candidates a gradient finds promising, audited by branch and bound over all."""

    def __init__(self, exact: Exact, size: int) -> None:
        self.exact, self.size = exact, size

    def start(self) -> Choice:
        """The result of the model as it is."""
        return self.exact.current.choice

    def choose(self, candidates: Sequence[Head]) -> Choice:
        """The best of the most promising candidates."""
        promising = shortlist(self.exact.current, candidates, self.size)
        return self.exact.choose(self.exact.ranks.from_first(promising))

    def audited(self, candidates: Sequence[Head]) -> tuple[Choice, int]:
        """The best candidate, and how far from it the screened choice was."""
        screened = self.choose(candidates)
        best = self.exact.choose(candidates, known=screened)
        return best, screened.value - best.value

    def remove(self, head: Head) -> None:
        """Leave a head off from now on."""
        self.exact.current.remove(head)


def start_method(
    settings: CircuitSettings, evaluation: Evaluation, candidates: Sequence[Head], off: Sequence[Head]
) -> GreedyMethod:
    """Set a method up for a model without the heads in `off`, to choose among the candidates."""
    if settings.method == "naive":
        return NaiveMethod(evaluation.naive(off))
    exact = evaluation.exact(candidates, off)
    if settings.method == "screened":
        return ScreenedMethod(exact, settings.screen_size)
    return ExactMethod(exact, evaluation.naive(off) if settings.audit_steps else None)
