"""How an ensemble is built, and what that is checked against before the long work: the model and the data."""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._utils import require_device, warn
from ..batches import Batches, Inputs
from ..circuit.scores import Ties
from ..convert.convert import convert
from ..errors import ConfigError, DataError
from ..fuse import Fusion, StemFusion
from ..heads.masking import Head, heads_in, max_removable, prune
from ..heads.ranking import CIRCUIT_ORDER
from ..heads.taylor import Scope
from ..metrics.distance import FamiliarityChoice
from ..model.dual_encoder import DualEncoder, require_single
from ..model.ensemble import Ensemble
from ..settings import Checked, Count, PositiveShare, Seed, Whole
from ..training.recipe import DataRecipe, Recipe

ReadBatch = tuple[Inputs, Tensor | None]
Strategy = Literal["circuit", "taylor", "sampled", "random", "branches"]
TrainingMode = Literal["together", "apart"]

PAPER_POOL = 100 / 48  # the paper samples 48 heads to prune out of the first 100 of a ranking (B.5)
TRUNK = 5 / 6  # our defaults: trunk as a share of the layers; pruned heads, of all and at most of those above it
PRUNED, PRUNED_ABOVE = 0.08, 0.25


def starting_model(model: nn.Module, device: torch.device | str | None, caller: str) -> Ensemble:
    """A classifier with one member, on the device, from any model that `convert` takes."""
    base: Any = model if isinstance(model, Ensemble | DualEncoder) else convert(model)
    require_single(base, caller)
    if base.num_classes < 2:
        raise ConfigError(f"{caller} starts from a trained classifier, but this model has {base.num_classes} classes")
    target = base.device if device is None else require_device(device)
    if base is model and base.device != target:
        base = copy.deepcopy(base)
    moved: Ensemble = base.to(target)
    return moved


def pruned(base: Ensemble, heads: Sequence[Head]) -> Ensemble:
    """A member without these heads, and without what was fitted or measured on the base."""
    return prune(base.with_metadata(calibration=None, familiarity=None, metrics={}), heads)


def removable(base: Ensemble, layers: Iterable[int] | None) -> int:
    """Number of heads in these layers that a member may lose."""
    return max_removable(base, heads_in(base, layers))


@dataclass(frozen=True)
class BuildData:
    """Data of a build; sets that its config does not need are None."""

    train: Batches | None  # labelled, as given by the caller
    ranking: list[ReadBatch] | None  # labelled ID batches to rank heads on
    validation: list[ReadBatch] | None  # labelled ID batches for calibration, and for choices in fine-tuning
    ood: dict[str, list[ReadBatch]]  # for circuits, by name
    seed: int  # for the order of shuffling loaders

    @property
    def held_out(self) -> dict[str, list[ReadBatch] | None]:
        """The sets in memory, by name."""
        return {"ranking": self.ranking, "validation": self.validation, **self.ood}

    @property
    def for_taylor(self) -> Batches | None:
        """The batches that Taylor rankings read."""
        return self.ranking if self.train is None else self.train


def usual_trunk(layers: int) -> int:
    """Default number of shared layers in a model with `layers` layers."""
    return min(round(TRUNK * layers), layers - 1)


@dataclass(frozen=True)
class HydraConfig(Checked):
    """How to make an ensemble from one model.

    Attributes:
        prune: Heads each member loses; None takes 8 % of all, and at most a quarter of those above the trunk.
        members: Number of members.
        strategy: How heads are chosen: `"circuit"` (CircAvg, CircAcc, CircOOD, then drawn from CircAvg), `"taylor"` (a
            ranking per member), `"sampled"` (all drawn from the first `pool` heads of CircAvg), `"random"` (a control),
            `"branches"` (all heads; only training makes members differ).
        training: `"together"`: the fused ensemble, trunk included; `"apart"`: each member before fusing (None: the same
            if there is a recipe).
        ties: Which head a circuit removes if several leave the same score; see `extract_circuit`.
        pool: Heads to draw from; None takes the paper's ratio of 100 to 48, or all heads if there are fewer.
        taylor_scope: `"layer"` prunes equally many heads in every layer, `"global"` compares heads of all layers.
        calibration_batches: Batches that a Taylor ranking reads; fewer than there are, so that rankings differ.
        recipe: How to fine-tune; None trains nothing, or by `Recipe.preset("hydra")` if `training` is set.
        shared_layers: First layers that run once for all members; None takes five sixths, or none if `prune` is given.
        average_trunk: Members that train apart also train these layers and the stem, and the trunk is their mean.
        distill: Whether fused members then learn back, from the training data without labels, what they answered
            before: trained ones before they were fused, others before they were pruned; see `distill`.
        stem: How the stems are fused; see `fuse`, also for `mlp`, `norms` and `readout`.
        mlp: How the MLPs are fused.
        norms: How the norms are fused.
        readout: How poolers and classifiers are fused.
        calibrate: Whether to fit a temperature and thresholds at the end.
        accepted_share: Share of in-distribution inputs that each threshold accepts.
        familiarity: Feature score for how familiar an input is, fitted on the half that ranks heads; see `calibrate`.
        seed: Seed for drawing halves, batches and members. Fine-tuning uses the seed of its recipe.

    Examples:
        >>> config = he.HydraConfig(members=3, prune=24, shared_layers=0, strategy="taylor")
        >>> config.members, config.mlp
        (3, 'mean')
    """

    prune: Whole | None = None
    members: Whole = 3
    strategy: Strategy = "circuit"
    training: TrainingMode | None = None
    ties: Ties = "likelihood"
    pool: Whole | None = None
    taylor_scope: Scope = "layer"
    calibration_batches: Whole = 8
    recipe: Recipe | None = None
    shared_layers: Count | None = None
    average_trunk: bool = False
    distill: bool = False
    stem: StemFusion = "shared"
    mlp: Fusion = "mean"
    norms: Fusion = "separate"
    readout: Fusion = "separate"
    calibrate: bool = True
    accepted_share: PositiveShare = 0.95
    familiarity: FamiliarityChoice | None = "auto"
    seed: Seed = 0

    def __post_init__(self) -> None:
        """Check each setting, and those that only make sense together."""
        super().__post_init__()
        if self.strategy == "branches" and (self.prune or (self.training is None and self.recipe is None)):
            raise ConfigError("branches keep all heads and differ by training: give no prune, but training or a recipe")
        if self.training is not None and self.recipe is None:
            object.__setattr__(self, "recipe", DataRecipe.preset("hydra"))
        recipe = self.recipe
        if self.average_trunk and (recipe is None or self.training == "together" or self.shared_layers == 0):
            raise ConfigError("average_trunk is for members trained 'apart', with a recipe and shared_layers above 0")
        if self.distill and self.training == "together":
            raise ConfigError("distill is for members made one by one: what trains together has not answered before")
        one_stem = self.stem == "shared" and self.members > 1 and self.training != "together"
        moves = recipe is not None and "stem" in recipe.train_groups and recipe.last_blocks is None
        no_trunk = self.shared_layers == 0 or (self.shared_layers is None and self.prune is not None)
        if one_stem and moves and no_trunk:
            raise ConfigError(
                "the recipe trains every member's stem, but stem is 'shared'; set it to 'mean' or 'separate', or leave "
                "the stem out of train_groups"
            )

    @property
    def lost(self) -> int:
        """Number of heads that a pruned member loses, once settled."""
        return self.prune or 0

    @property
    def trunk(self) -> int:
        """Number of layers that all members share, once settled."""
        return self.shared_layers or 0

    @property
    def pruned_members(self) -> int:
        """Number of members that lose heads."""
        return 0 if self.strategy == "branches" else self.members

    @property
    def fusions(self) -> dict[str, Any]:
        """How each parameter group is fused, as arguments of `fuse`."""
        return {"stem": self.stem, "mlp": self.mlp, "norms": self.norms, "readout": self.readout}

    @property
    def extracts_circuits(self) -> bool:
        """Whether heads are ranked by circuits, which need ID and OOD data."""
        return self.strategy in ("circuit", "sampled")

    @property
    def reads_train(self) -> bool:
        """Whether some step reads training data if they are given."""
        return self.recipe is not None or self.distill or self.strategy == "taylor"

    def in_words(self) -> str:
        """Name of such an ensemble in tables, once settled."""
        parts = [f"{self.strategy} ×{self.members}", f"trunk {self.trunk}"]
        parts += [f"{self.lost} heads off"] if self.lost else []
        parts += [f"trained {self.training}{', trunk averaged' if self.average_trunk else ''}"] if self.training else []
        parts += ["MLPs apart"] if self.mlp == "separate" else []
        return ", ".join([*parts, *(["distilled"] if self.distill else [])])

    def settled(self, base: Ensemble) -> "HydraConfig":
        """Fill in all open numbers for this model; warn if giving `prune` alone disables the default trunk."""
        layers, shared = base.num_layers, self.shared_layers
        if shared is None:
            usual = usual_trunk(layers)
            shared = usual if self.prune is None or self.average_trunk else 0
            if shared < usual:
                warn(
                    f"prune is {self.prune} and shared_layers not given: members share none of the {layers} layers, as "
                    f"in the paper. Set shared_layers to 0 if you want that, or to {usual}, the default without prune"
                )
        prune = self.prune
        if prune is None and self.pruned_members:
            free = range(min(shared, layers - 1), self._last(base))
            above = removable(base, free)
            prune = max(1, min(round(PRUNED * removable(base, None)), math.floor(PRUNED_ABOVE * above)))
            if self.strategy == "taylor" and self.taylor_scope == "layer":
                prune = max(1, round(prune / len(free))) * len(free)  # equally many in each layer
        training = self.training or (None if self.recipe is None else "apart")
        return replace(self, prune=prune, shared_layers=shared, training=training)

    def pool_size(self, base: Ensemble) -> int | None:
        """Number of heads that members are drawn from; None if no member is drawn."""
        if self.strategy != "sampled" and not (self.strategy == "circuit" and self.pruned_members > len(CIRCUIT_ORDER)):
            return None
        return self.pool or min(round(self.lost * PAPER_POOL), removable(base, self.layers(base)))

    def layers(self, base: Ensemble) -> range:
        """Layers in which members may differ."""
        return range(self.trunk, self._last(base))

    def _last(self, base: Ensemble) -> int:
        """End of the layers to prune; attention pooling is included unless all layers lose equally many heads."""
        per_layer = self.strategy == "taylor" and self.taylor_scope == "layer"
        return base.num_layers if per_layer else len(base.config.head_counts)

    def training_recipe(self, base: Ensemble) -> Recipe | None:
        """The recipe for members: training apart skips the trunk; members with equal starts get new classifiers."""
        recipe = self.recipe
        if recipe is None:
            return None
        if recipe.reinit_classifier is None and self.strategy == "branches":
            recipe = replace(recipe, reinit_classifier="random")
        if self.training == "together" or self.average_trunk or not self.trunk:
            return recipe
        free = base.num_layers - self.trunk
        return replace(recipe, last_blocks=min(free, recipe.last_blocks or free))

    def check(self, base: Ensemble, data: BuildData) -> None:
        """Check config, model and data against each other before the long work; raises `HydraError`."""
        if self.trunk >= base.num_layers:
            raise ConfigError(f"shared_layers is {self.trunk}, not below the number of layers, {base.num_layers}")
        free = removable(base, self.layers(base))
        if max(self.lost, self.pool or 0) > free:
            raise ConfigError(f"prune is {self.lost} and pool {self.pool}, but {free} heads can be pruned; lower them")
        if self.extracts_circuits and (data.ranking is None or not data.ood):
            need = f"the strategy {self.strategy!r} needs id and ood"
            raise DataError(f"{need}; without OOD data give 'synthetic' for ood, or use the strategy 'taylor'")
        if self.strategy == "taylor" and data.for_taylor is None:
            raise DataError("the strategy 'taylor' needs labelled batches; give train or id")
        if (self.recipe is not None or self.distill) and data.train is None:
            raise DataError("fine-tuning by a recipe, and distilling, need data: give train")
        if self.calibrate and data.validation is None:
            raise DataError("calibration needs held-out data: give id or validation, or turn calibrate off")
        if (recipe := self.training_recipe(base)) is not None:
            recipe.check(base, data.train, data.validation)
