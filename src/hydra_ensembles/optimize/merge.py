"""Equal copies stored once: what is the same for all members needs neither memory nor work of its own."""

import torch
from torch import Tensor, nn

from ..model.layers import Attention, Block, GroupedLinear, GroupedNorm
from .model import EnsembleLike


def merge_equal_copies(ensemble: EnsembleLike) -> None:
    """Keep one copy of every parameter that is equal in all members, in place; they then branch as late as possible."""
    if all(_equal_copies(parameter) for parameter in ensemble.stem.parameters()):
        for module in ensemble.stem.modules():
            _keep_first(module, list(module._parameters))
    for part in (ensemble.encoder, ensemble.readout):
        for module in part.modules():
            if isinstance(module, GroupedLinear | GroupedNorm):
                _merge(module, ("weight", "bias"))
            elif isinstance(module, Block):
                _merge(module.mlp, ("scale",))
                _merge_attention(module.attention)


def merge_equal_heads(attention: Attention) -> None:
    """For members that see the same input: keep one of each set of equal heads, to be computed once."""
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
