"""What makes exact circuits fast: activations of the current model, kept and carried from step to step."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._distributed import Ranks
from ..batches import move
from ..errors import ConfigError, HeadError
from ..heads.masking import TOWER, checked_layers, head_rows
from ..heads.ranking import Head
from ..model.clip import (
    DualEncoder,
    Templates,
    Tower,
    average_templates,
    checked_names,
    checked_templates,
    prompts_of,
    require_model,
    zero_shot,
)
from ..model.config import EncoderConfig, EnsembleConfig
from ..model.ensemble import Ensemble
from ..model.layers import Attention, Block
from ..model.stem_readout import compose
from .scores import (
    LEAST_CONFIDENT,
    MOST_CONFIDENT,
    NO_HEAD,
    Choice,
    IntArray,
    Objective,
    SampleGroup,
    Samples,
    judge,
    margins,
    parts,
    quantum,
    require_finite,
    tokens_of,
)


@dataclass
class Work:
    """What was computed so far.

    Attributes:
        layer_evaluations: Blocks run on one sample; a block counts in full, whatever part of it was needed.
        multiply_adds: Those of the matrix products that were really needed.
    """

    layer_evaluations: int = 0
    multiply_adds: int = 0

    def add(self, layer_evaluations: int, multiply_adds: int) -> None:
        """Count some more."""
        self.layer_evaluations += layer_evaluations
        self.multiply_adds += multiply_adds


@dataclass(frozen=True)
class BlockCost:
    """Multiply-adds of the parts of a block, for one sample."""

    encoder: EncoderConfig

    def attention(self, heads: int, tokens: int, queries: int) -> int:
        """Attention with some heads over all tokens, for the queries of some of them."""
        inner, width = heads * self.encoder.head_dim, self.encoder.width
        return 2 * inner * (width * (queries + tokens) + queries * tokens)

    def few_queries(self, heads: int, tokens: int, queries: int) -> int:
        """The same without keys and values of all tokens (`working_model.few_queries`)."""
        width, asked = self.encoder.width, heads * queries
        return asked * (4 * self.encoder.head_dim * width + 2 * tokens * width)

    def head_output(self, queries: int) -> int:
        """The output projection of a single head."""
        return queries * self.encoder.head_dim * self.encoder.width

    def mlp(self, queries: int) -> int:
        """The MLP on some tokens."""
        return queries * self.encoder.width * self.encoder.mlp_width * (3 if self.encoder.gated else 2)

    def forward(self, heads: list[int], tokens: int, read: int) -> int:
        """All blocks, by the number of heads of each; the last one only for the tokens that are read."""
        queries = [*(tokens for _ in heads[1:]), read]
        return sum(self.attention(h, tokens, q) + self.mlp(q) for h, q in zip(heads, queries, strict=True))


def working_copy(ensemble: Ensemble, dtype: torch.dtype, device: torch.device) -> Ensemble:
    """The same model in evaluation mode, in another dtype and place, sharing no memory with the original."""
    copy = Ensemble.from_state(ensemble.config, ensemble.state_dict()).to(device, dtype)
    return copy.eval().requires_grad_(False)


class WorkingModel:
    """A model with one member that can be entered at any block and loses heads for good.

    Attributes:
        ensemble: The copy, also used for its stem and readout.
        work: Counts every block that is run.
        kept: Original indices of the heads left, by layer.
    """

    def __init__(self, copy: Ensemble, work: Work) -> None:
        self.ensemble, self.work, self.cost = copy, work, BlockCost(copy.config.encoder)
        self.kept = [list(layer) for layer in copy.heads[0]]
        self.layers = copy.num_layers
        self.read = copy.readout.tokens_read()
        for layer in range(self.layers):  # rows side by side in memory, whatever the original had
            self._keep_rows(layer, list(range(len(self.kept[layer]))))

    def block(self, layer: int, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """Run one block on `[1, B, T, d]`; after the last, only the tokens the readout looks at are left."""
        self._count(layer, x, inputs=x.shape[1], outputs=x.shape[1])
        block, read = self._block(layer), self._read_after(layer)
        attended = self._scaled(block, block.attention.project(self._mix(layer, x, key_mask), 1))
        return block.finish(x if read is None else x[:, :, read], attended)

    def gated_block(self, layer: int, x: Tensor, key_mask: Tensor | None, gates: Tensor) -> Tensor:
        """Run one block with the output of each head multiplied by its gate, `[B, heads]`."""
        self._count(layer, x, inputs=x.shape[1], outputs=x.shape[1])
        block, read = self._block(layer), self._read_after(layer)
        z = self._mix(layer, x, key_mask)  # [B, T', H, d_k]
        attended = self._scaled(block, block.attention.project(z * gates[:, None, :, None].to(z.dtype), 1))
        return block.finish(x if read is None else x[:, :, read], attended)

    def without_heads(
        self, layer: int, x: Tensor, key_mask: Tensor | None, rows: Tensor, heads: Sequence[tuple[int, slice]]
    ) -> Tensor:
        """Run one block P times, each time without one head, on inputs that several of the runs share.

        The attention is computed once for each input; a run takes the part of its head off.

        Args:
            layer: The block.
            x: `[1, S, T, d]`, the different inputs.
            key_mask: `[S, T]` or None.
            rows: `[P]`, the input of each run.
            heads: Original index of a head, and the runs that go without it; together they cover all P.

        Returns:
            `[1, P, T', d]`.
        """
        self._count(layer, x, inputs=x.shape[1], outputs=len(rows), heads_off=len(rows))
        block, read = self._block(layer), self._read_after(layer)
        z = self._mix(layer, x, key_mask)  # [S, T', H, d_k]
        attended = block.attention.project(z, 1)[0].index_select(0, rows)  # [S, T', d] -> [P, T', d]
        for head, runs in heads:
            position = self.kept[layer].index(head)
            attended[runs] -= z[:, :, position].index_select(0, rows[runs]) @ block.attention.out[position]
        residual = (x if read is None else x[:, :, read]).index_select(1, rows)  # [1, P, T', d]
        return block.finish(residual, self._scaled(block, attended[None]))

    def logits(self, x: Tensor, key_mask: Tensor | None, ids: Tensor | None) -> Tensor:
        """From the tokens after the last block, `[1, B, T', d]`, to logits `[B, C]`."""
        return self.classify(self.features(x, key_mask, ids))

    def features(self, x: Tensor, key_mask: Tensor | None, ids: Tensor | None) -> Tensor:
        """Pooled features `[B, d]` from the tokens after the last block (`[B, 2, d]` where two tokens are read)."""
        return self.ensemble.readout.pool(x, key_mask, ids)[0]

    def classify(self, features: Tensor) -> Tensor:
        """From pooled features to logits `[B, C]`."""
        return self.ensemble.readout.classify(features[None])[0]

    def drop(self, head: Head) -> None:
        """Take a head out: its rows leave the projections, and later passes cost less."""
        position = self.kept[head.layer].index(head.head)
        self._keep_rows(head.layer, [row for row in range(len(self.kept[head.layer])) if row != position])
        del self.kept[head.layer][position]

    def _keep_rows(self, layer: int, rows: list[int]) -> None:
        attention = self._block(layer).attention
        index = torch.tensor(rows, dtype=torch.long, device=attention.out.device)
        for name in ("qkv", "qkv_bias", "out"):
            tensor = getattr(attention, name)
            if tensor is not None:
                setattr(attention, name, nn.Parameter(tensor.detach().index_select(0, index), requires_grad=False))
        attention.sizes = (len(rows),)

    def _mix(self, layer: int, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """Outputs of the single heads of a block, `[B, T', H, d_k]`."""
        block, read = self._block(layer), self._read_after(layer)
        x = block.attention_input(x)
        if self._has_few_queries(layer):
            return few_queries(block.attention, x[0], key_mask, x[0, :, read])
        return block.attention.mix(x, key_mask, read)

    def _has_few_queries(self, layer: int) -> bool:
        """Whether the block has queries of one or two tokens, and keys that are linear in its input."""
        attention = self._block(layer).attention
        linear = not attention.causal and attention.key_norm is None and bool(self.kept[layer])
        return linear and self._read_after(layer) is not None

    def _count(self, layer: int, x: Tensor, inputs: int, outputs: int, heads_off: int = 0) -> None:
        """Count a block with attention for `inputs` samples and an MLP for `outputs`."""
        tokens, read = x.shape[2], self._read_after(layer)
        queries = tokens if read is None else len(range(*read.indices(tokens)))
        few = self._has_few_queries(layer)
        attention = self.cost.few_queries if few else self.cost.attention
        products = inputs * attention(len(self.kept[layer]), tokens, queries)
        products += outputs * self.cost.mlp(queries) + heads_off * self.cost.head_output(queries)
        self.work.add(outputs + (inputs if heads_off else 0), products)

    def _block(self, layer: int) -> Block:
        return cast(Block, self.ensemble.encoder.layers[layer])

    def _read_after(self, layer: int) -> slice | None:
        return self.read if layer == self.layers - 1 else None

    @staticmethod
    def _scaled(block: Block, attended: Tensor) -> Tensor:
        scale = block.attention.scale
        return attended if scale is None else attended * scale[:, None, None, :]


def few_queries(attention: Attention, x: Tensor, key_mask: Tensor | None, asking: Tensor) -> Tensor:
    """Attention from a few tokens, without the keys and values of all the others.

    The score of a token is (W_q a) · (W_k x) = (W_kᵀ W_q a) · x, and the mixture of values is W_v applied to a
    mixture of inputs; so W_k and W_v are applied once for each query, not once for each token. The bias of the
    keys adds the same to all scores of a query and drops out.

    Args:
        attention: One copy, no norm on queries or keys, not causal.
        x: `[B, T, d]`, the input of all tokens.
        key_mask: `[B, T]`, true where a token may be attended to; None when all may.
        asking: `[B, T', d]`, the input of the tokens that ask.

    Returns:
        `[B, T', H, d_k]`.
    """
    heads, _, head_dim, _ = attention.qkv.shape
    to_query, to_key, to_value = attention.qkv.unbind(1)  # each [H, d_k, d]
    q = torch.einsum("bqd,hkd->bqhk", asking, to_query)
    if attention.qkv_bias is not None:
        q = q + attention.qkv_bias[:, 0]
    probes = torch.einsum("bqhk,hkd->bqhd", q, to_key).flatten(1, 2)  # [B, T'·H, d]
    scores = probes @ x.transpose(1, 2) * head_dim**-0.5  # [B, T'·H, T]
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, :], -torch.inf)
    mixed = (scores.softmax(-1) @ x).unflatten(1, (-1, heads))  # [B, T', H, d]
    z = torch.einsum("bqhd,hkd->bqhk", mixed, to_value)
    return z if attention.qkv_bias is None else z + attention.qkv_bias[:, 2]


@dataclass(frozen=True, eq=False)
class Texts:
    """What class embeddings are made of.

    Attributes:
        tower: A private copy of the text tower; it answers with embeddings, its projection being its classifier.
        prompts: Every class in every template, one class after another, as samples without labels.
        templates: Prompts of each class.
        scale: `[1]`, what cosines are multiplied with.
    """

    tower: Ensemble
    prompts: Samples
    templates: int
    scale: Tensor

    def classes(self, embeddings: Tensor) -> Tensor:
        """Scaled class embeddings `[…, C, e]` out of those of all prompts, `[…, P, e]`."""
        embedded = F.normalize(embeddings.reshape(-1, *embeddings.shape[-2:]), dim=-1)
        averaged = average_templates(embedded, self.templates)  # [K, C, e]
        return (averaged * self.scale).reshape(*embeddings.shape[:-2], *averaged.shape[1:])


def read_texts(
    dual: DualEncoder, names: Sequence[str], templates: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Texts:
    """A copy of the text tower in another dtype and place, and the prompts beside it."""
    tower = working_copy(_embedding_tower(dual), dtype, device)
    prepared = dual.text.prepare(prompts_of(names, templates))
    ids, mask, segments = (None if part is None else part.to(device) for part in dual.text.unpack(prepared, None, None))
    assert ids is not None
    count = len(ids)
    group = SampleGroup(np.arange(count), ids, mask, segments)
    prompts = Samples(
        groups=(group,),
        labels=torch.full((count,), -1, device=device),
        id_count=0,
        ood_count=count,
        group_of=np.zeros(count, np.int64),
        row_of=np.arange(count),
        origin=np.zeros((count, 2), np.int64),
        fingerprint="",
    )
    return Texts(tower, prompts, len(templates), dual.logit_scale.detach().to(device, dtype).exp())


def use_classes(classifier: Ensemble, classes: Tensor) -> None:
    """Give a zero-shot classifier other class embeddings, `[C, e]`."""
    embeddings = classifier.readout.class_embeddings
    assert embeddings is not None
    embeddings.weight = nn.Parameter(classes[None], requires_grad=False)


def _embedding_tower(dual: DualEncoder) -> Ensemble:
    """The text tower with its projection as classifier."""
    tower = dual.text
    if tower.config.readout.cosine is not None:
        raise ConfigError("the text tower classifies by class embeddings; use the text tower as it was converted")
    projection = compose(tower.readout.classifier, dual.projections.text)
    if projection is None:
        return tower
    readout = replace(tower.config.readout, num_classes=projection.weight.shape[1], bias=projection.bias is not None)
    prefix = "readout.classifier."
    state = {name: tensor for name, tensor in tower.state_dict().items() if not name.startswith(prefix)}
    state |= {prefix + name: tensor for name, tensor in projection.state_dict().items()}
    return Ensemble.from_state(replace(tower.config, readout=readout), state)


class GroupActivations:
    """Activations of one group of samples in the current model, by level.

    Level l is the input of block l, `[g, T, d]`; level 0 is what the stem gives. Levels that are not kept are
    computed again from the last kept one below.

    Attributes:
        key_mask: `[g, T]`, true where a token may be attended to; None when all may.
        ids: `[g, T]`, the token ids of a text model; None for images.
    """

    def __init__(self, model: WorkingModel, embedded: Tensor, key_mask: Tensor | None, ids: Tensor | None) -> None:
        self.model = model
        self.key_mask, self.ids = key_mask, ids
        self.levels: dict[int, Tensor] = {0: embedded}

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.levels[0])

    @property
    def token_shape(self) -> tuple[int, int]:
        """Tokens of a sample, and their width."""
        return self.levels[0].shape[1], self.levels[0].shape[2]

    def at(self, level: int, rows: Tensor) -> Tensor:
        """Inputs of a block for some samples, `[1, S, T, d]`."""
        start = max(kept for kept in self.levels if kept <= level)
        x = self.levels[start].index_select(0, rows)[None]
        mask = self.mask(rows)
        for layer in range(start, level):
            x = self.model.block(layer, x, mask)
        return x

    def mask(self, rows: Tensor) -> Tensor | None:
        """Key mask of some samples, `[S, T]`."""
        return None if self.key_mask is None else self.key_mask.index_select(0, rows)

    def recompute(self, above: int, kept: Sequence[int], batch_size: int) -> Tensor:
        """Bring all levels above one up to date, keep the given ones, and return the pooled features `[g, d]`."""
        device = self.levels[0].device
        for level in kept:
            if level > above and level not in self.levels:
                self.levels[level] = torch.empty_like(self.levels[0])
        fresh = {level: self.levels.pop(level) for level in sorted(self.levels) if level > above}
        features = []
        for part in parts(len(self), batch_size):
            rows = torch.arange(part.start, part.stop, device=device)
            x, mask = self.at(above, rows), self.mask(rows)
            for layer in range(above, self.model.layers):
                x = self.model.block(layer, x, mask)
                if layer + 1 in fresh:
                    fresh[layer + 1][part] = x[0]
            features.append(self.model.features(x, mask, None if self.ids is None else self.ids[rows]))
        self.levels |= fresh
        return torch.cat(features)


def embed(model: WorkingModel, samples: Samples, batch_size: int) -> list[GroupActivations]:
    """Run the stem on all samples."""
    groups = []
    for group in samples.groups:
        pieces, key_mask = [], None
        for rows in parts(len(group), batch_size):
            mask, segments = (
                None if one is None else one[rows] for one in (group.attention_mask, group.token_type_ids)
            )
            inputs = move(group.inputs[rows], model.ensemble.device, model.ensemble.dtype)
            assert isinstance(inputs, Tensor)
            pieces.append(model.ensemble.embed(inputs, mask, segments)[0][0])  # [1, B, T, d] -> [B, T, d]
        if group.attention_mask is not None:
            key_mask = group.attention_mask.bool()
        ids = group.inputs if model.ensemble.kind == "text" else None
        groups.append(GroupActivations(model, torch.cat(pieces), key_mask, ids))
    return groups


_FALLBACK = 1 << 30  # where the system does not say how much is free


def default_budget(device: torch.device) -> int:
    """Half of the free memory of a GPU, a quarter of that of the host, shared with the other local ranks."""
    if device.type == "cuda":
        return _free_on_gpu(device) // 2
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = 4 * _FALLBACK
    return free // 4 // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _free_on_gpu(device: torch.device) -> int:
    """What the driver has left, and what PyTorch holds without using it."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def default_batch_size(model: Ensemble, samples: Samples) -> int:
    """Samples (or pairs of candidate and sample) in a batch: enough to keep the device busy, if they fit."""
    if model.device.type != "cuda":
        return 64
    encoder = model.config.encoder
    hidden = encoder.mlp_width * (2 if encoder.gated else 1)
    one = max(tokens_of(model, group) for group in samples.groups) * hidden * model.dtype.itemsize
    return max(1, min(2048, _free_on_gpu(model.device) // (32 * one)))


def gradient_batch_size(model: Ensemble, samples: Samples, batch_size: int) -> int:
    """Samples in a batch whose activations are held in all blocks at once, for a gradient."""
    if model.device.type != "cuda":
        return batch_size
    encoder = model.config.encoder
    values = encoder.layers * (12 * encoder.width + 3 * encoder.mlp_width * (2 if encoder.gated else 1))
    one = max(tokens_of(model, group) for group in samples.groups) * values * model.dtype.itemsize
    return max(1, min(512, _free_on_gpu(model.device) // (4 * one)))


@dataclass(frozen=True)
class MemoryPlan:
    """What is kept: levels of the current model, and slots for candidates in each group of samples."""

    base_levels: tuple[int, ...]
    slots: tuple[int, ...]


def plan(budget: int, groups: list[GroupActivations], layers: int) -> MemoryPlan:
    """Divide a budget in bytes.

    At most half goes to the current model: all levels where they fit, else evenly spaced ones. The rest is
    for candidates, in proportion to the size of the groups.
    """
    level = sum(group.levels[0].nbytes for group in groups)
    kept = min(layers, max(1, budget // 2 // level))
    base_levels = tuple(sorted({index * layers // kept for index in range(kept)}))
    left = max(0, budget - level * len(base_levels))
    slots = tuple(left * len(group) // level for group in groups)
    return MemoryPlan(base_levels, slots)


class CarriedActivations:
    """Slots for (candidate, level, sample), level l being the input of block l, for one group of samples.

    Args:
        layer_of: `[K]`, layer of each candidate; -1 for candidates that are not evaluated here.
        rows: Samples in the group.
        layers: Blocks of the model.
        token_shape: Tokens of a sample, and their width.
        capacity: Slots there is room for.
        dtype: Dtype of the activations.
        device: Where they lie.
    """

    def __init__(
        self,
        layer_of: IntArray,
        rows: int,
        layers: int,
        token_shape: tuple[int, int],
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        candidates = layer_of[layer_of >= 0]
        below = [int((candidates < level).sum()) for level in range(layers)]  # candidates that reach a level
        self.levels = frozenset(worthwhile_levels(below, capacity // max(rows, 1)))
        needed = rows * sum(below[level] for level in self.levels)
        self._pool = torch.empty(min(capacity, needed), *token_shape, dtype=dtype, device=device)
        self._free = np.arange(len(self._pool), dtype=np.int64)[::-1].copy()
        self._slot = np.full((len(layer_of), layers, rows), -1, np.int64)
        self._deepest = np.zeros((len(layer_of), rows), np.int64)

    def deepest(self, candidates: IntArray, rows: IntArray) -> IntArray:
        """The highest level held for each pair; 0 where there is none."""
        return self._deepest[candidates, rows]

    def load(self, level: int, candidates: IntArray, rows: IntArray) -> Tensor:
        """Activations of pairs that are held at a level, `[1, P, T, d]`."""
        slots = torch.from_numpy(self._slot[candidates, level, rows]).to(self._pool.device, non_blocking=True)
        return self._pool.index_select(0, slots)[None]

    def save(self, level: int, candidates: IntArray, rows: IntArray, x: Tensor) -> None:
        """Hold the activations `[1, P, T, d]` of pairs at a level, as many of them as there is room for."""
        if level not in self.levels:
            return
        count = min(len(candidates), len(self._free))
        if not count:
            return
        slots, self._free = self._free[-count:], self._free[:-count]
        candidates, rows = candidates[:count], rows[:count]
        self._slot[candidates, level, rows] = slots
        self._deepest[candidates, rows] = level
        self._pool.index_copy_(0, torch.from_numpy(slots).to(self._pool.device, non_blocking=True), x[0, :count])

    def holds_all(self, candidate: int, level: int) -> bool:
        """Whether a candidate's activations at a level are held for every sample."""
        return bool((self._slot[candidate, level] >= 0).all())

    def forget_candidate(self, candidate: int) -> None:
        """Give the room of a candidate back."""
        self._release(np.s_[candidate : candidate + 1])
        self._deepest[candidate] = 0

    def forget_above(self, level: int) -> None:
        """Give back what lies above a level; what lies at it or below is still right."""
        if len(self._free) == len(self._pool):
            return  # nothing is held
        self._release(np.s_[:, level + 1 :])
        held = self._slot[:, : level + 1] >= 0  # [K, levels, rows]
        highest = level - held[:, ::-1].argmax(1)  # of those that hold anything
        self._deepest = np.where(held.any(1), highest, 0)

    def _release(self, where: slice | tuple[slice, ...]) -> None:
        slots = self._slot[where]
        self._free = np.concatenate([self._free, slots[slots >= 0]])
        self._slot[where] = -1


def worthwhile_levels(below: Sequence[int], capacity: int) -> list[int]:
    """Levels to hold so that the next step saves most blocks, within a number of slots for each sample.

    The head removed next may lie in any layer r, and saves each candidate of a lower layer the blocks up to
    the highest level held that is at most r. Levels are added greedily by the blocks they save for each slot.

    Args:
        below: For each level, how many candidates lie in a layer below it (and would be held there).
        capacity: Slots for each sample.
    """
    layers = len(below)
    chosen: list[int] = []

    def saved(levels: list[int]) -> int:
        total = 0
        for removed in range(layers):
            best = max((level for level in levels if level <= removed), default=0)
            total += sum(below[level] for level in range(1, best + 1))  # a candidate of layer l skips l … best-1
        return total

    while True:
        used, before = sum(below[level] for level in chosen), saved(chosen)
        gains = [
            ((saved([*chosen, level]) - before) / below[level], level)
            for level in range(1, layers)
            if level not in chosen and 0 < below[level] <= capacity - used
        ]
        gain, level = max(gains, default=(0.0, 0))
        if gain <= 0:
            return sorted(chosen)
        chosen.append(level)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model whose heads are to be ranked.

    Attributes:
        whole: What was given.
        classifier: What answers the samples: the ensemble itself, or the image tower with its class embeddings.
        towers: Names of the towers whose heads are candidates.
        names: Class names of a dual encoder; None for an ensemble.
        templates: The sentences they stand in.
    """

    whole: Ensemble | DualEncoder
    classifier: Ensemble
    towers: tuple[str, ...]
    names: tuple[str, ...] | None
    templates: tuple[str, ...]

    @property
    def configs(self) -> dict[str, EnsembleConfig]:
        """The transformers a head may lie in, by tower."""
        if isinstance(self.whole, DualEncoder):
            return {"image": self.classifier.config, "text": self.whole.text.config}
        return {TOWER: self.classifier.config}

    @property
    def prompts(self) -> str | None:
        """A short name for the classes and their prompts that changes when they do; None for an ensemble."""
        if self.names is None:
            return None
        return hashlib.sha256(json.dumps([self.names, self.templates]).encode()).hexdigest()

    def layers(self, layers: Iterable[int] | None) -> tuple[int, ...] | None:
        """The layers whose heads are candidates; None for all layers of several towers."""
        if len(self.towers) > 1:
            if layers is not None:
                raise ConfigError(
                    "layers are numbered within one tower, but heads of both are candidates; leave `layers` out, or "
                    'choose one tower with towers=("image",)'
                )
            return None
        return checked_layers(self.configs[self.towers[0]], layers)

    def require_heads(self, heads: Sequence[Head]) -> None:
        """Refuse heads that do not exist or were pruned."""
        for head in heads:
            if head.tower not in self.configs:
                raise HeadError(f"head {head} lies in tower {head.tower!r}; there are {list(self.configs)}")
            head_rows(self.configs[head.tower], head, tower=head.tower)

    def texts(self, removed: Sequence[Head], dtype: torch.dtype, device: torch.device) -> Texts | None:
        """The text tower and its prompts, where any of its heads may be switched off."""
        if self.names is None or not isinstance(self.whole, DualEncoder):
            return None
        if "text" not in self.towers and all(head.tower != "text" for head in removed):
            return None
        return read_texts(self.whole, self.names, self.templates, dtype, device)


def subject_of(
    model: Ensemble | DualEncoder,
    class_names: Sequence[str] | None,
    templates: Templates,
    towers: Sequence[Tower],
) -> Subject:
    """Check what was given and put it together."""
    require_model(model, "extract_circuit")
    if model.num_members != 1:
        raise ConfigError(
            f"a circuit is extracted from one model, got an ensemble of {model.num_members} members; take one of "
            "them with ensemble.member(i)"
        )
    if isinstance(model, DualEncoder):
        if class_names is None:
            raise ConfigError("a dual encoder answers for classes by their names; give class_names")
        chosen = tuple(towers)
        if not chosen or len(set(chosen)) < len(chosen) or set(chosen) - set(get_args(Tower)):
            raise ConfigError(f"towers must be some of {list(get_args(Tower))}, each once, got {list(chosen)}")
        names, sentences = checked_names(class_names), checked_templates(templates)
        classifier = zero_shot(model, names, sentences, keep_text=False)
        return Subject(model, classifier, tuple(sorted(chosen)), names, sentences)
    if class_names is not None:
        raise ConfigError("class_names are for dual encoders; an ensemble has its classes already")
    if model.num_classes < 2:
        raise ConfigError(
            f"a circuit needs answers to score, but this ensemble has {model.num_classes} classes; convert the "
            "model with num_labels= and train its classifier first"
        )
    return Subject(model, model, (TOWER,), None, ())


def of_tower(heads: Sequence[Head], text: bool) -> list[Head]:
    """The heads of the text tower, or of the other one."""
    return [head for head in heads if (head.tower == "text") == text]


def plain(heads: Sequence[Head]) -> list[Head]:
    """Heads as the ensemble that holds their tower calls them."""
    return [Head(head.layer, head.head) for head in heads]


class CurrentTower:
    """A transformer that loses heads, its activations on all samples, and those carried for candidates.

    Attributes:
        candidates: All heads that may be removed, over the whole run.
        index_of: Their positions in `candidates`.
        own: Those that this rank evaluates.
        base: The activations, by group of samples.
        carried: Activations of candidates, by group of samples.
        features: Pooled features `[g, d]`, by group of samples.
    """

    def __init__(
        self,
        model: WorkingModel,
        samples: Samples,
        candidates: Sequence[Head],
        ranks: Ranks,
        batch_size: int,
        memory_budget: int,
        carry: bool = True,
    ) -> None:
        self.model, self.samples = model, samples
        self.batch_size = batch_size
        self.device, dtype = model.ensemble.device, model.ensemble.dtype
        self.candidates = list(candidates)
        self.index_of = {head: index for index, head in enumerate(candidates)}
        self.own = frozenset(ranks.share(candidates))
        self.features: list[Tensor] = []
        with torch.no_grad():
            self.base = embed(model, samples, batch_size)
            memory = plan(memory_budget, self.base, model.layers)
            self._levels = memory.base_levels
            self._refresh([0] * len(self.base))
        layer_of = np.array([head.layer if head in self.own else -1 for head in candidates], np.int64)
        room = memory.slots if carry else (0,) * len(self.base)
        self.carried = [
            CarriedActivations(layer_of, len(group), model.layers, group.token_shape, slots, dtype, self.device)
            for group, slots in zip(self.base, room, strict=True)
        ]

    @torch.no_grad()
    def remove(self, head: Head) -> None:
        """Take a head out: what was computed below it stays right, the rest is brought up to date."""
        index = self.index_of.get(head)
        self.model.drop(head)
        known = []
        for group, carried in zip(self.base, self.carried, strict=True):
            known.append(head.layer if index is None else self._adopt(group, carried, index, head.layer))
            carried.forget_above(head.layer)
            if index is not None:
                carried.forget_candidate(index)
        self._refresh(known)

    def _refresh(self, known: Sequence[int]) -> None:
        """Bring activations above the known levels of each group, and the features, up to date."""
        self.features = [
            group.recompute(level, self._levels, self.batch_size) for group, level in zip(self.base, known, strict=True)
        ]

    def _adopt(self, group: GroupActivations, carried: CarriedActivations, index: int, layer: int) -> int:
        """Take over what was computed for a candidate that is now the model; the highest level that is right."""
        rows = np.arange(len(group))
        known = layer
        for level in sorted(group.levels):
            if level <= layer:
                continue
            if not carried.holds_all(index, level):
                break
            group.levels[level] = carried.load(level, np.full(len(group), index), rows)[0]
            known = level
        return known


class CurrentModel(CurrentTower):
    """A classifier that loses heads, with its answers on all samples.

    Attributes:
        wrong: `[n_id]`, the model's errors.
        confidence: `[n]`, its confidences.
        margin: `[n]`, how far the labels of its ID samples are ahead of the other classes.
        choice: Its result, with `NO_HEAD` for a head.
        hardest_first: Sample numbers, those first that add most to its integer.
    """

    def __init__(
        self,
        model: WorkingModel,
        samples: Samples,
        objective: Objective,
        candidates: Sequence[Head],
        ranks: Ranks,
        batch_size: int,
        memory_budget: int,
        carry: bool = True,
    ) -> None:
        self.objective = objective
        self._values: dict[int, int] = {}
        super().__init__(model, samples, candidates, ranks, batch_size, memory_budget, carry)

    def value_on_hardest(self, chunk: int) -> dict[int, int]:
        """The integers of the model on its hardest samples alone: on one chunk of them, on two, … on all."""
        if not self._values:
            total, split = self.objective.samples, self.objective.id_count
            counts = [*range(chunk, total, chunk), total]
            place = torch.empty(total, dtype=torch.int64, device=self.device)
            place[torch.from_numpy(self.hardest_first).to(self.device)] = torch.arange(total, device=self.device)
            seen = place[None, :] < torch.tensor(counts, device=self.device)[:, None]  # [chunks, n]
            confidence = torch.where(seen, self.confidence, LEAST_CONFIDENT)
            confidence[:, :split].masked_fill_(~seen[:, :split], MOST_CONFIDENT)
            found = self.objective.count(self.wrong & seen[:, :split], confidence)
            errors, discordance = (column.tolist() for column in found)
            values = (self.objective.value(e, d) for e, d in zip(errors, discordance, strict=True))
            self._values.update(zip(counts, values, strict=True))
        return self._values

    def _refresh(self, known: Sequence[int]) -> None:
        """Bring activations above the known levels of each group, and the answers, up to date."""
        super()._refresh(known)
        self.answer()

    @torch.no_grad()
    def answer(self) -> None:
        """Answer all samples anew from their features; no block is run."""
        total = self.objective.samples
        wrong, finite = (torch.empty(total, dtype=torch.bool, device=self.device) for _ in range(2))
        self.confidence = torch.empty(total, dtype=torch.int64, device=self.device)
        self.margin = torch.empty(total, dtype=torch.float64, device=self.device)
        for features, group in zip(self.features, self.samples.groups, strict=True):
            for rows in parts(len(group), _ROWS):
                logits = self.model.classify(features[rows])
                numbers = torch.from_numpy(group.numbers[rows]).to(self.device)
                labels = self.samples.labels[numbers]
                answers = judge(logits, labels, quantum(self.model.ensemble.dtype))
                self.margin[numbers] = margins(logits, labels)
                wrong[numbers], self.confidence[numbers], finite[numbers] = answers
        require_finite(finite, self.samples, None)
        self.wrong = wrong[: self.objective.id_count]
        counts = self.objective.count(self.wrong[None], self.confidence[None])
        errors, discordance = (int(count) for count in counts)
        self.choice = Choice(self.objective.value(errors, discordance), NO_HEAD, errors, discordance)
        self.hardest_first: IntArray = self.objective.hardest_first(self.wrong, self.confidence)
        self._values.clear()


_ROWS = 1 << 14  # samples whose logits are held at once
