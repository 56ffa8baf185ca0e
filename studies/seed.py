"""One seed of a study of classifiers: its models, made once and cached in its folder."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import hydra_ensembles as he
from hydra_ensembles import HeadRanking, Recipe
from hydra_ensembles.errors import DataError
from hydra_ensembles.files import read_json
from hydra_ensembles.heads.members import (
    CIRCUIT_ORDER,
    Members,
    Score,
    circuit_members,
    distinct_taylor,
    random_members,
)

from .samples import SampleBatches
from .seed_folder import CHOICES, SeedFolder, slug
from .storing import SINGLE
from .task import Task
from .weights import fresh_classifier, redrawn

IDENTITY = "run.json"  # of a task: the settings its models were made with
SPARE = 3  # extra heads that a circuit ranks, for members that would otherwise be equal
Heads = Literal["circuits", "taylor", "random"]
Setting = Mapping[str, Any]


class NotChosenError(DataError):
    """Half B has not chosen a setting for this row yet."""


class Seed(SeedFolder):
    """Models of one seed of a task."""

    def __init__(self, task: Task, number: int, output: Path) -> None:
        super().__init__(output / task.name, number, task.device)
        self.task = task
        self.require_same(self.study / IDENTITY, task.identity)

    @property
    def members(self) -> int:
        """Number of members of an ensemble."""
        return int(self.task.settings["members"])

    def chosen(self, row: str) -> Setting:
        """The setting that half B chose for a row."""
        path = self.study / CHOICES / f"{slug(row)}.json"
        if not path.exists():
            raise NotChosenError(f"no setting of {row!r} is chosen yet for {self.task.name}; run its stage `choose`")
        return read_json(path)["setting"]

    def trained(self, name: str, start: Callable[[], he.Ensemble], training: Recipe) -> he.Ensemble:
        """Train the model of `start()` with a recipe; cached by name."""
        task = self.task
        held_out = task.batches(task.half_b) if training.patience is not None else None
        return self.kept(name, lambda: he.finetune(start(), task.lessons(training), training, held_out, progress=False))

    def training(self, **changes: Any) -> Recipe:
        """Single's recipe; if it has several learning rates, with the one that half B chose."""
        if len(self.task.training().rates) > 1 and "learning_rate" not in changes:
            changes["learning_rate"] = float(self.chosen(SINGLE)["rate"])
        return self.task.training(**changes)

    def single(self, index: int = 0, rate: float | None = None) -> he.Ensemble:
        """A fine-tuning with its own classifier, data order and augmentation; `rate` overrides the learning rate."""
        seed = self.derived("backbone", index)
        training = self.training(seed=seed, **({} if rate is None else {"learning_rate": rate}))
        suffix = f"-rate-{training.learning_rate:g}" if len(self.task.training().rates) > 1 else ""
        return self.trained(f"single-{index}{suffix}", lambda: self.fresh(seed), training)

    def fresh(self, seed: int) -> he.Ensemble:
        """The start of a training: the pretrained model with a classifier drawn by the seed, or all weights drawn."""
        start = self.task.start()
        return redrawn(start, seed) if self.task.scratch else fresh_classifier(start, seed)

    @cached_property
    def base(self) -> he.Ensemble:
        """The model a user has."""
        return self.single()

    @cached_property
    def singles(self) -> list[he.Ensemble]:
        """As many fine-tunings as an ensemble has members; the first is Single."""
        return [self.base, *(self.single(index) for index in range(1, self.members))]

    # --- heads -------------------------------------------------------------------------------------------------------

    def circuit(self, score: Score, budget: int | None = None, layers: Sequence[int] | None = None) -> HeadRanking:
        """A circuit of Single on the ranking samples; ranks `budget` heads, by default enough for the paper's share."""
        count = budget or self.prune + SPARE
        lowest = 0 if layers is None else min(layers)
        return self.extracted(f"{score}-{count}-{lowest}", self.sides, score=score, budget=count, layers=layers)

    def sides(self) -> tuple[he.Ensemble, SampleBatches, SampleBatches]:
        """Inputs of circuit extraction: Single, and the ID and OOD samples that rank heads."""
        return self.base, self.task.batches(self.task.ranking), self.task.batches(self.task.foreign)

    def taylor(self, draw: int = 0, budget: int | None = None) -> HeadRanking:
        """A Taylor ranking of Single on randomly drawn batches; `draw` is part of the random seed."""
        count = budget or self.prune
        task = self.task
        batches = SampleBatches(task.train, 128, training=True)

        def rank() -> HeadRanking:
            drawn = self.derived("taylor", draw)
            used = task.settings["taylor_batches"]
            return he.taylor(self.base, batches, budget=count, seed=drawn, calibration_batches=used)

        return self.ranked(f"taylor-{count}-{draw}", rank)

    @property
    def prune(self) -> int:
        """Heads that each of the paper's members loses."""
        return int(self.task.plain["recovery"]["prune"])

    def heads(self, kind: Heads) -> Members:
        """The heads that each of the paper's members loses."""
        if kind == "random":
            return random_members(self.base, self.prune, self.members, self.number)
        if kind == "taylor":
            return tuple(one.first(self.prune) for _, one in distinct_taylor(self.taylor, self.prune, self.members))
        return circuit_members({score: self.circuit(score) for score in CIRCUIT_ORDER}, self.prune, self.members)

    def lost(self, kind: Heads, index: int) -> Sequence[he.Head]:
        """The heads that one of the paper's members loses; the first by Taylor exists even if no second one differs."""
        return self.taylor().first(self.prune) if (kind, index) == ("taylor", 0) else self.heads(kind)[index]

    # --- the paper's members -----------------------------------------------------------------------------------------

    def recovered(self, kind: Heads, index: int, rate: float, **changes: Any) -> he.Ensemble:
        """One of the paper's members: Single without its heads, trained by D.2."""
        suffix = "".join(f"-{key}-{value}" for key, value in changes.items())
        training = self.task.recovery(seed=self.derived("recovery", index), learning_rate=rate, **changes)
        return self.trained(
            f"{kind}-{index}-rate-{rate:g}{suffix}", lambda: he.prune(self.base, self.lost(kind, index)), training
        )

    def whole_recovered(self, rate: float) -> he.Ensemble:
        """Single, trained by D.2 with nothing pruned."""
        training = self.task.recovery(seed=self.derived("recovery", 0), learning_rate=rate)
        return self.trained(f"whole-rate-{rate:g}", lambda: self.base, training)
