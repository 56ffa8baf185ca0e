"""Conversion of models of other libraries; no other part of this package knows about those libraries."""

from .convert import convert

__all__ = ["convert"]
