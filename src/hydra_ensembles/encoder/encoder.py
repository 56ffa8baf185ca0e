"""The stack of blocks."""

from torch import Tensor, nn

from ..config import EnsembleConfig
from .block import Block


class Encoder(nn.Module):
    """All blocks, first to last. Members that agree in the first layers run them once."""

    def __init__(self, config: EnsembleConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.encoder.layers))

    def forward(self, x: Tensor, key_mask: Tensor | None, read: slice | None = None) -> Tensor:
        """Map `[N, B, T, d]` to `[N', B, T', d]`.

        Args:
            x: Embedded tokens; N = 1 when the stem is shared.
            key_mask: `[B, T]`, true where a token may be attended to; None when all may.
            read: Positions the readout looks at. The last block computes nothing else.
        """
        last = len(self.layers) - 1
        for index, block in enumerate(self.layers):
            x = block(x, key_mask, read if index == last else None)
        return x
