"""What a model is made of, as frozen settings that check themselves."""

from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import ClassVar, Literal, get_args

from ..errors import ConfigError
from ..schema import ADDED_LATER

MAX_SIZE = 1 << 24  # no width, vocabulary or count of a real model is larger; guards against absurd files


def require_sizes(where: object, **sizes: int) -> None:
    """Refuse sizes below one or absurdly large."""
    for name, size in sizes.items():
        if not 1 <= size <= MAX_SIZE:
            raise ConfigError(f"{type(where).__name__}.{name} must be between 1 and {MAX_SIZE}, got {size}")


def require_rates(where: object, **rates: object) -> None:
    """Refuse rates outside of [0, 1)."""
    for name, rate in rates.items():
        if not isinstance(rate, Real) or not 0.0 <= float(rate) < 1.0:
            raise ConfigError(f"{type(where).__name__}.{name} must be a number in [0, 1), got {rate!r}")


def require_whole(name: str, value: object, least: int) -> int:
    """The value as Python's own integer; refused where it is no whole number, or too small."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def require_positive(where: object, **numbers: float) -> None:
    """Refuse numbers that are not positive."""
    for name, number in numbers.items():
        if not number > 0.0:
            raise ConfigError(f"{type(where).__name__}.{name} must be positive, got {number}")


def require_choice(where: object, name: str, value: object, options: object) -> None:
    """Refuse what is not one of the options of a `Literal`."""
    accepted = get_args(options)
    if value not in accepted:
        raise ConfigError(f"{type(where).__name__}.{name} must be one of {list(accepted)}, got {value!r}")


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
        require_sizes(
            self,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            head_dim=self.head_dim,
            mlp_width=self.mlp_width,
        )
        if self.layers > 4096 or self.heads > 4096:
            raise ConfigError(
                f"EncoderConfig has {self.layers} layers and {self.heads} heads; at most 4096 of each are accepted"
            )
        require_choice(self, "activation", self.activation, Activation)
        require_choice(self, "norm", self.norm, NormKind)
        require_positive(self, norm_eps=self.norm_eps)
        require_rates(
            self,
            attention_dropout=self.attention_dropout,
            projection_dropout=self.projection_dropout,
            activation_dropout=self.activation_dropout,
            output_dropout=self.output_dropout,
        )
        if self.drop_path and len(self.drop_path) != self.layers:
            raise ConfigError(
                f"EncoderConfig.drop_path has {len(self.drop_path)} rates for {self.layers} layers; "
                "give one per layer, or none"
            )
        require_rates(self, **{f"drop_path[{i}]": rate for i, rate in enumerate(self.drop_path)})


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
        require_sizes(self, channels=self.channels)
        for name in ("patch_size", "grid"):
            height, width = getattr(self, name)
            require_sizes(self, **{f"{name}[0]": height, f"{name}[1]": width, f"{name} area": height * width})
        if not 0 <= self.registers <= MAX_SIZE:
            raise ConfigError(f"PatchStemConfig.registers must not be negative or huge, got {self.registers}")
        if not 0 <= self.position_prefix <= self.prefix_tokens:
            raise ConfigError(
                f"PatchStemConfig.position_prefix is {self.position_prefix}, but there are "
                f"{self.prefix_tokens} prefix tokens"
            )
        require_choice(self, "resample", self.resample, Resample)
        require_rates(self, dropout=self.dropout)
        require_positive(self, norm_eps=self.norm_eps)

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
        """Check sizes."""
        require_sizes(
            self,
            vocabulary=self.vocabulary,
            positions=self.positions,
            embedding_width=self.embedding_width,
        )
        if not 0 <= self.segments <= MAX_SIZE:
            raise ConfigError(f"TextStemConfig.segments must not be negative or huge, got {self.segments}")
        offset = self.positions_after
        if offset is not None and not 0 <= offset < self.positions - 1:
            raise ConfigError(
                f"TextStemConfig.positions_after is {offset}, which leaves no position of {self.positions}"
            )
        require_rates(self, dropout=self.dropout)
        require_positive(self, norm_eps=self.norm_eps)

    @property
    def max_tokens(self) -> int:
        """Longest sequence the position embedding covers."""
        return self.positions - (0 if self.positions_after is None else self.positions_after + 1)


Pool = Literal["cls", "mean", "cls_mean", "distilled", "eot", "last", "map"]
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
            require_sizes(self, width=self.width)
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
    norm: Literal["none", "tokens", "pooled"] = "tokens"
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
        require_choice(self, "pool", self.pool, Pool)
        if not 0 <= self.num_classes <= MAX_SIZE:
            raise ConfigError(f"ReadoutConfig.num_classes must not be negative or huge, got {self.num_classes}")
        if self.hidden is not None:
            require_choice(self, "hidden", self.hidden, HiddenActivation)
        require_rates(self, dropout=self.dropout, hidden_dropout=self.hidden_dropout)
        require_positive(self, norm_eps=self.norm_eps)
        if self.pool == "map":
            require_sizes(self, map_heads=self.map_heads, map_mlp_width=self.map_mlp_width)
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


@dataclass(frozen=True)
class ProjectionConfig:
    """A linear map from a tower's features to the common embedding, stored once or once per member."""

    outputs: int
    bias: bool = False
    copies: int = 1

    def __post_init__(self) -> None:
        """Check sizes."""
        if not 1 <= self.outputs <= MAX_SIZE:
            raise ConfigError(f"ProjectionConfig.outputs must be between 1 and {MAX_SIZE}, got {self.outputs}")
        if not 1 <= self.copies <= 4096:
            raise ConfigError(f"ProjectionConfig.copies must be between 1 and 4096, got {self.copies}")


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
        if not isinstance(self.image.stem, PatchStemConfig) or not isinstance(self.text.stem, TextStemConfig):
            raise ConfigError(
                f"a dual encoder has an image tower and a text tower, in this order; got towers for "
                f"{_kind(self.image)} and {_kind(self.text)}"
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
        stored = {"scale_copies": self.scale_copies}
        for name in ("image_projection", "text_projection"):
            projection = getattr(self, name)
            if projection is not None:
                stored[f"{name}.copies"] = projection.copies
        for name, copies in stored.items():
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


def _kind(config: EnsembleConfig) -> str:
    return "images" if isinstance(config.stem, PatchStemConfig) else "text"
