"""Recipes of the studies: everything that decides what a study does, read from YAML and checked."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from hydra_ensembles.errors import ConfigError
from hydra_ensembles.fuse import Fusion
from hydra_ensembles.prediction import ScoreName
from hydra_ensembles.schema import from_plain, to_plain
from hydra_ensembles.training.recipe import Recipe

FOLDER = Path(__file__).parent / "recipes"
CLASSIFIERS = ("vision-cifar10", "vision-tinyimagenet", "text-sst2")
ZERO_SHOT = "zero-shot"
SUITES = {"shared": ZERO_SHOT, "paper": "zero-shot-paper"}  # of the zero-shot study, and their recipes

Backbone = Literal["dinov2_vits14", "all_minilm_l6_v2"]
Inputs = Literal["image", "text"]
INPUTS: Mapping[Backbone, Inputs] = {"dinov2_vits14": "image", "all_minilm_l6_v2": "text"}
TINY_SIZES: Mapping[Inputs, int] = {"image": 56, "text": 24}


def _require(*rules: tuple[object, str]) -> None:
    """Refuse the first rule that does not hold, with its message."""
    for holds, message in rules:
        if not holds:
            raise ConfigError(message)


@dataclass(frozen=True)
class MemberSet:
    """Members of one ensemble: how their heads are chosen and how they are trained.

    Heads: `circuits` (CircAvg, CircAcc, CircOOD), `sampled` (drawn from the first `pool` heads of CircAvg), `taylor`
    (one ranking for each member, on other batches), `random` (the control). `finetuned` members are pruned from the
    single model, and the training recovers. `pretrained` ones are the pretrained model with a classifier of their own,
    pruned where the single model says so, and the training is a whole fine-tuning on all training data; a trunk is
    still the single model's.
    """

    heads: Literal["circuits", "sampled", "taylor", "random"]
    prune: int  # heads each member loses
    trunk: int = 0  # layers at the start that stay whole and common
    training: str | None = "standard"  # of the recipe; None leaves the members as pruned
    pool: int | None = None
    start: Literal["finetuned", "pretrained"] = "finetuned"

    def __post_init__(self) -> None:
        pooled = (self.pool or 0) > self.prune if self.heads == "sampled" else self.pool is None
        _require(
            (self.prune >= 1 and self.trunk >= 0, f"prune is at least 1 and trunk 0, got {self.prune}, {self.trunk}"),
            (pooled, f"pool={self.pool}: sampled members need one of more than {self.prune} heads, others none"),
            (self.start == "finetuned" or self.training, "members from the pretrained model need training"),
        )

    @property
    def key(self) -> str:
        """A name that tells this set from all others of a recipe."""
        pool = "" if self.pool is None else f"-of-{self.pool}"
        start = "" if self.start == "finetuned" else "-from-pretrained"
        return f"{self.heads}-{self.prune}{pool}-trunk{self.trunk}-{self.training or 'untrained'}{start}"

    def member(self, index: int) -> str:
        """The unit of one member by itself."""
        return f"member/{self.key}/{index}"

    def units(self, mlp: Fusion, count: int) -> tuple[str, ...]:
        """The units of the ensemble: one where MLPs are averaged, each member where they are apart."""
        return (f"fused/{self.key}",) if mlp == "mean" else tuple(self.member(index) for index in range(count))


@dataclass(frozen=True)
class Control:
    """A further row of the results, whose settings are fixed: it tells what a part of the method brings."""

    name: str
    members: MemberSet | None  # None: the backbones of Deep Ensembles, with averaged MLPs
    mlp: Fusion = "mean"


@dataclass(frozen=True)
class Dropout:
    """MC Dropout: rates to choose from, and the number of passes."""

    rates: tuple[float, ...]
    passes: int


@dataclass(frozen=True)
class ClassifierCounts:
    """How many samples each part of a study of classifiers reads; None for all there are."""

    train: int | None  # of a backbone
    member_train: int | None  # of a pruned member
    circuits: int  # ID and OOD samples, each, that a circuit is extracted on
    choose: int | None  # ID and OOD samples, each, that settings are chosen on
    test: int | None  # of each test set
    taylor_batches: int


@dataclass(frozen=True)
class ClassifierRecipe:
    """One study of classifiers."""

    KIND: ClassVar[str] = "classifier"
    STAGES: ClassVar[tuple[str, ...]] = ("backbones", "rank", "explore", "choose", "members", "evaluate", "cost")

    name: str
    suite: str
    backbone: Backbone
    input_size: int  # side of the images, or the largest number of tokens
    members: int
    seeds: tuple[int, ...]
    explore_seeds: tuple[int, ...]  # seeds whose half B chooses the settings
    counts: ClassifierCounts
    trainings: Mapping[str, Recipe]  # `backbone`, perhaps `classifier` (alone, on a frozen backbone), those of members
    paper: MemberSet  # the paper's setting: three circuits, trained; MLPs are fused
    explore: tuple[MemberSet, ...]  # what may become Hydra (Circ)
    explore_trunk: tuple[MemberSet, ...]  # what may become Hydra (Circ) with a shared trunk
    fusions: tuple[Fusion, ...]  # what may become of their MLPs
    scores: tuple[ScoreName, ...]  # OOD scores that may be chosen
    trunk_cost: float  # most multiply-adds of the ensemble with a shared trunk, over those of a single model
    dropout: Dropout
    cost_batch: int  # inputs a batch when latency is measured
    open_layers: int | None = None  # only heads of so many layers at the end may be pruned
    controls: tuple[Control, ...] = ()
    ood_halves: Literal["images", "classes"] = "images"  # `classes`: half B has OOD classes that ranked no head

    def __post_init__(self) -> None:
        seeds, explored = self.explore_seeds, (*self.explore, *self.explore_trunk)
        needed = {"backbone", *(one.training for one in self.member_sets if one.training is not None)}
        missing = sorted(needed - set(self.trainings))
        names = [one.name for one in self.controls]
        paper = self.paper.heads == "circuits" and not self.paper.trunk and self.paper.training
        trunks = [bool(one.trunk) for one in explored] == [False] * len(self.explore) + [True] * len(self.explore_trunk)
        kinds = {one.heads for one in explored} <= {"circuits", "sampled"}
        _require(
            (seeds and set(seeds) <= set(self.seeds), f"explore_seeds {seeds} must be some of the seeds {self.seeds}"),
            (not missing, f"trainings {missing} are missing of {sorted(needed)}"),
            (self.explore and self.explore_trunk, "explore and explore_trunk must each list at least one choice"),
            (paper, f"the paper's setting is three circuits, trained, without a trunk; got {self.paper.key}"),
            (kinds, "Hydra (Circ) is chosen among circuits and members sampled from one; see explore"),
            (trunks, "sets with a trunk belong in explore_trunk, and only they"),
            (len(set(names)) == len(names), f"controls need names of their own, got {names}"),
        )

    @property
    def inputs(self) -> Inputs:
        return INPUTS[self.backbone]

    @property
    def taylor(self) -> MemberSet:
        return replace(self.paper, heads="taylor")

    @property
    def random(self) -> MemberSet:
        return replace(self.paper, heads="random")

    @property
    def member_sets(self) -> tuple[MemberSet, ...]:
        """Every set of members that a row or a candidate is made of."""
        controls = (one.members for one in self.controls if one.members is not None)
        return (self.paper, self.taylor, self.random, *controls, *self.explore, *self.explore_trunk)

    def tiny(self) -> "ClassifierRecipe":
        """Only counts shrink: samples, pixels, tokens, steps, heads and layers to prune, variants to explore."""
        kinds = {one.heads: one for one in reversed(self.explore)}
        return replace(
            self,
            seeds=self.seeds[:1],
            explore_seeds=self.seeds[:1],
            input_size=TINY_SIZES[self.inputs],
            open_layers=2,
            counts=ClassifierCounts(train=16, member_train=16, circuits=6, choose=6, test=3, taylor_batches=1),
            trainings={name: _shorter(one, steps=1, batch=4) for name, one in self.trainings.items()},
            paper=_fewer(self.paper),
            explore=tuple(_fewer(kinds[heads]) for heads in ("circuits", "sampled") if heads in kinds),
            explore_trunk=tuple(_fewer(one) for one in self.explore_trunk[-1:]),
            controls=tuple(replace(one, members=one.members and _fewer(one.members)) for one in self.controls),
            dropout=Dropout(self.dropout.rates[:2], passes=2),
            cost_batch=2,
        )


@dataclass(frozen=True)
class PairSet:
    """A set that a dual encoder learns from, by captions or by the names of its classes."""

    source: str
    share: float  # of a batch, over that of all sets
    split: str = "train"
    captions: bool = False


@dataclass(frozen=True)
class DualChoice:
    """How long and how fast a dual encoder learns: names that it does not learn from choose among several."""

    steps: int
    learning_rate: float
    projection_rate: float  # of projections and scale, over that of the text tower


@dataclass(frozen=True)
class DualCounts:
    """How many samples each part of a zero-shot study reads; None for all there are."""

    pairs: int | None  # images whose pairs with texts train the dual encoder
    tuned_pairs: int | None  # images whose pairs with texts tune the text sides of pruned members
    circuits: int  # ID and OOD images, each, that circuits of both towers are extracted on
    image_circuits: int  # ID images of CIFAR-100 that circuits of the image tower alone read as well
    calibration: int  # ID images that temperatures are fitted on
    taylor_batches: int
    test: int | None  # of each classification task
    detection: int | None  # of each OOD set
    classes: int | None  # of every task


@dataclass(frozen=True)
class DualRecipe:
    """One zero-shot study."""

    KIND: ClassVar[str] = "dual"
    STAGES: ClassVar[tuple[str, ...]] = ("choose", "train", "rank", "fix", "report", "cost", "store")

    name: str
    suite: Literal["shared", "paper"]  # images of the shared folder, or the paper's
    input_size: int
    seeds: tuple[int, ...]  # a seed is a training of the dual encoder and everything after it
    counts: DualCounts
    pairs: tuple[PairSet, ...]  # what the dual encoder learns from
    prune: int  # heads of both towers that each member loses
    more: int  # further heads in the row with more heads pruned
    image_prune: int  # heads that each member loses where the image tower alone is pruned
    taylor_prune: int  # heads that the Taylor ranking takes out of the image tower, as many in every layer
    dual: Recipe | None  # training of the dual encoder; None where a trained one is given
    choices: tuple[DualChoice, ...]  # of its steps and rates; the first where held-out names have not chosen
    tune: Recipe | None  # training of the text side of a pruned member; None for no such rows
    views: int  # of each training image, whose features are computed
    least_over_chance: float  # tasks where the single model is below so many times chance leave the means
    cost_batch: int  # images a batch when latency is measured
    model: str | None = None  # of the user's own, as `load_dual` takes it; None for the one that the study trains

    def __post_init__(self) -> None:
        pruned = min(self.prune, self.more, self.image_prune, self.taylor_prune)
        _require(
            (pruned >= 1, "prune, more, image_prune and taylor_prune are each at least one head"),
            (
                self.model or (self.dual and self.pairs),
                "the recipe names no model, and no `dual` and `pairs` to train one",
            ),
        )

    @property
    def trains_text(self) -> bool:
        """Whether text sides of pruned members are trained, on the pairs that trained the model."""
        return self.model is None and self.tune is not None

    def tiny(self) -> "DualRecipe":
        """Only counts shrink: samples, pixels, classes, steps, heads."""
        return replace(
            self,
            seeds=self.seeds[:1],
            input_size=TINY_SIZES["image"] if self.suite == "shared" else self.input_size,
            counts=DualCounts(24, 24, 6, 6, calibration=8, taylor_batches=1, test=12, detection=6, classes=6),
            prune=2,
            more=1,
            image_prune=2,
            dual=self.dual and _shorter(self.dual, steps=2, batch=8),
            choices=tuple(replace(one, steps=place + 1) for place, one in enumerate(self.choices[:2])),
            tune=self.tune and _shorter(self.tune, steps=2, batch=8),
            cost_batch=2,
        )


def _shorter(training: Recipe, steps: int, batch: int) -> Recipe:
    usual: dict[str, Any] = {"epochs": None, "warmup": 0, "patience": None, "evaluate_every": None, "grid": ()}
    return replace(training, steps=steps, batch_size=batch, **usual)


def _fewer(members: MemberSet) -> MemberSet:
    prune = max(2, members.prune // 6)
    return replace(members, prune=prune, pool=None if members.pool is None else 2 * prune)


def load_recipe(name: str, tiny: bool = False) -> ClassifierRecipe:
    """The recipe of one of `CLASSIFIERS`; `tiny` has the same stages in counts that a CPU does in a minute."""
    _require((name in CLASSIFIERS, f"no study {name!r}; choose one of {', '.join(CLASSIFIERS)}"))
    recipe = from_plain(ClassifierRecipe, _read(name), name)
    return recipe.tiny() if tiny else recipe


def load_dual_recipe(tiny: bool = False, suite: str | None = None, model: str | None = None) -> DualRecipe:
    """The recipe of the zero-shot study: on one of `SUITES` (None for `shared`), maybe of a model of the user's own."""
    _require((suite in (None, *SUITES), f"no suite {suite!r}; choose one of {', '.join(SUITES)}"))
    name = SUITES[suite or "shared"]
    recipe = from_plain(DualRecipe, _read(name) | ({"model": model} if model else {}), name)
    return recipe.tiny() if tiny else recipe


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return found


def digest_of(plain: Any) -> str:
    """A short name for plain data, or for a recipe or record."""
    return hashlib.sha256(json.dumps(to_plain(plain), sort_keys=True).encode()).hexdigest()[:16]


def derived_seed(*parts: int | str, bits: int = 31) -> int:
    """A seed that depends on every part and on nothing else, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1) % (1 << bits)
