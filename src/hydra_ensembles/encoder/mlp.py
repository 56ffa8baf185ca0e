"""The feed-forward sublayer, plain or gated, shared by the members or one each."""

from typing import cast

from torch import Tensor, nn

from ..config import EncoderConfig
from .activations import ACTIVATIONS
from .grouped import GroupedLinear, empty


class MLP(nn.Module):
    """Two linear layers with an activation; gated (SwiGLU), the first gives the gate and the value, in this order."""

    def __init__(self, config: EncoderConfig, copies: int) -> None:
        super().__init__()
        self.gated = config.gated
        self.activation = ACTIVATIONS[config.activation]
        hidden = config.mlp_width * (2 if config.gated else 1)
        self.up = GroupedLinear(copies, config.width, hidden, config.mlp_bias)
        self.down = GroupedLinear(copies, config.mlp_width, config.width, config.mlp_bias)
        self.scale = empty(copies, config.width) if config.layer_scale else None
        self.activation_dropout = nn.Dropout(config.activation_dropout)
        self.output_dropout = nn.Dropout(config.output_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, B, T, d]` to `[max(N, G), B, T, d]`; LayerScale and dropout applied, residual not added."""
        hidden = self.up(x)  # [N, B, T, hidden]
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = self.activation(gate) * value
        else:
            hidden = self.activation(hidden)
        y = self.down(self.activation_dropout(hidden))
        if self.scale is not None:
            y = y * self.scale[:, None, None, :]
        return cast(Tensor, self.output_dropout(y))
