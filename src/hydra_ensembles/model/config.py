"""What a model is made of, as frozen settings that check themselves."""

from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import ClassVar, Literal, get_args

from ..errors import ConfigError
from ..schema import ADDED_LATER

MAX_SIZE = 1 << 24  # no width, vocabulary or count of a real model is larger; guards against absurd files
MAX_COPIES = 4096  # of layers, heads, members


def require_between(where: object, names: str, least: int = 1, most: int = MAX_SIZE) -> None:
    """Refuse fields, given by their names, that are smaller or larger than accepted."""
    for name in names.split():
        size = getattr(where, name)
        if not least <= size <= most:
            raise ConfigError(f"{type(where).__name__}.{name} must be between {least} and {most}, got {size}")


def require_rates(where: object, **rates: object) -> None:
    """Refuse rates outside of [0, 1)."""
    for name, rate in rates.items():
        if not isinstance(rate, Real) or not 0.0 <= float(rate) < 1.0:
            raise ConfigError(f"{type(where).__name__}.{name} must be a number in [0, 1), got {rate!r}")


def require_positive(where: object, name: str) -> None:
    """Refuse a field that is not positive."""
    number = getattr(where, name)
    if not number > 0.0:
        raise ConfigError(f"{type(where).__name__}.{name} must be positive, got {number}")


def require_choices(where: object, **options: object) -> None:
    """Refuse fields, given with their `Literal`, that are not one of its options."""
    for name, literal in options.items():
        accepted, value = get_args(literal), getattr(where, name)
        if value not in accepted:
            raise ConfigError(f"{type(where).__name__}.{name} must be one of {list(accepted)}, got {value!r}")


def require_whole(name: str, value: object, least: int) -> int:
    """The value as Python's own integer; refused where it is no whole number, or too small."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
NormKind = Literal["layer", "rms"]


@dataclass(frozen=True)
class EncoderConfig:
    """The stack of transformer blocks: sizes, norm placement, activation, biases, regularisation."""

    width: int
    layers: int
    heads: int
    head_dim: int
    mlp_width: int
    activation: Activation = "gelu"
    gated: bool = False
    norm: NormKind = "layer"
    norm_eps: float = 1e-6
    norm_first: bool = True
    qk_norm: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    layer_scale: bool = False
    causal: bool = False
    attention_dropout: float = 0.0
    projection_dropout: float = 0.0
    activation_dropout: float = 0.0
    output_dropout: float = 0.0
    drop_path: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check sizes and rates; `drop_path` is empty or has one rate per layer."""
        require_between(self, "width head_dim mlp_width")
        require_between(self, "layers heads", most=MAX_COPIES)
        require_choices(self, activation=Activation, norm=NormKind)
        require_positive(self, "norm_eps")
        if self.drop_path and len(self.drop_path) != self.layers:
            raise ConfigError(
                f"EncoderConfig.drop_path has {len(self.drop_path)} rates for {self.layers} layers; "
                "give one per layer, or none"
            )
        require_rates(
            self,
            attention_dropout=self.attention_dropout,
            projection_dropout=self.projection_dropout,
            activation_dropout=self.activation_dropout,
            output_dropout=self.output_dropout,
            **{f"drop_path[{layer}]": rate for layer, rate in enumerate(self.drop_path)},
        )


Resample = Literal["bicubic", "bicubic_antialias", "bicubic_align_corners", "bilinear"]


@dataclass(frozen=True)
class PatchStemConfig:
    """Images into tokens: a patch projection, prefix tokens, a position embedding that can be resampled.

    Tokens are ordered class, distillation, registers, patches. The first `position_prefix` of the prefix
    tokens have a position embedding of their own; the others get none.
    """

    kind: ClassVar[str] = "patch"

    patch_size: tuple[int, int]
    grid: tuple[int, int]
    channels: int = 3
    patch_bias: bool = True
    class_token: bool = True
    distillation_token: bool = False
    registers: int = 0
    position_prefix: int = 1
    resample: Resample = "bicubic_antialias"
    norm: bool = False
    norm_eps: float = 1e-5
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check sizes, and that the position embedding covers existing tokens."""
        require_between(self, "channels")
        require_between(self, "registers", least=0)
        require_between(self, "position_prefix", least=0, most=self.prefix_tokens)
        for name in ("patch_size", "grid"):
            height, width = getattr(self, name)
            if not (height > 0 and width > 0 and height * width <= MAX_SIZE):
                raise ConfigError(f"PatchStemConfig.{name} must be two sizes of at least 1, got {height}x{width}")
        require_choices(self, resample=Resample)
        require_rates(self, dropout=self.dropout)
        require_positive(self, "norm_eps")

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens before the first patch."""
        return int(self.class_token) + int(self.distillation_token) + self.registers

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images the position embedding was made for."""
        return self.patch_size[0] * self.grid[0], self.patch_size[1] * self.grid[1]

    @property
    def tokens(self) -> int:
        """Sequence length at `image_size`."""
        return self.prefix_tokens + self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class TextStemConfig:
    """Token ids into embeddings: words, learned positions, optional segments, optional norm and projection.

    `positions_after` is set for models (RoBERTa) that count positions from the padding id and give padding
    that id itself; otherwise positions are 0, 1, 2, …
    """

    kind: ClassVar[str] = "text"

    vocabulary: int
    positions: int
    embedding_width: int
    segments: int = 0
    positions_after: int | None = None
    norm: bool = True
    norm_eps: float = 1e-12
    project: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check sizes, and that a position is left for a token."""
        require_between(self, "vocabulary positions embedding_width")
        require_between(self, "segments", least=0)
        if self.positions_after is not None:
            require_between(self, "positions_after", least=0, most=self.positions - 2)
        require_rates(self, dropout=self.dropout)
        require_positive(self, "norm_eps")

    @property
    def max_tokens(self) -> int:
        """Longest sequence the position embedding covers."""
        return self.positions - (0 if self.positions_after is None else self.positions_after + 1)


Pool = Literal["cls", "mean", "cls_mean", "distilled", "eot", "last", "map"]
ReadoutNorm = Literal["none", "tokens", "pooled"]
HiddenActivation = Literal["tanh", "relu", "gelu"]


@dataclass(frozen=True)
class CosineConfig:
    """Classes by their embeddings: features are projected, scaled to length one and compared with each of them.

    The class embeddings are stored with the logit scale multiplied in.

    Attributes:
        width: Width of the embedding that features are projected to; None where the features are the embedding.
        bias: Whether the projection has a bias.
    """

    width: int | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        """Check the width, and that there is a projection for the bias."""
        if self.width is not None:
            require_between(self, "width")
        elif self.bias:
            raise ConfigError("CosineConfig.bias is true, but without a width there is no projection to have one")


@dataclass(frozen=True)
class ReadoutConfig:
    """Tokens into logits: final norm, pooling, an optional hidden layer (a pooler), a linear classifier.

    `num_classes = 0` means no classifier: the ensemble then answers with its pooled features. `map` pooling
    (SigLIP) attends from one learned query with `map_heads` heads over all tokens. `cosine` makes the classifier
    one of class embeddings (zero-shot classification).
    """

    pool: Pool = "cls"
    num_classes: int = 0
    norm: ReadoutNorm = "tokens"
    norm_eps: float = 1e-6
    hidden: HiddenActivation | None = None
    bias: bool = True
    dropout: float = 0.0
    hidden_dropout: float = 0.0
    eot_token: int | None = None
    map_heads: int = 0
    map_mlp_width: int = 0
    map_activation: Activation = "gelu"
    cosine: CosineConfig | None = field(default=None, metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        """Check sizes, and that pooling has what it needs."""
        require_choices(self, pool=Pool, norm=ReadoutNorm, map_activation=Activation)
        if self.hidden is not None:
            require_choices(self, hidden=HiddenActivation)
        require_between(self, "num_classes", least=0)
        require_rates(self, dropout=self.dropout, hidden_dropout=self.hidden_dropout)
        require_positive(self, "norm_eps")
        if self.pool == "map":
            require_between(self, "map_heads map_mlp_width")
        if self.pool == "cls_mean" and self.norm == "pooled":
            raise ConfigError(
                "ReadoutConfig.norm is 'pooled', but pool 'cls_mean' gives features twice as wide as the norm; use "
                "norm 'tokens' or 'none', or another pool"
            )
        if self.cosine is not None and (self.num_classes < 1 or self.pool == "distilled"):
            raise ConfigError(
                f"ReadoutConfig.cosine needs classes and one feature vector, got num_classes {self.num_classes} and "
                f"pool {self.pool!r}"
            )


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
        require_between(self, "members", most=MAX_COPIES)
        require_between(self, "trunk", least=0, most=self.encoder.layers)
        for member, layers in enumerate(self.heads):
            if len(layers) != self.encoder.layers:
                raise ConfigError(f"heads[{member}] lists {len(layers)} layers, the encoder has {self.encoder.layers}")
            for layer, kept in enumerate(layers):
                self._check_kept(member, layer, kept)
        self._check_ends()

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

    def _check_ends(self) -> None:
        """Refuse a readout that cannot read what such a stem gives, and widths that do not meet."""
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

    @property
    def kind(self) -> Literal["image", "text"]:
        """What goes in."""
        return "text" if isinstance(self.stem, TextStemConfig) else "image"

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


@dataclass(frozen=True)
class ProjectionConfig:
    """A linear map from a tower's features to the common embedding, stored once or once per member."""

    outputs: int
    bias: bool = False
    copies: int = 1

    def __post_init__(self) -> None:
        """Check sizes."""
        require_between(self, "outputs")
        require_between(self, "copies", most=MAX_COPIES)


@dataclass(frozen=True)
class DualEncoderConfig:
    """Two towers with one embedding space.

    Attributes:
        image: The image tower.
        text: The text tower.
        image_projection: From image features to the embedding; None when they are the embedding.
        text_projection: From text features to the embedding; None when they are the embedding.
        scale_copies: How many logit scales (and biases) are stored: 1, or one per member.
        logit_bias: Whether a bias is added to the scaled similarities.
    """

    image: EnsembleConfig
    text: EnsembleConfig
    image_projection: ProjectionConfig | None = None
    text_projection: ProjectionConfig | None = None
    scale_copies: int = 1
    logit_bias: bool = False

    def __post_init__(self) -> None:
        """Check that the towers are of the right kind and meet in one embedding."""
        if (self.image.kind, self.text.kind) != ("image", "text"):
            raise ConfigError(
                f"a dual encoder has an image tower and a text tower, in this order; got towers for "
                f"{self.image.kind} and {self.text.kind}"
            )
        if self.image.members != self.text.members and 1 not in (self.image.members, self.text.members):
            raise ConfigError(
                f"the image tower has {self.image.members} members and the text tower {self.text.members}; "
                "both must have the same number, or one of them a single member"
            )
        widths = self.embedding_of("image"), self.embedding_of("text")
        if widths[0] != widths[1]:
            raise ConfigError(
                f"the image tower ends in an embedding of width {widths[0]}, the text tower in one of width "
                f"{widths[1]}; give projections to a common width (Projections.fresh makes new ones)"
            )
        projections = {"image_projection": self.image_projection, "text_projection": self.text_projection}
        stored = {f"{name}.copies": one.copies for name, one in projections.items() if one is not None}
        for name, copies in {**stored, "scale_copies": self.scale_copies}.items():
            if copies not in (1, self.members):
                raise ConfigError(f"{name} is {copies}, it must be 1 or the number of members, {self.members}")

    @property
    def members(self) -> int:
        """Number of members, M."""
        return max(self.image.members, self.text.members)

    @property
    def embedding_width(self) -> int:
        """Width of the embedding that both towers share."""
        return self.embedding_of("image")

    def embedding_of(self, tower: str) -> int:
        """Width of the embedding one tower ends in."""
        projection: ProjectionConfig | None = getattr(self, f"{tower}_projection")
        return output_width(getattr(self, tower)) if projection is None else projection.outputs


def output_width(config: EnsembleConfig) -> int:
    """Width of what an ensemble answers with: its logits, or its pooled features where it does not classify."""
    if config.readout.num_classes:
        return config.readout.num_classes
    if config.readout.pool == "distilled":
        raise ConfigError("a tower that reads class and distillation token apart has no single feature vector")
    return config.encoder.width * (2 if config.readout.pool == "cls_mean" else 1)
