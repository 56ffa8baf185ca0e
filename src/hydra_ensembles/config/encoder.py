"""The stack of transformer blocks."""

from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError
from .checks import require_choice, require_positive, require_rates, require_sizes

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
NormKind = Literal["layer", "rms"]


@dataclass(frozen=True)
class EncoderConfig:
    """The stack of transformer blocks: sizes, norm placement, activation, biases, regularisation."""

    width: int
    layers: int
    heads: int
    head_dim: int
    mlp_width: int
    activation: Activation = "gelu"
    gated: bool = False
    norm: NormKind = "layer"
    norm_eps: float = 1e-6
    norm_first: bool = True
    qk_norm: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    layer_scale: bool = False
    causal: bool = False
    attention_dropout: float = 0.0
    projection_dropout: float = 0.0
    activation_dropout: float = 0.0
    output_dropout: float = 0.0
    drop_path: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check sizes and rates; `drop_path` is empty or has one rate per layer."""
        require_sizes(
            self,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            head_dim=self.head_dim,
            mlp_width=self.mlp_width,
        )
        if self.layers > 4096 or self.heads > 4096:
            raise ConfigError(
                f"EncoderConfig has {self.layers} layers and {self.heads} heads; at most 4096 of each are accepted"
            )
        require_choice(self, "activation", self.activation, Activation)
        require_choice(self, "norm", self.norm, NormKind)
        require_positive(self, norm_eps=self.norm_eps)
        require_rates(
            self,
            attention_dropout=self.attention_dropout,
            projection_dropout=self.projection_dropout,
            activation_dropout=self.activation_dropout,
            output_dropout=self.output_dropout,
        )
        if self.drop_path and len(self.drop_path) != self.layers:
            raise ConfigError(
                f"EncoderConfig.drop_path has {len(self.drop_path)} rates for {self.layers} layers; "
                "give one per layer, or none"
            )
        require_rates(self, **{f"drop_path[{i}]": rate for i, rate in enumerate(self.drop_path)})
