"""Everything a build is asked for: its model, its data, and how the ensemble is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..pipeline.settings import HydraConfig
from ..schema import from_plain, to_plain
from .recipes import read_recipe
from .settings import USUAL_BATCH, DataSettings, ModelSettings
from .yaml_file import merge_settings

VARIETY = 2  # times as many batches as a ranking reads, so that members are ranked on different ones


@dataclass(frozen=True)
class BuildSources(DataSettings, ModelSettings):
    """What goes into a build and where it comes out; the rest is `HydraConfig`.

    Attributes:
        output: Run folder.
        id: Held-out labelled data.
        ood: Data unlike the training data, for circuits.
        train: Labelled training data, for fine-tuning and Taylor rankings.
        validation: Held-out labelled data for calibration; half of `id` if not given.
        suite: A suite that gives the sets not named here.
        augment: Random crops and flips of training images (and RandAugment, where the recipe has it); if not
            given, where the recipe has RandAugment.
        train_batch_size: Samples a training batch; if not given, the recipe's, else `batch_size`.
    """

    output: str = ""
    id: str | None = None
    ood: str | None = None
    train: str | None = None
    validation: str | None = None
    suite: str | None = None
    augment: bool | None = None
    train_batch_size: int | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without loading anything."""
        ModelSettings.__post_init__(self)
        DataSettings.__post_init__(self)
        if not self.output:
            raise ConfigError("no output folder was given; name one with --output FOLDER")
        if self.train_batch_size is not None and self.train_batch_size < 1:
            raise ConfigError(f"train_batch_size must be at least 1, got {self.train_batch_size}")


@dataclass(frozen=True)
class BuildSettings:
    """A build, fully resolved."""

    sources: BuildSources
    hydra: HydraConfig = field(default_factory=lambda: HydraConfig(prune=1))

    def plain(self) -> dict[str, Any]:
        """One flat mapping, as the YAML file has it."""
        return {**to_plain(self.sources), **to_plain(self.hydra)}

    def with_batch_sizes(self, held_out: int, train: int | None) -> "BuildSettings":
        """The settings with every batch size filled in, so that members differ and few samples suffice.

        A Taylor ranking reads some batches of the training data, or else of the held-out data; there must be more
        of them than it reads, or all members would be ranked alike.

        Args:
            held_out: Samples of `id`.
            train: Samples of `train`; None where there is none.
        """
        sources, recipe = self.sources, self.hydra.recipe
        ranks = self.hydra.strategy == "taylor"
        usual = self._small_enough(held_out) if ranks and train is None else USUAL_BATCH
        batch = sources.batch_size or usual
        of_recipe = None if recipe is None else recipe.batch_size
        if recipe is not None and of_recipe is not None:
            training = max(1, of_recipe // recipe.gradient_accumulation)
        else:
            training = self._small_enough(train) if ranks and train is not None else batch
        return replace(
            self,
            sources=replace(sources, batch_size=batch, train_batch_size=sources.train_batch_size or training),
        )

    def _small_enough(self, samples: int) -> int:
        return max(1, min(USUAL_BATCH, samples // (VARIETY * self.hydra.calibration_batches)))


def resolve_build(config: Path | None, flags: Mapping[str, Any]) -> BuildSettings:
    """Settings from a YAML file and flags; flags win.

    Args:
        config: The file, or None.
        flags: Settings by name; None where a flag was not given. `recipe_options` changes single settings of
            the recipe.

    Raises:
        ConfigError: A setting is unknown, missing, or cannot be what it is.
    """
    sources = {one.name for one in fields(BuildSources)}
    hydra = {one.name for one in fields(HydraConfig)}
    recipe_options = flags.get("recipe_options")
    given = {name: value for name, value in flags.items() if name != "recipe_options"}
    merged = merge_settings(config, given, sources | hydra)
    if "prune" not in merged:
        raise ConfigError("how many heads each member loses was not given; say so with --prune N")
    merged["recipe"] = read_recipe(merged.get("recipe"), recipe_options)
    where = "build" if config is None else str(config)
    return BuildSettings(
        from_plain(BuildSources, {name: merged[name] for name in merged.keys() & sources}, where),
        from_plain(HydraConfig, {name: merged[name] for name in merged.keys() & hydra}, where),
    )
