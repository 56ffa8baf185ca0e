"""From tokens to logits."""

from dataclasses import dataclass, field
from typing import Literal

from ..errors import ConfigError
from ..schema import ADDED_LATER
from .checks import MAX_SIZE, require_choice, require_positive, require_rates, require_sizes
from .encoder import Activation

Pool = Literal["cls", "mean", "cls_mean", "distilled", "eot", "last", "map"]
HiddenActivation = Literal["tanh", "relu", "gelu"]


@dataclass(frozen=True)
class CosineConfig:
    """Classes by their embeddings: features are projected, scaled to length one and compared with each of them.

    The class embeddings are stored with the logit scale multiplied in.

    Attributes:
        width: Width of the embedding that features are projected to; None where the features are the embedding.
        bias: Whether the projection has a bias.
    """

    width: int | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        """Check the width, and that there is a projection for the bias."""
        if self.width is not None:
            require_sizes(self, width=self.width)
        elif self.bias:
            raise ConfigError("CosineConfig.bias is true, but without a width there is no projection to have one")


@dataclass(frozen=True)
class ReadoutConfig:
    """Tokens into logits: final norm, pooling, an optional hidden layer (a pooler), a linear classifier.

    `num_classes = 0` means no classifier: the ensemble then answers with its pooled features. `map` pooling
    (SigLIP) attends from one learned query with `map_heads` heads over all tokens. `cosine` makes the classifier
    one of class embeddings (zero-shot classification).
    """

    pool: Pool = "cls"
    num_classes: int = 0
    norm: Literal["none", "tokens", "pooled"] = "tokens"
    norm_eps: float = 1e-6
    hidden: HiddenActivation | None = None
    bias: bool = True
    dropout: float = 0.0
    hidden_dropout: float = 0.0
    eot_token: int | None = None
    map_heads: int = 0
    map_mlp_width: int = 0
    map_activation: Activation = "gelu"
    cosine: CosineConfig | None = field(default=None, metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        """Check sizes, and that pooling has what it needs."""
        require_choice(self, "pool", self.pool, Pool)
        if not 0 <= self.num_classes <= MAX_SIZE:
            raise ConfigError(f"ReadoutConfig.num_classes must not be negative or huge, got {self.num_classes}")
        if self.hidden is not None:
            require_choice(self, "hidden", self.hidden, HiddenActivation)
        require_rates(self, dropout=self.dropout, hidden_dropout=self.hidden_dropout)
        require_positive(self, norm_eps=self.norm_eps)
        if self.pool == "map":
            require_sizes(self, map_heads=self.map_heads, map_mlp_width=self.map_mlp_width)
        if self.pool == "cls_mean" and self.norm == "pooled":
            raise ConfigError(
                "ReadoutConfig.norm is 'pooled', but pool 'cls_mean' gives features twice as wide as the norm; use "
                "norm 'tokens' or 'none', or another pool"
            )
        if self.cosine is not None and (self.num_classes < 1 or self.pool == "distilled"):
            raise ConfigError(
                f"ReadoutConfig.cosine needs classes and one feature vector, got num_classes {self.num_classes} and "
                f"pool {self.pool!r}"
            )
