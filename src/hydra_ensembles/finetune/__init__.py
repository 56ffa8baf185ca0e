"""Fine-tuning: recipes, and a training loop that resumes exactly."""

from .members import finetune
from .recipe import RandAugment, Recipe

__all__ = ["RandAugment", "Recipe", "finetune"]
