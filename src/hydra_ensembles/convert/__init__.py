"""Translation of the models people already have; nothing else in this library knows about other libraries."""

from .convert import convert

__all__ = ["convert"]
