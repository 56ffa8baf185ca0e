"""The whole chain behind one call."""

from .build import build
from .config import HydraConfig

__all__ = ["HydraConfig", "build"]
