"""Fast inference: the same numbers from the plan that suits shape, dtype and device."""

from .optimized import OptimizedEnsemble, optimize

__all__ = ["OptimizedEnsemble", "optimize"]
