"""The recipe of the zero-shot study: all its settings, read from YAML and checked."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from hydra_ensembles.errors import ConfigError
from hydra_ensembles.schema import ADDED_LATER, from_plain
from hydra_ensembles.training.recipe import DataRecipe

FOLDER = Path(__file__).parent / "recipes"
ZERO_SHOT = "zero-shot"
SUITES = {"shared": ZERO_SHOT, "paper": "zero-shot-paper"}  # image suites of the zero-shot study, and their recipes

Backbone = Literal["dinov2_vits14", "all_minilm_l6_v2"]
TINY_SIZE = 56  # image side in a tiny run


@dataclass(frozen=True)
class PairSet:
    """A set that trains a dual encoder, with captions or with its class names."""

    source: str
    share: float  # of a batch, relative to the total of all sets
    split: str = "train"
    captions: bool = False


@dataclass(frozen=True)
class DualChoice:
    """Steps and learning rates for training a dual encoder; held-out class names choose among several."""

    steps: int
    learning_rate: float
    projection_rate: float  # of projections and scale, relative to that of the text tower


@dataclass(frozen=True)
class DualCounts:
    """How many samples each part of a zero-shot study reads; None for all of them."""

    pairs: int | None  # images whose pairs with texts train the dual encoder
    tuned_pairs: int | None  # images whose pairs with texts tune the text sides of pruned members
    circuits: int  # ID and OOD images, each, that circuits of both towers are extracted on
    image_circuits: int  # ID images of CIFAR-100 also used for circuits of the image tower alone
    calibration: int  # ID images that temperatures are fitted on
    taylor_batches: int
    test: int | None  # of each classification task
    detection: int | None  # of each OOD set
    classes: int | None  # of every task
    words: int | None = None  # of the tokenizer's vocabulary, for NegLabel


@dataclass(frozen=True)
class DualRecipe:
    """All settings of one zero-shot study."""

    name: str
    suite: Literal["shared", "paper"]  # images of the shared folder, or the paper's
    input_size: int
    seeds: tuple[int, ...]  # a seed is a training of the dual encoder and everything after it
    counts: DualCounts
    pairs: tuple[PairSet, ...]  # training data of the dual encoder
    prune: int  # heads of both towers that each member loses
    more: int  # further heads in the row with more heads pruned
    image_prune: int  # heads that each member loses if only the image tower is pruned
    taylor_prune: int  # heads that the Taylor ranking removes from the image tower, equally many per layer
    dual: DataRecipe | None  # training of the dual encoder; None if a trained one is given
    choices: tuple[DualChoice, ...]  # of its steps and rates; the first unless held-out names have chosen
    tune: DataRecipe | None  # training of the text side of a pruned member; None for no such rows
    views: int  # per training image, whose features are computed
    least_over_chance: float  # tasks where Single is below this multiple of chance are left out of the means
    cost_batch: int  # images per batch for measuring latency
    model: str | None = None  # the user's own, as `load_dual` takes it; None for the model that the study trains
    factors: str | None = field(default=None, metadata=ADDED_LATER)  # BayesVLM's folder, for a user's own model

    def __post_init__(self) -> None:
        if min(self.prune, self.more, self.image_prune, self.taylor_prune) < 1:
            raise ConfigError("prune, more, image_prune and taylor_prune must each be at least one head")
        if not (self.model or (self.dual and self.pairs)):
            raise ConfigError("the recipe names no model, and no `dual` and `pairs` to train one")
        if self.factors is not None and self.model is None:
            raise ConfigError(f"factors {self.factors!r} need the model they were made for; give --model, too")

    @property
    def trains_text(self) -> bool:
        """Whether the text sides of pruned members are trained, on the pairs that trained the model."""
        return self.model is None and self.tune is not None

    def tiny(self) -> "DualRecipe":
        """The same recipe with small counts: samples, pixels, classes, steps, heads."""
        return replace(
            self,
            seeds=self.seeds[:1],
            input_size=TINY_SIZE if self.suite == "shared" else self.input_size,
            counts=DualCounts(
                24, 24, 6, 6, calibration=8, taylor_batches=1, test=12, detection=6, classes=6, words=400
            ),
            prune=2,
            more=1,
            image_prune=2,
            dual=self.dual and _shorter(self.dual, steps=2, batch=8),
            choices=tuple(replace(choice, steps=index + 1) for index, choice in enumerate(self.choices[:2])),
            tune=self.tune and _shorter(self.tune, steps=2, batch=8),
            cost_batch=2,
        )


def _shorter(training: DataRecipe, steps: int, batch: int) -> DataRecipe:
    usual: dict[str, Any] = {"epochs": None, "warmup": 0, "patience": None, "evaluate_every": None, "grid": ()}
    return replace(training, steps=steps, batch_size=batch, **usual)


def load_dual_recipe(
    tiny: bool = False, suite: str | None = None, model: str | None = None, factors: str | None = None
) -> DualRecipe:
    """The recipe of the zero-shot study on one of `SUITES` (default `shared`), optionally for the user's own model."""
    name = SUITES.get(suite or "shared")
    if name is None:
        raise ConfigError(f"no suite {suite!r}; choose one of {', '.join(SUITES)}")
    changes = {key: value for key, value in {"model": model, "factors": factors}.items() if value}
    recipe = from_plain(DualRecipe, read_recipe(name) | changes, name)
    return recipe.tiny() if tiny else recipe


def read_recipe(name: str) -> dict[str, Any]:
    """Read a recipe from YAML; the caller may modify it."""
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
