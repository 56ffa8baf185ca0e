"""What can be measured, by name: sets of pruned members, and the units whose logits are stored.

A unit is something that is run over the data by itself. Methods are put together from units, so that a member
that serves several methods is trained, run and stored once.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigError
from ..fuse import Fusion

HeadChoice = Literal["circuits", "sampled", "taylor", "random"]


@dataclass(frozen=True)
class MemberSet:
    """Members of one ensemble: how their heads are chosen and how they are trained.

    Attributes:
        heads: `circuits` (CircAvg, CircAcc, CircOOD), `sampled` (drawn from the first `pool` heads of CircAvg),
            `taylor` (one ranking for each member, on other batches), `random` (the control).
        prune: Heads each member loses.
        trunk: Layers at the start that stay whole and common.
        training: Name of a training of the recipe; None leaves the members as pruned.
        pool: Heads to draw from, for `sampled`.
    """

    heads: HeadChoice
    prune: int
    trunk: int = 0
    training: str | None = "standard"
    pool: int | None = None

    def __post_init__(self) -> None:
        """Check the counts, and that a pool is there where one is drawn from."""
        if self.heads not in get_args(HeadChoice):
            raise ConfigError(f"heads must be one of {list(get_args(HeadChoice))}, got {self.heads!r}")
        if self.prune < 1 or self.trunk < 0:
            raise ConfigError(f"prune must be at least 1 and trunk at least 0, got {self.prune} and {self.trunk}")
        if (self.heads == "sampled") != (self.pool is not None):
            raise ConfigError(f"heads={self.heads!r} and pool={self.pool}: sampled members need a pool, no others do")
        if self.pool is not None and self.pool <= self.prune:
            raise ConfigError(f"a pool of {self.pool} heads leaves nothing to choose when {self.prune} are pruned")

    @property
    def key(self) -> str:
        """A name that tells this set from all others of a recipe."""
        pool = "" if self.pool is None else f"-of-{self.pool}"
        return f"{self.heads}-{self.prune}{pool}-trunk{self.trunk}-{self.training or 'untrained'}"

    def member(self, index: int) -> str:
        """The unit of one member by itself."""
        return f"member/{self.key}/{index}"

    def members(self, count: int) -> tuple[str, ...]:
        """The units of all members: together they are the ensemble whose MLPs are kept apart."""
        return tuple(self.member(index) for index in range(count))

    @property
    def fused(self) -> str:
        """The unit of the ensemble whose MLPs are averaged."""
        return f"fused/{self.key}"

    def units(self, mlp: Fusion, count: int) -> tuple[str, ...]:
        """The units of the ensemble with its MLPs averaged or apart."""
        return (self.fused,) if mlp == "mean" else self.members(count)


def backbone(index: int) -> str:
    """The unit of a fine-tuned backbone."""
    return f"backbone/{index}"


DROPOUT = "dropout"
CLASSIFIERS = "classifiers"
