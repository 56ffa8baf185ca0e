"""Training settings: schedule, trained parameters and their learning rates; `presets.yaml` has the paper's recipes."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor, nn

from .._utils import library, warn
from ..batches import Batches, length_of
from ..errors import ConfigError
from ..model.config import GROUPS, EnsembleConfig, Group
from ..model.ensemble import Ensemble
from ..model.member_states import place_of
from ..settings import Checked, NotNegative, Positive, Range, Rate, Seed, Share, Whole, from_plain

OptimizerName = Literal["sgd", "adamw"]
Precision = Literal["float32", "bf16"]
Schedule = Literal["cosine", "linear", "constant"]
ALTERNATIVES = (("learning_rate", "grid", ()), ("steps", "epochs", None))  # exactly one of each pair is given


@dataclass(frozen=True)
class Recipe(Checked):
    """One way to fine-tune. Give exactly one of `learning_rate` and `grid`, and one of `steps` and `epochs`.

    Attributes:
        optimizer: `"sgd"` or `"adamw"` (decoupled weight decay).
        classifier_rate: Learning rate of the classifier, as a multiple of the others'; not for class embeddings.
        grid: Peak learning rates to try; the one with the best validation accuracy wins.
        select: `"train"` takes that with the lowest training loss, the mean over the last tenth of the updates.
        steps: Number of weight updates; with `gradient_accumulation` each reads several batches.
        no_decay_on_bias_and_norm: Whether biases and norm weights are exempt from it.
        warmup: Updates (a whole number), or a fraction of all updates (a float below 1).
        warmup_from: Share of the peak rate from which the warm-up rises.
        schedule: How the rate falls after the warm-up.
        floor: Final rate, as a fraction of the peak.
        dropout: Rate after attention projection, MLP activation and MLP output of every layer in training. 0
            switches off all dropout, including stochastic depth; None keeps the model's own.
        clip_norm: Largest norm of the whole gradient, of all members that train together; None for no clipping.
        train_groups: Parameter groups to train, whatever the parameters' `requires_grad`; the others stay unchanged.
        last_blocks: Train only this many last blocks, and what comes after them; None for all.
        reinit_classifier: `"zeros"` starts the classifier at zero, `"random"` draws one for every member (normal,
            standard deviation 0.02) from the seed; not for class embeddings, either.
        patience: Evaluations without improvement after which training stops; None never stops early.
        min_delta: Validation accuracy must rise by more than this to count as an improvement.
        evaluate_every: Updates between evaluations; None evaluates after every epoch.
        precision: `"bf16"` computes in mixed precision; the weights stay in float32.
        compile: Whether to compile blocks: faster steps on a GPU, after a few seconds. Dropout draws differently.
        seed: Seed for the order of the data, random augmentation and dropout.
        order_seed: Separate seed for the order of the data and their augmentation, the same for every member.

    Examples:
        >>> recipe = he.Recipe(learning_rate=1e-4, epochs=3, warmup=0.1, train_groups=("attention", "readout"))
        >>> recipe.plan(batches=100)  # updates in all, and of the warm-up
        (300, 30)
        >>> he.Recipe.preset("sst2", seed=1).seed
        1
    """

    optimizer: OptimizerName = "adamw"
    learning_rate: Positive | None = None
    classifier_rate: Positive = 1.0
    grid: tuple[Positive, ...] = ()
    select: Literal["validation", "train"] = "validation"
    steps: Whole | None = None
    epochs: Whole | None = None
    momentum: Rate = 0.9
    weight_decay: NotNegative = 0.0
    no_decay_on_bias_and_norm: bool = True
    warmup: int | float = 0
    warmup_from: Rate = 0.0
    schedule: Schedule = "cosine"
    floor: Share = 0.0
    label_smoothing: Rate = 0.0
    dropout: Rate | None = None
    clip_norm: Positive | None = None
    train_groups: tuple[Group, ...] = GROUPS
    last_blocks: Whole | None = None
    reinit_classifier: Literal["zeros", "random"] | None = None
    patience: Whole | None = None
    min_delta: Rate = 0.0
    evaluate_every: Whole | None = None
    precision: Precision = "float32"
    compile: bool = False
    gradient_accumulation: Whole = 1
    seed: Seed = 0
    order_seed: Seed | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        (Range(0) if isinstance(self.warmup, int) else Range(0, below=1)).require("Recipe.warmup", self.warmup)
        for name, other, none in ALTERNATIVES:
            values = [getattr(self, name), getattr(self, other)]
            if sum(value not in (None, none) for value in values) != 1:
                raise ConfigError(f"Recipe needs exactly one of {name} and {other}, got {values[0]} and {values[1]}")
        if self.reinit_classifier and "readout" not in self.train_groups:
            raise ConfigError("Recipe.reinit_classifier needs 'readout' in train_groups, or it would never be trained")
        if self.steps is not None:
            self.plan(None)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """A recipe of the paper, with some settings changed; a `learning_rate` replaces a grid, `steps` epochs."""
        if name not in presets():
            raise ConfigError(f"there is no recipe {name!r}; choose one of {', '.join(sorted(presets()))}")
        settings = {field.name for field in fields(cls)}
        plain = {key: value for key, value in presets()[name].items() if key in settings} | changes
        for pair in (*ALTERNATIVES, *((other, one, None) for one, other, _ in ALTERNATIVES)):
            if changes.get(pair[0]) and pair[1] not in changes:
                plain.pop(pair[1], None)
        return from_plain(cls, plain, f"recipe {name!r}")

    @property
    def rates(self) -> tuple[float, ...]:
        """Peak learning rates to train with: the grid, or the only one."""
        return self.grid or (() if self.learning_rate is None else (self.learning_rate,))

    def plan(self, batches: int | None) -> tuple[int, int]:
        """Number of updates, in total and in the warm-up, if one pass over the training data has `batches` batches."""
        if self.steps is not None:
            total = self.steps
        elif batches is not None and self.epochs is not None:
            total = self.epochs * math.ceil(batches / self.gradient_accumulation)
        else:
            raise ConfigError(f"{self.epochs} epochs were asked for, but train has no length; give steps instead")
        # a fraction is rounded up; without rounding errors: 0.07 · 100 is 7, not 8
        warmup = self.warmup if isinstance(self.warmup, int) else math.ceil(round(self.warmup * total, 9))
        if warmup >= max(total, 1):
            raise ConfigError(f"Recipe.warmup takes {warmup} updates, but the whole training has {total}; shorten it")
        return total, warmup

    def check(self, model: Ensemble, train: Batches | None, validation: Batches | None) -> None:
        """Raise if the recipe cannot train this model (or text tower) on these data; `build` calls this early."""
        if train is not None:
            self.plan(length_of(train))
        needs = [f"grid={self.grid}"] * (len(self.grid) > 1 and self.select == "validation")
        needs += [f"patience={self.patience}"] * (self.patience is not None)
        if validation is None and needs:
            raise ConfigError(f"Recipe({', '.join(needs)}) needs validation data to judge by; give some, or change it")
        if self.last_blocks is not None and self.last_blocks > model.num_layers:
            raise ConfigError(f"Recipe.last_blocks is {self.last_blocks}, but the model has {model.num_layers} blocks")
        has_classifier = model.num_classes and model.config.readout.cosine is None  # not class embeddings
        if not has_classifier and (self.reinit_classifier or self.classifier_rate != 1.0):
            raise ConfigError("this model has no classifier; leave reinit_classifier and classifier_rate out")
        parameters = {name: one for name, one in model.named_parameters() if self.trains(name, model.num_layers)}
        if model.num_classes and not parameters:
            what = f"nothing of Recipe.train_groups {list(self.train_groups)}"
            raise ConfigError(f"the last {self.last_blocks} blocks contain {what}; add groups, or train more blocks")
        frozen = [name for name, one in parameters.items() if not one.requires_grad]
        if frozen and any(one.requires_grad for one in model.parameters()):  # else it was prepared for inference
            which = (
                f"{len(frozen)} of {len(parameters)} parameters to train are frozen in the model (first {frozen[0]})"
            )
            warn(f"{which}; they train anyway: train_groups and last_blocks of the recipe decide")

    def trains(self, name: str, layers: int) -> bool:
        """Whether the parameter of this name trains in a model with `layers` blocks."""
        group, layer = place_of(name)
        if group not in self.train_groups or self.last_blocks is None:
            return group in self.train_groups
        return group != "stem" if layer is None else layer >= layers - self.last_blocks

    def rate_factor(self, update: int, total: int, warmup: int) -> float:
        """Share of the peak learning rate that update number `update` (from 0) uses; see `plan`.

        The k-th of W warm-up updates uses k / W of the way from `warmup_from` to 1. Then the rate falls to the floor,
        reached after `total` updates.
        """
        if update < warmup:
            return self.warmup_from + (1.0 - self.warmup_from) * (update + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        progress = min((update - warmup) / (total - warmup), 1.0)
        remaining = (1.0 + math.cos(math.pi * progress)) / 2.0 if self.schedule == "cosine" else 1.0 - progress
        return self.floor + (1.0 - self.floor) * remaining

    def with_dropout(self, config: EnsembleConfig) -> EnsembleConfig:
        """The configuration with the dropout of this recipe; see `dropout`."""
        rate = self.dropout
        if not rate:
            return config if rate is None else config.undropped
        encoder = replace(config.encoder, projection_dropout=rate, activation_dropout=rate, output_dropout=rate)
        return replace(config, encoder=encoder)


@dataclass(frozen=True)
class DataRecipe(Recipe):
    """A recipe that also says how its data should be read: for commands, which make the loader themselves.

    Attributes:
        batch_size: Samples per batch.
        augment: Whether images are cropped and mirrored at random.
        rand_augment: Operations and magnitude of torchvision's RandAugment, in addition.
    """

    batch_size: Whole | None = None
    augment: bool = False
    rand_augment: tuple[Whole, Annotated[int, Range(0, 30)]] | None = None


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Settings of the paper's recipes by name, from `presets.yaml`, read on first use."""
    text = Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8")
    declared: dict[str, dict[str, Any]] = library("yaml", extra="data").safe_load(text)
    return declared["presets"]


def read_recipe(value: Any) -> DataRecipe | None:
    """A recipe from plain data: the name of a preset, `none`, or settings, optionally based on a `preset`."""
    if value is None or value == "none":
        return None
    plain = {"preset": value} if isinstance(value, str) else value
    if not isinstance(plain, Mapping) or "preset" not in plain:
        return from_plain(DataRecipe, plain, "recipe")
    return DataRecipe.preset(**{"name" if key == "preset" else key: item for key, item in plain.items()})


def trainable_state(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """The weights to train, on a device; half precision is too coarse for small updates and becomes float32."""
    half = (torch.float16, torch.bfloat16)
    return {
        name: tensor.to(device, torch.float32 if tensor.dtype in half else tensor.dtype)
        for name, tensor in model.state_dict().items()
    }


def make_optimizer(
    trained: Mapping[str, nn.Parameter], recipe: Recipe, shares: Mapping[str, float], spared: Collection[str] = ()
) -> torch.optim.Optimizer:
    """The recipe's optimizer for parameters by name; the learning rate is set before every update.

    `shares` are multiples of the recipe's learning rate, 1 by default. Logit scales and `spared` names have no decay.
    """
    groups: dict[tuple[float, float], dict[str, Any]] = {}  # by share of the rate, and weight decay
    for name, parameter in trained.items():
        module, _, leaf = name.rpartition(".")
        bias_or_norm = leaf.endswith("bias") or "norm" in module.rpartition(".")[2]
        free = name == "logit_scale" or name in spared or (recipe.no_decay_on_bias_and_norm and bias_or_norm)
        share = shares.get(name, 1.0)
        decay = 0.0 if free else recipe.weight_decay
        group = groups.setdefault((share, decay), {"params": [], "weight_decay": decay, "share": share})
        group["params"].append(parameter)
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups.values(), lr=0.0, momentum=recipe.momentum)
    return torch.optim.AdamW(groups.values(), lr=0.0)
