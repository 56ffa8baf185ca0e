"""Rewriting an ensemble for inference: nothing stored or computed twice, nothing computed that could be stored.

These functions work on a copy. The result computes the same logits, but its parameters no longer have the shapes
its configuration names, so it can be run and not saved.
"""

import copy
from typing import TypeVar

import torch

from ..model.layers import Block
from .fold import PlainNorm, fold_block
from .merge import merge_equal_copies, merge_equal_heads
from .model import EnsembleLike

E = TypeVar("E", bound=EnsembleLike)


@torch.no_grad()
def simplified(ensemble: E) -> E:
    """A frozen copy in which equal copies are merged and constants are folded into the weights.

    Weights of half precision come back in float32, where folding does not lose digits; the caller converts.
    """
    result = copy.deepcopy(ensemble)
    result.eval()
    result.requires_grad_(False)
    merge_equal_copies(result)
    if result.dtype in (torch.bfloat16, torch.float16):
        result.to(torch.float32)
    for block in blocks(result):
        fold_block(block)
    _compute_common_heads_once(result)
    return result


def blocks(ensemble: EnsembleLike) -> list[Block]:
    """The blocks of the encoder."""
    return [block for block in ensemble.encoder.layers if isinstance(block, Block)]


def branching_layer(ensemble: EnsembleLike) -> int:
    """The first layer in which activations differ between members; the number of layers if none does."""
    inputs = _attention_inputs(ensemble)
    for index, block in enumerate(blocks(ensemble)):
        if max(inputs[index], _copies(block)) > 1:
            return index
    return len(ensemble.encoder.layers)


def shares_its_input(ensemble: EnsembleLike) -> list[bool]:
    """For each layer, whether all heads of the attention see one and the same input, or there is one copy of it."""
    layers = zip(_attention_inputs(ensemble), blocks(ensemble), strict=True)
    return [members == 1 or len(block.attention.sizes) == 1 for members, block in layers]


def _attention_inputs(ensemble: EnsembleLike) -> list[int]:
    """How many different inputs the attention of each layer sees: 1, or one for each member."""
    members = next(iter(ensemble.stem.parameters())).shape[0]
    counts = []
    for block in blocks(ensemble):
        if block.norm_first and not isinstance(block.norm1, PlainNorm):
            members = max(members, block.norm1.weight.shape[0])
        counts.append(members)
        members = max(members, _copies(block))
    return counts


def _copies(block: Block) -> int:
    """The most copies of anything in a block."""
    small = [p.shape[0] for name, p in block.named_parameters() if name not in _HEAD_AXIS]
    return max([len(block.attention.sizes), *small])


_HEAD_AXIS = frozenset(f"attention.{name}" for name in ("qkv", "qkv_bias", "out"))


def _compute_common_heads_once(ensemble: EnsembleLike) -> None:
    """Where members see the same input for the last time, let heads they have in common be computed once."""
    layer = branching_layer(ensemble)
    if layer == len(ensemble.encoder.layers) or _attention_inputs(ensemble)[layer] > 1:
        return
    attention = blocks(ensemble)[layer].attention
    normed = attention.query_norm is not None and attention.query_norm.weight.shape[0] > 1
    if not normed and len(attention.sizes) > 1 and len(attention.out):
        merge_equal_heads(attention)
