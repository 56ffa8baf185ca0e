"""Linear layers and norms that hold one copy of their weights for all members, or one copy each.

Activations carry the member axis first, `[N, B, T, d]`, with N = 1 as long as all members still compute the
same thing and N = M from the first layer on in which they differ. Weights carry `[G, …]`, G = 1 (shared) or
M (per member). So "run the common part once" is not a special case: it is what happens while N and G are 1.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import NormKind


def empty(*shape: int) -> nn.Parameter:
    """A parameter whose values are still to be filled in, by loading or by `reset`."""
    return nn.Parameter(torch.empty(*shape))


class GroupedLinear(nn.Module):
    """`y = x Wᵀ + b` with weights `[G, out, in]`: shared by all members (G = 1) or one per member (G = M)."""

    def __init__(self, copies: int, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.one_by_one = False  # run the copies one after another instead of in one batched product
        self.weight = empty(copies, outputs, inputs)
        self.bias = empty(copies, outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, …, in]` to `[max(N, G), …, out]`."""
        return grouped_linear(x, self.weight, self.bias, self.one_by_one)

    def extra_repr(self) -> str:
        """Sizes, for `repr`."""
        copies, outputs, inputs = self.weight.shape
        return f"copies={copies}, inputs={inputs}, outputs={outputs}, bias={self.bias is not None}"


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, one_by_one: bool = False) -> Tensor:
    """Apply weights `[G, out, in]` to activations `[N, …, in]`; N and G are equal, or one of them is 1."""
    if weight.shape[0] == 1:
        return F.linear(x, weight[0], None if bias is None else bias[0])
    members, _, inputs = weight.shape
    if one_by_one:
        parts = x.expand(members, *x.shape[1:])
        biases = [None] * members if bias is None else list(bias)
        return torch.stack([F.linear(*one) for one in zip(parts, weight, biases, strict=True)])
    rows = x.flatten(1, -2).expand(members, -1, inputs)  # [N, B·T, in] -> [M, B·T, in]
    y = torch.bmm(rows, weight.transpose(1, 2))  # [M, B·T, out]
    if bias is not None:
        y = y + bias[:, None, :]
    return y.unflatten(1, x.shape[1:-1])  # [M, B, T, out]


class GroupedNorm(nn.Module):
    """LayerNorm or RMSNorm over the last axis, with one set of weights or one per member."""

    def __init__(self, copies: int, width: int, eps: float, kind: NormKind = "layer") -> None:
        super().__init__()
        self.eps = eps
        self.kind = kind
        self.weight = empty(copies, width)
        self.bias = empty(copies, width) if kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[N, …, d]`; the result has max(N, G) as first axis."""
        if self.weight.shape[0] == 1:
            return self.for_copy(0, x)
        shape = (x.shape[-1],)
        axes = (self.weight.shape[0],) + (1,) * (x.dim() - 2) + shape
        weight = self.weight.view(axes)  # [M, 1, …, d]
        if self.bias is None:
            return F.rms_norm(x, shape, None, self.eps) * weight
        return torch.addcmul(self.bias.view(axes), F.layer_norm(x, shape, None, None, self.eps), weight)

    def for_copy(self, copy: int, x: Tensor) -> Tensor:
        """Normalise the last axis of `x`, whatever its other axes mean, with the weights of one copy."""
        shape = (x.shape[-1],)
        if self.bias is None:
            return F.rms_norm(x, shape, self.weight[copy], self.eps)
        return F.layer_norm(x, shape, self.weight[copy], self.bias[copy], self.eps)

    def extra_repr(self) -> str:
        """Sizes, for `repr`."""
        copies, width = self.weight.shape
        return f"copies={copies}, width={width}, eps={self.eps}, kind={self.kind!r}"
