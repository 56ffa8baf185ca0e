"""Circuit extraction (Algorithm 1), exact and fast."""

from .extract import extract_circuit

__all__ = ["extract_circuit"]
