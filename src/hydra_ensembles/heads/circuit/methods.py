"""The three methods behind one face: choose, check the choice, remove."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ...ensemble import Ensemble
from ..head import Head
from .choice import Choice
from .current import CurrentModel
from .distributed import Ranks
from .exact import Exact
from .memory import default_budget
from .naive import Naive
from .samples import Samples
from .scores import Objective
from .screened import Screen
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

    def exact(self, candidates: Sequence[Head], off: Sequence[Head], memory_share: float = 1.0) -> Exact:
        """Branch and bound, with heads off, with a share of the memory."""
        return Exact(self._current(candidates, off, self.model.dtype, self.batch_size, memory_share), self.ranks)

    def half_precision(self, candidates: Sequence[Head], off: Sequence[Head], memory_share: float) -> CurrentModel:
        """The model in bfloat16, with heads off, in few large batches."""
        return self._current(candidates, off, torch.bfloat16, 4 * self.batch_size, memory_share)

    def _current(
        self, candidates: Sequence[Head], off: Sequence[Head], dtype: torch.dtype, batch_size: int, memory_share: float
    ) -> CurrentModel:
        model = WorkingModel(working_copy(self.model, dtype, self.model.device), self.work)
        for head in off:
            model.drop(head)
        budget = default_budget(self.model.device) if self.memory_budget is None else self.memory_budget
        return CurrentModel(
            model, self.samples, self.objective, candidates, self.ranks, batch_size, int(budget * memory_share)
        )


class GreedyMethod(Protocol):
    """A way to take greedy steps."""

    def start(self) -> Choice:
        """The result of the model as it is."""

    def take(self, candidates: Sequence[Head], audit: bool) -> tuple[Choice, int | None]:
        """Choose one of the candidates and leave it off from now on.

        Returns:
            The head with its result; and, when audited, by how many units the method's own choice misses
            that of its reference.
        """


class NaiveMethod:
    """The reference itself; there is nothing to audit it by."""

    def __init__(self, naive: Naive) -> None:
        self.naive = naive

    def start(self) -> Choice:
        """The result of the model as it is."""
        return self.naive.evaluate(None)

    def take(self, candidates: Sequence[Head], audit: bool) -> tuple[Choice, int | None]:
        """Remove the best candidate."""
        choice = self.naive.choose(candidates)
        self.naive.remove(choice.head)
        return choice, 0 if audit else None


class ExactMethod:
    """Branch and bound, audited by the naive method."""

    def __init__(self, exact: Exact, referee: Naive | None) -> None:
        self.exact, self.referee = exact, referee

    def start(self) -> Choice:
        """The result of the model as it is."""
        return self.exact.current.choice

    def take(self, candidates: Sequence[Head], audit: bool) -> tuple[Choice, int | None]:
        """Remove the best candidate; audited, hold it against the best by the naive method's own count."""
        choice, excess = self.exact.choose(candidates), None
        if self.referee is not None:
            if audit:
                excess = self.referee.evaluate(choice.head).value - self.referee.choose(candidates).value
            self.referee.remove(choice.head)
        self.exact.current.remove(choice.head)
        return choice, excess


class ScreenedMethod:
    """Evaluation of the candidates that a gradient finds promising, audited by branch and bound over all.

    Args:
        exact: The model whose results are reported.
        screen: Chooses; where it pays, by the same model in half precision.
    """

    def __init__(self, exact: Exact, screen: Screen) -> None:
        self.exact, self.screen = exact, screen

    def start(self) -> Choice:
        """The result of the model as it is."""
        return self.exact.current.choice

    def take(self, candidates: Sequence[Head], audit: bool) -> tuple[Choice, int | None]:
        """Remove the best of the promising candidates; audited, hold it against the best of all."""
        head, excess = self.screen.choose(candidates), None
        if audit:
            screened = self.exact.choose([head])
            excess = screened.value - self.exact.choose(candidates, known=screened).value
        self.exact.current.remove(head)
        if self.screen.current is not self.exact.current:
            self.screen.current.remove(head)
        return replace(self.exact.current.choice, head=head), excess


def start_method(
    settings: CircuitSettings, evaluation: Evaluation, candidates: Sequence[Head], off: Sequence[Head]
) -> GreedyMethod:
    """Set a method up for a model without the heads in `off`, to choose among the candidates."""
    if settings.method == "naive":
        return NaiveMethod(evaluation.naive(off))
    if settings.method == "exact":
        referee = evaluation.naive(off) if settings.audit_steps else None
        return ExactMethod(evaluation.exact(candidates, off), referee)
    if evaluation.model.device.type == "cuda" and settings.dtype == torch.float32:
        coarse = evaluation.half_precision(candidates, off, memory_share=0.5)
        exact = evaluation.exact(candidates, off, memory_share=0.5)
        return ScreenedMethod(exact, Screen(coarse, evaluation.ranks, settings.screen_size))
    exact = evaluation.exact(candidates, off)
    return ScreenedMethod(exact, Screen(exact.current, evaluation.ranks, settings.screen_size))
