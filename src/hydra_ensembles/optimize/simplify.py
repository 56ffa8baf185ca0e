"""An ensemble whose weights are rewritten for inference: equal copies merged, constants folded in.

The modules stay those of the model, and so does what they compute; `freeze` puts faster ones in their place.
"""

import copy
from typing import cast

import torch
from torch import Tensor, nn

from ..model.ensemble import Ensemble
from ..model.layers import MLP, Attention, Block, GroupedLinear, GroupedNorm
from ..model.members import HEAD_AXIS


@torch.no_grad()
def simplified(ensemble: Ensemble) -> Ensemble:
    """A frozen copy in which equal copies are merged and constants are folded into the weights.

    Weights of half precision come back in float32, where folding does not lose digits; the caller converts.
    """
    metadata = ensemble.metadata  # never changed, and may hold text towers: not copied
    result = copy.deepcopy(ensemble, {id(metadata): metadata}).eval().requires_grad_(False)
    merge_equal_copies(result)
    if result.dtype in (torch.bfloat16, torch.float16):
        result.to(torch.float32)
    for block in blocks(result):
        fold_block(block)
    _compute_common_heads_once(result)
    return result


# --- where members part ----------------------------------------------------------------------------------


def blocks(ensemble: Ensemble) -> list[Block]:
    """The blocks of the encoder."""
    return [cast(Block, block) for block in ensemble.encoder.layers]


def branching_layer(ensemble: Ensemble) -> int:
    """The first layer in which activations differ between members; the number of layers if none does."""
    inputs = attention_inputs(ensemble)
    branches = (index for index, block in enumerate(blocks(ensemble)) if max(inputs[index], _copies(block)) > 1)
    return next(branches, len(inputs))


def attention_inputs(ensemble: Ensemble) -> list[int]:
    """How many different inputs the attention of each layer sees: 1, or one for each member."""
    members = next(ensemble.stem.parameters()).shape[0]
    counts = []
    for block in blocks(ensemble):
        if block.norm_first and isinstance(block.norm1, GroupedNorm):
            members = max(members, block.norm1.weight.shape[0])
        counts.append(members)
        members = max(members, _copies(block))
    return counts


def _copies(block: Block) -> int:
    """The most copies of anything in a block."""
    small = [parameter.shape[0] for name, parameter in block.named_parameters() if name not in HEAD_AXIS]
    return max([len(block.attention.sizes), *small])


# --- merging: what all members have in common is stored once ---------------------------------------------


def merge_equal_copies(ensemble: Ensemble) -> None:
    """Keep one copy of every parameter that is equal in all members, in place; they then branch as late as possible."""
    if all(_equal_copies(parameter) for parameter in ensemble.stem.parameters()):
        for module in ensemble.stem.modules():
            _keep_first(module, *module._parameters)
    for module in [*ensemble.encoder.modules(), *ensemble.readout.modules()]:
        if isinstance(module, GroupedLinear | GroupedNorm):
            _merge(module, "weight", "bias")
        elif isinstance(module, Block):
            _merge(module.mlp, "scale")
            _merge_attention(module.attention)


def _merge_attention(attention: Attention) -> None:
    """Store the whole sublayer once where all copies are equal; else what can be stored once by itself."""
    _merge(attention, "scale")
    _merge(attention, "out_bias")
    if len(attention.sizes) == 1 or not attention.even:
        return
    own = {name: parameter for name, parameter in attention.named_parameters() if f"attention.{name}" in HEAD_AXIS}
    copies = [tensor.unflatten(0, (len(attention.sizes), -1)) for tensor in own.values() if len(tensor)]
    small = [parameter for name, parameter in attention.named_parameters() if name not in own]
    if all(_equal_copies(tensor) for tensor in [*copies, *small]):
        attention.sizes = attention.sizes[:1]
        for name, tensor in own.items():
            setattr(attention, name, fixed(tensor[: attention.sizes[0]].clone()))


def _compute_common_heads_once(ensemble: Ensemble) -> None:
    """Where members see the same input for the last time, keep one of each set of equal heads, to be computed once."""
    layer = branching_layer(ensemble)
    if layer == len(blocks(ensemble)) or attention_inputs(ensemble)[layer] > 1:
        return
    attention = blocks(ensemble)[layer].attention
    normed = attention.query_norm is not None and attention.query_norm.weight.shape[0] > 1
    if normed or len(attention.sizes) == 1 or not len(attention.out):
        return
    rows = attention.qkv.flatten(1)
    if attention.qkv_bias is not None:
        rows = torch.cat([rows, attention.qkv_bias.flatten(1)], dim=1)
    alike = [next(other for other, row in enumerate(rows) if torch.equal(row, one)) for one in rows]
    firsts = sorted(set(alike))
    if len(firsts) < len(rows):
        attention.qkv = fixed(attention.qkv[firsts])
        attention.qkv_bias = None if attention.qkv_bias is None else fixed(attention.qkv_bias[firsts])
        attention.distinct = torch.tensor([firsts.index(one) for one in alike], device=rows.device)


def _merge(module: nn.Module, *names: str) -> None:
    """Store parameters once where all copies of all of them are equal."""
    present = [getattr(module, name) for name in names if getattr(module, name) is not None]
    if all(_equal_copies(parameter) for parameter in present):
        _keep_first(module, *names)


def _keep_first(module: nn.Module, *names: str) -> None:
    for name in names:
        parameter = getattr(module, name)
        if parameter is not None and parameter.shape[0] > 1:
            setattr(module, name, fixed(parameter[:1].clone()))


def _equal_copies(parameter: Tensor) -> bool:
    return all(torch.equal(parameter[0], other) for other in parameter[1:])


def fixed(tensor: Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)


def replace_part(module: nn.Module, name: str, part: nn.Module) -> None:
    """Put another part in the place of one, of a class that the module does not declare."""
    setattr(module, name, part)


# --- folding: what does not depend on the input is worked out beforehand ---------------------------------


def fold_block(block: Block) -> None:
    """Fold norms that members have of their own, LayerScale and biases of one block into its weights, in place."""
    if block.norm_first:
        _fold_norm_into_attention(block)
        _fold_norm_into_mlp(block)
    _fold_attention_scale(block.attention)
    _fold_mlp_scale(block.mlp)
    _fold_biases(block.attention)


def _fold_norm_into_attention(block: Block) -> None:
    norm, attention = block.norm1, block.attention
    if norm.weight.shape[0] == 1 or norm.weight.shape[0] != len(attention.sizes):
        return
    owner = _member_of_each_head(attention)
    if norm.bias is not None:
        constant = torch.einsum("kpid,kd->kpi", attention.qkv, norm.bias[owner])  # what β becomes, [K, 3, d_k]
        attention.qkv_bias = _added(constant, attention.qkv_bias)
    attention.qkv = fixed(attention.qkv * norm.weight[owner][:, None, None, :])
    replace_part(block, "norm1", _without_weights(norm))


def _fold_norm_into_mlp(block: Block) -> None:
    norm, up = block.norm2, block.mlp.up
    if norm.weight.shape[0] == 1 or norm.weight.shape[0] != up.weight.shape[0]:
        return
    if norm.bias is not None:
        up.bias = _added(torch.einsum("god,gd->go", up.weight, norm.bias), up.bias)  # [M, hidden]
    up.weight = fixed(up.weight * norm.weight[:, None, :])
    replace_part(block, "norm2", _without_weights(norm))


def _without_weights(norm: GroupedNorm) -> nn.Module:
    """What is left of a norm whose weights are folded: the same for every member."""
    if norm.kind == "layer":
        return nn.LayerNorm(norm.weight.shape[1], norm.eps, elementwise_affine=False)
    return nn.RMSNorm(norm.weight.shape[1], norm.eps, elementwise_affine=False)


def _fold_attention_scale(attention: Attention) -> None:
    if (scale := attention.scale) is None:  # [1 or G, d]
        return
    of_heads = scale if scale.shape[0] == 1 else scale[_member_of_each_head(attention)]  # [1 or K, d]
    attention.out = fixed(attention.out * of_heads[:, None, :])
    if attention.out_bias is not None:
        attention.out_bias = fixed(attention.out_bias * scale)
    attention.scale = None


def _fold_mlp_scale(mlp: MLP) -> None:
    scale = mlp.scale  # [1 or G, d]
    if scale is None or scale.shape[0] not in (1, mlp.down.weight.shape[0]):
        return
    mlp.down.weight = fixed(mlp.down.weight * scale[:, :, None])
    if mlp.down.bias is not None:
        mlp.down.bias = fixed(mlp.down.bias * scale)
    mlp.scale = None


def _fold_biases(attention: Attention) -> None:
    """The bias of the value becomes one of the output, that of the key is dropped: softmax does not see it."""
    bias = attention.qkv_bias  # [K, 3, d_k]
    if bias is None or not sum(attention.sizes):
        return
    through_heads = torch.einsum("ki,kid->kd", bias[:, 2], attention.out)  # [K, d]
    constant = through_heads.new_zeros(len(attention.sizes), through_heads.shape[1])
    constant.index_add_(0, _member_of_each_head(attention), through_heads)  # [G, d]
    attention.out_bias = _added(constant, attention.out_bias)
    kept = bias.clone()
    kept[:, 1 if attention.key_norm is None else 2 :] = 0  # a norm in between sees the bias of the key
    attention.qkv_bias = fixed(kept)


def _member_of_each_head(attention: Attention) -> Tensor:
    """`[K]`: which copy each head belongs to."""
    sizes = torch.tensor(attention.sizes, device=attention.out.device)
    return torch.repeat_interleave(torch.arange(len(attention.sizes), device=sizes.device), sizes)


def _added(constant: Tensor, old: Tensor | None) -> nn.Parameter:
    return fixed(constant if old is None else old + constant)
