"""`hydra-ensembles serve`, `score` and `export`: a model behind HTTP, on an archive, or as a file."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import DataError
from ..serve import ServeSettings
from ..serve import score as score_archive
from ..serve import serve as run_server
from ..serve.export import ABOUT, TOKENIZER, Format
from ..serve.export import export as write_export
from ..settings import to_plain
from .command import Json, NamedColumns, command, emit_json
from .predict_info import find_inputs, named_columns
from .sources import USUAL_BATCH, ModelSettings, load_classifier


@command
def serve(model: ModelSettings, settings: ServeSettings) -> None:
    """Answer requests over HTTP: a page to try it, JSON, and the Open Inference Protocol.

    POST images or texts to /v1/predict; the page is at /, Prometheus metrics at /metrics, and clients of KServe or
    Triton find the model at /v2. An abstention is an answer: accept is false, with the reason. The log is one line of
    JSON per request on standard output. SIGTERM and Ctrl-C stop it once all accepted requests are answered.

    Examples:
      hydra-ensembles serve run
      HYDRA_API_KEY=... hydra-ensembles serve run --host 0.0.0.0 --max-batch 32 --max-wait 10
      hydra-ensembles serve hub:me/my-hydra --uds hydra.sock
      curl -F file=@photo.jpg http://127.0.0.1:8000/v1/predict
    """
    run_server(load_classifier(model), settings)


@command
def export(
    model: ModelSettings,
    output: Annotated[Path, typer.Argument(metavar="FILE", help="File to write: NAME.onnx or NAME.pt2.")],
    format: Annotated[Format | None, typer.Option("--format", "-f", help="Format; by the suffix if not given.")] = None,
    example: Annotated[
        list[str] | None, typer.Option(help="Images, a folder, texts or a table to compare on as well, repeatable.")
    ] = None,
    column: NamedColumns = None,
    tolerance: Annotated[float | None, typer.Option(help="How much answers may differ; 5e-5 for float32.")] = None,
) -> None:
    """Write a model as a file that runs without this library.

    It contains calibration, familiarity and the verdict; a JSON file next to it has class names and preprocessing.
    Before it is stored, the file is run and compared with the model; if answers differ, nothing is written.

    Examples:
      hydra-ensembles export run model.onnx --example photos/
      hydra-ensembles export run model.pt2
    """
    ensemble = load_classifier(model)
    inputs = find_inputs(ensemble.kind, example, (), named_columns(column)) if example else []
    examples = [read() for _, read in inputs] or None
    path = write_export(ensemble, output, format, examples=examples, tolerance=tolerance)
    tokenizer = path.with_name(f"{path.name}{TOKENIZER}")
    print(f"wrote {path}, {path.name}{ABOUT}{f' and {tokenizer.name}' if tokenizer.exists() else ''}")


@command
def score(
    model: ModelSettings,
    source: Annotated[Path, typer.Argument(metavar="IN", help="Folder, table, tar file, lines of text.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the shards; made if it does not exist.")],
    column: NamedColumns = None,
    keep: Annotated[list[str] | None, typer.Option(help="Column of tables to copy to the output, repeatable.")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="Write probabilities and member logits, too.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per batch.")] = USUAL_BATCH,
    shard_rows: Annotated[int, typer.Option(min=1, help="Items per shard.")] = 4096,
    workers: Annotated[int, typer.Option(min=1, help="Threads that decode images.")] = 4,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    as_json: Json = False,
) -> None:
    """Label an archive of any size, or abstain, row by row.

    Reads folders, Parquet, CSV, TSV, JSON lines and tar shards of images or texts; writes Parquet shards with label,
    confidence, uncertainty, familiarity and verdict. Unreadable items are skipped and listed with the reason; if
    nothing can be read, that is an error. After any interruption the same command resumes; no row is lost or written
    twice.

    Examples:
      hydra-ensembles score run photos/ --output scores
      hydra-ensembles score run shards/ --output scores --keep id --batch-size 256
      hydra-ensembles score my-hydra-bert reviews.parquet --output scores --column text=review --wide
    """
    names = {role: name for role, name in to_plain(named_columns(column)).items() if role != "label"}
    summary = score_archive(
        load_classifier(model), source, output, columns=names, keep=keep or (), wide=wide, batch_size=batch_size,
        shard_rows=shard_rows, workers=workers, progress=progress)  # fmt: skip
    if as_json:
        emit_json(to_plain(summary))
    else:
        print(f"{summary.rows} rows in {summary.shards} shards below {output}")
        if summary.unreadable:
            print(f"{summary.unreadable} of them have no answer: their column `error` says why")
    if summary.unreadable == summary.rows:
        raise DataError(f"nothing in {source} could be read; see the column `error` in {output}")
