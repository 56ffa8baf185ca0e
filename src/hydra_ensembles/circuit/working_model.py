"""A model that can be entered at any block and loses heads for good, and what its blocks cost."""

from collections import Counter
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..heads.masking import working_copy
from ..heads.ranking import Head
from ..model.config import EncoderConfig, PatchStemConfig
from ..model.ensemble import Ensemble
from ..model.layers import Attention, Block
from .scores import SampleGroup

Work = Counter[str]  # "layer_evaluations", blocks run on one sample; "multiply_adds", of the products really needed


class WorkingModel:
    """A private copy of a model with one member that can be entered at any block and loses heads for good."""

    def __init__(self, model: Ensemble, off: Sequence[Head], work: Work) -> None:
        self.ensemble, self.work = working_copy(model, None, None), work  # counts every block that is run
        self.kept = [list(layer) for layer in model.heads[0]]  # original indices of the heads left, by layer
        self.blocks, self.layers = cast(Sequence[Block], self.ensemble.encoder.layers), model.num_layers
        self._read = model.readout.tokens_read()
        for head in off:
            self.drop(head)

    def block(self, layer: int, x: Tensor, key_mask: Tensor | None, gates: Tensor | None = None) -> Tensor:
        """Run one block on `[1, B, T, d]`; after the last, only the tokens the readout looks at are left.

        With gates `[B, heads]`, the output of each head is multiplied by its gate.
        """
        self._count(layer, x.shape[2], inputs=x.shape[1], outputs=x.shape[1])
        z = self._mix(layer, x, key_mask)  # [B, T', H, d_k]
        if gates is not None:
            z = z * gates[:, None, :, None].to(z.dtype)
        return self._finish(layer, self._needed(layer, x), self.blocks[layer].attention.project(z, 1))

    def block_without(
        self, layer: int, x: Tensor, key_mask: Tensor | None, rows: Tensor, heads: Sequence[tuple[int, slice]]
    ) -> Tensor:
        """Run one block P times, each time without one head, on inputs `[1, S, T, d]` that the runs share.

        The attention is computed once for each input; a run takes the part of its head off. `rows` `[P]` is the input
        of each run; `heads` are original indices with the runs that go without them, and cover all P. Returns
        `[1, P, T', d]`.
        """
        self._count(layer, x.shape[2], inputs=x.shape[1], outputs=len(rows), heads_off=len(rows))
        attention = self.blocks[layer].attention
        z = self._mix(layer, x, key_mask)  # [S, T', H, d_k]
        attended = attention.project(z, 1)[0].index_select(0, rows)  # [S, T', d] -> [P, T', d]
        for head, runs in heads:
            position = self.kept[layer].index(head)
            attended[runs] -= z[:, :, position].index_select(0, rows[runs]) @ attention.out[position]
        return self._finish(layer, self._needed(layer, x).index_select(1, rows), attended[None])

    def pool(self, x: Tensor, key_mask: Tensor | None, ids: Tensor | None) -> Tensor:
        """Pooled features `[B, d]` from the tokens after the last block (`[B, 2, d]` where two tokens are read)."""
        return self.ensemble.readout.pool(x, key_mask, ids)[0]

    def classify(self, features: Tensor) -> Tensor:
        """From pooled features to logits `[B, C]`."""
        return self.ensemble.readout.classify(features[None])[0]

    def drop(self, head: Head) -> None:
        """Take a head out: its rows leave the projections, and later passes cost less."""
        kept, attention = self.kept[head.layer], self.blocks[head.layer].attention
        position = kept.index(head.head)
        del kept[position]
        rows = torch.tensor([row for row in range(len(kept) + 1) if row != position], dtype=torch.long)
        for name in ("qkv", "qkv_bias", "out"):
            tensor = getattr(attention, name)
            if tensor is not None:
                left = tensor.detach().index_select(0, rows.to(tensor.device))
                setattr(attention, name, nn.Parameter(left, requires_grad=False))
        attention.sizes = (len(kept),)

    def _mix(self, layer: int, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """Outputs of the single heads of a block, `[B, T', H, d_k]`."""
        block = self.blocks[layer]
        x = block.attention_input(x)
        if self._has_few_queries(layer):
            return few_queries(block.attention, x[0], key_mask, self._needed(layer, x)[0])
        return block.attention.mix(x, key_mask, self._read if layer == self.layers - 1 else None)

    def _finish(self, layer: int, residual: Tensor, attended: Tensor) -> Tensor:
        scale = self.blocks[layer].attention.scale
        return self.blocks[layer].finish(residual, attended if scale is None else attended * scale[:, None, None, :])

    def _needed(self, layer: int, x: Tensor) -> Tensor:
        """The tokens `[1, B, T', d]` whose output is needed: after the last block, those that the readout reads."""
        return x[:, :, self._read] if layer == self.layers - 1 and self._read is not None else x

    def _has_few_queries(self, layer: int) -> bool:
        """Whether the block has queries of one or two tokens, and keys that are linear in its input."""
        attention = self.blocks[layer].attention
        linear = not attention.causal and attention.key_norm is None and bool(self.kept[layer])
        return linear and layer == self.layers - 1 and self._read is not None

    def _count(self, layer: int, tokens: int, inputs: int, outputs: int, heads_off: int = 0) -> None:
        """Count a block with attention for `inputs` samples and an MLP for `outputs`."""
        encoder = self.ensemble.config.encoder
        queries = tokens if layer < self.layers - 1 else _tokens_read(self._read, tokens)
        few = self._has_few_queries(layer)
        products = inputs * attention_cost(encoder, len(self.kept[layer]), tokens, queries, few)
        products += outputs * mlp_cost(encoder, queries)
        products += heads_off * queries * encoder.head_dim * encoder.width  # the output projection of one head each
        self.work["layer_evaluations"] += outputs + (inputs if heads_off else 0)
        self.work["multiply_adds"] += products


def few_queries(attention: Attention, x: Tensor, key_mask: Tensor | None, asking: Tensor) -> Tensor:
    """Attention of the tokens `asking` `[B, T', d]` to all tokens `x` `[B, T, d]`, as `[B, T', H, d_k]`.

    The score of a token is (W_q a) · (W_k x) = (W_kᵀ W_q a) · x, and the mixture of values is W_v applied to a
    mixture of inputs; so W_k and W_v are applied once for each query, not once for each token. The bias of the
    keys adds the same to all scores of a query and drops out. The keys have no norm, and nothing is causal.
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


# --- multiply-adds of one sample ---------------------------------------------------------------------------


def attention_cost(encoder: EncoderConfig, heads: int, tokens: int, queries: int, few: bool = False) -> int:
    """Attention with some heads over all tokens, for the queries of some of them; `few`, as `few_queries` does it."""
    if few:
        return heads * queries * encoder.width * (4 * encoder.head_dim + 2 * tokens)
    return 2 * heads * encoder.head_dim * (encoder.width * (queries + tokens) + queries * tokens)


def mlp_cost(encoder: EncoderConfig, queries: int) -> int:
    """The MLP on some tokens."""
    return queries * encoder.width * encoder.mlp_width * (3 if encoder.gated else 2)


def forward_cost(model: Ensemble, group: SampleGroup) -> int:
    """All blocks, for all samples of a group; the last one only for the tokens that are read."""
    encoder, tokens = model.config.encoder, tokens_of(model, group)
    queries = [tokens] * (model.num_layers - 1) + [_tokens_read(model.readout.tokens_read(), tokens)]
    return len(group) * sum(
        attention_cost(encoder, len(kept), tokens, count) + mlp_cost(encoder, count)
        for kept, count in zip(model.heads[0], queries, strict=True)
    )


def tokens_of(model: Ensemble, group: SampleGroup) -> int:
    """Tokens of the samples of a group, prefix tokens included."""
    stem, shape = model.config.stem, group.inputs[0].shape
    if not isinstance(stem, PatchStemConfig):
        return shape[1]
    return stem.prefix_tokens + (shape[2] // stem.patch_size[0]) * (shape[3] // stem.patch_size[1])


def _tokens_read(read: slice | None, tokens: int) -> int:
    return tokens if read is None else len(range(*read.indices(tokens)))
