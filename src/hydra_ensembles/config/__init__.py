"""What an ensemble is made of, as plain data.

These dataclasses describe one canonical transformer (stem, encoder, readout), how many members it has,
which of its parameter groups they share, and which heads each member keeps. They say everything needed to
allocate the parameters, and nothing about where the model came from.
"""

from .checks import MAX_SIZE
from .encoder import Activation, EncoderConfig, NormKind
from .ensemble import GROUPS, EnsembleConfig, Group, KeptHeads, Sharing, all_heads
from .readout import CosineConfig, HiddenActivation, Pool, ReadoutConfig
from .stems import PatchStemConfig, Resample, TextStemConfig

__all__ = [
    "Activation",
    "CosineConfig",
    "EncoderConfig",
    "EnsembleConfig",
    "GROUPS",
    "Group",
    "HiddenActivation",
    "KeptHeads",
    "MAX_SIZE",
    "NormKind",
    "PatchStemConfig",
    "Pool",
    "ReadoutConfig",
    "Resample",
    "Sharing",
    "TextStemConfig",
    "all_heads",
]
