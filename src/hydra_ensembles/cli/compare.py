"""`hydra-ensembles compare`: saved evaluations side by side in one table."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .._utils import write_atomically
from ..report.compare import compare as compare_evaluations
from ..report.compare import to_csv, to_latex, to_markdown, to_rich
from .errors import one_line_errors
from .saved_runs import find_runs

EXAMPLES = """\b
Examples:
  hydra-ensembles compare runs/
  hydra-ensembles compare single.json hydra.json --format latex --output table.tex
"""


WIDE = 240
"""Width of a table for the terminal that goes to a file."""


class TableFormat(StrEnum):
    """How the table is written."""

    TABLE = "table"
    MARKDOWN = "markdown"
    LATEX = "latex"
    CSV = "csv"


@one_line_errors
def compare(
    paths: Annotated[list[Path], typer.Argument(help="Saved evaluations (.json), or folders that hold them.")],
    format: Annotated[TableFormat, typer.Option("--format", "-f", help="How to write the table.")] = TableFormat.TABLE,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead.")] = None,
    allow_mismatch: Annotated[bool, typer.Option(help="Also compare evaluations of different data.")] = False,
) -> None:
    """Compare saved evaluations in one table: best bold, second best underlined.

    Evaluations with the same name are runs of one method and are shown as mean ± standard deviation.
    """
    found = find_runs(paths)
    comparison = compare_evaluations(found.evaluations, found.costs, allow_mismatch=allow_mismatch)
    writers = {TableFormat.MARKDOWN: to_markdown, TableFormat.LATEX: to_latex, TableFormat.CSV: to_csv}
    if format in writers:
        text = writers[format](comparison)
    else:
        console = Console(width=None if output is None else WIDE)
        with console.capture() as captured:
            console.print(to_rich(comparison))
        text = captured.get()
    if output is None:
        print(text, end="")
    else:
        write_atomically(output, text.encode())
