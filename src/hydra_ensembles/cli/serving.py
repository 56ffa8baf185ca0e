"""`hydra-ensembles export`: a model as a file for other runtimes."""

from pathlib import Path
from typing import Annotated

import typer

from ..data.loading import Columns
from ..serve.export import Format
from ..serve.export import export as write_export
from .command import command
from .sources import ModelSettings, load_classifier
from .use import find_inputs


@command
def export(
    model: ModelSettings,
    output: Annotated[Path, typer.Argument(metavar="FILE", help="File to write: NAME.onnx or NAME.pt2.")],
    format: Annotated[Format | None, typer.Option("--format", "-f", help="By the suffix if not given.")] = None,
    example: Annotated[
        list[str] | None, typer.Option(help="An image, folder or text file to compare on, too; once for each.")
    ] = None,
    tolerance: Annotated[float | None, typer.Option(help="How much answers may differ; 1e-5 for float32.")] = None,
) -> None:
    """Write a model as a file that runs without this library.

    Calibration, familiarity and the verdict are inside it; class names and preprocessing lie beside it, as JSON. Before
    the file gets its name it is run and compared with the model; where answers differ nothing is written.

    Examples:
      hydra-ensembles export run model.onnx --example photos/
      hydra-ensembles export run model.pt2
      hydra-ensembles export run compiled.pt2 --format aoti
    """
    ensemble = load_classifier(model)
    found = find_inputs(ensemble.kind, example, (), Columns()) if example else []
    examples = [read() for _, read in found] or None
    path = write_export(ensemble, output, format, examples=examples, tolerance=tolerance)
    print(f"wrote {path} and {path.name}.json")
