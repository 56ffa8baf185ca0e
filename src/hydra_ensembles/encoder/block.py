"""One transformer block: attention and MLP, each with its norm and its residual."""

from typing import cast

import torch
from torch import Tensor, nn

from ..config import EnsembleConfig
from .attention import Attention
from .grouped import GroupedNorm
from .mlp import MLP


class Block(nn.Module):
    """Pre-norm (`x + f(norm(x))`) or post-norm (`norm(x + f(x))`) block for all members."""

    def __init__(self, config: EnsembleConfig, layer: int) -> None:
        super().__init__()
        encoder = config.encoder
        self.norm_first = encoder.norm_first
        self.drop_path = encoder.drop_path[layer] if encoder.drop_path else 0.0
        norms = config.copies("norms", layer)
        copies = config.copies("attention", layer)
        self.norm1 = GroupedNorm(norms, encoder.width, encoder.norm_eps, encoder.norm)
        self.attention = Attention(encoder, tuple(len(config.heads[m][layer]) for m in range(copies)))
        self.norm2 = GroupedNorm(norms, encoder.width, encoder.norm_eps, encoder.norm)
        self.mlp = MLP(encoder, config.copies("mlp", layer))

    def forward(self, x: Tensor, key_mask: Tensor | None, read: slice | None = None) -> Tensor:
        """Map `[N, B, T, d]` to `[N', B, T', d]`; with `read`, only those positions are computed."""
        attended = self.attention(self.attention_input(x), key_mask, read)
        return self.finish(x if read is None else x[:, :, read], attended)

    def attention_input(self, x: Tensor) -> Tensor:
        """What the attention sublayer sees of the residual stream."""
        return cast(Tensor, self.norm1(x)) if self.norm_first else x

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Everything after the attention sublayer: its residual, and the MLP with its own."""
        x = x + self._drop(attended)
        if self.norm_first:
            return x + self._drop(self.mlp(self.norm2(x)))
        x = self.norm1(x)
        return cast(Tensor, self.norm2(x + self._drop(self.mlp(x))))

    def _drop(self, branch: Tensor) -> Tensor:
        """Stochastic depth: drop the branch of a sample (of a member), scale the others up."""
        if not self.training or self.drop_path == 0.0:
            return branch
        keep = 1.0 - self.drop_path
        kept = torch.rand(*branch.shape[:2], 1, 1, dtype=torch.float32, device=branch.device) < keep
        return branch * (kept.to(branch.dtype) / keep)
