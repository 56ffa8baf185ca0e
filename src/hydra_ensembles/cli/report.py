"""`hydra-ensembles report`: saved evaluations as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from ..report.html import write_report
from .errors import one_line_errors
from .saved_runs import find_runs

EXAMPLES = """\b
Examples:
  hydra-ensembles report runs/ --output report.html
  hydra-ensembles report runs/ --focus "Hydra (Circ)" --baseline Single
"""


@one_line_errors
def report(
    paths: Annotated[list[Path], typer.Argument(help="Saved evaluations (.json), or folders that hold them.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    focus: Annotated[
        str | None, typer.Option(help="The method the report is about; the last one, if not given.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The method it is held against; the first one, if not given.")
    ] = None,
    allow_mismatch: Annotated[bool, typer.Option(help="Also compare evaluations of different data.")] = False,
) -> None:
    """Write a report on saved evaluations: one HTML file that needs neither network nor scripts."""
    found = find_runs(paths)
    written = write_report(
        output,
        found.evaluations,
        costs=found.costs,
        title=title,
        focus=focus,
        baseline=baseline,
        allow_mismatch=allow_mismatch,
    )
    print(f"wrote {written}")
