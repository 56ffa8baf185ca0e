"""HydraConfig: how to make a Hydra Ensemble, checked by itself and against the model and the data."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from ..batches import length_of
from ..circuit.scores import Method
from ..errors import ConfigError, DataError
from ..fuse import Fusion, StemFusion
from ..heads.members import CIRCUIT_ORDER
from ..heads.taylor import Scope
from ..schema import require_types
from ..training.recipe import Recipe
from .given import BuildData, StartingModel

Strategy = Literal["circuit", "taylor", "sampled", "random"]

PAPER_POOL = 100 / 48  # the paper samples 48 heads to prune out of the first 100 of a ranking (B.5)
LARGEST_SEED = 2**62  # what every random generator behind a build accepts, with room for one seed per member


@dataclass(frozen=True)
class HydraConfig:
    """How to make a Hydra Ensemble out of one model.

    Attributes:
        prune: Heads each member loses.
        members: Number of members.
        strategy: How the members' heads are chosen: `"circuit"` (CircAvg, CircAcc, CircOOD, further ones
            drawn from CircAvg), `"taylor"` (one Taylor ranking per member, each on other calibration
            batches), `"sampled"` (all drawn from the first `pool` heads of CircAvg), `"random"` (a control).
        method: How circuits are extracted; see `extract_circuit`.
        pool: Heads to draw from, for `"sampled"` and for more than three circuit members; None takes the
            paper's ratio of 100 to 48, as far as there are heads.
        taylor_scope: `"layer"` prunes every layer alike, `"global"` compares heads of all layers.
        calibration_batches: Batches a Taylor ranking reads; fewer than there are, or all members would be
            ranked on the same ones.
        recipe: How each member is fine-tuned; None leaves the members as pruned.
        shared_layers: The first so many layers stay whole and common to all members, and frozen together with
            the stem: they run once however many members there are.
        stem: How the stems are fused; see `fuse`.
        mlp: How the MLPs are fused.
        norms: How the norms are fused.
        readout: How poolers and classifiers are fused.
        calibrate: Whether to fit a temperature and a threshold at the end.
        per_member_temperature: One temperature per member instead of one for all.
        accepted_share: Share of held-out in-distribution data the threshold accepts.
        seed: Draws halves, batches and members. Fine-tuning has the seed of its recipe.
    """

    prune: int
    members: int = 3
    strategy: Strategy = "circuit"
    method: Method = "exact"
    pool: int | None = None
    taylor_scope: Scope = "layer"
    calibration_batches: int = 8
    recipe: Recipe | None = None
    shared_layers: int = 0
    stem: StemFusion = "shared"
    mlp: Fusion = "mean"
    norms: Fusion = "separate"
    readout: Fusion = "separate"
    calibrate: bool = True
    per_member_temperature: bool = False
    accepted_share: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        """Check each setting, and those that only make sense together."""
        require_types(self)
        for name, least in {"prune": 1, "members": 1, "calibration_batches": 1, "shared_layers": 0, "seed": 0}.items():
            if not least <= getattr(self, name) <= LARGEST_SEED:
                raise ConfigError(f"HydraConfig.{name} must be from {least} to 2**62, got {getattr(self, name)}")
        if not 0.0 < self.accepted_share <= 1.0:
            raise ConfigError(f"HydraConfig.accepted_share must be above 0 and at most 1, got {self.accepted_share}")
        if self.pool is not None and self.pool <= self.prune:
            raise ConfigError(f"HydraConfig.pool is {self.pool}; draws differ only if it is above prune ({self.prune})")
        recipe, one_stem = self.recipe, self.stem == "shared" and self.members > 1
        moves = recipe is not None and "stem" in recipe.train_groups and recipe.last_blocks is None
        if one_stem and moves and not self.shared_layers:
            raise ConfigError(
                'HydraConfig.recipe trains the stem of every member, but stem="shared" keeps one for all; leave "stem" '
                'out of Recipe.train_groups, or set stem="mean" or "separate"'
            )

    @property
    def extracts_circuits(self) -> bool:
        """Whether heads are ranked by circuits, which takes ID and OOD data."""
        return self.strategy in ("circuit", "sampled")

    @property
    def reads_train(self) -> bool:
        """Whether some stage reads training data where there are any."""
        return self.recipe is not None or self.strategy == "taylor"

    @property
    def draws_from_pool(self) -> bool:
        """Whether some member is drawn from a pool of heads."""
        return self.strategy == "sampled" or (self.strategy == "circuit" and self.members > len(CIRCUIT_ORDER))

    def pool_size(self, heads: int) -> int:
        """Size of the pool, out of `heads` that could be pruned."""
        if self.pool is None:
            return min(max(round(self.prune * PAPER_POOL), self.prune + 1), heads)
        if self.pool > heads:
            raise ConfigError(f"HydraConfig.pool is {self.pool}, but only {heads} heads can be pruned; lower it")
        return self.pool

    def layers(self, start: StartingModel) -> range | None:
        """Layers in which members may differ; None for all of both towers."""
        return None if start.dual is not None else range(self.shared_layers, start.base.num_layers)

    def member_recipe(self, layers: int) -> Recipe | None:
        """The recipe, kept out of the stem and the layers that all members share."""
        if self.recipe is None or not self.shared_layers:
            return self.recipe
        free = layers - self.shared_layers
        return replace(self.recipe, last_blocks=min(free, self.recipe.last_blocks or free))

    def check(self, start: StartingModel, data: BuildData) -> None:
        """Hold config, model and data against each other, before the long work; raises a `HydraError`."""
        self._check_layers(start)
        self._check_sets(data)
        self._check_heads(start)
        for recipe in (self.recipe, self.member_recipe(start.base.num_layers)):  # as given, and above the trunk
            if recipe is not None:
                recipe.check(start.base, data.train, data.validation)
        data.require_readable(start.base)

    def _check_sets(self, data: BuildData) -> None:
        """Every set that some stage reads is there; Taylor rankings can draw different batches."""
        if self.extracts_circuits and (data.ranking is None or data.ood is None):
            raise DataError(f"strategy={self.strategy!r} needs id= and ood=; without OOD data use strategy='taylor'")
        if self.strategy == "taylor" and data.for_taylor is None:
            raise DataError("strategy='taylor' reads labelled batches; give train= or id=")
        if self.recipe is not None and data.train is None:
            raise DataError("the config has a recipe for fine-tuning, which needs train=")
        if self.calibrate and data.validation is None:
            raise DataError("calibration needs held-out data: give id= or validation=, or set calibrate=False")
        total = length_of(data.for_taylor) if self.strategy == "taylor" and data.for_taylor is not None else None
        if total is not None and total < self.calibration_batches + (self.members > 1):
            name = "the ranking half of id" if data.train is None else "train"
            raise ConfigError(
                f"HydraConfig.calibration_batches is {self.calibration_batches}, but {name} has {total} batches, and "
                "each member is ranked on others; lower calibration_batches, or make the batches smaller"
            )

    def _check_layers(self, start: StartingModel) -> None:
        """Layers are left to differ in; of a dual encoder, the method can rank both towers."""
        if start.dual is None and self.shared_layers >= start.base.num_layers:
            raise ConfigError(
                f"HydraConfig.shared_layers is {self.shared_layers}, the model has {start.base.num_layers} layers; "
                "leave at least the last one for the members to differ"
            )
        one_tower = self.strategy == "taylor" or (self.extracts_circuits and self.method == "screened")
        if start.dual is not None and (self.shared_layers or one_tower):
            raise ConfigError(
                f"strategy {self.strategy!r}, method {self.method!r}, shared_layers {self.shared_layers} are for one "
                "tower; for both use circuits, method='exact' and shared_layers=0, or build from "
                "zero_shot(dual, class_names), which prunes the image tower alone"
            )

    def _check_heads(self, start: StartingModel) -> None:
        """There are enough heads for every member to lose a set of its own."""
        layers = self.layers(start)
        free = start.heads(layers)
        where = f" above the first {self.shared_layers} layers" if self.shared_layers else ""
        if self.prune > free:
            raise ConfigError(f"HydraConfig.prune is {self.prune}, but there are {free} heads{where}")
        if self.strategy == "taylor" and self.taylor_scope == "layer" and layers is not None:
            counts = [len(start.base.heads[0][layer]) for layer in layers]
            each, rest = divmod(self.prune, len(counts))
            if rest or min(counts) < each:
                raise ConfigError(
                    f"HydraConfig.prune is {self.prune}, not the same number in each of {len(counts)} layers with "
                    f"{min(counts)} heads or more; use a multiple of {len(counts)}, or taylor_scope='global'"
                )
            choices = math.prod(math.comb(count, each) for count in counts)
        else:
            choices = math.comb(self.pool_size(free) if self.draws_from_pool else free, self.prune)
        if choices < self.members:
            raise ConfigError(
                f"HydraConfig.prune is {self.prune} of {free} heads{where}: {choices} different choices for "
                f"{self.members} members; prune another number, make the pool larger, or ask for fewer members"
            )
