"""The studies behind docs/results.md: real backbones on real data, from recipe to tables, stage by stage."""

from .recipe import STUDIES, StudyRecipe, load_recipe
from .run import STAGES, run_study

__all__ = ["STAGES", "STUDIES", "StudyRecipe", "load_recipe", "run_study"]
