"""Fast inference: the same numbers from the plan that suits shape, dtype and device."""

from .runner import Choice, OptimizedEnsemble

__all__ = ["Choice", "OptimizedEnsemble"]
