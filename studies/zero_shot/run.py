"""Running a zero-shot study: stages in order, each of which goes on where an earlier run stopped."""

from collections.abc import Sequence
from pathlib import Path

import torch

from ..run import checked_seeds, checked_stages, release_memory
from ..seed_folder import SeedFolder
from ..seed_models import CIRCUITS
from .costs import measure
from .evaluating import evaluate, fix
from .recipe import ZeroShotRecipe
from .seed_models import BOTH_TOWERS, IMAGE_TOWER, ZeroShotModels
from .sources import EvaluationSets, ModelSource

ZERO_SHOT_STAGES = ("dual", "rank", "tune", "evaluate", "cost")
SAVED_DUAL = "dual"


def run_zero_shot(
    recipe: ZeroShotRecipe,
    model: ModelSource,
    sets: EvaluationSets,
    output: Path,
    device: torch.device,
    *,
    stages: Sequence[str] = ZERO_SHOT_STAGES,
    seeds: Sequence[int] | None = None,
) -> None:
    """Run stages of a study for some seeds; what is in `output` already is not made again.

    Args:
        recipe: What to do.
        model: The dual encoder.
        sets: All images.
        output: Run folder.
        device: Where to compute.
        stages: Which of `ZERO_SHOT_STAGES`; they run in that order.
        seeds: Which seeds; None for all of the recipe. Seeds may run in processes of their own.

    Raises:
        ConfigError: A stage or a seed does not exist.
        DataError: Data are missing, or a stage comes before one that it needs.
    """
    wanted, chosen = checked_stages(stages, ZERO_SHOT_STAGES), checked_seeds(seeds, recipe.seeds)
    for seed in chosen:
        folder = SeedFolder(output, recipe, seed)
        models = ZeroShotModels(recipe, seed, model, sets, folder, device)
        for stage in wanted:
            with folder.timed(f"stage {stage}"):
                _run(stage, models, first=seed == chosen[0])
            release_memory(device)


def _run(stage: str, models: ZeroShotModels, first: bool) -> None:
    if stage == "dual":
        saved = models.folder.path / SAVED_DUAL
        if not saved.exists():
            models.dual.save_pretrained(saved)
    elif stage == "rank":
        for towers in (BOTH_TOWERS, IMAGE_TOWER):
            for score in CIRCUITS:
                models.circuit(score, towers)
        models.taylor()
    elif stage == "tune":
        fix(models)
    elif stage == "evaluate":
        evaluate(models)
    elif first:  # costs are those of one seed, measured once
        measure(models)
