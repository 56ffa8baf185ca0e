"""Heads of an ensemble: their addresses; switching them off for a while, and removing them for good.

Heads are always addressed by the index they had before any pruning; `head_rows` maps it to rows of the weights.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from ..errors import HeadError
from ..model.config import EnsembleConfig
from ..model.dual_encoder import DualEncoder, require_model
from ..model.ensemble import Ensemble
from ..model.layers import Attention, gating
from ..model.member_states import member_index, rows_of, ungrouped


class Head(NamedTuple):
    """One attention head: layer and original index, counted from 0, and the tower it belongs to.

    Examples:
        >>> he.Head(layer=11, head=3)
        Head(layer=11, head=3, tower='main')
        >>> he.Head(11, 3) == (11, 3, "main")
        True
    """

    layer: int
    head: int
    tower: str = "main"

    def __str__(self) -> str:
        """`3.7`, or `text:3.7` outside the main tower."""
        prefix = "" if self.tower == "main" else f"{self.tower}:"
        return f"{prefix}{self.layer}.{self.head}"


HeadLike = Head | tuple[int, int] | tuple[int, int, str] | Sequence[int]


def as_heads(values: Iterable[HeadLike]) -> tuple[Head, ...]:
    """Read heads from `Head`s or tuples, keeping their order; the same head twice is an error."""
    heads = list[Head]()
    for value in values:
        parts = tuple(value) if isinstance(value, list | tuple) else ()
        if len(parts) not in (2, 3) or not all(isinstance(part, Integral) for part in parts[:2]):
            raise HeadError(f"a head is Head(layer, head) or a tuple (layer, head), got {value!r}")
        heads.append(Head(int(parts[0]), int(parts[1]), *parts[2:]))  # NumPy integers become Python ones
    if len(set(heads)) < len(heads):
        raise HeadError(f"a head is listed twice: {' '.join(map(str, heads))}")
    return tuple(heads)


Model = TypeVar("Model", Ensemble, DualEncoder)


@contextmanager
def masked(ensemble: Model, heads: Iterable[HeadLike], member: int | None = None) -> Iterator[Model]:
    """Switch heads off within a `with` block, by a gate on their outputs; no weight is changed.

    Only calls of this thread inside the block lack the heads, and what they computed can be differentiated later.
    Anything made or saved inside is whole: calibrate outside. Blocks may be nested and may end in any order.

    Heads of a dual encoder are given with their tower, `"image"` or `"text"`. They are off in every member that has
    them, or in one `member`, if members do not share the attention; negative numbers count from the last.

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
    return {"main": model} if isinstance(model, Ensemble) else {"image": model.image, "text": model.text}


def tower_of(model: Ensemble | DualEncoder, head: Head) -> Ensemble:
    """The transformer that contains a head."""
    towers = towers_of(model)
    if head.tower not in towers:
        raise HeadError(f"head {head} is in tower {head.tower!r}, and the model has {list(towers)}: Head(3, 7, tower)")
    return towers[head.tower]


def heads_in(model: Ensemble | DualEncoder, layers: Iterable[int] | None = None) -> list[Head]:
    """The heads that the first member keeps in `layers` (None: all) of every tower, in layer order."""
    chosen = None if layers is None else tuple(layers)
    return [
        Head(layer, head, name)
        for name, tower in towers_of(model).items()
        for layer in checked_layers(tower.config, chosen)
        for head in tower.config.heads[0][layer]
    ]


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


def working_copy(ensemble: Ensemble, device: torch.device | None = None) -> Ensemble:
    """A private copy in evaluation mode, free to be modified, on the same device or on another.

    Heads of one member share nothing in it: each has its own key and value.
    """
    config, state = ensemble.config, dict[str, Tensor](ensemble.state_dict())
    if ensemble.num_members == 1:
        config, state = ungrouped(config, state)
    return Ensemble.from_state(config, state).to(device).requires_grad_(False)


def head_rows(config: EnsembleConfig, head: Head, member: int | None = None) -> tuple[int, ...]:
    """The rows of a head in its layer's `attention.out`: of one member, or of all stored copies (None)."""
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


def checked_layers(config: EnsembleConfig, layers: Iterable[int] | None) -> tuple[int, ...]:
    """Layers in ascending order, None for all; refused if one does not exist or is listed twice."""
    count = len(config.head_counts)
    chosen = list(range(count)) if layers is None else [int(layer) for layer in layers]
    if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= layer < count for layer in chosen):
        raise HeadError(f"layers must be distinct numbers from 0 to {count - 1}, at least one, got {chosen}")
    return tuple(sorted(chosen))


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
    state, left = {}, tuple(map(tuple, kept))
    for name, tensor in ensemble.state_dict().items():
        rows, stay = rows_of(config, name, config.heads[0]), rows_of(config, name, left)
        if rows is not None and stay is not None:
            chosen = torch.tensor([rows.index(row) for row in stay], dtype=torch.long, device=tensor.device)
            tensor = tensor[chosen]
        state[name] = tensor
    metadata = ensemble.metadata
    if gone:
        metadata = metadata.after(f"pruned {len(gone)} heads (layer.head): {' '.join(map(str, gone))}")
    config = replace(config, heads=(left,))
    return Ensemble.from_state(config, state, metadata, ensemble.frozen)
