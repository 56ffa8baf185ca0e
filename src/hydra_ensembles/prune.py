"""Taking heads out for good: a smaller ensemble that computes what masking them would."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from .ensemble import Ensemble
from .errors import HeadError
from .heads.head import HeadLike, as_heads
from .member_states import has_head_axis, place_of


def prune(ensemble: Ensemble, heads: Iterable[HeadLike]) -> Ensemble:
    """A new ensemble without the given heads; the input is untouched.

    A head's rows leave the query, key, value and output projections together with their biases; the bias
    of the output projection stays, also in a layer that loses its last head. Heads keep the indices they had
    in the original model, so pruning in two steps and pruning at once name the same heads.

    Args:
        ensemble: One member. Prune members before fusing them; `fused.member(i)` takes one out again.
        heads: `Head(layer, head)` or `(layer, head)`, original indices.

    Raises:
        HeadError: A head does not exist, was pruned before, or is listed twice.
    """
    if ensemble.num_members != 1:
        raise HeadError(
            f"prune takes an ensemble with one member, this one has {ensemble.num_members}; "
            "prune each member (ensemble.member(i)) and fuse them again"
        )
    gone = as_heads(heads)
    kept = [list(layer) for layer in ensemble.heads[0]]
    for head in gone:
        if head.tower != "main":
            raise HeadError(f"head {head} is in tower {head.tower!r}; this ensemble has the tower 'main' only")
        if not 0 <= head.layer < ensemble.num_layers or head.head not in kept[head.layer]:
            left = kept[head.layer] if 0 <= head.layer < ensemble.num_layers else f"{ensemble.num_layers} layers"
            raise HeadError(f"head {head} is not in this ensemble; layer {head.layer} has {left}")
        kept[head.layer].remove(head.head)

    state = {}
    for name, tensor in ensemble.state_dict().items():
        _, layer = place_of(name)
        if layer is not None and has_head_axis(name):
            before = ensemble.heads[0][layer]
            rows = [row for row, head in enumerate(before) if head in kept[layer]]
            tensor = tensor[torch.tensor(rows, dtype=torch.long, device=tensor.device)]
        state[name] = tensor
    config = replace(ensemble.config, heads=(tuple(tuple(layer) for layer in kept),))
    line = f"pruned {len(gone)} heads: {' '.join(str(head) for head in gone)}"
    metadata = replace(ensemble.metadata, calibration=None, metrics={}, history=(*ensemble.metadata.history, line))
    return Ensemble.from_state(config, state, metadata)
