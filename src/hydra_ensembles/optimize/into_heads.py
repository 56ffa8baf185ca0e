"""The input projections of attention, with only the biases that matter."""

from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.layers import into_heads_batched, into_heads_grouped
from .weights import Int8Weight, dense

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
