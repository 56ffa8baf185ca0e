"""Uncertainty from one pretrained transformer: prune different heads, fuse the copies, predict in one pass."""

from ._version import __version__
from .convert import convert
from .ensemble import Ensemble
from .errors import HydraError
from .fuse import fuse
from .heads.head import Head
from .heads.ranking import HeadRanking
from .prediction import Prediction
from .prune import prune

__all__ = ["Ensemble", "Head", "HeadRanking", "HydraError", "Prediction", "__version__", "convert", "fuse", "prune"]
