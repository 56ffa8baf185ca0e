"""Members: what they share, and which heads each of them keeps."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from ..errors import ConfigError
from .encoder import EncoderConfig
from .readout import ReadoutConfig
from .stems import PatchStemConfig, TextStemConfig

Group = Literal["stem", "attention", "mlp", "norms", "readout"]
GROUPS: tuple[Group, ...] = get_args(Group)
KeptHeads = tuple[tuple[tuple[int, ...], ...], ...]  # [member][layer] -> original head indices


@dataclass(frozen=True)
class Sharing:
    """Which parameter groups the members share (stored once) and which are per member (stored M times).

    LayerScale belongs to the group of its sublayer, the final norm to *norms*, a pooler to *readout*, the
    norm of an embedding to *stem*.
    """

    stem: bool = False
    attention: bool = False
    mlp: bool = False
    norms: bool = False
    readout: bool = False


@dataclass(frozen=True)
class EnsembleConfig:
    """One ensemble: its transformer, its members, what they share and which heads they keep.

    The first `trunk` layers are stored once for all members, whatever `sharing` says.
    """

    stem: PatchStemConfig | TextStemConfig
    encoder: EncoderConfig
    readout: ReadoutConfig
    heads: KeptHeads
    sharing: Sharing = Sharing()
    trunk: int = 0

    def __post_init__(self) -> None:
        """Check that head lists, sharing and trunk are consistent with each other."""
        if not 1 <= len(self.heads) <= 4096:
            raise ConfigError(f"an ensemble has between 1 and 4096 members, got {len(self.heads)}")
        if not 0 <= self.trunk <= self.encoder.layers:
            raise ConfigError(f"trunk is {self.trunk}, but the encoder has {self.encoder.layers} layers")
        for member, layers in enumerate(self.heads):
            if len(layers) != self.encoder.layers:
                raise ConfigError(f"heads[{member}] lists {len(layers)} layers, the encoder has {self.encoder.layers}")
            for layer, kept in enumerate(layers):
                self._check_kept(member, layer, kept)
        self._check_readout()

    def _check_kept(self, member: int, layer: int, kept: tuple[int, ...]) -> None:
        if list(kept) != sorted(set(kept)) or any(not 0 <= head < self.encoder.heads for head in kept):
            raise ConfigError(
                f"heads[{member}][{layer}] is {list(kept)}; it must list distinct heads between 0 and "
                f"{self.encoder.heads - 1} in ascending order"
            )
        if (layer < self.trunk or self.sharing.attention) and kept != self.heads[0][layer]:
            raise ConfigError(
                f"members share the attention of layer {layer}, but member 0 keeps {list(self.heads[0][layer])} "
                f"and member {member} keeps {list(kept)}"
            )

    def _check_readout(self) -> None:
        pool, stem = self.readout.pool, self.stem
        if isinstance(stem, TextStemConfig):
            allowed: tuple[str, ...] = ("cls", "mean", "eot", "last")
        else:
            allowed = ("mean", "map", *(("cls", "cls_mean") if stem.class_token else ()))
            allowed += ("distilled",) if stem.class_token and stem.distillation_token else ()
        if pool not in allowed:
            raise ConfigError(f"readout.pool is {pool!r}; a stem like this one allows {list(allowed)}")
        if pool == "map" and self.encoder.width % self.readout.map_heads:
            raise ConfigError(
                f"readout.map_heads is {self.readout.map_heads}, which does not divide width {self.encoder.width}"
            )
        if isinstance(stem, TextStemConfig) and not stem.project and stem.embedding_width != self.encoder.width:
            raise ConfigError(
                f"stem.embedding_width is {stem.embedding_width} and encoder.width {self.encoder.width}; "
                "they may differ only with stem.project"
            )

    @property
    def members(self) -> int:
        """Number of members, M."""
        return len(self.heads)

    def copies(self, group: Group, layer: int | None = None) -> int:
        """How many times a group's parameters are stored: 1 when shared (or in the trunk), else M."""
        in_trunk = layer is not None and layer < self.trunk
        return 1 if in_trunk or getattr(self.sharing, group) else self.members

    def differences(self, other: "EnsembleConfig") -> list[str]:
        """Architecture fields in which two ensembles differ, as readable lines; head lists do not count."""
        lines: list[str] = []
        for part in ("stem", "encoder", "readout"):
            mine, theirs = getattr(self, part), getattr(other, part)
            if type(mine) is not type(theirs):
                lines.append(f"{part}: {type(mine).__name__} and {type(theirs).__name__}")
                continue
            lines += [
                f"{part}.{field.name}: {getattr(mine, field.name)} and {getattr(theirs, field.name)}"
                for field in fields(mine)
                if getattr(mine, field.name) != getattr(theirs, field.name)
            ]
        return lines


def all_heads(encoder: EncoderConfig, members: int = 1) -> KeptHeads:
    """Head lists of `members` members that keep every head."""
    return ((tuple(range(encoder.heads)),) * encoder.layers,) * members
