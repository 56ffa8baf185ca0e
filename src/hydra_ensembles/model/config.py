"""Frozen model configurations that validate themselves."""

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from ..errors import ConfigError
from ..settings import Checked, Count, InnerShare, NotNegative, Positive, Range, Rate, Whole

Base = Annotated[float, Range(1)]

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
NormKind = Literal["layer", "layer_no_bias", "rms", "rms_plus_one"]  # the last adds one to its weights (Gemma)


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
        frequencies: The rotation of each pair by one position, instead of the powers of `base`, in layers without
            `local_base`. Fewer than half of a head rotate its first numbers alone.
        attention_factor: Factor of cosines and sines in these layers (YaRN).

    Examples:
        >>> he.RotaryConfig(base=10_000.0).local_base is None  # for `Declaration(rotary=...)` of an image model
        True
    """

    base: Base
    local_base: Base | None = None
    centred: bool = False
    offset: float = 0.0
    reference: tuple[Whole, Whole] | None = None
    frequencies: tuple[NotNegative, ...] | None = None
    attention_factor: Positive = 1.0


@dataclass(frozen=True)
class EncoderConfig(Checked):
    """The stack of transformer blocks: sizes, norm placement, activation, biases, regularisation.

    Attributes:
        first_norm: False if the attention of the first block gets the embedding without a norm (ModernBERT).
        key_bias: False if `qkv_bias` only applies to queries and values (EVA).
        up_bias: False if only the last linear layer of an MLP has a bias (GTE).
        mlp_norm: Whether each MLP has a norm before its last linear layer (EVA-02).
        local: For each layer, whether a token attends only to tokens at most `window` away; empty for none.
        kv_heads: Keys and values of a layer, if several heads share one (grouped attention): each serves as many
            successive heads, and goes with the last of them. None if each head has its own.
        attention_scale: Factor of the products of query and key; None for `head_dim ** -0.5`.
        softcap: Scaled products s become `softcap * tanh(s / softcap)` (Gemma 2).
        sandwich: Whether outputs of sublayers have a norm, too, before they are added (Gemma 2 and 3).
        norm_after: Whether they have, but inputs have none (OLMo 2).
        parallel: Norms of a block in which attention and MLP get the same input, `x + f(norm1(x)) + g(norm2(x))`
            (GPT-NeoX); with 1 they share it (Phi). 0 if the MLP comes after the attention.
        rotated: For each layer, whether queries and keys rotate; empty for all.
        joint_qk_norm: Whether `qk_norm` is one over all heads together (OLMo 2). A pruned head then keeps its rows of
            query, key and value, which the others' norms need, and loses the rest.
    """

    width: Whole
    layers: Whole
    heads: Whole
    head_dim: Whole
    mlp_width: Whole
    activation: Activation = "gelu"
    gated: bool = False
    norm: NormKind = "layer"
    norm_eps: InnerShare = 1e-6
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
    window: Whole | None = None
    kv_heads: Whole | None = None
    attention_scale: Positive | None = None
    softcap: Positive | None = None
    sandwich: bool = False
    norm_after: bool = False
    parallel: Literal[0, 1, 2] = 0
    rotated: tuple[bool, ...] = ()
    joint_qk_norm: bool = False

    def shares(self, kept: tuple[int, ...]) -> tuple[int, ...]:
        """How many of the `kept` heads use each key and value, of those that any uses."""
        each = self.heads // (self.kv_heads or self.heads)
        return tuple(Counter(head // each for head in kept).values())

    def projected(self, kept: tuple[int, ...]) -> tuple[int, ...]:
        """The heads with rows in the input projections, if the `kept` ones are used."""
        return tuple(range(self.heads)) if self.joint_qk_norm and kept else kept


Resample = Literal["bicubic", "bicubic_antialias", "bicubic_align_corners", "bilinear"]


@dataclass(frozen=True)
class PatchStemConfig(Checked):
    """Turn images into tokens: class, distillation, registers, patches.

    Of the tokens before the patches, the first `position_prefix` have a position embedding, the others none. Without
    `learned_positions` no token has one.
    """

    kind: ClassVar[str] = "patch"

    patch_size: tuple[Whole, Whole]
    grid: tuple[Whole, Whole]
    channels: Whole = 3
    patch_bias: bool = True
    class_token: bool = True
    distillation_token: bool = False
    registers: Count = 0
    position_prefix: int = 1
    resample: Resample = "bicubic_antialias"
    norm: bool = False
    norm_eps: InnerShare = 1e-5
    dropout: Rate = 0.0
    norm_kind: NormKind = "layer"
    learned_positions: bool = True

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
    Without `learned_positions`, `positions` is only the maximum length of a text. `prefix` are tokens in front of every
    text, which is given without them (`Ensemble.with_prefix`).
    """

    kind: ClassVar[str] = "text"

    vocabulary: Whole
    positions: Whole
    embedding_width: Whole
    segments: Count = 0
    positions_after: int | None = None
    norm: bool = True
    norm_eps: InnerShare = 1e-12
    project: bool = False
    dropout: Rate = 0.0
    norm_kind: NormKind = "layer"
    learned_positions: bool = True
    prefix: tuple[Count, ...] = ()

    @property
    def max_tokens(self) -> int:
        """Longest text that is taken, without the prefix."""
        start = 0 if self.positions_after is None else self.positions_after + 1
        return self.positions - start - len(self.prefix)


Pool = Literal["cls", "mean", "cls_mean", "distilled", "eot", "last", "final", "map"]
ReadoutNorm = Literal["none", "tokens", "pooled"]
HiddenActivation = Literal["tanh", "relu", "gelu"]
Outputs = Literal["classes", "odds", "labels"]


@dataclass(frozen=True)
class CosineConfig(Checked):
    """Classify by class embeddings, which include the logit scale; features are projected and scaled to length one.

    `width` is the width of the embedding; None if the features are the embedding and there is no projection.
    """

    width: Whole | None = None
    bias: bool = False


@dataclass(frozen=True)
class ReadoutConfig(Checked):
    """Turn tokens into logits: final norm, pooling, an optional hidden layer (a pooler), a classifier.

    Without classes the ensemble returns its pooled features. `map` pooling (SigLIP) attends from one learned query over
    all tokens; for pruning, this attention is one more layer after those of the encoder. `last` is the last token of a
    text, `final` the one at the last position, padding or not. With `pool_prefix`, mean and map pooling include the
    tokens before the patches. `hidden_norm` is a norm after the hidden layer. `cosine` makes the classifier one of
    class embeddings (zero-shot classification).

    Decoders: with `pad_token`, `last` is the last token that is not this one, whatever the mask says. `words` is how
    many rows of the classifier each class has, whose probabilities are summed; empty for one each. `softcap` c limits
    logits to c · tanh(logit / c).

    `outputs` is what logits mean: one of all classes is right (`classes`); the only logit is the log-odds of the second
    of two classes (`odds`); or each logit is that of a label by itself, of which several may be right (`labels`).
    """

    pool: Pool = "cls"
    num_classes: Count = 0
    norm: ReadoutNorm = "tokens"
    norm_eps: InnerShare = 1e-6
    hidden: HiddenActivation | None = None
    bias: bool = True
    dropout: Rate = 0.0
    hidden_dropout: Rate = 0.0
    eot_token: int | None = None
    map_heads: Count = 0
    map_mlp_width: Count = 0
    map_activation: Activation = "gelu"
    cosine: CosineConfig | None = None
    hidden_bias: bool = True
    hidden_norm: bool = False
    pool_prefix: bool = False
    pad_token: int | None = None
    words: tuple[Whole, ...] = ()
    softcap: Positive | None = None
    outputs: Outputs = "classes"

    @property
    def rows(self) -> int:
        """Rows of the classifier."""
        return 1 if self.outputs == "odds" else sum(self.words) or self.num_classes


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
class LowRank(Checked):
    """Ranks of the updates that each member adds to linear maps of attention and MLP; 0 for none.

    They are added to what the members share: to the input projections of attention together, to its output projection,
    and to the first and last layer of the MLP, above the trunk.
    """

    inputs: Count = 0
    out: Count = 0
    up: Count = 0
    down: Count = 0


@dataclass(frozen=True)
class EnsembleConfig:
    """One ensemble: its transformer, its members, what they share and which heads they keep.

    The first `trunk` layers are stored once for all members, whatever `sharing` says. If an attention pools the tokens,
    its heads are the last layer in `heads`. Where a member has no list for a layer, it keeps all heads of it.
    """

    stem: PatchStemConfig | TextStemConfig
    encoder: EncoderConfig
    readout: ReadoutConfig
    heads: KeptHeads = ((),)
    sharing: Sharing = Sharing()
    trunk: int = 0
    updates: LowRank = LowRank()

    def __post_init__(self) -> None:
        everything = tuple(tuple(range(count)) for count in self.head_counts)
        object.__setattr__(self, "heads", tuple(layers + everything[len(layers) :] for layers in self.heads))
        if self.readout.outputs == "odds" and self.readout.num_classes != 2:
            raise ConfigError(f"outputs='odds' is of two classes, not {self.readout.num_classes}")
        if isinstance(self.stem, TextStemConfig) and self.stem.prefix:
            if not self.packed or self.readout.pool not in ("last", "eot"):
                raise ConfigError("a prefix needs a decoder that reads its last token: others see what comes after it")
            if self.stem.max_tokens < 1 or not all(0 <= one < self.stem.vocabulary for one in self.stem.prefix):
                raise ConfigError(f"a prefix of {len(self.stem.prefix)} tokens does not fit window and vocabulary")
        pools = {"cls", "mean", "eot", "last", "final"}
        if isinstance(self.stem, PatchStemConfig):
            pools = {"mean", "map"} | ({"cls", "cls_mean"} if self.stem.class_token else set())
            pools |= {"distilled"} if self.stem.distillation_token else set()
        if self.readout.pool not in pools:
            raise ConfigError(f"readout.pool is {self.readout.pool!r}; this stem allows {sorted(pools)}")

    @property
    def members(self) -> int:
        """Number of members, M."""
        return len(self.heads)

    @property
    def packed(self) -> bool:
        """Whether real tokens are moved to the front of each row: in causal texts they never see what comes after."""
        return self.kind == "text" and self.encoder.causal and self.readout.pool != "final"

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

    def ranks(self, layer: int) -> LowRank:
        """Ranks of the members' updates of a layer."""
        return LowRank() if layer < self.trunk else self.updates

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

    outputs: Whole
    bias: bool = False
    copies: Whole = 1


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
        if (self.image.kind, self.text.kind) != ("image", "text"):
            raise ConfigError("a dual encoder has first a tower for images and then one for text")
        counts = self.image.members, self.text.members
        if counts[0] != counts[1] and 1 not in counts:
            raise ConfigError(f"the towers have {counts[0]} and {counts[1]} members; give as many, or a single one")
        widths = self.embedding_of("image"), self.embedding_of("text")
        if widths[0] != widths[1]:
            problem = f"the image tower ends in width {widths[0]}, the text tower in width {widths[1]}"
            raise ConfigError(f"{problem}; give projections to a common width (Projections.fresh makes new ones)")

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
