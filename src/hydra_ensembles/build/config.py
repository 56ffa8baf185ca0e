"""The settings of a whole build, in one place and checked when made."""

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigError
from ..finetune import Recipe
from ..fuse import Fusion, StemFusion

Strategy = Literal["circuit", "taylor", "sampled", "random"]
CircuitMethod = Literal["naive", "exact", "screened"]

PAPER_POOL = 100 / 48  # the paper samples 48 heads to prune out of the first 100 of a ranking (B.5)


@dataclass(frozen=True)
class HydraConfig:
    """How to make a Hydra Ensemble out of one model.

    Attributes:
        prune: Heads each member loses.
        members: Number of members.
        strategy: How the members' heads are chosen: `"circuit"` (CircAvg, CircAcc, CircOOD, further ones
            sampled from CircAvg), `"taylor"` (one Taylor ranking per member, each on other calibration
            batches), `"sampled"` (all drawn from the first `pool` heads of CircAvg), `"random"` (a control).
        method: How circuits are extracted; see `extract_circuit`.
        pool: Heads to draw from, for `"sampled"` and for more than three circuit members; None takes the
            paper's ratio of 100 to 48.
        taylor_scope: `"layer"` prunes every layer alike, `"global"` compares heads of all layers.
        calibration_batches: Batches of training data a Taylor ranking reads.
        recipe: How each member is fine-tuned; None leaves the members as pruned.
        shared_layers: The first so many layers stay whole and common to all members, and frozen: they run
            once however many members there are.
        stem, mlp, norms, readout: How the groups are fused; see `fuse`.
        calibrate: Whether to fit a temperature and a threshold at the end.
        per_member_temperature: One temperature per member instead of one for all.
        accepted_share: Share of held-out in-distribution data the threshold accepts.
        seed: Draws halves, batches and members.
    """

    prune: int
    members: int = 3
    strategy: Strategy = "circuit"
    method: CircuitMethod = "exact"
    pool: int | None = None
    taylor_scope: Literal["layer", "global"] = "layer"
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
        for name, least in (
            ("prune", 1),
            ("members", 1),
            ("calibration_batches", 1),
            ("shared_layers", 0),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"HydraConfig.{name} must be a whole number of at least {least}, got {value!r}")
        choices = {
            "strategy": get_args(Strategy),
            "method": get_args(CircuitMethod),
            "taylor_scope": ("layer", "global"),
            "stem": get_args(StemFusion),
            **{group: get_args(Fusion) for group in ("mlp", "norms", "readout")},
        }
        for name, accepted in choices.items():
            if getattr(self, name) not in accepted:
                raise ConfigError(f"HydraConfig.{name} must be one of {list(accepted)}, got {getattr(self, name)!r}")
        if self.pool is not None and self.pool <= self.prune:
            raise ConfigError(
                f"HydraConfig.pool is {self.pool} and prune {self.prune}: every draw would be the same; "
                "make the pool larger than the number of heads to prune"
            )
        if not 0.0 < self.accepted_share <= 1.0:
            raise ConfigError(f"HydraConfig.accepted_share must be in (0, 1], got {self.accepted_share}")
        if self.recipe is not None and not isinstance(self.recipe, Recipe):
            raise ConfigError(
                f"HydraConfig.recipe must be a Recipe, such as Recipe.preset('sst2'), got {type(self.recipe).__name__}"
            )

    @property
    def draws_from_pool(self) -> bool:
        """Whether some member is drawn from a pool of heads."""
        return self.strategy == "sampled" or (self.strategy == "circuit" and self.members > 3)

    def pool_size(self, heads: int) -> int:
        """Size of the pool, out of `heads` that could be pruned."""
        wanted = self.pool if self.pool is not None else max(round(self.prune * PAPER_POOL), self.prune + 1)
        if self.pool is not None and wanted > heads:
            raise ConfigError(f"HydraConfig.pool is {wanted}, but only {heads} heads can be pruned")
        return min(wanted, heads)
