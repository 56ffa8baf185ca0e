"""The attention sublayer as inference needs it: weights laid out for the products that will run."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.layers import Attention, GroupedNorm, Plan, out_of_heads_batched, out_of_heads_grouped
from .into_heads import IntoHeads, Parts, head_ranges, padded_heads
from .weights import Int8Weight, dense


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
