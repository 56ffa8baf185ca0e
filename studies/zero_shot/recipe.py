"""The recipe of a zero-shot study: everything that decides what it does, read from YAML and checked."""

from dataclasses import dataclass, replace
from importlib import resources
from typing import Literal, get_args

from hydra_ensembles._utils import require
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.schema import from_plain, to_plain
from hydra_ensembles.training.recipe import Recipe

from ..compact_logits import Storing
from ..recipe import digest_of

ZERO_SHOT = "zero-shot"
SuiteName = Literal["shared", "paper"]
TemplateChoice = Literal["paper", "ensemble"]
RECIPES = {"shared": "zero-shot", "paper": "zero-shot-paper"}
TINY_SIZE = 56


@dataclass(frozen=True)
class Counts:
    """How many samples each part of a study reads; None for all there are.

    Attributes:
        pairs: Images whose pairs with captions train the dual encoder and tune text sides.
        circuits: ID and OOD images, each, that circuits of both towers are extracted on.
        image_circuits: ID images of their second task, CIFAR-100, that circuits of the image tower alone read as well.
        calibration: ID images that temperatures are fitted on.
        taylor_batches: Batches that the Taylor ranking reads.
        test: Images of each classification task.
        detection: Images of each OOD set.
        classes: Classes of every task; None for all of them.
    """

    pairs: int | None
    circuits: int
    image_circuits: int
    calibration: int
    taylor_batches: int
    test: int | None
    detection: int | None
    classes: int | None


@dataclass(frozen=True)
class ZeroShotRecipe:
    """One zero-shot study.

    Attributes:
        name: Name of the study.
        suite: Which images: those of the shared folder, or the paper's.
        input_size: Side of the images.
        members: Members of every ensemble.
        seeds: A seed is a training of the dual encoder and everything after it.
        counts: Sample counts.
        prune: Heads of both towers that each member loses.
        more: Further heads in the row with more heads pruned.
        image_prune: Heads that each member loses where the image tower alone is pruned.
        taylor_prune: Heads that the Taylor ranking takes out of the image tower, the same number in every layer.
        templates: `paper` asks by its one sentence, `ensemble` by many sentences, averaged.
        dual: Training of the dual encoder; None where a trained one is given.
        tune: Training of the text side of a pruned member; None for no such rows.
        views: Views of each training image whose features are computed.
        projection_rate: Learning rate of projections and scale over that of the text tower, in `dual`.
        least_over_chance: Tasks where the single model's accuracy is below so many times chance leave the means.
        cost_batch: Images a batch when latency is measured.
        logit_step: How finely logits are stored; see `Storing`.
        keep_classes: Classes of an image of a task whose logits each family stores one by one.
        ood_keep_classes: The same of an OOD image.
        model: A model of the user's own, as `load_dual` takes it; None for the one that the study trains.
    """

    name: str
    suite: SuiteName
    input_size: int
    members: int
    seeds: tuple[int, ...]
    counts: Counts
    prune: int
    more: int
    image_prune: int
    taylor_prune: int
    templates: TemplateChoice
    dual: Recipe | None
    tune: Recipe | None
    views: int
    projection_rate: float
    least_over_chance: float
    cost_batch: int
    logit_step: float
    keep_classes: int
    ood_keep_classes: int
    model: str | None = None

    def __post_init__(self) -> None:
        """Check what the fields' types do not say."""
        if self.suite not in get_args(SuiteName) or self.name != RECIPES[self.suite]:
            raise ConfigError(f"suites are {list(RECIPES)} in recipes {list(RECIPES.values())}, got {self.suite!r}")
        if self.members != 3 or not self.seeds:
            raise ConfigError(f"members are three circuits, and at least one seed runs; got {self.members}")
        if min(self.prune, self.more, self.image_prune, self.taylor_prune) < 1:
            raise ConfigError("prune, more, image_prune and taylor_prune are each at least one head")
        if self.least_over_chance < 1:
            raise ConfigError(f"least_over_chance is at least 1, got {self.least_over_chance}")
        for task in (True, False):
            self.storing(task)  # checks itself

    def storing(self, task: bool) -> Storing:
        """How logits of the images of a task, or of an OOD set, are stored."""
        return Storing(self.logit_step, self.keep_classes if task else self.ood_keep_classes)

    @property
    def digest(self) -> str:
        """A short name for the whole recipe."""
        return digest_of(to_plain(self))


def load_zero_shot_recipe(suite: SuiteName = "shared", tiny: bool = False) -> ZeroShotRecipe:
    """The recipe for a suite; with `tiny`, the same stages in counts that a CPU does in a minute.

    Raises:
        ConfigError: There is no such suite.
    """
    if suite not in RECIPES:
        raise ConfigError(f"no suite {suite!r} for the zero-shot study; choose one of {', '.join(RECIPES)}")
    file = resources.files("studies") / "recipes" / f"{RECIPES[suite]}.yaml"
    plain = require("yaml", extra="cli").safe_load(file.read_text(encoding="utf-8"))
    recipe = from_plain(ZeroShotRecipe, plain, file.name)
    return tiny_recipe(recipe) if tiny else recipe


def tiny_recipe(recipe: ZeroShotRecipe) -> ZeroShotRecipe:
    """Only counts shrink: samples, pixels, classes, steps, heads."""

    def shorter(training: Recipe | None) -> Recipe | None:
        if training is None:
            return None
        return replace(training, epochs=None, steps=2, warmup=0, batch_size=8, gradient_accumulation=1)

    return replace(
        recipe,
        seeds=recipe.seeds[:1],
        input_size=TINY_SIZE if recipe.suite == "shared" else recipe.input_size,
        counts=Counts(
            pairs=24, circuits=6, image_circuits=6, calibration=8, taylor_batches=1, test=12, detection=6, classes=6
        ),
        prune=2,
        more=1,
        image_prune=2,
        dual=shorter(recipe.dual),
        tune=shorter(recipe.tune),
        cost_batch=2,
    )
