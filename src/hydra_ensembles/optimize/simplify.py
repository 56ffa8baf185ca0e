"""Rewriting an ensemble for inference: nothing stored or computed twice that is the same for all members.

These functions change a copy in place. The result computes the same logits, but its parameters no longer have
the shapes its configuration names, so it can be run and not saved.
"""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..encoder import Attention, Block, GroupedLinear, GroupedNorm
from ..encoder.head_products import Plan
from .model import EnsembleLike

E = TypeVar("E", bound=EnsembleLike)


def simplified(ensemble: E) -> E:
    """A frozen copy in which copies that are equal are stored once, so that members branch as late as possible."""
    result = copy.deepcopy(ensemble)
    result.eval()
    result.requires_grad_(False)
    stem = list(result.stem.parameters())
    if all(_equal_copies(parameter) for parameter in stem):
        for module in result.stem.modules():
            _keep_first(module, list(module._parameters))
    for module in result.encoder.modules():
        if isinstance(module, GroupedLinear | GroupedNorm):
            _merge(module, ("weight", "bias"))
        elif isinstance(module, Block):
            _merge(module.mlp, ("scale",))
            _merge_attention(module.attention)
    for module in result.readout.modules():
        if isinstance(module, GroupedLinear | GroupedNorm):
            _merge(module, ("weight", "bias"))
    _compute_common_heads_once(result)
    return result


def use_plan(ensemble: E, plan: Plan) -> E:
    """Set how members with inputs of their own are run, in every layer of a simplified copy."""
    for module in ensemble.modules():
        if isinstance(module, Attention):
            if plan == "batched":
                _pad_heads(module)
            module.use_plan(plan)
        elif isinstance(module, GroupedLinear):
            module.one_by_one = plan == "loop"
    return ensemble


def branching_layer(ensemble: EnsembleLike) -> int:
    """The first layer in which activations differ between members; the number of layers if none does."""
    members = next(iter(ensemble.stem.parameters())).shape[0]
    for index, block in enumerate(_blocks(ensemble)):
        counts = [members, len(block.attention.sizes)]
        counts += [parameter.shape[0] for name, parameter in block.named_parameters() if "attention." not in name]
        counts += [
            parameter.shape[0]
            for name, parameter in block.attention.named_parameters()
            if name not in ("qkv", "qkv_bias", "out")
        ]
        if max(counts) > 1:
            return index
    return len(ensemble.encoder.layers)


def _blocks(ensemble: EnsembleLike) -> list[Block]:
    return [block for block in ensemble.encoder.layers if isinstance(block, Block)]


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


def _compute_common_heads_once(ensemble: EnsembleLike) -> None:
    """Where members see the same input for the last time, let heads they have in common be computed once."""
    layer = branching_layer(ensemble)
    if layer == len(ensemble.encoder.layers):
        return
    block = _blocks(ensemble)[layer]
    attention = block.attention
    same_input = next(iter(ensemble.stem.parameters())).shape[0] == 1
    same_input &= not block.norm_first or block.norm1.weight.shape[0] == 1
    normed = attention.query_norm is not None and attention.query_norm.weight.shape[0] > 1
    if not same_input or normed or len(attention.sizes) == 1 or not sum(attention.sizes):
        return
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


def _pad_heads(attention: Attention) -> None:
    """Give every member as many heads as the widest, the new ones all zero: they add nothing to the result."""
    if attention.even or attention.distinct is not None:
        return
    widest = max(attention.sizes)
    for name in ("qkv", "qkv_bias", "out"):
        tensor = getattr(attention, name)
        if tensor is not None:
            parts = tensor.split(attention.sizes)
            padded = [torch.cat([part, part.new_zeros(widest - len(part), *part.shape[1:])]) for part in parts]
            setattr(attention, name, nn.Parameter(torch.cat(padded), requires_grad=False))
    attention.sizes = (widest,) * len(attention.sizes)
