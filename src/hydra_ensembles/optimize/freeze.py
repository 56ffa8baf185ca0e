"""Freeze an ensemble: equal copies merged, constants folded into the weights, layers laid out for one plan."""

import copy
from collections import OrderedDict
from dataclasses import is_dataclass
from itertools import chain
from typing import Literal, cast

import torch
from torch import Tensor, nn

from ..model.config import PatchStemConfig
from ..model.ensemble import Ensemble
from ..model.layers import (
    MLP,
    Attention,
    Block,
    GroupedLinear,
    GroupedNorm,
    to_heads,
)
from ..model.member_states import GROUP_AXIS, HEAD_AXIS

Plan = Literal["batched", "loop"]
"""How to run what is per member: in one batched product, padded to the widest member, or one member after another. The
result is the same."""


@torch.no_grad()
def frozen(ensemble: Ensemble, dtype: torch.dtype) -> Ensemble:
    """A copy of an ensemble rewritten for inference; it runs with the plan `"loop"` until `with_plan` changes it."""
    result = simplified(ensemble)
    *_, last = attentions(result)
    if result.readout.reads_few:
        _split_query(last)
    if (rotary := result.encoder.rotary) is not None:
        stem = result.stem.config
        size = stem.grid if isinstance(stem, PatchStemConfig) else (stem.max_tokens + len(stem.prefix),)
        rotary.fix(size, next(result.parameters()))
    return result.to(dtype)


@torch.no_grad()
def with_plan(ensemble: Ensemble, plan: Plan) -> Ensemble:
    """A frozen ensemble that runs with this plan and shares the weights; `"batched"` may pad some of them."""
    result = _twin(ensemble, share=True)
    for module in result.modules():
        if isinstance(module, Attention | GroupedLinear):
            module.one_by_one = plan == "loop"
    if plan == "batched":
        for attention, inputs in zip(attentions(result), attention_inputs(result), strict=True):
            if inputs > 1 and not attention.even and attention.joint is None:  # heads normalised together stay
                _pad(attention)
    result.before = result.read_prefix()
    return result


def has_copies(ensemble: Ensemble) -> bool:
    """Whether heads or MLPs are per member; where none are, all plans run the same code."""
    layers = [*ensemble.encoder.modules(), *(() if ensemble.readout.map is None else ensemble.readout.map.modules())]
    linears = (layer for layer in layers if isinstance(layer, GroupedLinear))
    return any(len(one.sizes) > 1 for one in attentions(ensemble)) or any(len(one.weight) > 1 for one in linears)


# --- rewriting weights: equal copies merged, constants folded in -------------------------------------------


@torch.no_grad()
def simplified(ensemble: Ensemble) -> Ensemble:
    """A copy, with the model's own modules, in which equal copies are merged and constants folded into the weights.

    Half-precision weights are returned in float32, so that folding loses no digits; the caller converts them.
    """
    result = _twin(ensemble.without_updates(), share=False).eval()
    _merge_equal_copies(result)
    if result.dtype in (torch.bfloat16, torch.float16):
        result.to(torch.float32)
    for block in blocks(result):
        if block.attention.shares is None and (biases := block.attention.biases()) is not None:
            block.attention.qkv_bias = fixed(biases)
        if block.norm_first:
            _fold_norms(block)
        _fold_scales(block.attention, block.mlp)
        _fold_biases(block.attention)
    if (pooling := result.readout.map) is not None:
        _fold_biases(pooling.attention)
    _compute_common_heads_once(result)
    return result


def _twin(ensemble: Ensemble, share: bool) -> Ensemble:
    """The same modules around the same tensors, or around copies of them; settings and metadata are shared.

    Hooks are removed: they would only run in modules that are not rewritten, and may not be copyable.
    """
    tensors = (*ensemble.parameters(), *ensemble.buffers()) if share else ()
    twins: dict[int, object] = {id(part): part for part in (ensemble.metadata, *tensors)}
    for name, part in (item for module in ensemble.modules() for item in vars(module).items()):
        if "_hooks" in name:  # of every kind
            twins[id(part)] = OrderedDict()
        elif is_dataclass(part):
            twins[id(part)] = part
    return copy.deepcopy(ensemble, twins).requires_grad_(False)


def blocks(ensemble: Ensemble) -> list[Block]:
    """The blocks of the encoder."""
    return [cast(Block, block) for block in ensemble.encoder.layers]


def attentions(ensemble: Ensemble) -> list[Attention]:
    """The attention of every block, and the one that pools, if any."""
    pooling = ensemble.readout.map
    return [block.attention for block in blocks(ensemble)] + ([] if pooling is None else [pooling.attention])


def branching_layer(ensemble: Ensemble) -> int:
    """The first layer in which activations differ between members; the number of layers if there is none."""
    inputs = attention_inputs(ensemble)
    branches = (index for index, block in enumerate(blocks(ensemble)) if max(inputs[index], _copies(block)) > 1)
    return next(branches, ensemble.num_layers)


def attention_inputs(ensemble: Ensemble) -> list[int]:
    """How many different inputs each attention has, including one that pools: 1, or one per member."""
    members = next(ensemble.stem.parameters()).shape[0]
    counts = []
    for block in blocks(ensemble):
        if block.norm_first and isinstance(block.norm1, GroupedNorm):
            members = max(members, block.norm1.weight.shape[0])
        counts.append(members)
        members = max(members, _copies(block))
    readout = ensemble.readout
    if readout.map is not None:
        norms = len(readout.norm.weight) if readout.norm is not None and readout.config.norm == "tokens" else 1
        counts.append(max(members, norms, len(readout.map.query_token)))
    return counts


def _copies(block: Block) -> int:
    """The largest number of copies of any parameter in a block."""
    small = [parameter.shape[0] for name, parameter in block.named_parameters() if name not in HEAD_AXIS + GROUP_AXIS]
    return max([len(block.attention.sizes), *small])


def _merge_equal_copies(ensemble: Ensemble) -> None:
    """Keep one copy of every parameter that is equal in all members, so that members branch as late as possible."""
    _merge(*((module, name) for module in ensemble.stem.modules() for name in module._parameters))
    for module in [*ensemble.encoder.modules(), *ensemble.readout.modules()]:
        if isinstance(module, Attention):
            _merge_attention(module)
        else:
            _merge(*((module, name) for name in module._parameters))


def _merge(*places: tuple[nn.Module, str]) -> None:
    """Store these parameters once if all copies of all of them are equal."""
    present = [(module, name, getattr(module, name)) for module, name in places if getattr(module, name) is not None]
    if all(_equal_copies(parameter) for _, _, parameter in present):
        for module, name, parameter in present:
            setattr(module, name, fixed(parameter[:1].clone()))


def _merge_attention(attention: Attention) -> None:
    """Store the whole sublayer once if all copies are equal; else those parameters that can be stored once."""
    _merge((attention, "scale"))
    _merge((attention, "out_bias"))
    if len(attention.sizes) == 1 or not attention.even:
        return
    of_heads = _of_heads(attention)
    count = len(attention.sizes)
    copies = [tensor.unflatten(0, (count, -1)) for tensor in of_heads.values() if len(tensor)]
    small = [parameter for name, parameter in attention.named_parameters() if name not in of_heads]
    if all(_equal_copies(tensor) for tensor in [*copies, *small]):
        attention.sizes = attention.sizes[:1]
        attention.joint = None if attention.joint is None else attention.joint[:1]
        attention.shares = None if attention.shares is None else attention.shares[:1]
        for name, tensor in of_heads.items():
            setattr(attention, name, fixed(tensor[: len(tensor) // count].clone()))


def _of_heads(attention: Attention) -> dict[str, nn.Parameter]:
    """Its parameters whose first axis holds heads, or groups of heads."""
    return {name: one for name, one in attention.named_parameters() if f"attention.{name}" in HEAD_AXIS + GROUP_AXIS}


def _equal_copies(parameter: Tensor) -> bool:
    return all(torch.equal(parameter[0], other) for other in parameter[1:])


def _compute_common_heads_once(ensemble: Ensemble) -> None:
    """In the last layer where members have the same input, keep one of each set of equal heads, to compute it once."""
    layer = branching_layer(ensemble)
    if layer == len(blocks(ensemble)) or attention_inputs(ensemble)[layer] > 1:
        return
    attention = blocks(ensemble)[layer].attention
    normed = attention.query_norm is not None and attention.query_norm.weight.shape[0] > 1
    if (
        normed
        or attention.joint is not None
        or attention.shares is not None
        or len(attention.sizes) == 1
        or not len(attention.out)
    ):
        return
    rows = attention.qkv.flatten(1)
    if attention.qkv_bias is not None:
        rows = torch.cat([rows, attention.qkv_bias.flatten(1)], dim=1)
    alike: list[int] = []  # for each head the first equal one; one with NaN equals only itself
    for index, head in enumerate(rows):
        alike.append(next((first for first in range(index) if torch.equal(rows[first], head)), index))
    firsts = sorted(set(alike))
    if len(firsts) < len(rows):
        attention.qkv = fixed(attention.qkv[firsts])
        attention.qkv_bias = None if attention.qkv_bias is None else fixed(attention.qkv_bias[firsts])
        attention.distinct = torch.tensor([firsts.index(first) for first in alike], device=rows.device)


def _fold_norms(block: Block) -> None:
    """Fold norms that are per member into the projections after them, if these are per member, too."""
    norm, attention = block.norm1, block.attention
    own = isinstance(norm, GroupedNorm) and block.parallel != 1  # the MLP does not read the same norm
    if own and isinstance(norm, GroupedNorm) and 1 < norm.weight.shape[0] == len(attention.sizes):
        for name, rows in attention.inputs.items():
            owner, weight = _member_of_each(rows, norm.weight.device), getattr(attention, name)
            if norm.bias is not None:
                constant = torch.einsum("kpid,kd->kpi", weight, norm.bias[owner])  # contribution of β, [K, P, d_k]
                setattr(attention, f"{name}_bias", _added(constant, getattr(attention, f"{name}_bias")))
            setattr(attention, name, fixed(weight * norm.factor[owner][:, None, None, :]))
        block.norm1 = _without_weights(norm)
    norm, up = block.norm2, block.mlp.up
    if isinstance(norm, GroupedNorm) and 1 < norm.weight.shape[0] == up.weight.shape[0]:
        if norm.bias is not None:
            up.bias = _added(torch.einsum("god,gd->go", up.weight, norm.bias), up.bias)  # [M, hidden]
        up.weight = fixed(up.weight * norm.factor[:, None, :])
        block.norm2 = _without_weights(norm)


def _without_weights(norm: GroupedNorm) -> nn.Module:
    """A norm without weights, the same for every member, after these were folded."""
    kind = nn.RMSNorm if norm.kind.startswith("rms") else nn.LayerNorm
    return kind(norm.weight.shape[1], norm.eps, elementwise_affine=False)


def _fold_scales(attention: Attention, mlp: MLP) -> None:
    """Fold LayerScale into the output projection before it."""
    if (scale := attention.scale) is not None:  # [1 or G, d]
        of_heads = (
            scale if scale.shape[0] == 1 else scale[_member_of_each(attention.sizes, scale.device)]
        )  # [1 or K, d]
        attention.out = fixed(attention.out * of_heads[:, None, :])
        attention.out_bias = None if attention.out_bias is None else fixed(attention.out_bias * scale)
        attention.scale = None
    if (scale := mlp.scale) is not None and scale.shape[0] in (1, mlp.down.weight.shape[0]):
        mlp.down.weight = fixed(mlp.down.weight * scale[:, :, None])
        mlp.down.bias = None if mlp.down.bias is None else fixed(mlp.down.bias * scale)
        mlp.scale = None


def _fold_biases(attention: Attention) -> None:
    """Fold the value bias into the output bias, and drop the key bias where softmax cancels it."""
    *_, name = attention.inputs
    bias = getattr(attention, f"{name}_bias")  # [K or L, P, d_k], value last, key before it
    if bias is None or not sum(attention.sizes) or attention.joint is not None:
        return
    values = bias[:, -1] if attention.shares is None else to_heads(bias[:, -1], 0, tuple(chain(*attention.shares)))
    through_heads = torch.einsum("ki,kid->kd", values, attention.out)  # [K, d]
    constant = through_heads.new_zeros(len(attention.sizes), through_heads.shape[1])
    constant.index_add_(0, _member_of_each(attention.sizes, bias.device), through_heads)  # [G, d]
    attention.out_bias = _added(constant, attention.out_bias)
    # a norm of keys, or a rotation, which changes the bias at every position, keeps softmax from cancelling it
    attention.folded = (2,) if attention.key_norm is not None or attention.turn is not None else (1, 2)
    remaining = bias.clone()
    remaining[:, -len(attention.folded) :] = 0
    setattr(attention, f"{name}_bias", fixed(remaining) if len(attention.folded) < bias.shape[1] else None)


def _member_of_each(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """The copy that each head, or group, belongs to, of so many in each copy."""
    counts = torch.tensor(sizes, device=device)
    return torch.repeat_interleave(torch.arange(len(sizes), device=device), counts)


def _added(constant: Tensor, old: Tensor | None) -> nn.Parameter:
    return fixed(constant if old is None else old + constant)


# --- weights laid out for a plan ---------------------------------------------------------------------------


def _split_query(attention: Attention) -> None:
    """Store the query apart from key and value, for a layer in which few tokens are queries."""
    if attention.shares is not None:
        return
    attention.shares = tuple((1,) * size for size in attention.sizes)  # each head with its own key and value
    for suffix in ("", "_bias"):
        one: Tensor | None = getattr(attention, f"qkv{suffix}")
        rest = None if one is None or (suffix and len(attention.folded) == 2) else fixed(one[:, 1:].contiguous())
        setattr(attention, f"query{suffix}", None if one is None else fixed(one[:, :1].contiguous()))
        setattr(attention, f"key_value{suffix}", rest)
        delattr(attention, f"qkv{suffix}")


def _pad(attention: Attention) -> None:
    """Pad every member with zero heads to as many as the widest has, each head with its own key and value."""
    sizes, widest = attention.sizes, max(attention.sizes)
    for name, one in _of_heads(attention).items():
        grouped = attention.shares is not None and name.startswith("key_value")
        of_heads = to_heads(one, 0, tuple(chain(*attention.shares or ()))) if grouped else one
        parts = of_heads.split(sizes)
        members = (torch.cat([part, part.new_zeros(widest - len(part), *part.shape[1:])]) for part in parts)
        setattr(attention, name, fixed(torch.cat([*members])))
    attention.sizes = (widest,) * len(sizes)
    attention.shares = None if attention.shares is None else ((1,) * widest,) * len(sizes)


def fixed(tensor: Tensor) -> nn.Parameter:
    """A parameter that is not trainable."""
    return nn.Parameter(tensor, requires_grad=False)
