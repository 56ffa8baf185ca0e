"""The model: an `Ensemble` of M members, two-tower models, and their cost."""

from collections.abc import Callable
from typing import Any

LATER: dict[str, Callable[[], Callable[..., Any]]] = {}
"""Methods of `Ensemble` that higher layers make, by name: each entry imports the function. The package's `__init__`
fills it, so that nothing here imports a higher layer."""
