"""HydraConfig, and what it must agree with."""

from dataclasses import dataclass
from typing import Literal, get_args

from ..circuit.scores import Method
from ..errors import ConfigError
from ..fuse import Fusion, StemFusion
from ..heads.taylor import Scope
from ..training.recipe import Recipe

Strategy = Literal["circuit", "taylor", "sampled", "random"]

PAPER_POOL = 100 / 48  # the paper samples 48 heads to prune out of the first 100 of a ranking (B.5)
LARGEST_SEED = 2**62  # what every random generator behind a build accepts, with room for one seed per member
_CIRCUITS = 3  # members that have a circuit of their own: CircAvg, CircAcc, CircOOD


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
        self._check_numbers()
        self._check_choices()
        if self.pool is not None and self.pool <= self.prune:
            raise ConfigError(
                f"HydraConfig.pool is {self.pool} and prune {self.prune}: every draw would be the same; "
                "make the pool larger than the number of heads to prune"
            )
        if self.recipe is not None:
            self._check_recipe(self.recipe)

    @property
    def extracts_circuits(self) -> bool:
        """Whether heads are ranked by circuits, which takes ID and OOD data."""
        return self.strategy in ("circuit", "sampled")

    @property
    def draws_from_pool(self) -> bool:
        """Whether some member is drawn from a pool of heads."""
        return self.strategy == "sampled" or (self.strategy == "circuit" and self.members > _CIRCUITS)

    def pool_size(self, heads: int) -> int:
        """Size of the pool, out of `heads` that could be pruned."""
        if self.pool is None:
            return min(max(round(self.prune * PAPER_POOL), self.prune + 1), heads)
        if self.pool > heads:
            raise ConfigError(f"HydraConfig.pool is {self.pool}, but only {heads} heads can be pruned; lower it")
        return self.pool

    def _check_numbers(self) -> None:
        least = {"prune": 1, "members": 1, "calibration_batches": 1, "shared_layers": 0, "seed": 0}
        for name, smallest in (least if self.pool is None else {**least, "pool": 1}).items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
                raise ConfigError(f"HydraConfig.{name} must be a whole number of at least {smallest}, got {value!r}")
        if self.seed > LARGEST_SEED:
            raise ConfigError(f"HydraConfig.seed must be at most {LARGEST_SEED}, got {self.seed}")
        share = self.accepted_share
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0.0 < share <= 1.0:
            raise ConfigError(f"HydraConfig.accepted_share must be a number above 0 and at most 1, got {share!r}")

    def _check_choices(self) -> None:
        choices: dict[str, tuple[object, ...]] = {
            "strategy": get_args(Strategy),
            "method": get_args(Method),
            "taylor_scope": get_args(Scope),
            "stem": get_args(StemFusion),
            **{group: get_args(Fusion) for group in ("mlp", "norms", "readout")},
        }
        for name, accepted in choices.items():
            if getattr(self, name) not in accepted:
                raise ConfigError(f"HydraConfig.{name} must be one of {list(accepted)}, got {getattr(self, name)!r}")
        for name in ("calibrate", "per_member_temperature"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"HydraConfig.{name} must be True or False, got {getattr(self, name)!r}")

    def _check_recipe(self, recipe: Recipe) -> None:
        if not isinstance(recipe, Recipe):
            raise ConfigError(
                f"HydraConfig.recipe must be a Recipe, such as Recipe.preset('sst2'), got {type(recipe).__name__}"
            )
        frozen = recipe.last_blocks is not None or self.shared_layers > 0
        if "stem" in recipe.train_groups and not frozen and self.stem == "shared" and self.members > 1:
            raise ConfigError(
                'HydraConfig.recipe trains the stem of every member, but stem="shared" keeps one for all; leave '
                f'"stem" out of Recipe.train_groups {list(recipe.train_groups)}, or set stem="mean" or "separate"'
            )
