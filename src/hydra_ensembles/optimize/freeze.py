"""An ensemble made ready to run: weights folded, merged and laid out for one plan."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.config import EnsembleConfig, NormKind, PatchStemConfig
from ..model.cost import Description
from ..model.layers import (
    MLP,
    Attention,
    Block,
    Encoder,
    GroupedLinear,
    GroupedNorm,
    Plan,
    into_heads_batched,
    into_heads_grouped,
    out_of_heads_batched,
    out_of_heads_grouped,
)
from ..model.metadata import Metadata


class PlainNorm(nn.Module):
    """LayerNorm or RMSNorm without weights: the same for every member."""

    def __init__(self, eps: float, kind: NormKind) -> None:
        super().__init__()
        self.eps = eps
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        shape = (x.shape[-1],)
        return (
            F.layer_norm(x, shape, None, None, self.eps)
            if self.kind == "layer"
            else F.rms_norm(x, shape, None, self.eps)
        )


def fold_block(block: Block) -> None:
    """Apply all of the above to one block."""
    if block.norm_first:
        _fold_norm_into_attention(block)
        _fold_norm_into_mlp(block)
    _fold_attention_scale(block.attention)
    _fold_mlp_scale(block.mlp)
    _fold_biases(block.attention)


def member_of_each_head(attention: Attention) -> Tensor:
    """`[K]`: which copy each head belongs to."""
    sizes = torch.tensor(attention.sizes, device=attention.out.device)
    return torch.repeat_interleave(torch.arange(len(attention.sizes), device=sizes.device), sizes)


def _fold_norm_into_attention(block: Block) -> None:
    norm, attention = block.norm1, block.attention
    if not isinstance(norm, GroupedNorm) or norm.weight.shape[0] == 1 or norm.weight.shape[0] != len(attention.sizes):
        return
    owner = member_of_each_head(attention)
    if norm.bias is not None:
        constant = torch.einsum("kpid,kd->kpi", attention.qkv, norm.bias[owner])  # what β becomes, [K, 3, d_k]
        old = attention.qkv_bias
        attention.qkv_bias = _frozen(constant if old is None else old + constant)
    attention.qkv = _frozen(attention.qkv * norm.weight[owner][:, None, None, :])
    setattr(block, "norm1", PlainNorm(norm.eps, norm.kind))  # noqa: B010 (the block declares another class)


def _fold_norm_into_mlp(block: Block) -> None:
    norm, up = block.norm2, block.mlp.up
    if not isinstance(norm, GroupedNorm) or norm.weight.shape[0] == 1 or norm.weight.shape[0] != up.weight.shape[0]:
        return
    if norm.bias is not None:
        constant = torch.einsum("god,gd->go", up.weight, norm.bias)  # [M, hidden]
        up.bias = _frozen(constant if up.bias is None else up.bias + constant)
    up.weight = _frozen(up.weight * norm.weight[:, None, :])
    setattr(block, "norm2", PlainNorm(norm.eps, norm.kind))  # noqa: B010


def _fold_attention_scale(attention: Attention) -> None:
    scale = attention.scale  # [1 or G, d]
    if scale is None:
        return
    of_heads = scale if scale.shape[0] == 1 else scale[member_of_each_head(attention)]  # [1 or K, d]
    attention.out = _frozen(attention.out * of_heads[:, None, :])
    if attention.out_bias is not None:
        attention.out_bias = _frozen(attention.out_bias * scale)
    attention.scale = None


def _fold_mlp_scale(mlp: MLP) -> None:
    scale = mlp.scale  # [1 or G, d]
    if scale is None or scale.shape[0] not in (1, mlp.down.weight.shape[0]):
        return
    mlp.down.weight = _frozen(mlp.down.weight * scale[:, :, None])
    if mlp.down.bias is not None:
        mlp.down.bias = _frozen(mlp.down.bias * scale)
    mlp.scale = None


def _fold_biases(attention: Attention) -> None:
    bias = attention.qkv_bias  # [K, 3, d_k]
    if bias is None or not sum(attention.sizes):
        return
    copies = len(attention.sizes)
    through_heads = torch.einsum("ki,kid->kd", bias[:, 2], attention.out)  # [K, d]
    constant = through_heads.new_zeros(copies, through_heads.shape[1])
    constant.index_add_(0, member_of_each_head(attention), through_heads)  # [G, d]
    old = attention.out_bias
    attention.out_bias = _frozen(constant if old is None else old + constant)
    kept = torch.zeros_like(bias)
    kept[:, 0] = bias[:, 0]
    if attention.key_norm is not None:  # a norm in between sees the bias of the key
        kept[:, 1] = bias[:, 1]
    attention.qkv_bias = _frozen(kept)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


BLOCK = 32  # numbers that share a scale: 9 bits for each weight


class Int8Weight(nn.Module):
    """A weight as whole numbers from -127 to 127 with a scale for every 32 of them.

    The numbers that share a scale lie next to each other on the axis that the product sums over. The first axis can
    be read in part, so that no more than what is needed is turned back at a time.
    """

    values: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, summed: int) -> None:
        super().__init__()
        self.summed = summed
        size = next(size for size in range(BLOCK, 0, -1) if weight.shape[summed] % size == 0)
        blocks = weight.detach().unflatten(summed, (-1, size))
        scale = blocks.abs().amax(summed + 1, keepdim=True).clamp_min(1e-12) / 127
        self.register_buffer("values", torch.round(blocks / scale).to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The weight, or rows `start:stop` of its first axis, in the type of the scale."""
        blocks = self.values[start:stop].to(self.scale.dtype) * self.scale[start:stop]
        return blocks.flatten(self.summed, self.summed + 1)


def dense(weight: Tensor | Int8Weight, start: int = 0, stop: int | None = None) -> Tensor:
    """Rows of a weight, however it is stored."""
    return weight[start:stop] if isinstance(weight, Tensor) else cast(Tensor, weight(start, stop))


class Int8Linear(nn.Module):
    """`GroupedLinear` with its weight in int8; copies run one after another."""

    def __init__(self, source: GroupedLinear) -> None:
        super().__init__()
        self.weight = Int8Weight(source.weight, summed=2)
        self.bias = source.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, …, in]` to `[max(N, G), …, out]`."""
        copies = self.weight.values.shape[0]
        parts = [x] if copies == 1 else x.expand(copies, *x.shape[1:]).split(1)
        results = []
        for index, part in enumerate(parts):
            bias = None if self.bias is None else self.bias[index]
            results.append(F.linear(part, self.weight(index, index + 1)[0], bias))
        return torch.cat(results) if copies > 1 else results[0]


Parts = tuple[Tensor, ...]  # those of query, key and value that were asked for, each [R, T, H', d_k]


class IntoHeads(nn.Module):
    """Some of query, key and value of all heads: weights `[K, P, d_k, d]`.

    A plain product takes its bias along for free. In a batched or grouped product the bias is a pass of its own
    over the result, so it is added to the parts that have one and to no other.

    Attributes:
        biased: Places among the P parts whose bias is not zero.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, parts: tuple[int, ...], biased: set[int], int8: bool
    ) -> None:
        super().__init__()
        chosen = weight if len(parts) == weight.shape[1] else weight[:, list(parts)]
        self.weight: nn.Parameter | Int8Weight = (
            Int8Weight(chosen, summed=3) if int8 else nn.Parameter(chosen, requires_grad=False)
        )
        self.biased = () if bias is None else tuple(place for place, part in enumerate(parts) if part in biased)
        self.bias = (
            nn.Parameter(bias[:, list(parts)].contiguous(), requires_grad=False)
            if bias is not None and self.biased
            else None
        )

    def plain(self, x: Tensor, start: int = 0, stop: int | None = None) -> Parts:
        """All heads, or `start:stop` of them, on `[R, T, d]` that each of them sees: one plain product."""
        weight = dense(self.weight, start, stop)  # [H', P, d_k, d]
        bias = None if self.bias is None else self.bias[start:stop].flatten()
        y = F.linear(x.flatten(0, 1), weight.flatten(0, 2), bias)  # two axes: one product, not one for each of R
        return y.reshape(*x.shape[:2], *weight.shape[:3]).unbind(3)

    def batched(self, x: Tensor, members: int) -> Parts:
        """`[M, B, T, d]`, each member's part by its own K / M heads, members on the batch axis of the result."""
        parts = into_heads_batched(x, dense(self.weight), None, members).unbind(3)  # each [M·B, T, h, d_k]
        if self.bias is None:
            return parts
        bias = self.bias.unflatten(0, (members, -1))[:, None, None]  # [M, 1, 1, h, P, d_k]
        return tuple(
            (part.unflatten(0, (members, -1)) + bias[..., place, :]).flatten(0, 1) if place in self.biased else part
            for place, part in enumerate(parts)
        )

    def grouped(self, x: Tensor, head_ends: Tensor) -> Parts:
        """`[M, B, T, d]`, each member's part by its own heads, all heads side by side in the result."""
        parts = into_heads_grouped(x, dense(self.weight), None, head_ends).unbind(3)  # each [B, T, K, d_k]
        if self.bias is None:
            return parts
        return tuple(part + self.bias[:, place] if place in self.biased else part for place, part in enumerate(parts))

    def pad(self, sizes: tuple[int, ...]) -> None:
        """Give every member as many heads as the widest; the new ones are zero."""
        if isinstance(self.weight, Tensor):
            self.weight = padded_heads(self.weight, sizes)
        if self.bias is not None:
            self.bias = padded_heads(self.bias, sizes)


def padded_heads(tensor: Tensor, sizes: tuple[int, ...]) -> nn.Parameter:
    """A tensor `[K, …]` with zeros put after each member's heads, up to as many as the widest has."""
    widest = max(sizes)
    parts = [torch.cat([part, part.new_zeros(widest - len(part), *part.shape[1:])]) for part in tensor.split(sizes)]
    return nn.Parameter(torch.cat(parts), requires_grad=False)


def head_ranges(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """First and last head (exclusive) of each copy."""
    ends = list(accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


class FrozenAttention(nn.Module):
    """Computes what an `Attention` with folded biases computes, by one of the plans.

    Attributes:
        sizes: Number of heads of each copy; K is their sum, G how many copies there are.
        one_input: Whether all heads see one input, or there is one copy of them: then a plain product with all of
            them does, whatever the plan.
        into: Input projections: one with query, key and value; or, in a block that computes few of its tokens,
            one with the query and one with key and value, each contiguous.
        out: `[K, d_k, d]`.
        out_bias: `[1 or G, d]` or None.
        distinct: As in `Attention`.
    """

    distinct: Tensor | None
    head_ends: Tensor | None

    def __init__(self, source: Attention, one_input: bool, reads_few: bool, int8: bool = False) -> None:
        super().__init__()
        self.sizes, self.causal, self.one_input = source.sizes, source.causal, one_input
        self.plan: Plan = "loop"
        self.head_dim, self.width = source.out.shape[1:]
        self.query_norm, self.key_norm = source.query_norm, source.key_norm
        biased = {0} if source.key_norm is None else {0, 1}  # of query, key, value; the rest is folded away
        parts = ((0,), (1, 2)) if reads_few else ((0, 1, 2),)
        self.into = nn.ModuleList(IntoHeads(source.qkv, source.qkv_bias, one, biased, int8) for one in parts)
        self.out: nn.Parameter | Int8Weight = Int8Weight(source.out, summed=1) if int8 else source.out
        self.out_bias = source.out_bias
        self.register_buffer("distinct", source.distinct, persistent=False)
        self.register_buffer("head_ends", None, persistent=False)

    def use_plan(self, plan: Plan) -> None:
        """Choose how members with inputs of their own are run; `"batched"` pads them to the widest member."""
        self.plan = plan
        if plan == "grouped":
            ends = [stop for _, stop in head_ranges(self.sizes)]
            device = next(self.into.parameters()).device
            self.head_ends = torch.tensor(ends, dtype=torch.int32, device=device)
        if plan == "batched" and not self.one_input and len(set(self.sizes)) > 1:
            for projection in self.into:
                cast(IntoHeads, projection).pad(self.sizes)
            self.out = padded_heads(dense(self.out), self.sizes)
            self.sizes = (max(self.sizes),) * len(self.sizes)

    def forward(self, x: Tensor, key_mask: Tensor | None, read: slice | None = None) -> Tensor:
        """Attend within `[N, B, T, d]` as `Attention` does, to `[max(N, G), B, T', d]`."""
        if not sum(self.sizes):
            return self._with_bias(x.new_zeros(*x.shape[:2], _count(x.shape[2], read), self.width))
        if self.one_input:
            return self._all_at_once(x, key_mask, read)
        if self.plan == "loop":
            return self._one_after_another(x, key_mask, read)
        copies, ends = len(self.sizes), self.head_ends
        if ends is not None:
            parts = self._parts(x, read, lambda into, one: into.grouped(one, ends))
            return self._out_of_members(self._attend(parts, key_mask, 1))
        parts = self._parts(x, read, lambda into, one: into.batched(one, copies))
        z = self._attend(parts, key_mask, copies)  # [M·B, T', h, d_k]
        return self._with_bias(out_of_heads_batched(z, dense(self.out), copies))

    def _all_at_once(self, x: Tensor, key_mask: Tensor | None, read: slice | None) -> Tensor:
        """One product with all heads."""
        parts = self._parts(x.flatten(0, 1), read, IntoHeads.plain)
        z = self._attend(parts, key_mask, x.shape[0])  # [N·B, T', H, d_k]
        if len(self.sizes) == 1:
            return self._out_of_copy(0, z).unflatten(0, (x.shape[0], -1))  # [N, B, T', d]
        return self._out_of_members(z if self.distinct is None else z.index_select(2, self.distinct))

    def _one_after_another(self, x: Tensor, key_mask: Tensor | None, read: slice | None) -> Tensor:
        """Member by member, from the input of the sublayer to its output."""
        results = []
        for member, (start, stop) in enumerate(head_ranges(self.sizes)):
            if start == stop:  # nothing to attend with
                z = x.new_zeros(x.shape[1], _count(x.shape[2], read), 0, self.head_dim)
            else:
                parts = self._parts(x[member], read, partial(IntoHeads.plain, start=start, stop=stop))
                z = self._attend(parts, key_mask, 1, member)  # [B, T', h, d_k]
            results.append(self._out_of_copy(member, z))
        return torch.stack(results)  # [M, B, T', d]

    def _parts(self, x: Tensor, read: slice | None, product: Callable[[IntoHeads, Tensor], Parts]) -> Parts:
        """Query, key and value, each `[R, T, H', d_k]`, the query for the tokens to be read alone."""
        projections = [cast(IntoHeads, one) for one in self.into]
        if len(projections) == 1:
            return product(projections[0], x)
        return product(projections[0], x if read is None else x[..., read, :]) + product(projections[1], x)

    def _attend(self, parts: Parts, key_mask: Tensor | None, repeats: int, member: int | None = None) -> Tensor:
        """Attention of query, key and value to `[R, T', H', d_k]`, where R = repeats · B.

        `member` says which one they belong to where it is one alone.
        """
        q, k, v = parts
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self._normed(q, self.query_norm, member), self._normed(k, self.key_norm, member)
        mask = None if key_mask is None else self._mask(key_mask, repeats, q.shape[1], k.shape[1])
        z = F.scaled_dot_product_attention(
            q.transpose(1, 2),  # [R, H', T', d_k]
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=self.causal and mask is None,
        )
        return z.transpose(1, 2)

    def _mask(self, key_mask: Tensor, repeats: int, queries: int, keys: int) -> Tensor:
        """Mask for `scaled_dot_product_attention`, `[R, 1, 1 or T', T]`, true where attention may go."""
        mask = (key_mask.repeat(repeats, 1) if repeats > 1 else key_mask)[:, None, None, :]
        if self.causal:
            mask = mask & torch.ones(queries, keys, dtype=torch.bool, device=key_mask.device).tril()
        return mask

    def _normed(self, x: Tensor, norm: GroupedNorm, member: int | None) -> Tensor:
        """Normalise each head of `[R, T, H', d_k]` with the weights of the copy it belongs to."""
        if norm.weight.shape[0] == 1:
            return norm.for_copy(0, x)
        if member is not None:
            return norm.for_copy(member, x)
        if x.shape[2] == sum(self.sizes):  # all copies side by side
            parts = x.split(self.sizes, dim=2)
            return torch.cat([norm.for_copy(copy, part) for copy, part in enumerate(parts)], dim=2)
        return cast(Tensor, norm(x.unflatten(0, (len(self.sizes), -1)))).flatten(0, 1)  # copies on the batch axis

    def _out_of_members(self, z: Tensor) -> Tensor:
        """Output projections of heads side by side, `[B, T', K, d_k]` to `[M, B, T', d]`."""
        copies = len(self.sizes)
        if self.head_ends is not None:
            return self._with_bias(out_of_heads_grouped(z, dense(self.out), self.head_ends))
        if self.plan == "batched" and len(set(self.sizes)) == 1:
            rows = z.flatten(0, 1).unflatten(1, (copies, -1)).flatten(2).transpose(0, 1)  # [M, B·T', h·d_k]
            y = torch.bmm(rows, dense(self.out).reshape(copies, -1, self.width))
            return self._with_bias(y.unflatten(1, z.shape[:2]))
        return torch.stack([self._out_of_copy(copy, part) for copy, part in enumerate(z.split(self.sizes, dim=2))])

    def _out_of_copy(self, copy: int, z: Tensor) -> Tensor:
        """Output projection of one copy's heads, `[R, T', h, d_k]` to `[R, T', d]`, with its bias."""
        weight = dense(self.out, *head_ranges(self.sizes)[copy]).flatten(0, 1)  # [h·d_k, d]
        bias = None
        if self.out_bias is not None:
            bias = self.out_bias[min(copy, self.out_bias.shape[0] - 1)]
        return F.linear(z.flatten(2).flatten(0, 1), weight.t(), bias).unflatten(0, z.shape[:2])

    def _with_bias(self, y: Tensor) -> Tensor:
        """`[M, B, T', d]` with each member's bias."""
        return y if self.out_bias is None else y + self.out_bias[:, None, None]


def _count(tokens: int, read: slice | None) -> int:
    """How many of the tokens are read."""
    return tokens if read is None else len(range(*read.indices(tokens)))


class FrozenPatchStem(nn.Module):
    """A patch stem for images of the size its position embedding was made for; others go the usual way.

    Attributes:
        source: The stem it stands for; weights are its own.
        prefix: `[G, P, d]`, the prefix tokens with their positions, or None.
    """

    prefix: Tensor | None

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source
        config: PatchStemConfig = source.config
        self.config = config
        covered = config.position_prefix
        tokens = [source.class_token, source.distillation_token, source.register_tokens]
        present = [token for token in tokens if token is not None]
        prefix = None
        if present:
            joined = torch.cat(present, dim=1)  # [G, P, d]
            prefix = torch.cat([joined[:, :covered] + source.position[:, :covered], joined[:, covered:]], dim=1)
        self.register_buffer("prefix", prefix, persistent=False)

    def forward(self, images: Tensor, segments: None = None) -> Tensor:
        """Embed images `[B, channels, H, W]` as `[G, B, T, d]`; there are no segments, as text would have them."""
        config, source = self.config, self.source
        if images.dim() != 4 or images.shape[1:] != (config.channels, *config.image_size):
            return cast(Tensor, source(images))
        (rows, columns), (height, width) = config.grid, config.patch_size
        copies = source.patch.shape[0]
        patches = images.reshape(-1, config.channels, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
        bias = None if source.patch_bias is None else source.patch_bias.flatten()
        x = F.linear(patches.flatten(3).flatten(1, 2), source.patch.flatten(2).flatten(0, 1), bias)  # [B, h·w, G·d]
        x = x.unflatten(2, (copies, -1)).permute(2, 0, 1, 3)  # [G, B, h·w, d]
        x = x + source.position[:, None, config.position_prefix :]
        if self.prefix is not None:
            x = torch.cat([self.prefix[:, None].expand(-1, x.shape[1], -1, -1), x], dim=2)
        return x if source.norm is None else cast(Tensor, source.norm(x))


class EnsembleLike(Protocol):
    """The part of `Ensemble` that running it fast depends on."""

    stem: Any
    encoder: Encoder
    readout: Any
    config: EnsembleConfig
    metadata: Metadata

    @property
    def kind(self) -> str:
        """`"image"` or `"text"`."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""

    def __call__(self, *arguments: Any) -> Any:
        """Member logits."""

    def eval(self) -> Any:
        """Switch to evaluation mode."""

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set whether gradients are recorded."""

    def to(self, dtype: torch.dtype) -> Any:
        """Convert the floating-point parameters."""

    def modules(self) -> Any:
        """All modules."""

    def parameters(self) -> Any:
        """All parameters."""

    def buffers(self) -> Any:
        """All buffers."""

    def unpack(
        self,
        inputs: Tensor | Mapping[str, Tensor],
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Arguments of `forward`, in order."""

    def describe(self) -> Description:
        """Parameters, multiply-adds and heads kept."""


def merge_equal_copies(ensemble: EnsembleLike) -> None:
    """Keep one copy of every parameter that is equal in all members, in place; they then branch as late as possible."""
    if all(_equal_copies(parameter) for parameter in ensemble.stem.parameters()):
        for module in ensemble.stem.modules():
            _keep_first(module, list(module._parameters))
    for part in (ensemble.encoder, ensemble.readout):
        for module in part.modules():
            if isinstance(module, GroupedLinear | GroupedNorm):
                _merge(module, ("weight", "bias"))
            elif isinstance(module, Block):
                _merge(module.mlp, ("scale",))
                _merge_attention(module.attention)


def merge_equal_heads(attention: Attention) -> None:
    """For members that see the same input: keep one of each set of equal heads, to be computed once."""
    rows = attention.qkv.flatten(1)
    if attention.qkv_bias is not None:
        rows = torch.cat([rows, attention.qkv_bias.flatten(1)], dim=1)
    firsts: list[int] = []
    which: list[int] = []
    for index, row in enumerate(rows):
        match = next((place for place, first in enumerate(firsts) if torch.equal(rows[first], row)), None)
        which.append(len(firsts) if match is None else match)
        if match is None:
            firsts.append(index)
    if len(firsts) < len(rows):
        for name in ("qkv", "qkv_bias"):
            tensor = getattr(attention, name)
            if tensor is not None:
                setattr(attention, name, nn.Parameter(tensor[firsts].clone(), requires_grad=False))
        attention.distinct = torch.tensor(which, device=rows.device)


def _equal_copies(parameter: Tensor) -> bool:
    return all(torch.equal(parameter[0], other) for other in parameter[1:])


def _keep_first(module: nn.Module, names: list[str] | tuple[str, ...]) -> None:
    for name in names:
        parameter = getattr(module, name)
        if parameter is not None and parameter.shape[0] > 1:
            setattr(module, name, nn.Parameter(parameter[:1].clone(), requires_grad=False))


def _merge(module: nn.Module, names: tuple[str, ...]) -> None:
    """Store parameters once where all copies of all of them are equal."""
    parameters = [getattr(module, name) for name in names if getattr(module, name) is not None]
    if all(_equal_copies(parameter) for parameter in parameters):
        _keep_first(module, names)


def _merge_attention(attention: Attention) -> None:
    """Store the whole sublayer once where all copies are equal; else what can be stored once by itself."""
    _merge(attention, ("scale",))
    _merge(attention, ("out_bias",))
    if len(attention.sizes) == 1 or not attention.even:
        return
    heads = {name: getattr(attention, name) for name in ("qkv", "qkv_bias", "out")}
    present = {name: tensor for name, tensor in heads.items() if tensor is not None}
    copies = [tensor.unflatten(0, (len(attention.sizes), -1)) for tensor in present.values() if len(tensor)]
    small = [parameter for name, parameter in attention.named_parameters() if name not in heads]
    if all(_equal_copies(tensor) for tensor in [*copies, *small]):
        size = attention.sizes[0]
        for name, tensor in present.items():
            setattr(attention, name, nn.Parameter(tensor[:size].clone(), requires_grad=False))
        attention.sizes = (size,)


E = TypeVar("E", bound=EnsembleLike)


@torch.no_grad()
def simplified(ensemble: E) -> E:
    """A frozen copy in which equal copies are merged and constants are folded into the weights.

    Weights of half precision come back in float32, where folding does not lose digits; the caller converts.
    """
    result = copy.deepcopy(ensemble)
    result.eval()
    result.requires_grad_(False)
    merge_equal_copies(result)
    if result.dtype in (torch.bfloat16, torch.float16):
        result.to(torch.float32)
    for block in blocks(result):
        fold_block(block)
    _compute_common_heads_once(result)
    return result


def blocks(ensemble: EnsembleLike) -> list[Block]:
    """The blocks of the encoder."""
    return [block for block in ensemble.encoder.layers if isinstance(block, Block)]


def branching_layer(ensemble: EnsembleLike) -> int:
    """The first layer in which activations differ between members; the number of layers if none does."""
    inputs = _attention_inputs(ensemble)
    for index, block in enumerate(blocks(ensemble)):
        if max(inputs[index], _copies(block)) > 1:
            return index
    return len(ensemble.encoder.layers)


def shares_its_input(ensemble: EnsembleLike) -> list[bool]:
    """For each layer, whether all heads of the attention see one and the same input, or there is one copy of it."""
    layers = zip(_attention_inputs(ensemble), blocks(ensemble), strict=True)
    return [members == 1 or len(block.attention.sizes) == 1 for members, block in layers]


def _attention_inputs(ensemble: EnsembleLike) -> list[int]:
    """How many different inputs the attention of each layer sees: 1, or one for each member."""
    members = next(iter(ensemble.stem.parameters())).shape[0]
    counts = []
    for block in blocks(ensemble):
        if block.norm_first and not isinstance(block.norm1, PlainNorm):
            members = max(members, block.norm1.weight.shape[0])
        counts.append(members)
        members = max(members, _copies(block))
    return counts


def _copies(block: Block) -> int:
    """The most copies of anything in a block."""
    small = [p.shape[0] for name, p in block.named_parameters() if name not in _HEAD_AXIS]
    return max([len(block.attention.sizes), *small])


_HEAD_AXIS = frozenset(f"attention.{name}" for name in ("qkv", "qkv_bias", "out"))


def _compute_common_heads_once(ensemble: EnsembleLike) -> None:
    """Where members see the same input for the last time, let heads they have in common be computed once."""
    layer = branching_layer(ensemble)
    if layer == len(ensemble.encoder.layers) or _attention_inputs(ensemble)[layer] > 1:
        return
    attention = blocks(ensemble)[layer].attention
    normed = attention.query_norm is not None and attention.query_norm.weight.shape[0] > 1
    if not normed and len(attention.sizes) > 1 and len(attention.out):
        merge_equal_heads(attention)


@torch.no_grad()
def frozen(ensemble: E, dtype: torch.dtype, int8: bool = False) -> E:
    """A copy of an ensemble rewritten for inference; it runs by the plan `"loop"` until `with_plan` says otherwise."""
    result = simplified(ensemble)
    last = len(blocks(result)) - 1
    reads_few = result.readout.tokens_read() is not None
    inputs = shares_its_input(result)
    for index, block in enumerate(blocks(result)):
        attention = FrozenAttention(block.attention, inputs[index], reads_few and index == last, int8)
        setattr(block, "attention", attention)  # noqa: B010 (the block declares another class)
        if int8:
            setattr(block.mlp, "up", Int8Linear(block.mlp.up))  # noqa: B010
            setattr(block.mlp, "down", Int8Linear(block.mlp.down))  # noqa: B010
    if isinstance(result.config.stem, PatchStemConfig):
        result.stem = FrozenPatchStem(result.stem)
    result.to(dtype)
    return result


@torch.no_grad()
def with_plan(ensemble: E, plan: Plan) -> E:
    """A frozen ensemble that runs by this plan, around the same weights; `"batched"` may pad some of them."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in [*ensemble.parameters(), *ensemble.buffers()]}
    result = copy.deepcopy(ensemble, memo)
    for module in result.modules():
        if isinstance(module, FrozenAttention):
            module.use_plan(plan)
        elif isinstance(module, GroupedLinear):
            module.one_by_one = plan == "loop"
    return result
