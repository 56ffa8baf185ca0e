"""The whole chain from a model to a saved ensemble."""

from .chain import build
from .settings import HydraConfig

__all__ = ["HydraConfig", "build"]
