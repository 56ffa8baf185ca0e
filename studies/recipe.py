"""The recipe of a study: everything that decides what it does, read from YAML and checked."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

from hydra_ensembles._utils import require
from hydra_ensembles.data.suites import SUITES
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.fuse import Fusion
from hydra_ensembles.prediction import ScoreName
from hydra_ensembles.schema import ADDED_LATER, from_plain, to_plain
from hydra_ensembles.training.recipe import Recipe

from .compact_logits import Storing
from .specs import Control, MemberSet

STUDIES = ("vision-cifar10", "vision-tinyimagenet", "text-sst2")
Backbone = Literal["dinov2_vits14", "all_minilm_l6_v2"]
SPLIT_SEED = 0  # of every split: made once, the same for all seeds of a study


@dataclass(frozen=True)
class Counts:
    """How many samples each part of a study reads; None for all there are.

    Attributes:
        train: Training samples of a backbone.
        member_train: Training samples of a pruned member.
        circuits: ID and OOD samples, each, that a circuit is extracted on.
        choose: ID and OOD samples, each, that settings are chosen on.
        test: Samples of each test set.
        taylor_batches: Batches that a Taylor ranking reads.
    """

    train: int | None
    member_train: int | None
    circuits: int
    choose: int | None
    test: int | None
    taylor_batches: int


@dataclass(frozen=True)
class Dropout:
    """MC Dropout: rates to choose from, and the number of passes."""

    rates: tuple[float, ...]
    passes: int

    def __post_init__(self) -> None:
        """Check the rates."""
        if not self.rates or not all(0.0 < rate < 1.0 for rate in self.rates) or self.passes < 1:
            raise ConfigError(f"dropout takes rates between 0 and 1 and at least one pass, got {self}")


@dataclass(frozen=True)
class StudyRecipe:
    """One study.

    Attributes:
        name: Name of the study.
        suite: Suite of `hydra_ensembles.data` that names its sets.
        backbone: Pretrained model.
        input_size: Side of the images, or the largest number of tokens.
        members: Members of every ensemble.
        seeds: Seeds of the headline rows.
        explore_seeds: Seeds whose half B chooses the settings.
        open_layers: Only heads of so many layers at the end may be pruned; None for all layers.
        counts: Sample counts.
        trainings: Fine-tuning recipes by name. `backbone` makes the backbones; `classifier`, where there is one,
            trains new classifiers on a frozen backbone.
        paper: The prune count and training of the paper's setting: three circuits, MLPs fused.
        controls: Further rows with fixed settings.
        explore: Sets of members that may become Hydra (Circ).
        explore_trunk: Sets that may become Hydra (Circ) with a shared trunk.
        fusions: What may become of their MLPs.
        scores: OOD scores that may be chosen.
        trunk_cost: Most multiply-adds of the ensemble with a shared trunk, over those of a single model.
        dropout: MC Dropout.
        logit_step: How finely logits are stored; see `Storing`.
        keep_classes: Classes of an ID sample whose logits are stored one by one; None for all.
        ood_keep_classes: The same of an OOD sample; None for as many as of an ID sample.
        cost_batch: Inputs a batch when latency is measured.
        accuracy_weight: Weight of ID accuracy against OOD AUROC where settings are chosen.
        ood_halves: How the circuit OOD data are cut in two: `images` of every class, or whole `classes`, so that
            settings are chosen on OOD classes that ranked no head.
    """

    name: str
    suite: str
    backbone: Backbone
    input_size: int
    members: int
    seeds: tuple[int, ...]
    explore_seeds: tuple[int, ...]
    counts: Counts
    trainings: Mapping[str, Recipe]
    paper: MemberSet
    explore: tuple[MemberSet, ...]
    explore_trunk: tuple[MemberSet, ...]
    fusions: tuple[Fusion, ...]
    scores: tuple[ScoreName, ...]
    trunk_cost: float
    dropout: Dropout
    cost_batch: int
    logit_step: float
    keep_classes: int | None = None
    open_layers: int | None = None
    accuracy_weight: float = 0.5
    ood_keep_classes: int | None = field(default=None, metadata=ADDED_LATER)
    controls: tuple[Control, ...] = field(default=(), metadata=ADDED_LATER)
    ood_halves: Literal["images", "classes"] = field(default="images", metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        """Check that everything named exists and that chosen settings come from somewhere."""
        if self.name not in STUDIES or self.suite not in SUITES:
            raise ConfigError(f"studies are {list(STUDIES)} over a known suite, got {self.name!r} over {self.suite!r}")
        if not self.seeds or not set(self.explore_seeds) <= set(self.seeds) or not self.explore_seeds:
            raise ConfigError(f"explore_seeds {self.explore_seeds} must be some of the seeds {self.seeds}")
        if "backbone" not in self.trainings:
            raise ConfigError(f"the recipe has no training called 'backbone'; it has {sorted(self.trainings)}")
        for one in self.member_sets:
            if one.training is not None and one.training not in self.trainings:
                raise ConfigError(f"{one.key} needs a training that is not there; known are {sorted(self.trainings)}")
        if not self.explore or not self.explore_trunk or not self.fusions or not self.scores:
            raise ConfigError("explore, explore_trunk, fusions and scores must each list at least one choice")
        if self.paper.heads != "circuits" or self.paper.trunk:
            raise ConfigError(f"the paper's setting is three circuits without a trunk, got {self.paper.key}")
        if any(one.heads not in ("circuits", "sampled") for one in (*self.explore, *self.explore_trunk)):
            raise ConfigError("Hydra (Circ) is chosen among circuits and members sampled from one; see explore")
        if len({one.name for one in self.controls}) != len(self.controls):
            raise ConfigError(f"controls need names of their own, got {[one.name for one in self.controls]}")
        if self.ood_halves not in ("images", "classes"):
            raise ConfigError(f"ood_halves must be 'images' or 'classes', got {self.ood_halves!r}")
        if any(one.trunk for one in self.explore) or not all(one.trunk for one in self.explore_trunk):
            raise ConfigError("sets with a trunk belong in explore_trunk, and only they")
        if not 0.0 <= self.accuracy_weight <= 1.0 or self.members < 2:
            raise ConfigError("accuracy_weight lies between 0 and 1, and members is at least 2")
        for group in ("id", "near"):
            self.storing(group)  # checks itself

    @property
    def kind(self) -> Literal["image", "text"]:
        """What the study looks at."""
        return "image" if self.backbone == "dinov2_vits14" else "text"

    def storing(self, group: str) -> Storing:
        """How logits of a set of a group (`id` or another) are stored."""
        keep = self.keep_classes if group == "id" or self.ood_keep_classes is None else self.ood_keep_classes
        return Storing(self.logit_step, keep)

    @property
    def member_sets(self) -> tuple[MemberSet, ...]:
        """Every set of members that a row or a candidate is made of."""
        controls = (one.members for one in self.controls if one.members is not None)
        return (self.paper, self.taylor, self.random, *controls, *self.explore, *self.explore_trunk)

    @property
    def taylor(self) -> MemberSet:
        """Members by Taylor rankings, in the paper's setting."""
        return replace(self.paper, heads="taylor")

    @property
    def random(self) -> MemberSet:
        """Members that lose random heads, in the paper's setting."""
        return replace(self.paper, heads="random")

    @property
    def digest(self) -> str:
        """A short name for the whole recipe."""
        return digest_of(to_plain(self))


def digest_of(plain: Any) -> str:
    """A short name for plain data."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def recipe_text(name: str) -> str:
    """The YAML of a study.

    Raises:
        ConfigError: There is no such study.
    """
    if name not in STUDIES:
        raise ConfigError(f"no study {name!r}; choose one of {', '.join(STUDIES)}")
    return (resources.files(__package__) / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


def load_recipe(name: str, tiny: bool = False) -> StudyRecipe:
    """The recipe of a study; with `tiny`, the same stages in counts that a CPU does in a minute."""
    plain = require("yaml", extra="cli").safe_load(recipe_text(name))
    recipe = from_plain(StudyRecipe, plain, f"{name}.yaml")
    recipe = replace(recipe, trainings=MappingProxyType(dict(recipe.trainings)))
    return _tiny(recipe) if tiny else recipe


TINY_COUNTS = Counts(train=16, member_train=16, circuits=6, choose=6, test=3, taylor_batches=1)


TINY_SIZES: Mapping[str, int] = MappingProxyType({"image": 56, "text": 24})


def _tiny(recipe: StudyRecipe) -> StudyRecipe:
    """Only counts shrink: samples, pixels, tokens, steps, heads and layers to prune, variants to explore."""

    def fewer(one: MemberSet) -> MemberSet:
        prune = max(2, one.prune // 6)
        return replace(one, prune=prune, pool=None if one.pool is None else 2 * prune)

    def shorter(training: Recipe) -> Recipe:
        return replace(
            training, epochs=None, steps=1, warmup=0, patience=None, evaluate_every=None, batch_size=4, grid=()
        )

    kinds = {one.heads: one for one in reversed(recipe.explore)}
    return replace(
        recipe,
        seeds=recipe.seeds[:1],
        explore_seeds=recipe.seeds[:1],
        input_size=TINY_SIZES[recipe.kind],
        open_layers=2,
        counts=TINY_COUNTS,
        trainings={name: shorter(one) for name, one in recipe.trainings.items()},
        paper=fewer(recipe.paper),
        explore=tuple(fewer(kinds[heads]) for heads in ("circuits", "sampled") if heads in kinds),
        explore_trunk=tuple(fewer(one) for one in recipe.explore_trunk[-1:]),
        controls=tuple(
            one if one.members is None else replace(one, members=fewer(one.members)) for one in recipe.controls
        ),
        dropout=Dropout(recipe.dropout.rates[:2], passes=2),
        cost_batch=2,
    )
