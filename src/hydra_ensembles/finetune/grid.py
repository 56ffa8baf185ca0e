"""Training once per learning rate of a grid, and keeping the best."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..batches import Batches
from ..errors import ConfigError
from ..schema import to_plain
from .base_learner import BaseLearner, BatchT
from .checkpoints import Store
from .loop import Run, RunPlan, RunResult
from .recipe import Recipe
from .runtime import Runtime


def best_rate(
    make_learner: Callable[[], BaseLearner[BatchT]], plan: RunPlan, runtime: Runtime, folder: Path | None
) -> tuple[RunResult, float]:
    """Train once per learning rate of the recipe; the best result and its rate."""
    recipe = plan.recipe
    best: tuple[RunResult, float] | None = None
    for rate in sorted(recipe.rates):
        store = Store(None if folder is None else folder / f"rate-{rate!r}")
        identity = {
            **plan.fingerprint,
            "recipe": to_plain(recipe),
            "rate": rate,
            "member": plan.index,
            "processes": runtime.processes,
        }
        result = Run(make_learner, replace(plan, rate=rate, fingerprint=identity), runtime, store).finish()
        if best is None or (result.best is not None and result.best.better_than(best[0].best)):
            best = result, rate
    if best is None:
        raise ConfigError("the recipe has no learning rate")
    return best


def check_choosing(recipe: Recipe, validation: Batches | None) -> None:
    """Refuse a recipe that chooses or stops by validation where there is none."""
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"recipe must be a Recipe, such as Recipe.preset('sst2'), got {type(recipe).__name__}")
    if validation is None and len(recipe.grid) > 1:
        raise ConfigError(
            f"the recipe tries {len(recipe.grid)} learning rates {recipe.grid}, which needs validation data to choose "
            "by; give validation=, or one rate: dataclasses.replace(recipe, grid=(), learning_rate=...)"
        )
    if validation is None and recipe.patience is not None:
        raise ConfigError(
            f"the recipe stops early (patience={recipe.patience}), which needs validation data; give validation=, or "
            "set patience=None"
        )
