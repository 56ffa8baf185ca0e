"""Layers of a frozen ensemble: attention and patch stem, implemented for each plan."""

from collections.abc import Callable
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.layers import Attention, Context, Read, head_ranges, into_heads, out_of_heads, select_queries
from ..model.stem_readout import PatchStem

Plan = Literal["batched", "loop"]
"""How to run what is per member: in one batched product, padded to the widest member, or one member after another. The
result is the same."""

Parts = tuple[Tensor, ...]  # the requested ones of query, key and value, each [R, T, H, d_k]


class FrozenAttention(Attention):
    """Computes the same as an `Attention` with folded biases, with one of the plans and weights laid out for it.

    If all heads have the same input (`one_input`), or there is one copy of them, a plain product is enough.
    """

    def __init__(self, source: Attention, one_input: bool, reads_few: bool) -> None:
        nn.Module.__init__(self)  # uses the source's weights under other names
        self.sizes, self.causal, self.one_input = source.sizes, source.causal, one_input
        self.window, self.turn, self.dropout = source.window, source.turn, 0.0
        self.plan: Plan = "loop"
        self.query_norm, self.key_norm = source.query_norm, source.key_norm
        biased = {0, 1} if sees_key_bias(source) else {0}  # of query, key, value; the rest is folded
        split = ((0,), (1, 2)) if reads_few else ((0, 1, 2),)  # contiguous parts when split
        self.into = nn.ModuleList(IntoHeads(source.qkv, source.qkv_bias, parts, biased) for parts in split)
        self.out, self.out_bias = source.out, source.out_bias
        self.register_buffer("distinct", source.distinct, persistent=False)

    def use_plan(self, plan: Plan) -> None:
        """Set how members with their own inputs are run; `"batched"` pads them to the widest member."""
        self.plan = plan
        if plan == "batched" and not self.one_input and not self.even:
            for projection in self.into:
                cast(IntoHeads, projection).pad(self.sizes)
            self.out = _padded_heads(self.out, self.sizes)
            self.sizes = (max(self.sizes),) * len(self.sizes)

    def forward(self, x: Tensor, context: Context, read: Read = None) -> Tensor:
        """Attend within `[N, B, T, d]` like `Attention`, to `[max(N, G), B, T', d]`."""
        if not sum(self.sizes):
            return self._with_bias(x.new_zeros(*select_queries(x, read).shape[:3], self.out.shape[2]))
        if self.one_input:
            return self._all_at_once(x, context, read)
        if self.plan == "loop":
            return self._one_after_another(x, context, read)
        copies = len(self.sizes)
        parts = self._parts(x, select_queries(x, read), lambda into, tokens: into.batched(tokens, copies))
        z = self.heads_mixed(parts, context, read, copies)  # [M·B, T', h, d_k]
        return self._with_bias(out_of_heads(z, self.out, copies))

    def _all_at_once(self, x: Tensor, context: Context, read: Read) -> Tensor:
        """All heads in one product."""
        parts = self._parts(x.flatten(0, 1), select_queries(x, read).flatten(0, 1), IntoHeads.plain)
        z = self.heads_mixed(parts, context, read, x.shape[0])  # [N·B, T', H, d_k]
        if len(self.sizes) == 1:
            return self._out_of_copy(0, z).unflatten(0, (x.shape[0], -1))  # [N, B, T', d]
        return self._out_of_members(z if self.distinct is None else z.index_select(2, self.distinct))

    def _one_after_another(self, x: Tensor, context: Context, read: Read) -> Tensor:
        """One member after another, from the input of the sublayer to its output."""
        results = []
        asking = select_queries(x, read)
        for member, (start, stop) in enumerate(head_ranges(self.sizes)):
            if start == stop:  # no heads
                z = x.new_zeros(*asking.shape[1:3], 0, self.out.shape[1])
            else:
                parts = self._parts(x[member], asking[member], partial(IntoHeads.plain, start=start, stop=stop))
                z = self.heads_mixed(parts, context, read, 1, member)  # [B, T', h, d_k]
            results.append(self._out_of_copy(member, z))
        return torch.stack(results)  # [M, B, T', d]

    def _parts(self, x: Tensor, asking: Tensor, product: "Callable[[IntoHeads, Tensor], Parts]") -> Parts:
        """Query, key and value, each `[R, T, H, d_k]`; the query only for the tokens in `asking`."""
        projections = [cast(IntoHeads, projection) for projection in self.into]
        if len(projections) == 1:
            return product(projections[0], x)
        return product(projections[0], asking) + product(projections[1], x)

    def _out_of_members(self, z: Tensor) -> Tensor:
        """Output projections of concatenated heads, `[B, T', K, d_k]` to `[M, B, T', d]`."""
        copies = len(self.sizes)
        if self.plan == "loop" or not self.even:
            parts = enumerate(z.split(self.sizes, dim=2))
            return torch.stack([self._out_of_copy(copy, part) for copy, part in parts])
        rows = z.flatten(0, 1).unflatten(1, (copies, -1)).flatten(2).transpose(0, 1)  # [M, B·T', h·d_k]
        y = torch.bmm(rows, self.out.reshape(copies, -1, self.out.shape[2]))
        return self._with_bias(y.unflatten(1, z.shape[:2]))

    def _out_of_copy(self, copy: int, z: Tensor) -> Tensor:
        """Output projection of one copy's heads, `[R, T', h, d_k]` to `[R, T', d]`, with its bias."""
        start, stop = head_ranges(self.sizes)[copy]
        weight = self.out[start:stop].flatten(0, 1)  # [h·d_k, d]
        bias = None
        if self.out_bias is not None:
            bias = self.out_bias[min(copy, self.out_bias.shape[0] - 1)]
        return F.linear(z.flatten(2).flatten(0, 1), weight.t(), bias).unflatten(0, z.shape[:2])

    def _with_bias(self, y: Tensor) -> Tensor:
        """Add each member's bias to `[M, B, T', d]`."""
        return y if self.out_bias is None else y + self.out_bias[:, None, None]


class IntoHeads(nn.Module):
    """Projection to some of query, key and value for all heads: weights `[K, P, d_k, d]`.

    A plain product adds its bias for free. In a batched product the bias needs another pass over the result, so it is
    only added to the parts (`biased`) in which it is not zero.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, parts: tuple[int, ...], biased: set[int]) -> None:
        super().__init__()
        self.weight = fixed(weight if len(parts) == weight.shape[1] else weight[:, list(parts)])
        self.biased = tuple(index for index, part in enumerate(parts) if bias is not None and part in biased)
        self.bias = fixed(bias[:, list(parts)].contiguous()) if bias is not None and self.biased else None

    def plain(self, x: Tensor, start: int = 0, stop: int | None = None) -> Parts:
        """All heads, or `start:stop` of them, on a common input `[R, T, d]`: one plain product."""
        weight = self.weight[start:stop]  # [H, P, d_k, d]
        bias = None if self.bias is None else self.bias[start:stop].flatten()
        y = F.linear(x.flatten(0, 1), weight.flatten(0, 2), bias)  # two axes: one product instead of R
        return y.reshape(*x.shape[:2], *weight.shape[:3]).unbind(3)

    def batched(self, x: Tensor, members: int) -> Parts:
        """Each member's part of `[M, B, T, d]` with its own K / M heads; the result has members on the batch axis."""
        parts = into_heads(x, self.weight, None, members).unbind(3)  # each [M·B, T, h, d_k]
        if self.bias is None:
            return parts
        bias = self.bias.unflatten(0, (members, -1))[:, None, None]  # [M, 1, 1, h, P, d_k]
        return tuple(
            (part.unflatten(0, (members, -1)) + bias[..., index, :]).flatten(0, 1) if index in self.biased else part
            for index, part in enumerate(parts)
        )

    def pad(self, sizes: tuple[int, ...]) -> None:
        """Pad every member with zero heads to as many as the widest has."""
        self.weight = _padded_heads(self.weight, sizes)
        self.bias = None if self.bias is None else _padded_heads(self.bias, sizes)


def _padded_heads(tensor: Tensor, sizes: tuple[int, ...]) -> nn.Parameter:
    """A tensor `[K, …]` with each member's heads padded with zeros to as many as the widest has."""
    widest = max(sizes)
    parts = [torch.cat([part, part.new_zeros(widest - len(part), *part.shape[1:])]) for part in tensor.split(sizes)]
    return fixed(torch.cat(parts))


class FrozenPatchStem(nn.Module):
    """A patch stem for images of the size its position embedding was trained for; others use the original stem."""

    prefix: Tensor | None  # [G, P, d], prefix tokens with positions added

    def __init__(self, source: PatchStem) -> None:
        super().__init__()
        self.source, self.config = source, source.config
        self.register_buffer("prefix", source.prefix(source.position), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Embed images `[B, channels, H, W]` as `[G, B, T, d]`."""
        config, source = self.config, self.source
        if images.shape[1:] != (config.channels, *config.image_size):
            return source(images)
        (rows, columns), (height, width) = config.grid, config.patch_size
        copies = source.patch.shape[0]
        patches = images.reshape(-1, config.channels, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
        bias = None if source.patch_bias is None else source.patch_bias.flatten()
        x = F.linear(patches.flatten(3).flatten(1, 2), source.patch.flatten(2).flatten(0, 1), bias)  # [B, h·w, G·d]
        x = x.unflatten(2, (copies, -1)).permute(2, 0, 1, 3)  # [G, B, h·w, d]
        if source.position is not None:
            x = x + source.position[:, None, config.position_prefix :]
        if self.prefix is not None:
            x = torch.cat([self.prefix[:, None].expand(-1, x.shape[1], -1, -1), x], dim=2)
        return x if source.norm is None else source.norm(x)


def sees_key_bias(attention: Attention) -> bool:
    """Whether the key bias matters: with a norm, or with a rotation, which changes it at every position."""
    return attention.key_norm is not None or attention.turn is not None


def fixed(tensor: Tensor) -> nn.Parameter:
    """A parameter that is not trainable."""
    return nn.Parameter(tensor, requires_grad=False)
