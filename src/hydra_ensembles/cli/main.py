"""The command line: the list of commands, and the demo."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .._utils import __version__
from ..demo import DemoSettings, run_demo
from ..files import write_atomically
from ..report.table import to_rich
from .build import build, search
from .calibrate_fuse import calibrate, fuse
from .command import command
from .evaluations import compare, evaluate, report
from .predict_info import bench, info, predict
from .serving import export, score, serve

TABLE = Path(__file__).with_name("commands.json")


def commands() -> tuple[Callable[..., None], ...]:
    """All commands, in the order of the help."""
    making, judging = (demo, calibrate, fuse, build, search), (evaluate, compare, report)
    return (*making, *judging, predict, score, serve, export, bench, info)


def run_command(name: str, options: Mapping[str, Any]) -> None:
    """Run a command by name, with options parsed by `hydra_ensembles_cli`."""
    {function.__name__: function for function in commands()}[name](**options)


def table() -> str:
    """All commands and parameters as JSON, one line per parameter, for parsing and help in `hydra_ensembles_cli`."""

    def text(entry: dict[str, Any]) -> str:
        *head, (_, parameters) = entry.items()
        rows = ",\n".join(json.dumps(parameter, ensure_ascii=False) for parameter in parameters)
        return f'{json.dumps(dict(head), ensure_ascii=False)[:-1]}, "parameters": [\n{rows}\n]}}'

    rows = ",\n".join(text(function.table) for function in commands())  # type: ignore[attr-defined]
    return f'{{"version": {json.dumps(__version__)}, "commands": [\n{rows}\n]}}\n'


def write_table() -> None:
    """Write the table to `commands.json` (`make commands`)."""
    write_atomically(TABLE, table().encode())


@command
def demo(
    settings: DemoSettings,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write to; made if it does not exist.")
    ] = Path("hydra-demo"),
    progress: Annotated[bool, typer.Option(help="Show progress bars.")] = True,
) -> None:
    """See how it works on an embedded model, offline.

    Makes three members of one model by pruning, trains them together, and shows what is caught by two reasons to
    abstain: own mistakes and OOD images, compared with the model itself and a Deep Ensemble. Writes a report, the
    model and all numbers to a folder, in minutes, on a CPU.

    Examples:
      hydra-ensembles demo
      hydra-ensembles demo --output runs/demo --seed 1
    """
    console = Console()
    result = run_demo(output, settings, progress=progress, announce=lambda line: console.print(f"[bold]{line}[/]"))
    console.print(to_rich(result.table, title="One small vision transformer, seven EuroSAT classes"))
    model = output / "model"
    print(f"\nReport    {output / 'report.html'}\nModel     {model}\nNumbers   {output / 'results.json'}\n\nTry next")
    print(f"  hydra-ensembles info {model}\n  hydra-ensembles predict {model} YOUR_IMAGE.jpg")
    print(f"  hydra-ensembles compare {output / 'evaluations'}")
