"""Finding heads in an ensemble, and switching them off temporarily.

Heads are always addressed by the index they had before any pruning; `head_rows` maps it to rows of the weights.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from ..errors import HeadError
from ..model.config import EnsembleConfig
from ..model.dual_encoder import DualEncoder
from ..model.ensemble import Ensemble
from ..model.kinds import require_model
from ..model.layers import Attention, gating
from ..model.member_states import member_index
from .ranking import Head, HeadLike, as_heads

ONE_TOWER = "main"

Model = TypeVar("Model", Ensemble, DualEncoder)


@contextmanager
def masked(ensemble: Model, heads: Iterable[HeadLike], member: int | None = None) -> Iterator[Model]:
    """Switch heads off within a `with` block, by a gate on their outputs; no weight is changed.

    Only calls of this thread inside the block lack the heads, and what they computed can be differentiated later.
    Anything made or saved inside is whole: calibrate outside. Blocks may be nested and may end in any order.

    Args:
        ensemble: An ensemble or a dual encoder.
        heads: Heads by layer and original index; those of a dual encoder with their tower, `"image"` or `"text"`.
        member: The member to switch them off in, if members do not share the attention, negative ones counted from
            the last; None for every member that has the head.

    Examples:
        >>> images = torch.randn(2, 3, 64, 64)
        >>> with he.masked(base, [(5, 0), (5, 1)]):
        ...     without = base(images)
        >>> pruned = he.prune(base, [(5, 0), (5, 1)])
        >>> torch.equal(without, base(images)), torch.allclose(without, pruned(images), atol=1e-4)
        (False, True)
    """
    require_model(ensemble, "masked")
    gates: dict[nn.Module, Tensor] = {}  # by attention: [K], 0 for heads that are off
    for head in as_heads(heads):
        tower = tower_of(ensemble, head)
        if member is not None and tower.num_members < ensemble.num_members:
            raise HeadError(f"one {head.tower} tower serves all {ensemble.num_members} members; leave `member` out")
        rows = head_rows(tower.config, head, member)
        attention = attention_of(tower, head.layer)
        with torch.no_grad():
            gate = gates.setdefault(attention, torch.ones_like(attention.out[:, 0, 0]))
            gate[list(rows)] = 0.0
    with gating(gates):
        yield ensemble


def towers_of(model: Ensemble | DualEncoder) -> dict[str, Ensemble]:
    """The transformers of a model, keyed by tower name."""
    return {ONE_TOWER: model} if isinstance(model, Ensemble) else {"image": model.image, "text": model.text}


def tower_of(model: Ensemble | DualEncoder, head: Head) -> Ensemble:
    """The transformer that contains a head."""
    towers = towers_of(model)
    if head.tower not in towers:
        raise HeadError(f"head {head} is in tower {head.tower!r}, and the model has {list(towers)}: Head(3, 7, tower)")
    return towers[head.tower]


def split_heads(
    model: Ensemble | DualEncoder, towers: Iterable[str], layers: Iterable[int] | None, removed: Iterable[HeadLike] = ()
) -> tuple[tuple[Head, ...], list[Head]]:
    """The `removed` heads, checked to exist, and the heads left in `layers` (None: all) of `towers`."""
    off, chosen = as_heads(removed), None if layers is None else tuple(layers)
    for head in off:
        head_rows(tower_of(model, head).config, head)
    existing = (head for name in towers for head in existing_heads(towers_of(model)[name].config, chosen, tower=name))
    return off, [head for head in existing if head not in off]


def pooling_of(model: Ensemble | DualEncoder, heads: Iterable[Head]) -> list[Head]:
    """The heads of attention pooling among `heads`; one of them must stay, or nothing would be read."""
    tower = model.image if isinstance(model, DualEncoder) else model
    if tower.config.pooling is None:
        return []
    return [head for head in heads if head.layer == tower.num_layers and head.tower != "text"]


def removable(model: Ensemble | DualEncoder, left: Sequence[Head]) -> list[Head]:
    """Return those remaining heads that may be removed next."""
    pooling = pooling_of(model, left)
    return [head for head in left if pooling != [head]]


def max_removable(model: Ensemble | DualEncoder, left: Sequence[Head]) -> int:
    """How many of the remaining heads may be removed in total."""
    return len(left) - bool(pooling_of(model, left))


def attention_of(ensemble: Ensemble, layer: int) -> Attention:
    """The attention sublayer of a layer; layer `num_layers` is attention pooling, if the model has it."""
    if layer == ensemble.num_layers and ensemble.readout.map is not None:
        return ensemble.readout.map.attention
    return cast(Attention, ensemble.encoder.layers[layer].attention)


def working_copy(ensemble: Ensemble, dtype: torch.dtype | None, device: torch.device | None) -> Ensemble:
    """A private copy in evaluation mode, free to be modified; None keeps the original's dtype or device."""
    return Ensemble.from_state(ensemble.config, ensemble.whole_state()).to(device, dtype).requires_grad_(False)


def head_rows(config: EnsembleConfig, head: Head, member: int | None = None) -> tuple[int, ...]:
    """The rows of a head in its layer's `attention.qkv` and `out`: of one member, or of all stored copies (None)."""
    member = None if member is None else member_index(member, config.members)
    counts = config.head_counts
    if not 0 <= head.layer < len(counts):
        raise HeadError(f"head {head} does not exist: the layers are 0 to {len(counts) - 1}")
    copies = config.attention_copies(head.layer)
    if member is not None and copies < config.members:
        raise HeadError(f"all members share layer {head.layer} with head {head}; leave `member` out")
    rows, start = [], 0
    for copy in range(copies):
        kept = config.heads[copy][head.layer]
        if head.head in kept and member in (None, copy):
            rows.append(start + kept.index(head.head))
        start += len(kept)
    if not rows:
        problem = "was pruned" if 0 <= head.head < counts[head.layer] else "does not exist"
        left = [list(kept[head.layer]) for kept in config.heads]
        raise HeadError(f"head {head} {problem}; its layer has the heads {left[0] if member is None else left[member]}")
    return tuple(rows)


def existing_heads(
    config: EnsembleConfig, layers: Iterable[int] | None = None, tower: str = ONE_TOWER
) -> tuple[Head, ...]:
    """The heads that the first member keeps in the given layers (None: all), in layer order."""
    chosen = checked_layers(config, layers)
    return tuple(Head(layer, head, tower) for layer in chosen for head in config.heads[0][layer])


def checked_layers(config: EnsembleConfig, layers: Iterable[int] | None) -> tuple[int, ...]:
    """Layers in ascending order, None for all; refused if one does not exist or is listed twice."""
    count = len(config.head_counts)
    chosen = list(range(count)) if layers is None else [int(layer) for layer in layers]
    if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= layer < count for layer in chosen):
        raise HeadError(f"layers must be distinct numbers from 0 to {count - 1}, at least one, got {chosen}")
    return tuple(sorted(chosen))
