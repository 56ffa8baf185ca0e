"""A row of the studies of classifiers: how its model is made, what half B chooses from, what it costs to train."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .seed import Heads, Seed, Setting
from .task import Task

Model = Any
"""An `Ensemble`, or what answers with a `Prediction` as one does (`predict`)."""

PRETRAINED = ("image", "text")  # kinds of tasks that start from a pretrained model
EVERY = (*PRETRAINED, "scratch")


def as_it_is(task: Task) -> list[Setting]:
    """A row without settings to choose from."""
    return [{}]


def rate_of(setting: Setting) -> float:
    """The rate that was chosen."""
    return float(setting["rate"])


@dataclass(frozen=True)
class Row:
    """A method: its model for a seed and a setting, and the trainings of a whole model that it takes, Single's too.

    Trainings are counted in passes forwards and backwards over the training data of Single, D.2 as one, and rounded up;
    where settings differ, those of the dearest one.
    """

    make: Callable[[Seed, Setting], Model]
    trainings: float
    settings: Callable[[Task], list[Setting]] = as_it_is  # that half B of the first seed chooses from
    like: str | None = None  # the row whose setting it has
    kinds: Sequence[str] = PRETRAINED
    only: str | None = None  # the task that has it
    paper: tuple[Heads, int] | None = None  # the heads that its members lose, where they are the paper's, and how many

    def options(self, task: Task) -> list[Setting]:
        """The settings to choose from; one is sealed all the same, for rows that are like this one."""
        found = self.settings(task) if self.like is None else []
        return [] if found == [{}] else found

    def model(self, seed: Seed, name: str) -> Model:
        """Its model by the setting that was chosen."""
        if self.like is not None or self.options(seed.task):
            return self.make(seed, seed.chosen(self.like or name))
        return self.make(seed, {})
