"""Multi-head attention of M members, each with its own heads.

A head is the unit of storage: its query, key, value and output weights lie together, and the heads of all
members lie one after another (member by member). Pruning a head drops one row of that axis, a member is a
contiguous range of it, and members may keep different numbers of heads without any padding.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import EncoderConfig
from .grouped import GroupedNorm, empty


class Attention(nn.Module):
    """The attention sublayer for G copies (1 when shared by all members, else one per member).

    Attributes:
        sizes: Number of heads of each copy; K is their sum.
        qkv: `[K, 3, d_k, d]`, the input projections, a head's query, key and value together.
        qkv_bias: `[K, 3, d_k]` or None.
        out: `[K, d_k, d]`, a head's part of the output projection.
        out_bias: `[G, d]` or None; it counts even where no head is left.
        scale: `[G, d]` or None, the LayerScale of the sublayer.
    """

    def __init__(self, config: EncoderConfig, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = sizes
        self.causal = config.causal
        self.dropout = config.attention_dropout
        copies, total, width, head_dim = len(sizes), sum(sizes), config.width, config.head_dim
        self.qkv = empty(total, 3, head_dim, width)
        self.qkv_bias = empty(total, 3, head_dim) if config.qkv_bias else None
        self.query_norm = GroupedNorm(copies, head_dim, config.norm_eps, config.norm) if config.qk_norm else None
        self.key_norm = GroupedNorm(copies, head_dim, config.norm_eps, config.norm) if config.qk_norm else None
        self.out = empty(total, head_dim, width)
        self.out_bias = empty(copies, width) if config.out_bias else None
        self.scale = empty(copies, width) if config.layer_scale else None
        self.out_dropout = nn.Dropout(config.projection_dropout)

    @property
    def even(self) -> bool:
        """Whether all copies have the same number of heads, so that one batched product serves them."""
        return len(set(self.sizes)) == 1

    def forward(self, x: Tensor, key_mask: Tensor | None, read: slice | None = None) -> Tensor:
        """Attend within `[N, B, T, d]`.

        Args:
            x: Normalised activations; N is 1 while the members still agree.
            key_mask: `[B, T]`, true where a token may be attended to; None when all may.
            read: Positions whose output is needed; None for all.

        Returns:
            `[max(N, G), B, T', d]`, LayerScale and dropout applied, residual not added.
        """
        y = self.project(self.mix(x, key_mask, read), x.shape[0])
        if self.scale is not None:
            y = y * self.scale[:, None, None, :]
        return cast(Tensor, self.out_dropout(y))

    def mix(self, x: Tensor, key_mask: Tensor | None, read: slice | None = None) -> Tensor:
        """Outputs of the single heads, before the output projection.

        Returns:
            `[R, T', H', d_k]` with all heads that share an input on one axis. N = 1: R = B and H' = K. One
            copy for N members: R = N·B and H' = K. Otherwise, even: R = M·B, H' = K / M; uneven: R = B, H' = K.
        """
        if not sum(self.sizes):  # no head left in any member: nothing to attend with
            tokens = x.shape[2] if read is None else len(range(*read.indices(x.shape[2])))
            return x.new_zeros(x.shape[0] * x.shape[1], tokens, 0, self.out.shape[1])
        q, k, v = self._project_in(x, read)  # each [R, T, H', d_k]
        repeats = q.shape[0] // x.shape[1]  # R = repeats · B
        mask = self._attention_mask(key_mask, repeats, q.shape[1], k.shape[1], x.device)
        z = F.scaled_dot_product_attention(
            q.transpose(1, 2),  # [R, H', T', d_k]
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None,
        )
        return z.transpose(1, 2)  # [R, T', H', d_k]

    def project(self, z: Tensor, members: int) -> Tensor:
        """Output projection of head outputs as `mix` gives them for an input with `members` as first axis."""
        copies = len(self.sizes)
        flat = z.flatten(2)  # [R, T', H'·d_k]
        if not sum(self.sizes):
            y = flat.new_zeros(members, flat.shape[0] // members, flat.shape[1], self.out.shape[2])
        elif copies == 1:
            y = flat @ self.out.flatten(0, 1)  # [R, T', d]
            y = y.unflatten(0, (members, -1))  # [N, B, T', d]
        elif self.even:
            weight = self.out.unflatten(0, (copies, -1)).flatten(1, 2)  # [M, h·d_k, d]
            if members == 1:
                rows = flat.unflatten(2, (copies, -1)).permute(2, 0, 1, 3)  # [M, B, T', h·d_k]
            else:
                rows = flat.unflatten(0, (copies, -1))
            y = torch.bmm(rows.flatten(1, 2), weight).unflatten(1, rows.shape[1:3])  # [M, B, T', d]
        else:
            parts = zip(z.split(self.sizes, dim=2), self.out.split(self.sizes), strict=True)
            y = torch.stack([part.flatten(2) @ weight.flatten(0, 1) for part, weight in parts])  # [M, B, T', d]
        return y if self.out_bias is None else y + self.out_bias[:, None, None, :]

    def _project_in(self, x: Tensor, read: slice | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[R, T, H', d_k]`; queries only at the positions in `read`."""
        if read is None:
            q, k, v = self._linear(x, slice(0, 3)).unbind(3)
        else:
            q = self._linear(x[:, :, read], slice(0, 1))[:, :, :, 0]
            k, v = self._linear(x, slice(1, 3)).unbind(3)
        if self.query_norm is not None and self.key_norm is not None:
            q = self._norm_heads(q, self.query_norm, x.shape[0])
            k = self._norm_heads(k, self.key_norm, x.shape[0])
        return q, k, v

    def _linear(self, x: Tensor, parts: slice) -> Tensor:
        """Project `[N, B, T, d]` to `[R, T, H', P, d_k]` for the chosen parts of (query, key, value)."""
        weight = self.qkv[:, parts]  # [K, P, d_k, d]
        bias = None if self.qkv_bias is None else self.qkv_bias[:, parts]
        copies, head = len(self.sizes), weight.shape[1:3]
        if copies == 1 or x.shape[0] == 1:  # one input for all heads: a single product
            y = F.linear(x.flatten(0, 1), weight.flatten(0, 2), None if bias is None else bias.flatten())
            return y.unflatten(2, (-1, *head))  # [N·B, T, K, P, d_k]
        if self.even:
            rows = weight.unflatten(0, (copies, -1)).flatten(1, 3)  # [M, h·P·d_k, d]
            flat = x.flatten(1, 2)  # [M, B·T, d]
            if bias is None:
                y = torch.bmm(flat, rows.transpose(1, 2))
            else:
                y = torch.baddbmm(bias.reshape(copies, 1, -1), flat, rows.transpose(1, 2))
            heads = weight.shape[0] // copies
            return y.reshape(x.shape[0] * x.shape[1], x.shape[2], heads, *head)  # [M·B, T, h, P, d_k]
        biases = (None,) * copies if bias is None else bias.split(self.sizes)
        pieces = [
            F.linear(xm, wm.flatten(0, 2), None if bm is None else bm.flatten()).reshape(*xm.shape[:2], size, *head)
            for xm, wm, bm, size in zip(x, weight.split(self.sizes), biases, self.sizes, strict=True)
        ]
        return torch.cat(pieces, dim=2)  # [B, T, K, P, d_k]

    def _norm_heads(self, x: Tensor, norm: GroupedNorm, members: int) -> Tensor:
        """Normalise each head of `[R, T, H', d_k]` with the weights of the copy it belongs to."""
        copies = len(self.sizes)
        if copies == 1:
            return cast(Tensor, norm(x[None]))[0]
        if self.even and members > 1:
            return cast(Tensor, norm(x.unflatten(0, (copies, -1)))).flatten(0, 1)
        parts = x.split(self.sizes, dim=2)  # heads of all copies side by side
        one = [norm.for_copy(copy, part) for copy, part in enumerate(parts)]
        return torch.cat(one, dim=2)

    def _attention_mask(
        self, key_mask: Tensor | None, repeats: int, queries: int, keys: int, device: torch.device
    ) -> Tensor | None:
        """Boolean mask for `scaled_dot_product_attention`, or None where its causal flag is enough."""
        if key_mask is None:
            return None
        mask = key_mask[:, None, None, :].expand(-1, 1, queries, -1)  # [B, 1, T', T]
        if self.causal:
            mask = mask & torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
        return mask.repeat(repeats, 1, 1, 1) if repeats > 1 else mask  # [R, 1, T', T]

    def extra_repr(self) -> str:
        """Sizes, for `repr`."""
        _, _, head_dim, width = self.qkv.shape
        heads = self.sizes[0] if self.even else list(self.sizes)
        return f"copies={len(self.sizes)}, heads={heads}, head_dim={head_dim}, width={width}"
