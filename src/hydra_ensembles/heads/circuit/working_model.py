"""A private copy of the model, run block by block, from which heads are taken out as they are chosen."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ...model.ensemble import Ensemble
from ...model.layers import Attention, Block
from ..head import Head
from .work import BlockCost, Work


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
