"""Remove heads permanently: a smaller model that computes the same as with these heads masked."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from .errors import HeadError
from .heads.masking import Model, head_rows, tower_of, towers_of
from .heads.ranking import Head, HeadLike, as_heads
from .model.dual_encoder import DualEncoder
from .model.ensemble import Ensemble
from .model.kinds import require_model
from .model.member_states import head_axis


def prune(ensemble: Model, heads: Iterable[HeadLike]) -> Model:
    """Remove heads: a new ensemble, or dual encoder, without them; the input is not changed.

    The bias of the output projection stays, also in a layer that loses its last head. Heads keep the indices they
    had in the original model, so pruning in two steps and pruning at once name the same heads. Those of an attention
    that pools the tokens (SigLIP) are heads of layer `num_layers`; one of them must stay. Heads of a dual encoder are
    given with their tower, `(layer, head, "image")`. Prune members before fusing them.

    Examples:
        >>> member = he.prune(base, [(4, 0), (5, 1), (5, 2)])
        >>> member.heads[0][5], base.heads[0][5]
        ((0, 3, 4, 5), (0, 1, 2, 3, 4, 5))
    """
    require_model(ensemble, "prune")
    if ensemble.num_members != 1:
        raise HeadError(f"prune takes one member, got {ensemble.num_members}; prune each model.member(i), then fuse")
    gone = as_heads(heads)
    for head in gone:
        head_rows(tower_of(ensemble, head).config, head)  # raises if it does not exist
    towers = {
        name: _without(tower, [head for head in gone if head.tower == name])
        for name, tower in towers_of(ensemble).items()
    }
    if isinstance(ensemble, Ensemble):
        return next(iter(towers.values()))
    projections = ensemble.projections.member(0)
    return DualEncoder(towers["image"], towers["text"], projections, ensemble.logit_scale, ensemble.logit_bias).eval()


def _without(ensemble: Ensemble, gone: Sequence[Head]) -> Ensemble:
    """A copy without these heads, which its history lists."""
    config, lost = ensemble.config, {head[:2] for head in gone}
    kept = [[head for head in heads if (layer, head) not in lost] for layer, heads in enumerate(config.heads[0])]
    if config.pooling is not None and not kept[-1]:
        raise HeadError("one of the heads that pool the tokens must stay")
    state = {}
    for name, tensor in ensemble.whole_state().items():
        layer = head_axis(config, name)
        if layer is not None:
            rows = [row for row, head in enumerate(config.heads[0][layer]) if head in kept[layer]]
            tensor = tensor[torch.tensor(rows, dtype=torch.long, device=tensor.device)]
        state[name] = tensor
    metadata = ensemble.metadata
    if gone:
        metadata = metadata.after(f"pruned {len(gone)} heads (layer.head): {' '.join(map(str, gone))}")
    config = replace(config, heads=(tuple(map(tuple, kept)),))
    return Ensemble.from_state(config, state, metadata, ensemble.frozen)
