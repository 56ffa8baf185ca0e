"""Circuit extraction: which heads a model can do without, found by switching them off one after another."""

from .extract import extract_circuit
from .settings import Method, Score

__all__ = ["Method", "Score", "extract_circuit"]
