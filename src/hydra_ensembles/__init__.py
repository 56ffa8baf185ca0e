"""Uncertainty from one pretrained transformer: prune, fuse, predict in one forward pass."""

from ._version import __version__
from .ensemble import Ensemble
from .errors import HydraError

__all__ = ["Ensemble", "HydraError", "__version__"]
