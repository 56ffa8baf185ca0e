"""The canonical transformer encoder: M members in one pass."""

from .attention import Attention
from .block import Block
from .encoder import Encoder
from .grouped import GroupedLinear, GroupedNorm, grouped_linear
from .mlp import MLP

__all__ = ["MLP", "Attention", "Block", "Encoder", "GroupedLinear", "GroupedNorm", "grouped_linear"]
