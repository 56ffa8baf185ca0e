"""Fast inference: the same numbers from the plan that suits shape, dtype and device."""

from .choice import Choice
from .optimized import OptimizedEnsemble, optimize
from .options import RunOptions

__all__ = ["Choice", "OptimizedEnsemble", "RunOptions", "optimize"]
