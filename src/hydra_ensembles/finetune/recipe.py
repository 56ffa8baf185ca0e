"""How to train: one frozen dataclass that checks itself, and the paper's recipes by name."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from ..errors import ConfigError
from ..model.config import GROUPS, Group
from ..schema import ADDED_LATER, from_plain, require_types
from .presets import PRESETS
from .schedule import Schedule, warmup_updates

OptimizerName = Literal["sgd", "adamw"]
Precision = Literal["float32", "bf16", "fp16"]


@dataclass(frozen=True)
class RandAugment:
    """RandAugment settings for the data pipeline: operations per image, and their magnitude."""

    operations: int
    magnitude: int

    def __post_init__(self) -> None:
        """Check the ranges; torchvision's scale of 31 magnitudes is the custom."""
        require_types(self)
        if self.operations < 1 or not 0 <= self.magnitude <= 30:
            raise ConfigError(
                f"RandAugment needs at least 1 operation and a magnitude from 0 to 30, got {self.operations} "
                f"and {self.magnitude}"
            )


@dataclass(frozen=True)
class Recipe:
    """One way to fine-tune. Give exactly one of `learning_rate` and `grid`, and one of `steps` and `epochs`.

    A step is one update of the weights; with gradient accumulation it reads several batches.

    Attributes:
        optimizer: `"sgd"` or `"adamw"` (decoupled weight decay).
        learning_rate: Peak learning rate.
        classifier_rate: Learning rate of the classifier over that of all else. A new classifier on a pretrained model
            has far to go, at a rate that would wear the model down. Not for the class embeddings of a zero-shot
            ensemble.
        grid: Peak learning rates to try; the one with the best validation accuracy wins.
        steps: Updates in all.
        epochs: Passes over the training data.
        momentum: Of SGD.
        betas: Of AdamW.
        weight_decay: As the optimizer applies it.
        no_decay_on_bias_and_norm: Whether biases and norm weights are spared from weight decay.
        warmup: Updates (a whole number), or a fraction of all updates (a float below 1).
        schedule: How the rate falls after the warm-up.
        floor: Where it falls to, as a fraction of the peak.
        label_smoothing: Of the cross-entropy.
        dropout: Rate after attention projection, MLP activation and MLP output of every layer while
            training. 0 switches every dropout of the model off, stochastic depth included; None leaves the model's
            own.
        clip_norm: Largest norm of the whole gradient; None for no clipping.
        train_groups: Parameter groups that train; the others stay as they are, bit for bit.
        last_blocks: Only this many blocks at the end train, with what comes after them; the stem and the
            blocks before stay as they are. None for all blocks.
        reinit_classifier: `"zeros"` starts the classifier at zero; not for class embeddings, either.
        patience: Evaluations without improvement after which training stops; None never stops early.
        min_delta: Validation accuracy must rise by more than this to count as an improvement.
        evaluate_every: Updates between evaluations; None evaluates after every epoch.
        precision: `"bf16"` and `"fp16"` compute in mixed precision; the weights stay in float32.
        gradient_accumulation: Batches per update.
        seed: Of the order of the data, random augmentation and dropout.
        batch_size: Samples per update that the recipe is meant for. Batches come from the caller's loader, so
            this is information, as is `rand_augment`.
        rand_augment: Augmentation that the recipe is meant for.
        ours: Names of the settings whose value the paper does not state.
    """

    optimizer: OptimizerName = "adamw"
    learning_rate: float | None = None
    classifier_rate: float = field(default=1.0, metadata=ADDED_LATER)
    grid: tuple[float, ...] = ()
    steps: int | None = None
    epochs: int | None = None
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    no_decay_on_bias_and_norm: bool = True
    warmup: int | float = 0
    schedule: Schedule = "cosine"
    floor: float = 0.0
    label_smoothing: float = 0.0
    dropout: float | None = None
    clip_norm: float | None = None
    train_groups: tuple[Group, ...] = GROUPS
    last_blocks: int | None = None
    reinit_classifier: Literal["zeros"] | None = None
    patience: int | None = None
    min_delta: float = 0.0
    evaluate_every: int | None = None
    precision: Precision = "float32"
    gradient_accumulation: int = 1
    seed: int = 0
    batch_size: int | None = None
    rand_augment: RandAugment | None = None
    ours: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check every setting, and that they fit together."""
        require_types(self)
        self._check_rates()
        self._check_budget()
        self._check_parts()
        known = {field.name for field in fields(self)}
        if not known.issuperset(self.ours):
            raise ConfigError(f"Recipe.ours names {sorted(set(self.ours) - known)}, which are no settings of a recipe")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "Recipe":
        """A recipe of the paper, with some settings changed.

        To run a grid recipe at one rate: `Recipe.preset("imagenet", grid=(), learning_rate=0.01)`.
        """
        if name not in PRESETS:
            raise ConfigError(f"there is no recipe {name!r}; choose one of {', '.join(sorted(PRESETS))}")
        recipe = from_plain(cls, PRESETS[name], f"preset {name!r}")
        unknown = sorted(changes.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(f"Recipe has no settings {unknown}; it has {[field.name for field in fields(cls)]}")
        ours = tuple(setting for setting in recipe.ours if setting not in changes)
        return replace(recipe, **{"ours": ours, **changes})

    @property
    def rates(self) -> tuple[float, ...]:
        """Peak learning rates to train with: the grid, or the only one."""
        return self.grid or (() if self.learning_rate is None else (self.learning_rate,))

    def updates(self, batches: int | None) -> int:
        """Updates in all, when one pass over the training data has `batches` batches (None: unknown)."""
        if self.steps is not None:
            return self.steps
        if batches is None or self.epochs is None:
            raise ConfigError(
                f"the recipe trains for {self.epochs} epochs, but the training data has no length, so the learning "
                "rate cannot be planned; give steps instead of epochs, or a loader with a length"
            )
        return self.epochs * math.ceil(batches / self.gradient_accumulation)

    def _check_rates(self) -> None:
        if bool(self.grid) == (self.learning_rate is not None):
            raise ConfigError(
                f"Recipe needs exactly one of learning_rate and grid, got learning_rate={self.learning_rate} and "
                f"grid={self.grid}"
            )
        if any(not 0.0 < rate < math.inf for rate in self.rates) or len(set(self.grid)) != len(self.grid):
            raise ConfigError(f"learning rates must be positive, finite and distinct, got {self.rates}")
        if not 0.0 < self.classifier_rate < math.inf:
            raise ConfigError(f"Recipe.classifier_rate must be positive and finite, got {self.classifier_rate}")
        _within("momentum", self.momentum, 0.0, 1.0)
        for index, beta in enumerate(self.betas):
            _within(f"betas[{index}]", beta, 0.0, 1.0)
        _within("weight_decay", self.weight_decay, 0.0, math.inf)
        _within("min_delta", self.min_delta, 0.0, 1.0)
        _within("label_smoothing", self.label_smoothing, 0.0, 1.0)
        _within("dropout", 0.0 if self.dropout is None else self.dropout, 0.0, 1.0)
        if not 0.0 <= self.floor <= 1.0:
            raise ConfigError(f"Recipe.floor is a fraction of the peak rate, from 0 to 1; got {self.floor}")
        if self.clip_norm is not None and not 0.0 < self.clip_norm < math.inf:
            raise ConfigError(f"Recipe.clip_norm must be positive and finite, or None; got {self.clip_norm}")

    def _check_budget(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"Recipe needs exactly one of steps and epochs, got steps={self.steps} and epochs={self.epochs}"
            )
        for name in ("steps", "epochs", "patience", "evaluate_every", "batch_size", "last_blocks"):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value, 1)
        _whole("gradient_accumulation", self.gradient_accumulation, 1)
        _whole("seed", self.seed, 0)
        if isinstance(self.warmup, int):
            _whole("warmup", self.warmup, 0)
        else:
            _within("warmup (as a fraction)", self.warmup, 0.0, 1.0)
        if self.steps is not None and warmup_updates(self.warmup, self.steps) >= self.steps:
            raise ConfigError(
                f"Recipe.warmup is {self.warmup}, which leaves nothing of {self.steps} steps; shorten the warm-up, "
                "or give it as a fraction"
            )

    def _check_parts(self) -> None:
        if not self.train_groups or len(set(self.train_groups)) != len(self.train_groups):
            raise ConfigError(
                f"Recipe.train_groups must name some of {list(GROUPS)}, each once; got {list(self.train_groups)}"
            )
        if self.reinit_classifier and "readout" not in self.train_groups:
            raise ConfigError(
                f"Recipe.reinit_classifier is {self.reinit_classifier!r}, but 'readout' is not in train_groups, so "
                "the new classifier would never learn; add 'readout' or leave the classifier as it is"
            )


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value < high:
        raise ConfigError(f"Recipe.{name} must be at least {low} and below {high}, got {value}")


def _whole(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"Recipe.{name} must be a whole number of at least {least}, got {value!r}")
