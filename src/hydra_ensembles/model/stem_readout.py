"""Both ends of a model: from pixels or tokens to embeddings, and from features to logits."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..metrics.probabilities import class_logits
from .config import EncoderConfig, EnsembleConfig, PatchStemConfig, ProjectionConfig, Resample, TextStemConfig
from .layers import (
    ACTIVATIONS,
    Attention,
    Context,
    Dropout,
    GroupedLinear,
    GroupedNorm,
    Places,
    empty,
    linear,
    select_queries,
)


class PatchStem(nn.Module):
    """Cut images into patches, project them, prepend the prefix tokens and add positions."""

    def __init__(self, config: PatchStemConfig, width: int, copies: int) -> None:
        super().__init__()
        self.config = config
        rows, columns = config.grid
        self.patch = empty(copies, width, config.channels, *config.patch_size)
        self.patch_bias = empty(copies, width) if config.patch_bias else None
        self.class_token = empty(copies, 1, width) if config.class_token else None
        self.distillation_token = empty(copies, 1, width) if config.distillation_token else None
        self.register_tokens = empty(copies, config.registers, width) if config.registers else None
        self.position = None
        if config.learned_positions:
            self.position = empty(copies, config.position_prefix + rows * columns, width)
        self.norm = GroupedNorm(copies, width, config.norm_eps, config.norm_kind) if config.norm else None
        self.dropout = Dropout(config.dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Embed images `[B, channels, H, W]` as `[G, B, T, d]`; any size that is a multiple of the patch size."""
        height, width = self.config.patch_size
        grid = images.shape[2] // height, images.shape[3] // width
        patches = images.unflatten(3, (grid[1], width)).unflatten(2, (grid[0], height)).permute(0, 2, 4, 1, 3, 5)
        bias = None if self.patch_bias is None else self.patch_bias.flatten()
        x = F.linear(patches.flatten(3).flatten(1, 2), self.patch.flatten(2).flatten(0, 1), bias)  # [B, h·w, G·d]
        x = x.unflatten(2, self.patch.shape[:2]).permute(2, 0, 1, 3)  # [G, B, h·w, d]
        covered, position = self.config.position_prefix, None
        if self.position is not None:
            position = resample_position(self.position, covered, self.config.grid, grid, self.config.resample)
            x = x + position[:, None, covered:]
        tokens = (self.class_token, self.distillation_token, self.register_tokens)
        present: list[Tensor] = [token for token in tokens if token is not None]
        if present:
            prefix = torch.cat(present, dim=1)  # [G, P, d]
            if position is not None:
                prefix = torch.cat([prefix[:, :covered] + position[:, :covered], prefix[:, covered:]], dim=1)
            x = torch.cat([prefix[:, None].expand(-1, x.shape[1], -1, -1), x], dim=2)  # [G, B, P + h·w, d]
        x = self.dropout(x)
        return x if self.norm is None else self.norm(x)


def resample_position(
    position: Tensor, prefix: int, old: tuple[int, int], new: tuple[int, int], method: Resample
) -> Tensor:
    """Resample a position embedding `[G, prefix + h·w, d]` to another grid; the prefix part is unchanged."""
    if old == new:
        return position
    grid = position[:, prefix:].unflatten(1, old).permute(0, 3, 1, 2).float()  # [G, d, h, w]
    grid = F.interpolate(
        grid,
        size=new,
        mode="bilinear" if method == "bilinear" else "bicubic",
        antialias=method == "bicubic_antialias",
        align_corners=method == "bicubic_align_corners",
    )
    patches = grid.permute(0, 2, 3, 1).flatten(1, 2).to(position.dtype)  # [G, h'·w', d]
    return torch.cat([position[:, :prefix], patches], dim=1)


class TextStem(nn.Module):
    """Look up words, positions and segments, add them, normalise, project to the encoder's width."""

    def __init__(self, config: TextStemConfig, width: int, copies: int) -> None:
        super().__init__()
        self.config = config
        embedding = config.embedding_width
        self.words = empty(copies, config.vocabulary, embedding)
        self.positions = empty(copies, config.positions, embedding) if config.learned_positions else None
        self.segments = empty(copies, config.segments, embedding) if config.segments else None
        self.norm = GroupedNorm(copies, embedding, config.norm_eps, config.norm_kind) if config.norm else None
        self.project = GroupedLinear(copies, embedding, width) if config.project else None
        self.dropout = Dropout(config.dropout)

    def forward(self, ids: Tensor, segments: Tensor | None = None, start: int = 0) -> Tensor:
        """Embed token ids `[B, T]` (and segment ids of the same shape) as `[G, B, T, d]`, from position `start` on."""
        x = lookup(self.words, ids)
        if self.positions is not None:
            places = torch.arange(start, start + ids.shape[1], device=ids.device)[None]  # [1, T]
            if (padding := self.config.positions_after) is not None:
                real = ids.ne(padding).long()
                places = real.cumsum(1) * real + padding  # padding tokens get the padding position
            x = x + lookup(self.positions, places)
        if self.segments is not None:
            x = x + lookup(self.segments, torch.zeros_like(ids) if segments is None else segments)
        x = self.dropout(x if self.norm is None else self.norm(x))
        return x if self.project is None else self.project(x)


def lookup(table: Tensor, ids: Tensor) -> Tensor:
    """Rows `ids` `[B, T]` of each copy of a table `[G, V, d]`, as `[G, B, T, d]`."""
    if table.shape[0] == 1:
        return F.embedding(ids, table[0])[None]
    copies, rows = table.shape[:2]
    offsets = torch.arange(copies, device=ids.device)[:, None, None] * rows
    return F.embedding(ids[None] + offsets, table.flatten(0, 1))


_ENDS = ("eot", "last", "final")  # poolings that take one token of a text


class Readout(nn.Module):
    """Pool the tokens of each member and classify; without a classifier, return the pooled features."""

    def __init__(self, config: EnsembleConfig) -> None:
        super().__init__()
        readout = config.readout
        width = config.encoder.width
        copies = config.copies("readout")
        norms = config.copies("norms")
        kind = config.encoder.norm
        self.config = readout
        before = config.stem.prefix_tokens if isinstance(config.stem, PatchStemConfig) else 0
        self.prefix = 0 if readout.pool_prefix else before  # tokens excluded from pooling
        self.norm = None if readout.norm == "none" else GroupedNorm(norms, width, readout.norm_eps, kind)
        self.map = None if config.pooling is None else MapPool(config, config.pooling)
        self.features = features = 2 * width if readout.pool == "cls_mean" else width
        self.hidden = GroupedLinear(copies, features, features, readout.hidden_bias) if readout.hidden else None
        self.hidden_norm = GroupedNorm(copies, features, readout.norm_eps, kind) if readout.hidden_norm else None
        self.classifier = self.distillation_classifier = self.projection = self.class_embeddings = None
        if readout.cosine is not None:
            embedding = readout.cosine.width or features
            if readout.cosine.width is not None:
                self.projection = GroupedLinear(copies, features, embedding, readout.cosine.bias)
            self.class_embeddings = GroupedLinear(copies, embedding, readout.num_classes, readout.bias)
        elif readout.num_classes:
            self.classifier = GroupedLinear(copies, features, readout.rows, readout.bias)
            if readout.pool == "distilled":
                self.distillation_classifier = GroupedLinear(copies, features, readout.num_classes, readout.bias)
        self.dropout = Dropout(readout.dropout)
        self.hidden_dropout = Dropout(readout.hidden_dropout)

    @property
    def reads_few(self) -> bool:
        """Whether the last attention has only one or two queries."""
        return self.config.pool not in ("mean", "cls_mean")

    def tokens_read(self, context: Context) -> slice | Places | None:
        """Positions that this readout uses, or None if it may need any of them."""
        if context.last is not None:
            return Places(context.last)
        return {"cls": slice(0, 1), "distilled": slice(0, 2)}.get(self.config.pool)

    def forward(self, x: Tensor, key_mask: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """Map tokens `[N, B, T, d]` to logits (or features) `[N', B, C]`."""
        return self.classify(self.pool(x, key_mask, ids))

    def pool(self, x: Tensor, key_mask: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """Pooled features `[N, B, d]`; `[N, B, 2, d]` if class and distillation token are read separately."""
        return self.after_pool(self._pool_tokens(self.before_pool(x), key_mask, ids))

    def before_pool(self, x: Tensor) -> Tensor:
        """Tokens `[N, B, T, d]` after the norm that precedes pooling, if any; for an attention, only those it pools."""
        x = self.norm(x) if self.norm is not None and self.config.norm == "tokens" else x
        return x if self.map is None else x[:, :, self.prefix :]

    def after_pool(self, pooled: Tensor) -> Tensor:
        """Apply the norm that follows pooling, if any."""
        return self.norm(pooled) if self.norm is not None and self.config.norm == "pooled" else pooled

    def classify(self, pooled: Tensor) -> Tensor:
        """Hidden layer and classifier on pooled features, `[N, B, d]` to `[N', B, C]`."""
        if self.class_embeddings is not None:
            return self.class_embeddings(self.embedding(pooled))
        x = self.penultimate(pooled)
        if self.distillation_classifier is not None and self.classifier is not None:
            return (self.classifier(x[:, :, 0]) + self.distillation_classifier(x[:, :, 1])) / 2
        if self.classifier is None:
            return x
        logits = self.classifier(x)
        if (cap := self.config.softcap) is not None:
            logits = (logits / cap).tanh() * cap
        if self.config.words:  # their probabilities are summed
            logits = torch.stack([one.logsumexp(-1) for one in logits.split(self.config.words, dim=-1)], dim=-1)
        return class_logits(logits) if self.config.outputs == "odds" else logits

    def embedding(self, pooled: Tensor) -> Tensor:
        """Input of the class embeddings: pooled features `[N, B, d]` projected, of unit length, `[N', B, e]`."""
        x = self.penultimate(pooled)
        return F.normalize(x if self.projection is None else self.projection(x), dim=-1)

    def penultimate(self, pooled: Tensor) -> Tensor:
        """Input of classifier or projection: pooled features `[N, B, d]` after the hidden layer, if any."""
        x = self.dropout(pooled)
        if self.hidden is not None and self.config.hidden is not None:
            x = ACTIVATIONS[self.config.hidden](self.hidden(x))
            x = self.hidden_dropout(x if self.hidden_norm is None else self.hidden_norm(x))
        return x

    def _pool_tokens(self, x: Tensor, key_mask: Tensor | None, ids: Tensor | None) -> Tensor:
        pool = self.config.pool
        if pool == "cls":
            return x[:, :, 0]
        if pool == "distilled":
            return x[:, :, :2]
        if pool == "map" and self.map is not None:
            return self.map(x)[:, :, 0]
        if pool == "mean" and key_mask is not None:
            weight = key_mask[None, :, :, None].to(x.dtype)  # [1, B, T, 1]
            wide = torch.promote_types(x.dtype, torch.float32)  # in half precision sums overflow and counts round
            return ((x * weight).sum(2, dtype=wide) / weight.sum(2, dtype=wide)).to(x.dtype)
        if pool == "mean":
            return x[:, :, self.prefix :].mean(2)
        if pool == "cls_mean":
            return torch.cat([x[:, :, 0], x[:, :, self.prefix :].mean(2)], dim=-1)
        last = None if ids is None or x.shape[2] == 1 else self.last_token(ids, key_mask)
        return x[:, :, 0] if last is None else select_queries(x, Places(last))[:, :, 0]  # the last block chose it

    def last_token(self, ids: Tensor, key_mask: Tensor | None) -> Tensor | None:
        """Position `[B]` of the token that represents the whole text; None if several or fixed ones do."""
        if self.config.pool not in _ENDS:
            return None
        if self.config.pad_token is not None:
            places = torch.arange(ids.shape[1], device=ids.device)
            return (places * ids.ne(self.config.pad_token)).argmax(1)  # the last that is not padding
        if self.config.pool in ("last", "final"):
            if key_mask is None or self.config.pool == "final":
                return torch.full_like(ids[:, 0], ids.shape[1] - 1)
            return key_mask.shape[1] - 1 - key_mask.int().flip(1).argmax(1)  # the last 1, wherever padding is
        if self.config.eot_token is None:  # the end-of-text token has the highest id of the vocabulary
            return ids.argmax(1)
        return ids.eq(self.config.eot_token).int().argmax(1)


class MapPool(nn.Module):
    """Attention pooling with one learned query, then an MLP with its residual (SigLIP's pooling head)."""

    def __init__(self, config: EnsembleConfig, sizes: EncoderConfig) -> None:
        super().__init__()
        layer = config.encoder.layers
        width = sizes.width
        copies = config.copies("readout")
        heads = tuple(config.heads[member][layer] for member in range(config.attention_copies(layer)))
        self.activation = ACTIVATIONS[sizes.activation]
        self.query_token = empty(copies, 1, width)
        self.attention = Attention(sizes, heads)
        self.norm = GroupedNorm(copies, width, sizes.norm_eps)
        self.up = GroupedLinear(copies, width, sizes.mlp_width)
        self.down = GroupedLinear(copies, sizes.mlp_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map normed tokens `[N, B, T, d]` to `[N', B, 1, d]`."""
        x = x.expand(max(len(x), len(self.query_token)), *x.shape[1:])
        return self.finish(self.attention(x, Context(), self.query(x)))

    def query(self, x: Tensor) -> Tensor:
        """The query, expanded to each member and sample of `[N, B, T, d]`: `[N, B, 1, d]`."""
        return self.query_token[:, None].expand(*x.shape[:2], -1, -1)

    def finish(self, attended: Tensor) -> Tensor:
        """Everything after the attention, `[N, B, 1, d]`."""
        return attended + self.down(self.activation(self.up(self.norm(attended))))


class Projections(nn.Module):
    """One linear map per tower; None if a tower's features already are the embedding.

    Examples:
        >>> both = he.Projections(dual.projections.image, dual.projections.text)
        >>> he.DualEncoder(dual.image, dual.text, both).embedding_width == dual.embedding_width
        True
    """

    def __init__(self, image: GroupedLinear | None = None, text: GroupedLinear | None = None) -> None:
        super().__init__()
        self.image = image
        self.text = text

    @classmethod
    def fresh(cls, image_width: int, text_width: int, outputs: int, bias: bool = False) -> "Projections":
        """Create maps for both towers, from their feature widths to an embedding of width `outputs`."""
        zeros = torch.zeros(1, outputs) if bias else None
        widths = (image_width, text_width)
        return cls(*(linear(torch.randn(1, outputs, width) * width**-0.5, zeros) for width in widths))

    def member(self, index: int) -> "Projections":
        """A copy of the maps that one member uses."""
        return Projections(*(None if one is None else one.member(index) for one in (self.image, self.text)))


def projection_config(projection: GroupedLinear | None) -> ProjectionConfig | None:
    """The configuration of a projection."""
    if projection is None:
        return None
    copies, outputs, _ = projection.weight.shape
    return ProjectionConfig(outputs, projection.bias is not None, copies)


def compose(inner: GroupedLinear | None, outer: GroupedLinear | None) -> GroupedLinear | None:
    """A single map equivalent to two maps in sequence; None stands for the identity."""
    if inner is None or outer is None:
        return inner if outer is None else outer
    bias: Tensor | None = outer.bias  # [G, out]
    if inner.bias is not None:
        through = (outer.weight @ inner.bias[..., None])[..., 0]
        bias = through if outer.bias is None else through + outer.bias
    return linear(outer.weight @ inner.weight, bias)
