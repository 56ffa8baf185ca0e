"""The whole chain from a model to a saved ensemble, and the search for the best one."""

from .chain import build
from .settings import HydraConfig

__all__ = ["HydraConfig", "build"]
