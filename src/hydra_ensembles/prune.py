"""Remove heads permanently: a smaller model that computes the same as with these heads masked."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from .errors import HeadError
from .heads.masking import Model, tower_of, towers_of
from .heads.ranking import Head, HeadLike, as_heads
from .model.dual_encoder import DualEncoder
from .model.ensemble import Ensemble
from .model.kinds import require_model
from .model.member_states import head_axis


def prune(ensemble: Model, heads: Iterable[HeadLike]) -> Model:
    """Remove heads: a new ensemble, or dual encoder, without them; the input is not changed.

    The bias of the output projection stays, also in a layer that loses its last head. Heads keep the indices they
    had in the original model, so pruning in two steps and pruning at once name the same heads. Those of an attention
    that pools the tokens (SigLIP) are heads of layer `num_layers`; one of them must stay.

    Args:
        ensemble: An ensemble or a dual encoder with one member. Prune members before fusing them;
            `fused.member(i)` takes one out again.
        heads: `Head(layer, head)` or `(layer, head)`, original indices; of a dual encoder with the tower,
            `Head(layer, head, "image")` or `(layer, head, "text")`.

    Raises:
        HeadError: A head does not exist, was pruned before, is listed twice, or is the last that pools the tokens.

    Examples:
        >>> member = he.prune(base, [(4, 0), (5, 1), (5, 2)])
        >>> member.heads[0][5], base.heads[0][5]
        ((0, 3, 4, 5), (0, 1, 2, 3, 4, 5))
    """
    require_model(ensemble, "prune")
    if ensemble.num_members != 1:
        raise HeadError(f"prune takes one member, got {ensemble.num_members}; prune each model.member(i), then fuse")
    gone = as_heads(heads)
    kept = {name: [list(layer) for layer in tower.config.heads[0]] for name, tower in towers_of(ensemble).items()}
    for head in gone:
        tower = tower_of(ensemble, head)
        layers = kept[head.tower]
        if not 0 <= head.layer < len(layers) or head.head not in layers[head.layer]:
            present = f"{layers[head.layer]} in its layer" if 0 <= head.layer < len(layers) else f"{len(layers)} layers"
            raise HeadError(f"head {head} is not in this model; it has {present}")
        layers[head.layer].remove(head.head)
        if not layers[head.layer] and head.layer == tower.num_layers:
            raise HeadError(f"head {head} is the last that pools the tokens, and must stay")
    lost = {name: [head for head in gone if head.tower == name] for name in kept}
    towers = {name: _keep(tower, kept[name], lost[name]) for name, tower in towers_of(ensemble).items()}
    if isinstance(ensemble, Ensemble):
        return next(iter(towers.values()))
    projections = ensemble.projections.member(0)
    return DualEncoder(towers["image"], towers["text"], projections, ensemble.logit_scale, ensemble.logit_bias).eval()


def _keep(ensemble: Ensemble, kept: Sequence[Sequence[int]], gone: Sequence[Head]) -> Ensemble:
    """A copy with only these heads in every layer; its history lists the removed ones."""
    state = {}
    for name, tensor in ensemble.whole_state().items():
        layer = head_axis(ensemble.config, name)
        if layer is not None:
            rows = [row for row, head in enumerate(ensemble.config.heads[0][layer]) if head in kept[layer]]
            tensor = tensor[torch.tensor(rows, dtype=torch.long, device=tensor.device)]
        state[name] = tensor
    metadata = ensemble.metadata
    if gone:
        metadata = metadata.after(f"pruned {len(gone)} heads (layer.head): {' '.join(str(head) for head in gone)}")
    config = replace(ensemble.config, heads=(tuple(tuple(layer) for layer in kept),))
    return Ensemble.from_state(config, state, metadata, ensemble.frozen)
