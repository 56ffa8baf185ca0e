"""Fast inference: the same numbers from the fastest plan for shape, dtype and device."""

from .runner import Choice, OptimizedEnsemble

__all__ = ["Choice", "OptimizedEnsemble"]
