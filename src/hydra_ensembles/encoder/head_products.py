"""Matrix products between members' activations and their own heads, in the ways hardware can run them.

All members' heads lie on one axis (K of them, member by member). The functions below apply to activations that
differ from member to member, each member's to its own heads; when all members see the same input, one plain
product with all K heads is enough and none of this is needed.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Plan = Literal["batched", "loop", "grouped"]


def into_heads_batched(x: Tensor, weight: Tensor, bias: Tensor | None, members: int) -> Tensor:
    """One batched product; every member has K / M heads.

    Args:
        x: `[M, B, T, d]`.
        weight: `[K, P, d_k, d]`, P of query, key and value.
        bias: `[K, P, d_k]` or None.
        members: M.

    Returns:
        `[M·B, T, K / M, P, d_k]`.
    """
    heads, parts, head_dim, width = weight.shape
    rows = weight.reshape(members, -1, width).transpose(1, 2)  # [M, d, h·P·d_k]
    y = torch.bmm(x.flatten(1, 2), rows)  # [M, B·T, h·P·d_k]
    if bias is not None:
        y = y + bias.reshape(members, 1, -1)
    return y.reshape(x.shape[0] * x.shape[1], x.shape[2], heads // members, parts, head_dim)


def out_of_heads_batched(z: Tensor, weight: Tensor, members: int) -> Tensor:
    """One batched product from `[M·B, T, K / M, d_k]` through `[K, d_k, d]` to `[M, B, T, d]`."""
    rows = z.flatten(2).unflatten(0, (members, -1))  # [M, B, T, h·d_k]
    y = torch.bmm(rows.flatten(1, 2), weight.reshape(members, -1, weight.shape[2]))
    return y.unflatten(1, rows.shape[1:3])


def into_heads_grouped(x: Tensor, weight: Tensor, bias: Tensor | None, head_ends: Tensor) -> Tensor:
    """One grouped product; members may have different numbers of heads, and none is padded.

    `head_ends` `[M]` counts the heads up to and including each member's.

    Returns:
        `[B, T, K, P, d_k]`, all members' heads side by side.
    """
    heads, parts, head_dim, width = weight.shape
    ends = head_ends * (parts * head_dim)
    columns = weight.reshape(-1, width).t()  # [d, K·P·d_k]
    y = F.grouped_mm(x.flatten(1, 2), columns, offs=ends)  # [B·T, K·P·d_k]
    if bias is not None:
        y = y + bias.flatten()
    return y.reshape(x.shape[1], x.shape[2], heads, parts, head_dim)


def out_of_heads_grouped(z: Tensor, weight: Tensor, head_ends: Tensor) -> Tensor:
    """One grouped product from `[B, T, K, d_k]` through `[K, d_k, d]` to `[M, B, T, d]`."""
    ends = head_ends * weight.shape[1]
    rows = z.flatten(2).flatten(0, 1)  # [B·T, K·d_k]
    y = F.grouped_mm(rows, weight.flatten(0, 1), offs=ends)  # [M, B·T, d]
    return y.unflatten(1, z.shape[:2])
