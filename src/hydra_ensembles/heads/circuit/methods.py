"""The three methods behind one face: choose, check the choice, remove."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from ..._distributed import Ranks
from ...model.ensemble import Ensemble
from ..head import Head
from .choice import Choice
from .current import CurrentModel, CurrentTower
from .exact import Exact
from .joint import JointExact, JointNaive, TextCandidates
from .memory import default_budget
from .naive import Naive
from .samples import Samples
from .scores import Objective
from .screened import AFRESH, FastErrors, Screen
from .settings import CircuitSettings
from .subject import of_tower
from .texts import Texts, use_classes
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
    texts: Texts | None = None

    def naive(self, off: Sequence[Head]) -> Naive:
        """The reference, with heads off, on a copy of its own."""
        arguments = (_copy(self.model), self.samples, self.objective, self.ranks, self.work, self.batch_size, off)
        if self.texts is None:
            return Naive(*arguments)
        return JointNaive(*arguments, texts=replace(self.texts, tower=_copy(self.texts.tower)))

    def exact(self, candidates: Sequence[Head], off: Sequence[Head], carry: bool = True) -> Exact:
        """Branch and bound, with heads off; without `carry`, candidates keep nothing from step to step."""
        return self._exact(_copy(self.model), candidates, off, carry, self._budget)

    def joint(self, texts: Texts, candidates: Sequence[Head], off: Sequence[Head]) -> JointExact:
        """The same over the heads of both towers."""
        tower = self._working(_copy(texts.tower), of_tower(off, text=True))
        heads = of_tower(candidates, text=True)
        current = CurrentTower(tower, texts.prompts, heads, self.ranks, self.batch_size, self._budget // 4)
        text_candidates = TextCandidates(texts, current)
        model = _copy(self.model)
        use_classes(model, text_candidates.classes())
        heads, off = of_tower(candidates, text=False), of_tower(off, text=False)
        return JointExact(self._exact(model, heads, off, True, self._budget - self._budget // 4), text_candidates)

    @cached_property
    def _budget(self) -> int:
        return default_budget(self.model.device) if self.memory_budget is None else self.memory_budget

    def _working(self, model: Ensemble, off: Sequence[Head]) -> WorkingModel:
        working = WorkingModel(model, self.work)
        for head in off:
            working.drop(head)
        return working

    def _exact(
        self, model: Ensemble, candidates: Sequence[Head], off: Sequence[Head], carry: bool, budget: int
    ) -> Exact:
        working = self._working(model, off)
        current = CurrentModel(
            working, self.samples, self.objective, candidates, self.ranks, self.batch_size, budget, carry
        )
        return Exact(current, self.ranks)


def _copy(model: Ensemble) -> Ensemble:
    return working_copy(model, model.dtype, model.device)


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

    def __init__(self, exact: Exact | JointExact, referee: Naive | None) -> None:
        self.exact, self.referee = exact, referee

    def start(self) -> Choice:
        """The result of the model as it is."""
        return self.exact.result

    def take(self, candidates: Sequence[Head], audit: bool) -> tuple[Choice, int | None]:
        """Remove the best candidate; audited, hold it against the best by the naive method's own count."""
        choice, excess = self.exact.choose(candidates), None
        if self.referee is not None:
            if audit:
                excess = self.referee.evaluate(choice.head).value - self.referee.choose(candidates).value
            self.referee.remove(choice.head)
        self.exact.remove(choice.head)
        return choice, excess


class ScreenedMethod:
    """Measures the candidates that are expected to be good, audited by branch and bound over all.

    Args:
        exact: The model whose results are reported.
        screen: Chooses, by the same model.
    """

    def __init__(self, exact: Exact, screen: Screen | FastErrors) -> None:
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
        return replace(self.exact.current.choice, head=head), excess

    def repeat(self, candidates: Sequence[Head], head: Head) -> None:
        """Take a step whose result is known, to remember what was measured in it."""
        self.screen.choose(candidates)
        self.exact.current.remove(head)


def start_method(
    settings: CircuitSettings, evaluation: Evaluation, candidates: Sequence[Head], done: Sequence[Head]
) -> GreedyMethod:
    """Set a method up to go on after some steps.

    Args:
        settings: What to do.
        evaluation: What to do it with.
        candidates: The heads that could be chosen at the first step.
        done: Those that were chosen so far.
    """
    remembers = settings.method == "screened" and settings.score != "acc"
    repeated = len(done) % AFRESH if remembers else 0
    skipped = len(done) - repeated
    off = [*settings.removed, *done[:skipped]]
    left = [head for head in candidates if head not in done[:skipped]]
    if settings.method == "naive":
        return NaiveMethod(evaluation.naive(off))
    if settings.method == "exact":
        referee = evaluation.naive(off) if settings.audit_steps else None
        if evaluation.texts is not None:
            return ExactMethod(evaluation.joint(evaluation.texts, left, off), referee)
        return ExactMethod(evaluation.exact(left, off), referee)
    exact = evaluation.exact(left, off, carry=False)
    screen = Screen(exact, settings.screened(len(candidates)), skipped) if remembers else FastErrors(exact)
    screened = ScreenedMethod(exact, screen)
    for head in done[skipped:]:
        screened.repeat(left, head)
        left.remove(head)
    return screened
