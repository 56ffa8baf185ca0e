"""The whole chain behind one call."""

from .chain import build
from .config import HydraConfig

__all__ = ["HydraConfig", "build"]
