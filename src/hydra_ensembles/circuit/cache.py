"""Speeding up exact circuits: a model that can start at any block, and activations cached across steps.

Level l is the input of block l; level 0 is the output of the stem. As many levels of the current model as fit in memory
are cached. A candidate (the current model without one more head) starts at the block of its head, from the current
model's activations. What it computes above is cached too, and stays valid after a head of a later layer is removed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from .._utils import free_memory
from ..heads.masking import Head, working_copy
from ..model.ensemble import Ensemble
from ..model.layers import Attention, Block, Context, Read, select_queries
from ..model.stem_readout import MapPool, Readout
from .scores import CircuitData, IntArray, SampleGroup, parts, to_device

Recorder = Callable[[IntArray, IntArray, Tensor], None]  # receives pairs of candidate and sample, and their logits

_ROWS = 1 << 14  # samples whose logits are in memory at once


@dataclass
class Work:
    """What a search has computed so far."""

    blocks: int = 0  # runs of a block on one sample


# --- the model ---------------------------------------------------------------------------------------------


class WorkingModel:
    """A private copy of a single-member model that can start at any block, and whose heads can be removed."""

    def __init__(self, model: Ensemble, off: Sequence[Head], work: Work) -> None:
        self.ensemble = working_copy(model)
        self.work = work
        self.kept = [list(layer) for layer in model.config.heads[0]]  # original indices of remaining heads, by layer
        readout = self.ensemble.readout
        self.blocks: list[Block | PoolingBlock] = [cast(Block, block) for block in self.ensemble.encoder.layers]
        if readout.map is not None:
            self.blocks.append(PoolingBlock(readout, readout.map))
        self.layers = len(self.blocks)
        for head in off:
            self.drop(head)

    def block(self, layer: int, x: Tensor, context: Context) -> Tensor:
        """Run one block on `[1, B, T, d]`; the last block returns only the tokens that the readout reads."""
        self.work.blocks += x.shape[1]
        z = self._mix(layer, x, context)  # [B, T', H, d_k]
        asking = select_queries(x, self._read(layer, x, context))
        return self._finish(layer, asking, self.blocks[layer].attention.project(z, 1))

    def block_without(
        self, layer: int, x: Tensor, context: Context, rows: Tensor, heads: Sequence[tuple[int, slice]]
    ) -> Tensor:
        """Run one block P times, each time without one head, on shared inputs `[1, S, T, d]`; returns `[1, P, T', d]`.

        The attention is computed once per input; each run subtracts the contribution of its head. `rows` `[P]` is the
        input of each run. `heads` pairs original head indices with the runs that omit them, and covers all P runs.
        """
        self.work.blocks += len(rows)
        attention = self.blocks[layer].attention
        z = self._mix(layer, x, context)  # [S, T', H, d_k]
        attended = attention.project(z, 1)[0].index_select(0, rows)  # [S, T', d] -> [P, T', d]
        for head, runs in heads:
            position = self.kept[layer].index(head)
            attended[runs] -= z[:, :, position].index_select(0, rows[runs]) @ attention.out[position]
        asking = select_queries(x, self._read(layer, x, context))
        return self._finish(layer, asking.index_select(1, rows), attended[None])

    def pool(self, x: Tensor, key_mask: Tensor | None, ids: Tensor | None) -> Tensor:
        """Pool the output of the last block to features `[B, d]` (`[B, 2, d]` if two tokens are read)."""
        readout = self.ensemble.readout
        return (readout.pool(x, key_mask, ids) if readout.map is None else readout.after_pool(x[:, :, 0]))[0]

    def classify(self, features: Tensor) -> Tensor:
        """Compute the logits `[B, C]` (embeddings for a text tower) from pooled features `[B, d]`."""
        return self.ensemble.readout.classify(features[None])[0]

    def drop(self, head: Head) -> None:
        """Remove a head: its rows are deleted from the projections, so later passes cost less."""
        kept = self.kept[head.layer]
        attention = self.blocks[head.layer].attention
        position = kept.index(head.head)
        del kept[position]
        rows = torch.tensor([row for row in range(len(kept) + 1) if row != position], dtype=torch.long)
        for name in ("qkv", "qkv_bias", "out") if attention.joint is None else ("out",):
            tensor = getattr(attention, name)
            if tensor is not None:
                remaining = tensor.detach().index_select(0, rows.to(tensor.device))
                setattr(attention, name, nn.Parameter(remaining, requires_grad=False))
        attention.sizes = (len(kept),)
        attention.joint = None if attention.joint is None else (tuple(kept),)

    def _read(self, layer: int, x: Tensor, context: Context) -> Read:
        """Return the tokens of `[1, B, T, d]` whose output is needed; None for all, as in every block but the last."""
        block = self.blocks[layer]
        if isinstance(block, PoolingBlock):
            return block.query(x)
        return self.ensemble.readout.tokens_read(context) if layer == self.layers - 1 else None

    def _mix(self, layer: int, x: Tensor, context: Context) -> Tensor:
        """Compute the outputs of each head of a block, `[B, T', H, d_k]`."""
        block, read = self.blocks[layer], self._read(layer, x, context)
        x = block.attention_input(x)
        if self._has_few_queries(layer, read):
            return few_queries(block.attention, x[0], context.key_mask, select_queries(x, read)[0])
        return block.attention.mix(x, context, read)

    def _finish(self, layer: int, residual: Tensor, attended: Tensor) -> Tensor:
        scale = self.blocks[layer].attention.scale
        return self.blocks[layer].finish(residual, attended if scale is None else attended * scale[:, None, None, :])

    def _has_few_queries(self, layer: int, read: Read) -> bool:
        """Whether only one or two tokens are queries, they see all keys, and keys are linear in the block's input."""
        attention = self.blocks[layer].attention
        linear = attention.key_norm is None and attention.turn is None and bool(self.kept[layer])
        plain = not attention.config.causal and attention.window is None and attention.config.softcap is None
        return read is not None and linear and plain


class PoolingBlock:
    """Attention pooling, with the layers before and after it, as one more block at the end; its output is one token."""

    def __init__(self, readout: Readout, pooling: MapPool) -> None:
        self._readout, self._pooling = readout, pooling
        self.attention, self.query = pooling.attention, pooling.query

    def attention_input(self, x: Tensor) -> Tensor:
        """Compute the input of the attention from the tokens after the last block."""
        return self._readout.before_pool(x)

    def finish(self, asking: Tensor, attended: Tensor) -> Tensor:
        """Apply everything after the attention; the query token has no residual stream."""
        return self._pooling.finish(attended)


def few_queries(attention: Attention, x: Tensor, key_mask: Tensor | None, asking: Tensor) -> Tensor:
    """Attention of the query tokens `asking` `[B, T', d]` over all tokens `x` `[B, T, d]`, as `[B, T', H, d_k]`.

    The score of a token is (W_q a) · (W_k x) = (W_kᵀ W_q a) · x, and the weighted sum of values is W_v applied to a
    weighted sum of inputs; so W_k and W_v are applied once per query, not once per token. The key bias adds the same
    number to all scores of a query, so softmax cancels it. Requires keys without norm or rotation, and no causal mask.
    """
    heads, _, head_dim, _ = attention.qkv.shape
    to_query, to_key, to_value = attention.qkv.unbind(1)  # each [H, d_k, d]
    q = torch.einsum("bqd,hkd->bqhk", asking, to_query)
    biases = attention.biases()
    if biases is not None:
        q = q + biases[:, 0]
    probes = torch.einsum("bqhk,hkd->bqhd", q, to_key).flatten(1, 2)  # [B, T'·H, d]
    factor = attention.config.attention_scale or head_dim**-0.5
    scores = probes @ x.transpose(1, 2) * factor  # [B, T'·H, T]
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, :], -torch.inf)
    mixed = (scores.softmax(-1) @ x).unflatten(1, (-1, heads))  # [B, T', H, d]
    z = torch.einsum("bqhd,hkd->bqhk", mixed, to_value)
    return z if biases is None else z + biases[:, 2]


# --- activations of the model and of candidates ------------------------------------------------------------


class CachedTower:
    """A transformer whose heads are removed step by step, with cached activations of it and of its candidates.

    At most `max_memory` bytes of activations are cached in addition to the output of the stem.
    """

    def __init__(
        self,
        model: WorkingModel,
        samples: CircuitData,
        candidates: Sequence[Head],
        batch_size: int,
        max_memory: int,
    ) -> None:
        self.model, self.samples, self.batch_size = model, samples, batch_size
        self.candidates = list(candidates)
        self.index_of = {head: index for index, head in enumerate(candidates)}
        self.layer_of: IntArray = np.array([head.layer for head in candidates], np.int64)
        self.head_of: IntArray = np.array([head.head for head in candidates], np.int64)
        with torch.no_grad():
            self.base = [BaseActivations(model, group, batch_size) for group in samples.groups]
            self._levels, room = plan_memory(max_memory, [group.levels[0] for group in self.base], model.layers)
            self.features = [base.recompute(0, self._levels, batch_size) for base in self.base]  # pooled, [g, d] each
        self.carried = [
            CandidateActivations(self.layer_of, model.layers, group.levels[0], slots)
            for group, slots in zip(self.base, room, strict=True)
        ]

    def index(self, heads: Sequence[Head]) -> IntArray:
        """Return the positions of `heads` among the candidates."""
        return np.array([self.index_of[head] for head in heads], np.int64)

    def answers(self) -> Iterator[tuple[IntArray, Tensor]]:
        """Yield sample numbers and the current model's logits, for all samples; no block is run."""
        for features, group in zip(self.features, self.samples.groups, strict=True):
            for rows in parts(len(group), _ROWS):
                yield group.numbers[rows], self.model.classify(features[rows])

    def run(self, candidates: IntArray, numbers: IntArray, record: Recorder) -> None:
        """Evaluate pairs of candidate (by its position) and sample, each from its highest cached level."""
        group_of, row_of = self.samples.group_of[numbers], self.samples.row_of[numbers]
        for index in np.unique(group_of):
            chosen = (group_of == index).nonzero()[0]
            chosen = chosen[np.argsort(row_of[chosen], kind="stable")]  # keeps all candidates of a sample together
            for part in parts(len(chosen), self.batch_size):
                pairs = chosen[part]
                self._walk(index, candidates[pairs], numbers[pairs], row_of[pairs], record)

    def _walk(self, index: int, candidates: IntArray, numbers: IntArray, rows: IntArray, record: Recorder) -> None:
        """Run the blocks from first to last on a batch that grows as pairs join it.

        A pair joins at the block of its candidate, where it branches off the current model (whose attention is computed
        once for all candidates of the layer), or at a later level that is cached.
        """
        base, carried, last = self.base[index], self.carried[index], self.model.layers
        deepest = carried.deepest[candidates, rows]
        branches = deepest <= self.layer_of[candidates]
        joins = np.where(branches, self.layer_of[candidates] + 1, deepest)  # level at which a pair joins
        order = np.lexsort((self.head_of[candidates], branches, joins))
        candidates, numbers, rows = (array[order] for array in (candidates, numbers, rows))
        branches, joins = branches[order], joins[order]
        device_rows = to_device(rows, base.device)
        context = base.context.take(device_rows)
        x: Tensor | None = None
        active = 0  # number of pairs that have joined; these come first
        for level in range(int(joins[0]), last + 1):
            pieces: list[Tensor] = []
            if x is not None:
                pieces.append(self.model.block(level - 1, x, context.take(slice(active))))
            joined = int(np.searchsorted(joins, level, side="right"))
            # of the pairs that join, those before `resumed` are cached at this level, the others branch off
            resumed = active + int(np.count_nonzero(~branches[active:joined]))
            if resumed > active:
                pieces.append(carried.load(level, candidates[active:resumed], rows[active:resumed]))
            if joined > resumed:
                pieces.append(self._branch(base, level - 1, candidates[resumed:joined], rows[resumed:joined]))
            x = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
            if level < last:
                carried.save(level, candidates[:active], rows[:active], x[:, :active])
                carried.save(level, candidates[resumed:joined], rows[resumed:joined], x[:, resumed:joined])
            active = joined
        assert x is not None
        pooled = self.model.pool(x, context.key_mask, base.token_ids(device_rows))
        record(candidates, numbers, self.model.classify(pooled))

    def _branch(self, base: "BaseActivations", layer: int, candidates: IntArray, rows: IntArray) -> Tensor:
        """Run a block for the pairs of its layer, sorted by head, each without its head: `[1, P, T', d]`."""
        distinct, inverse = np.unique(rows, return_inverse=True)
        heads, starts = np.unique(self.head_of[candidates], return_index=True)
        ends = [*starts[1:], len(candidates)]
        runs = [(int(head), slice(int(a), int(b))) for head, a, b in zip(heads, starts, ends, strict=True)]
        inputs, inputs_of = to_device(distinct, base.device), to_device(inverse, base.device)
        return self.model.block_without(layer, base.at(layer, inputs), base.context.take(inputs), inputs_of, runs)

    @torch.no_grad()
    def remove(self, head: Head) -> None:
        """Remove a head: activations up to its layer stay valid, the others are updated."""
        self.model.drop(head)
        for group, (base, carried) in enumerate(zip(self.base, self.carried, strict=True)):
            index = self.index_of[head]
            valid = head.layer  # highest valid level
            for level in sorted(level for level in base.levels if level > head.layer):
                if not carried.holds_all(index, level):
                    break
                base.levels[level] = carried.load(level, np.full(len(base), index), np.arange(len(base)))[0]
                valid = level
            carried.forget(index, head.layer)
            self.features[group] = base.recompute(valid, self._levels, self.batch_size)


class BaseActivations:
    """Activations of the current model for a group of samples: some levels cached, others computed from one below."""

    def __init__(self, model: WorkingModel, group: SampleGroup, batch_size: int) -> None:
        ensemble = model.ensemble
        batches = [ensemble.embed(*group.take(rows)) for rows in parts(len(group), batch_size)]
        embedded = torch.cat([x[0] for x, _ in batches])  # [1, B, T, d] -> [g, T, d]
        ids, mask, _ = group.inputs
        self.model, self.device = model, embedded.device
        self.levels: dict[int, Tensor] = {0: embedded}
        key_mask = None if mask is None else mask.bool()  # [g, T]; of each group of samples, not only the first batch
        last = ensemble.readout.last_token(ids, key_mask)  # [g]
        self.context = batches[0][1]._replace(key_mask=key_mask, last=last)
        self._ids = ids if ensemble.kind == "text" else None  # [g, T]

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.levels[0])

    def at(self, level: int, rows: Tensor) -> Tensor:
        """Return the inputs of a block for some samples, `[1, S, T, d]`."""
        start = max(stored for stored in self.levels if stored <= level)
        x = self.levels[start].index_select(0, rows)[None]
        context = self.context.take(rows)
        for layer in range(start, level):
            x = self.model.block(layer, x, context)
        return x

    def token_ids(self, rows: Tensor) -> Tensor | None:
        """Return the token ids of some samples, `[S, T]`; None for an image model."""
        return None if self._ids is None else self._ids.index_select(0, rows)

    def recompute(self, above: int, keep: Sequence[int], batch_size: int) -> Tensor:
        """Recompute all levels above `above`, cache those in `keep`, and return the pooled features `[g, d]`."""
        for level in keep:
            if level > above and level not in self.levels:
                self.levels[level] = torch.empty_like(self.levels[0])
        fresh = {level: self.levels.pop(level) for level in sorted(self.levels) if level > above}
        features = []
        for part in parts(len(self), batch_size):
            rows = torch.arange(part.start, part.stop, device=self.device)
            x, context = self.at(above, rows), self.context.take(rows)
            for layer in range(above, self.model.layers):
                x = self.model.block(layer, x, context)
                if layer + 1 in fresh:
                    fresh[layer + 1][part] = x[0]
            features.append(self.model.pool(x, context.key_mask, self.token_ids(rows)))
        self.levels |= fresh
        return torch.cat(features)


class CandidateActivations:
    """Cached activations of (candidate, level, sample) for one group of samples, in a pool of slots.

    `layer_of` `[K]` is the layer of each candidate; `like` `[g, T, d]` are activations of the group; `capacity` is the
    maximum number of slots, each for one sample at one level.
    """

    def __init__(self, layer_of: IntArray, layers: int, like: Tensor, capacity: int) -> None:
        rows = len(like)
        below = [int((layer_of < level).sum()) for level in range(layers)]  # per level, candidates of lower layers
        self.levels = frozenset(worthwhile_levels(below, capacity // max(rows, 1)))
        needed = rows * sum(below[level] for level in self.levels)
        self._pool = like.new_empty(min(capacity, needed), *like.shape[1:])
        self._free = np.arange(len(self._pool), dtype=np.int64)[::-1].copy()
        self._slot = np.full((len(layer_of), layers, rows), -1, np.int64)
        self.deepest: IntArray = np.zeros((len(layer_of), rows), np.int64)  # highest cached level; 0 for none

    def load(self, level: int, candidates: IntArray, rows: IntArray) -> Tensor:
        """Return the cached activations of pairs at a level, `[1, P, T, d]`."""
        slots = to_device(self._slot[candidates, level, rows], self._pool.device)
        return self._pool.index_select(0, slots)[None]

    def save(self, level: int, candidates: IntArray, rows: IntArray, x: Tensor) -> None:
        """Cache the activations `[1, P, T, d]` of pairs at a level, as many as there are free slots."""
        count = min(len(candidates), len(self._free)) if level in self.levels else 0
        if not count:
            return
        slots, self._free = self._free[-count:], self._free[:-count]
        candidates, rows = candidates[:count], rows[:count]
        self._slot[candidates, level, rows] = slots
        self.deepest[candidates, rows] = level
        self._pool.index_copy_(0, to_device(slots, self._pool.device), x[0, :count])

    def holds_all(self, candidate: int, level: int) -> bool:
        """Whether a candidate's activations at a level are cached for every sample."""
        return bool((self._slot[candidate, level] >= 0).all())

    def forget(self, candidate: int, above: int) -> None:
        """Free all slots of a candidate, and those of all others above a level."""
        if not self.levels:
            return
        for region in (np.s_[candidate : candidate + 1], np.s_[:, above + 1 :]):
            slots = self._slot[region]
            self._free = np.concatenate([self._free, slots[slots >= 0]])
            self._slot[region] = -1
        held = self._slot[:, : above + 1] >= 0  # [K, levels, rows]; in reverse, argmax finds the highest level
        self.deepest = np.where(held.any(1), above - held[:, ::-1].argmax(1), 0)


def worthwhile_levels(below: Sequence[int], capacity: int) -> list[int]:
    """Return the levels to cache, given a number of slots per sample: as many as fit, evenly spaced.

    `below` is, for each level, the number of candidates in lower layers (each would need a slot there).
    """
    useful = [level for level, candidates in enumerate(below) if candidates]
    for count in range(len(useful), 0, -1):
        levels = [useful[index * (len(useful) + 1) // (count + 1) - 1] for index in range(1, count + 1)]
        if sum(below[level] for level in levels) <= capacity:
            return levels
    return []


# --- memory ------------------------------------------------------------------------------------------------


def plan_memory(max_memory: int, groups: Sequence[Tensor], layers: int) -> tuple[list[int], list[int]]:
    """Divide the memory: return the levels of the model to cache, and slots for candidates in each group of samples.

    At most half is for the model: all levels if they fit, else evenly spaced ones. The rest is for candidates, divided
    in proportion to the sizes of the groups. `groups` are the activations of each group at one level, `[g, T, d]`.
    """
    level = sum(group.nbytes for group in groups)
    count = min(layers, max(1, max_memory // 2 // level))
    levels = sorted({index * layers // count for index in range(count)})
    room = max(0, max_memory - level * len(levels))
    return levels, [room * len(group) // level for group in groups]


def default_max_memory(device: torch.device) -> int:
    """Half of the free GPU memory; on the CPU a quarter of the free host memory."""
    if device.type == "cuda":
        return _free_on_gpu(device) // 2
    return (free_memory() or 4 << 30) // 4


def fitting_batch_size(model: Ensemble, samples: CircuitData) -> int:
    """Batch size, in samples or pairs of candidate and sample: enough to keep the device busy, if memory allows."""
    if model.device.type != "cuda":
        return 64
    hidden = model.config.encoder.mlp_width * (2 if model.config.encoder.gated else 1)
    tokens = max(group.inputs[0].shape[1] for group in samples.groups)
    tokens = tokens if model.kind == "text" else model.config.stem.max_tokens
    sample = tokens * 32 * hidden * model.dtype.itemsize  # a generous upper bound
    return max(1, min(2048, _free_on_gpu(model.device) // sample))


def _free_on_gpu(device: torch.device) -> int:
    """Memory that the driver reports as free, plus what PyTorch has reserved but not allocated."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
