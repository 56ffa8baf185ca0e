"""`hydra-ensembles demo`: build and judge a Hydra Ensemble from what is inside the package."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..demo.run import run_demo
from ..demo.settings import DemoSettings
from ..report.compare import to_rich
from .errors import InterruptedRunError, one_line_errors

EXAMPLES = """\b
Examples:
  hydra-ensembles demo
  hydra-ensembles demo --output runs/demo --seed 1
"""


@one_line_errors
def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write to; made if it does not exist.")
    ] = Path("hydra-demo"),
    seed: Annotated[int, typer.Option(min=0, help="Draws the images that heads are ranked on.")] = 0,
    limit: Annotated[
        int | None, typer.Option(min=16, help="Use at most so many images of each set: faster, less certain.")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show progress bars.")] = True,
) -> None:
    """Build a Hydra Ensemble from an embedded, trained model on real images, in minutes, on a CPU, offline.

    Prunes, fuses and calibrates three members, compares them with the model they came from, with other ways of
    pruning and with a Deep Ensemble, and writes a report, the model and all numbers to a folder.
    """
    console = Console()
    settings = DemoSettings(seed=seed, limit=limit)
    try:
        result = run_demo(output, settings, progress=progress, announce=lambda line: console.print(f"[bold]{line}[/]"))
    except KeyboardInterrupt as error:
        raise InterruptedRunError(f"the same command goes on from here ({output} keeps what is done)") from error
    console.print()
    console.print(to_rich(result.comparison, title="One small vision transformer, seven EuroSAT classes"))
    console.print(f"\nReport    {result.report}\nModel     {result.model}\nNumbers   {result.results}", soft_wrap=True)
    console.print(
        f"\n[bold]Try next[/]\n  hydra-ensembles info {result.model}\n"
        f"  hydra-ensembles predict {result.model} YOUR_IMAGE.jpg\n"
        f"  hydra-ensembles compare {result.output / 'evaluations'}",
        soft_wrap=True,
    )
