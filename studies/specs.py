"""What can be measured, by name: sets of pruned members, and the units whose logits are stored.

A unit is something that is run over the data by itself. Methods are put together from units, so that a member
that serves several methods is trained, run and stored once.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from hydra_ensembles.errors import ConfigError
from hydra_ensembles.fuse import Fusion

HeadChoice = Literal["circuits", "sampled", "taylor", "random"]
Start = Literal["finetuned", "pretrained"]


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
        start: What the heads are pruned from. `finetuned`: the single model, and the training recovers. `pretrained`:
            the pretrained model with a new classifier for each member, and the training is a whole fine-tuning, on
            all training data; which heads go is still read off the single model, and a trunk is the single model's.
    """

    heads: HeadChoice
    prune: int
    trunk: int = 0
    training: str | None = "standard"
    pool: int | None = None
    start: Start = "finetuned"

    def __post_init__(self) -> None:
        """Check the counts, and that a pool is there where one is drawn from."""
        if self.heads not in get_args(HeadChoice):
            raise ConfigError(f"heads must be one of {list(get_args(HeadChoice))}, got {self.heads!r}")
        if self.prune < 1 or self.trunk < 0:
            raise ConfigError(f"prune must be at least 1 and trunk at least 0, got {self.prune} and {self.trunk}")
        if (self.heads == "sampled") != (self.pool is not None):
            raise ConfigError(f"heads={self.heads!r} and pool={self.pool}: sampled members need a pool, no others do")
        if self.start not in get_args(Start) or (self.start == "pretrained" and self.training is None):
            raise ConfigError(
                f"start must be one of {list(get_args(Start))}, and members that start from the pretrained model need "
                f"a training; got {self.start!r} and training={self.training}"
            )
        if self.pool is not None and self.pool <= self.prune:
            raise ConfigError(f"a pool of {self.pool} heads leaves nothing to choose when {self.prune} are pruned")

    @property
    def key(self) -> str:
        """A name that tells this set from all others of a recipe."""
        pool = "" if self.pool is None else f"-of-{self.pool}"
        start = "" if self.start == "finetuned" else "-from-pretrained"
        return f"{self.heads}-{self.prune}{pool}-trunk{self.trunk}-{self.training or 'untrained'}{start}"

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


AVERAGED = "averaged"
"""The unit of the backbones of Deep Ensembles with their MLPs averaged."""


@dataclass(frozen=True)
class Control:
    """A further row of the results, whose settings are fixed: it tells what a part of the method brings.

    Attributes:
        name: Name of the row.
        members: Its members; None for the backbones of Deep Ensembles.
        mlp: What becomes of their MLPs.
    """

    name: str
    members: MemberSet | None
    mlp: Fusion = "mean"

    def __post_init__(self) -> None:
        """Refuse what is Deep Ensembles by another name."""
        if self.members is None and self.mlp != "mean":
            raise ConfigError(f"control {self.name!r} is Deep Ensembles: whole backbones with MLPs apart")

    def units(self, count: int) -> tuple[str, ...]:
        """The units of the row."""
        return (AVERAGED,) if self.members is None else self.members.units(self.mlp, count)


def backbone(index: int) -> str:
    """The unit of a fine-tuned backbone."""
    return f"backbone/{index}"


def dropout(rate: float) -> str:
    """The unit of MC Dropout at one rate."""
    return f"dropout/{rate:g}"


CLASSIFIERS = "classifiers"
