"""Frozen model configurations that validate themselves."""

import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from ..errors import ConfigError
from ..settings import Checked, InnerShare, Range, Rate

MAX_SIZE = 1 << 24  # larger than any width, vocabulary or count of a real model; guards against absurd files
MAX_COPIES = 4096  # maximum number of layers, heads and members

Size = Annotated[int, Range(1, MAX_SIZE)]
SizeOrZero = Annotated[int, Range(0, MAX_SIZE)]
Copies = Annotated[int, Range(1, MAX_COPIES)]
Epsilon = InnerShare
Base = Annotated[float, Range(1, below=1e12)]

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
NormKind = Literal["layer", "layer_no_bias", "rms"]


@dataclass(frozen=True)
class RotaryConfig(Checked):
    """Positions as rotations of queries and keys: of n pairs of numbers, pair j rotates by position / base^(j / n).

    In a text, the position of a token is its index. In an image, half of the pairs rotate by the row of a patch and
    half by its column, and tokens before the patches do not rotate.

    Attributes:
        local_base: Base of the layers with local attention, if it differs.
        centred: Rows and columns of an image run from -2π to 2π, whatever its size (DINOv3), instead of counting.
        offset: Where counting rows and columns starts.
        reference: The grid to which counted rows and columns are scaled (EVA); None for no scaling.
        shift: In training, rows and columns, from -1 to 1, are shifted by up to this much, independently.
        jitter: In training, rows and columns are stretched or shrunk by up to this factor, independently.
        rescale: In training, both are stretched or shrunk by up to this factor.

    Examples:
        >>> he.RotaryConfig(base=10_000.0).local_base is None  # for `Declaration(rotary=...)` of an image model
        True
    """

    base: Base
    local_base: Base | None = None
    centred: bool = False
    offset: float = 0.0
    reference: tuple[Size, Size] | None = None
    shift: Annotated[float, Range(0, below=1e6)] = 0.0
    jitter: Base = 1.0
    rescale: Base = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.shift, self.jitter, self.rescale) != (0.0, 1.0, 1.0) and not self.centred:
            raise ConfigError("shift, jitter and rescale need centred positions: set centred, or none of them")


@dataclass(frozen=True)
class EncoderConfig(Checked):
    """The stack of transformer blocks: sizes, norm placement, activation, biases, regularisation.

    Attributes:
        first_norm: False if the attention of the first block gets the embedding without a norm (ModernBERT).
        key_bias: False if `qkv_bias` only applies to queries and values (EVA).
        up_bias: False if only the last linear layer of an MLP has a bias (GTE).
        mlp_norm: Whether each MLP has a norm before its last linear layer (EVA-02).
        local: For each layer, whether a token attends only to tokens at most `window` away; empty for none.
    """

    width: Size
    layers: Copies
    heads: Copies
    head_dim: Size
    mlp_width: Size
    activation: Activation = "gelu"
    gated: bool = False
    norm: NormKind = "layer"
    norm_eps: Epsilon = 1e-6
    norm_first: bool = True
    qk_norm: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    layer_scale: bool = False
    causal: bool = False
    attention_dropout: Rate = 0.0
    projection_dropout: Rate = 0.0
    activation_dropout: Rate = 0.0
    output_dropout: Rate = 0.0
    drop_path: tuple[Rate, ...] = ()
    first_norm: bool = True
    key_bias: bool = True
    up_bias: bool = True
    mlp_norm: bool = False
    rotary: RotaryConfig | None = None
    local: tuple[bool, ...] = ()
    window: Size | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("drop_path", "local"):
            if len(getattr(self, name)) not in (0, self.layers):
                raise ConfigError(f"{name} has {len(getattr(self, name))} values, for {self.layers} layers")
        if any(self.local) != (self.window is not None):
            raise ConfigError(f"local is {self.local} and window {self.window}; local layers and a window go together")

    def all_heads(self, members: int = 1) -> "KeptHeads":
        """Head lists of `members` members that keep every head."""
        return ((tuple(range(self.heads)),) * self.layers,) * members


Resample = Literal["bicubic", "bicubic_antialias", "bicubic_align_corners", "bilinear"]


@dataclass(frozen=True)
class PatchStemConfig(Checked):
    """Turn images into tokens: class, distillation, registers, patches.

    Of the tokens before the patches, the first `position_prefix` have a position embedding, the others none. Without
    `learned_positions` no token has one.
    """

    kind: ClassVar[str] = "patch"

    patch_size: tuple[Size, Size]
    grid: tuple[Size, Size]
    channels: Size = 3
    patch_bias: bool = True
    class_token: bool = True
    distillation_token: bool = False
    registers: SizeOrZero = 0
    position_prefix: int = 1
    resample: Resample = "bicubic_antialias"
    norm: bool = False
    norm_eps: Epsilon = 1e-5
    dropout: Rate = 0.0
    norm_kind: NormKind = "layer"
    learned_positions: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        Range(0, self.prefix_tokens).require("PatchStemConfig.position_prefix", self.position_prefix)
        for name in ("patch_size", "grid"):
            Range(1, MAX_SIZE).require(f"PatchStemConfig.{name}, multiplied,", math.prod(getattr(self, name)))

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens before the first patch."""
        return int(self.class_token) + int(self.distillation_token) + self.registers

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images that the position embedding was trained for."""
        return self.patch_size[0] * self.grid[0], self.patch_size[1] * self.grid[1]

    @property
    def max_tokens(self) -> int:
        """Sequence length at `image_size`."""
        return self.prefix_tokens + self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class TextStemConfig(Checked):
    """Turn token ids into embeddings: words, learned positions, optional segments, optional norm and projection.

    `positions_after` is the padding id if positions count from it (RoBERTa); otherwise they are 0, 1, 2, …
    Without `learned_positions`, `positions` is only the maximum length of a text.
    """

    kind: ClassVar[str] = "text"

    vocabulary: Size
    positions: Size
    embedding_width: Size
    segments: SizeOrZero = 0
    positions_after: int | None = None
    norm: bool = True
    norm_eps: Epsilon = 1e-12
    project: bool = False
    dropout: Rate = 0.0
    norm_kind: NormKind = "layer"
    learned_positions: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions_after is not None:  # leave at least one position for a token
            Range(0, self.positions - 2).require("TextStemConfig.positions_after", self.positions_after)

    @property
    def max_tokens(self) -> int:
        """Longest sequence the position embedding covers."""
        return self.positions - (0 if self.positions_after is None else self.positions_after + 1)


Pool = Literal["cls", "mean", "cls_mean", "distilled", "eot", "last", "final", "map"]
ReadoutNorm = Literal["none", "tokens", "pooled"]
HiddenActivation = Literal["tanh", "relu", "gelu"]


@dataclass(frozen=True)
class CosineConfig(Checked):
    """Classify by class embeddings, which include the logit scale; features are projected and scaled to length one.

    `width` is the width of the embedding; None if the features are the embedding and there is no projection.
    """

    width: Size | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias and self.width is None:
            raise ConfigError("CosineConfig.bias is true, but without a width there is no projection to add it to")


@dataclass(frozen=True)
class ReadoutConfig(Checked):
    """Turn tokens into logits: final norm, pooling, an optional hidden layer (a pooler), a classifier.

    Without classes the ensemble returns its pooled features. `map` pooling (SigLIP) attends from one learned query over
    all tokens; for pruning, this attention is one more layer after those of the encoder. `last` is the last token of a
    text, `final` the one at the last position, padding or not. With `pool_prefix`, mean and map pooling include the
    tokens before the patches. `hidden_norm` is a norm after the hidden layer. `cosine` makes the classifier one of
    class embeddings (zero-shot classification).
    """

    pool: Pool = "cls"
    num_classes: SizeOrZero = 0
    norm: ReadoutNorm = "tokens"
    norm_eps: Epsilon = 1e-6
    hidden: HiddenActivation | None = None
    bias: bool = True
    dropout: Rate = 0.0
    hidden_dropout: Rate = 0.0
    eot_token: int | None = None
    map_heads: SizeOrZero = 0
    map_mlp_width: SizeOrZero = 0
    map_activation: Activation = "gelu"
    cosine: CosineConfig | None = None
    hidden_bias: bool = True
    hidden_norm: bool = False
    pool_prefix: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool == "map" and not (self.map_heads and self.map_mlp_width):
            raise ConfigError("pool 'map' needs map_heads and map_mlp_width of at least 1")
        if self.pool == "cls_mean" and self.norm == "pooled":
            raise ConfigError("pool 'cls_mean' doubles the width of features; use norm 'tokens' or 'none' with it")
        if self.hidden_norm and self.hidden is None:
            raise ConfigError("hidden_norm is true, but there is no hidden layer to normalise")
        if self.cosine is not None and (self.num_classes < 1 or self.pool == "distilled"):
            raise ConfigError(f"cosine needs num_classes and another pool, got {self.num_classes} and {self.pool!r}")


Group = Literal["stem", "attention", "mlp", "norms", "readout"]
GROUPS: tuple[Group, ...] = get_args(Group)
KeptHeads = tuple[tuple[tuple[int, ...], ...], ...]  # [member][layer] -> original head indices


@dataclass(frozen=True)
class Sharing:
    """Which parameter groups the members share (stored once) and which are per member (stored M times).

    LayerScale and a norm inside a sublayer belong to the group of that sublayer, the final norm to *norms*, the norm of
    an embedding to *stem*, a pooler and an attention that pools to *readout*. If members keep different heads of that
    attention, each member has its own.
    """

    stem: bool = False
    attention: bool = False
    mlp: bool = False
    norms: bool = False
    readout: bool = False


@dataclass(frozen=True)
class EnsembleConfig:
    """One ensemble: its transformer, its members, what they share and which heads they keep.

    The first `trunk` layers are stored once for all members, whatever `sharing` says. If an attention pools the tokens,
    its heads are the last layer in `heads`; it keeps all of them if only the encoder's layers are given.
    """

    stem: PatchStemConfig | TextStemConfig
    encoder: EncoderConfig
    readout: ReadoutConfig
    heads: KeptHeads
    sharing: Sharing = Sharing()
    trunk: int = 0

    def __post_init__(self) -> None:
        Range(1, MAX_COPIES).require("members", self.members)
        Range(0, self.encoder.layers).require("trunk", self.trunk)
        blocks, counts = self.encoder.layers, self.head_counts
        for member, layers in enumerate(self.heads):
            if len(layers) not in (blocks, len(counts)):
                raise ConfigError(f"heads[{member}] lists {len(layers)} layers, the encoder has {blocks}")
            for layer, heads in enumerate(layers):
                received = f"heads[{member}][{layer}] is {list(heads)}"
                if list(heads) != sorted(set(heads)) or any(not 0 <= head < counts[layer] for head in heads):
                    raise ConfigError(f"{received}; it must list distinct heads below {counts[layer]}, ascending")
                shared = layer < self.trunk or (self.sharing.attention and layer < blocks)
                if shared and heads != self.heads[0][layer]:
                    raise ConfigError(f"{received}, but members share this attention with the heads of member 0")
        everything = tuple(tuple(range(count)) for count in counts)
        object.__setattr__(self, "heads", tuple(layers + everything[len(layers) :] for layers in self.heads))
        self._check_ends()

    def _check_ends(self) -> None:
        """Refuse a readout that does not match the stem, and widths that do not match."""
        pool, stem = self.readout.pool, self.stem
        if isinstance(stem, TextStemConfig):
            allowed: tuple[str, ...] = ("cls", "mean", "eot", "last", "final")
        else:
            allowed = ("mean", "map", *(("cls", "cls_mean") if stem.class_token else ()))
            allowed += ("distilled",) if stem.class_token and stem.distillation_token else ()
        if pool not in allowed:
            raise ConfigError(f"readout.pool is {pool!r}; this stem allows {list(allowed)}")
        if pool == "map" and self.encoder.width % self.readout.map_heads:
            raise ConfigError(f"readout.map_heads {self.readout.map_heads} does not divide width {self.encoder.width}")
        if isinstance(stem, TextStemConfig) and not stem.project and stem.embedding_width != self.encoder.width:
            widths = f"stem.embedding_width is {stem.embedding_width} and encoder.width {self.encoder.width}"
            raise ConfigError(f"{widths}; they may differ only with stem.project")
        pairs = 2 if isinstance(stem, TextStemConfig) else 4
        if self.encoder.rotary is not None and self.encoder.head_dim % pairs:
            received = f"encoder.head_dim is {self.encoder.head_dim}"
            raise ConfigError(f"{received}; rotary positions of {self.kind} models need a multiple of {pairs}")

    @property
    def members(self) -> int:
        """Number of members, M."""
        return len(self.heads)

    @property
    def kind(self) -> Literal["image", "text"]:
        """Type of the inputs."""
        return "text" if isinstance(self.stem, TextStemConfig) else "image"

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Heads of each layer before pruning; an attention that pools, if any, comes after the blocks."""
        pooling = (self.readout.map_heads,) if self.readout.pool == "map" else ()
        return (self.encoder.heads,) * self.encoder.layers + pooling

    @property
    def pooling(self) -> EncoderConfig | None:
        """The pooling attention and the MLP after it, as a layer with its own sizes; None if there is none."""
        if self.readout.pool != "map":
            return None
        heads, width = self.readout.map_heads, self.encoder.width
        sizes = (width, 1, heads, width // heads, self.readout.map_mlp_width)
        return EncoderConfig(*sizes, activation=self.readout.map_activation, norm_eps=self.readout.norm_eps)

    def copies(self, group: Group, layer: int | None = None) -> int:
        """How many times a group's parameters are stored: 1 if shared (or in the trunk), else M."""
        in_trunk = layer is not None and layer < self.trunk
        return 1 if in_trunk or getattr(self.sharing, group) else self.members

    def attention_copies(self, layer: int) -> int:
        """How many times the attention of a layer is stored, in a block or for pooling."""
        if layer < self.encoder.layers:
            return self.copies("attention", layer)
        return self.copies("readout") if len({heads[layer] for heads in self.heads}) == 1 else self.members

    @property
    def undropped(self) -> "EnsembleConfig":
        """A copy without dropout and stochastic depth, which do not affect answers."""

        def without(part: Any) -> Any:
            return replace(part, **{rate.name: rate.default for rate in fields(part) if "drop" in rate.name})

        return replace(self, stem=without(self.stem), encoder=without(self.encoder), readout=without(self.readout))

    def differences(self, other: "EnsembleConfig") -> list[str]:
        """Architecture fields in which two ensembles differ, as readable lines; heads and dropout are ignored."""
        if self.kind != other.kind:
            return [f"kind: {self.kind} and {other.kind}"]
        lines, both = [], (self.undropped, other.undropped)
        for part in ("stem", "encoder", "readout"):
            mine, theirs = (vars(getattr(config, part)) for config in both)
            lines += [f"{part}.{name}: {mine[name]} and {theirs[name]}" for name in mine if mine[name] != theirs[name]]
        return lines


@dataclass(frozen=True)
class ProjectionConfig(Checked):
    """A linear map from a tower's features to the common embedding, stored once or once per member."""

    outputs: Size
    bias: bool = False
    copies: Copies = 1


@dataclass(frozen=True)
class DualEncoderConfig:
    """Two towers with a common embedding space.

    A projection is None if a tower's features are the embedding. `scale_copies` is the number of stored logit scales
    (and biases, if any): 1, or one per member.
    """

    image: EnsembleConfig
    text: EnsembleConfig
    image_projection: ProjectionConfig | None = None
    text_projection: ProjectionConfig | None = None
    scale_copies: int = 1
    logit_bias: bool = False

    def __post_init__(self) -> None:
        kinds = self.image.kind, self.text.kind
        if kinds != ("image", "text"):
            raise ConfigError(f"a dual encoder has a tower for image and one for text, got {' and '.join(kinds)}")
        if self.image.members != self.text.members and 1 not in (self.image.members, self.text.members):
            counts = f"the image tower has {self.image.members} members and the text tower {self.text.members}"
            raise ConfigError(f"{counts}; both must have the same number, or one of them a single member")
        widths = self.embedding_of("image"), self.embedding_of("text")
        if widths[0] != widths[1]:
            ends = f"the image tower ends in width {widths[0]}, the text tower in width {widths[1]}"
            raise ConfigError(f"{ends}; give projections to a common width (Projections.fresh makes new ones)")
        projections = (self.image_projection, self.text_projection)
        copies = [self.scale_copies, *(projection.copies for projection in projections if projection is not None)]
        if any(count not in (1, self.members) for count in copies):
            raise ConfigError(f"scale and maps have {copies} copies; give one, or one for each of {self.members}")

    @property
    def members(self) -> int:
        """Number of members, M."""
        return max(self.image.members, self.text.members)

    def embedding_of(self, tower: str) -> int:
        """Width of a tower's embedding; the same for both towers."""
        projection: ProjectionConfig | None = getattr(self, f"{tower}_projection")
        return output_width(getattr(self, tower)) if projection is None else projection.outputs


def output_width(config: EnsembleConfig) -> int:
    """Width of an ensemble's output: its logits, or its pooled features if it does not classify."""
    if config.readout.num_classes:
        return config.readout.num_classes
    if config.readout.pool == "distilled":
        raise ConfigError("a tower that reads class and distillation token separately has no single feature vector")
    return config.encoder.width * (2 if config.readout.pool == "cls_mean" else 1)
