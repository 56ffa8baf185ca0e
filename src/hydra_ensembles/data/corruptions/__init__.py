"""The fifteen corruptions of ImageNet-C at five severities, with numpy, scipy and Pillow alone."""

from .apply import corrupt, corrupted
from .parameters import CORRUPTIONS, MEANING, PARAMETER_SETS, PARAMETERS, SEVERITIES, CorruptionName, ParameterSet

__all__ = [
    "CORRUPTIONS",
    "MEANING",
    "PARAMETERS",
    "PARAMETER_SETS",
    "SEVERITIES",
    "CorruptionName",
    "ParameterSet",
    "corrupt",
    "corrupted",
]
