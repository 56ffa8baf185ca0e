"""Exact algebra on the weights: operations of the forward pass that can be done once, beforehand.

All of these change a frozen copy in place and leave its results as they are, up to rounding:

- The weights of a norm go into the layer that reads it: `(x̂γ + β)Wᵀ = x̂(Wγ)ᵀ + Wβ`. Worth it where members have
  norms of their own: what is left of the norm is the same for all, and with one input it runs once.
- LayerScale goes into the projection before it.
- The bias of a key adds the same number to all scores of a query, which softmax does not see: it goes away.
- The weights of attention add up to one, so the bias of a value reaches the output as a constant: it goes into
  the output bias. Only the bias of the query stays.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.config import NormKind
from ..model.layers import MLP, Attention, Block, GroupedNorm


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
