"""Weights in int8: a quarter of the memory of float32, turned back into numbers of the input's type when used."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.layers import GroupedLinear

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
        for copy, part in enumerate(parts):
            bias = None if self.bias is None else self.bias[copy]
            results.append(F.linear(part, self.weight(copy, copy + 1)[0], bias))
        return torch.cat(results) if copies > 1 else results[0]
