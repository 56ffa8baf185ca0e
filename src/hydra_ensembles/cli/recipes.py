"""Recipes for fine-tuning as the command line gives them: a preset, single settings, or both."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..errors import ConfigError
from ..schema import from_plain, to_plain
from ..training.recipe import PRESETS, Recipe
from .nearest import did_you_mean
from .yaml_file import require_known

NONE = "none"
EXCLUSIVE: tuple[tuple[str, str, Any], ...] = (
    ("learning_rate", "grid", []),
    ("grid", "learning_rate", None),
    ("steps", "epochs", None),
    ("epochs", "steps", None),
)


def read_recipe(value: Any, changes: Mapping[str, Any] | None = None) -> Recipe | None:
    """A recipe from the name of a preset, or from settings, which may start from a `preset`.

    A setting that excludes another takes its place: `steps` that of `epochs`, `learning_rate` that of `grid`.

    Args:
        value: Name of a preset, `"none"`, a mapping of settings, or None.
        changes: Settings to put over it.

    Raises:
        ConfigError: There is no such preset or setting.
    """
    if value is None or value == NONE:
        if changes:
            raise ConfigError("--recipe-option changes a recipe, but there is none; name one with --recipe")
        return None
    if not isinstance(value, str | Mapping):
        raise ConfigError(f"recipe must be the name of a preset or a mapping of settings, got {value!r}")
    settings = {"preset": value} if isinstance(value, str) else dict(value)
    preset = settings.pop("preset", None)
    own = {**settings, **(changes or {})}
    require_known(own, [one.name for one in fields(Recipe)], "the recipe")
    if preset is None:
        return from_plain(Recipe, _without_excluded(settings, changes or {}), "Recipe")
    if preset not in PRESETS:
        raise ConfigError(
            f"there is no recipe {preset!r}{did_you_mean(str(preset), PRESETS)}; there are {', '.join(sorted(PRESETS))}"
        )
    start = to_plain(Recipe.preset(preset))
    start["ours"] = [name for name in start["ours"] if name not in own]
    return from_plain(Recipe, _without_excluded(start, own), "Recipe")


def _without_excluded(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**settings, **changes}
    for given, excluded, empty in EXCLUSIVE:
        if changes.get(given) and excluded not in changes:
            merged[excluded] = empty
    return merged
