"""From an ensemble to modules that run it, one for each plan, around the same weights wherever possible."""

import copy
from typing import Any, TypeVar

import torch

from ..model.config import PatchStemConfig
from ..model.layers import GroupedLinear, Plan
from .frozen_attention import FrozenAttention
from .model import EnsembleLike
from .simplify import blocks, shares_its_input, simplified
from .stem import FrozenPatchStem
from .weights import Int8Linear

E = TypeVar("E", bound=EnsembleLike)


@torch.no_grad()
def frozen(ensemble: E, dtype: torch.dtype, int8: bool = False) -> E:
    """A copy of an ensemble rewritten for inference; it runs by the plan `"loop"` until `with_plan` says otherwise."""
    result = simplified(ensemble)
    last = len(blocks(result)) - 1
    reads_few = result.readout.tokens_read() is not None
    inputs = shares_its_input(result)
    for index, block in enumerate(blocks(result)):
        attention = FrozenAttention(block.attention, inputs[index], reads_few and index == last, int8)
        setattr(block, "attention", attention)  # noqa: B010 (the block declares another class)
        if int8:
            setattr(block.mlp, "up", Int8Linear(block.mlp.up))  # noqa: B010
            setattr(block.mlp, "down", Int8Linear(block.mlp.down))  # noqa: B010
    if isinstance(result.config.stem, PatchStemConfig):
        result.stem = FrozenPatchStem(result.stem)
    result.to(dtype)
    return result


@torch.no_grad()
def with_plan(ensemble: E, plan: Plan) -> E:
    """A frozen ensemble that runs by this plan, around the same weights; `"batched"` may pad some of them."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in [*ensemble.parameters(), *ensemble.buffers()]}
    result = copy.deepcopy(ensemble, memo)
    for module in result.modules():
        if isinstance(module, FrozenAttention):
            module.use_plan(plan)
        elif isinstance(module, GroupedLinear):
            module.one_by_one = plan == "loop"
    return result
