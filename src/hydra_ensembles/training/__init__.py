"""One training loop for classifiers and text towers."""

from .finetune import finetune
from .recipe import Recipe
from .text import tune_text

__all__ = ["Recipe", "finetune", "tune_text"]
