"""`hydra-ensembles serve`, `score` and `export`: a model behind HTTP, on an archive, or as a file."""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .._utils import require
from ..errors import DataError, StorageError
from ..files import expanded
from ..schema import to_plain
from ..serve.app import make_app
from ..serve.connection import KEEP_ALIVE, bounded_connection
from ..serve.export import ABOUT, TOKENIZER, Format
from ..serve.export import export as write_export
from ..serve.scoring import SHARD, UNREADABLE, Scorer, score_archive
from ..serve.service import API_KEY, ServeSettings
from ..serve.telemetry import log_to_stdout
from .command import Json, NamedColumns, command, emit_json
from .predict_info import find_inputs, named_columns
from .sources import USUAL_BATCH, ModelSettings, load_classifier

BACKLOG = 2048  # connections that the system queues while the server is busy
LOOPBACK = ("127.0.0.1", "::1", "localhost")


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
    for name in ("fastapi", "httptools", "prometheus_client", "python_multipart"):  # fail before the model is loaded
        require(name, extra="serve")
    uvicorn = require("uvicorn", extra="serve")
    listener = listen(settings)
    try:
        app = make_app(load_classifier(model), settings)
        run_server(uvicorn, app, listener, settings)
    finally:
        listener.close()
        if settings.uds is not None:
            expanded(settings.uds).unlink(missing_ok=True)


def listen(settings: ServeSettings) -> socket.socket:
    """Bind the server's socket before the model is loaded; only this user can open a Unix socket."""
    try:
        if settings.uds is None:
            family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
            return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
        path = expanded(settings.uds)
        if path.is_socket() and not _answers(path):
            path.unlink()  # left by a killed server
        umask = os.umask(0o177)
        try:
            return socket.create_server(str(path), family=socket.AF_UNIX, backlog=BACKLOG)
        finally:
            os.umask(umask)
    except OSError as error:
        where = settings.uds or f"{settings.host}:{settings.port}"
        raise StorageError(f"cannot listen on {where}: {error}; give another address, or stop what uses it") from error


def _answers(path: Path) -> bool:
    """Whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def run_server(uvicorn: Any, app: Any, listener: socket.socket, settings: ServeSettings) -> None:
    """Serve until a signal arrives, then finish all accepted requests, which the timeout limits."""
    log_to_stdout()
    config = uvicorn.Config(
        app,
        http=bounded_connection(),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.timeout) + 5,
        timeout_keep_alive=KEEP_ALIVE,
        backlog=BACKLOG,
    )

    class Announcing(uvicorn.Server):  # type: ignore[misc]
        """A server that reports when it accepts requests."""

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                _announce(listener, settings)

        def handle_exit(self, sig: int, frame: Any) -> None:
            if not self.started:  # no request to finish, and a graceful exit would wait for the warm-up
                print("interrupted", file=sys.stderr, flush=True)
                os._exit(128 + sig)
            super().handle_exit(sig, frame)

    former = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn re-raises the signal when done; exit with 0
    try:
        Announcing(config).run([listener])
    except KeyboardInterrupt:  # re-raised in the same way
        pass
    except SystemExit as end:  # startup failed
        raise getattr(app.state, "failure", end) from None
    finally:
        signal.signal(signal.SIGTERM, former)


def _announce(listener: socket.socket, settings: ServeSettings) -> None:
    if settings.uds is not None:
        where = f"unix:{settings.uds}"
    else:
        host, port = listener.getsockname()[:2]
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if settings.key is None and settings.host not in LOOPBACK:
            print(f"warning: anyone who reaches {where} gets answers; set {API_KEY} to require a key", file=sys.stderr)
    threads = f"threads: {torch.get_num_threads()}"
    print(f"serving {settings.name} at {where} ({threads}); Ctrl-C ends it", file=sys.stderr, flush=True)


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
      hydra-ensembles export run compiled.pt2 --format aoti
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
    columns = named_columns(column)
    scorer = Scorer(load_classifier(model), columns=columns, keep=keep or (), wide=wide, workers=workers)
    summary = score_archive(scorer, source, output, batch_size=batch_size, shard_rows=shard_rows, progress=progress)
    unreadable = (output / UNREADABLE.format(0)).parent
    if as_json:
        emit_json(to_plain(summary))
    else:
        print(f"{summary.rows} rows in {summary.shards} shards: {output / SHARD.format(0)} …")
        if summary.unreadable:
            print(f"{summary.unreadable} items or whole files could not be read: {unreadable} says why")
        if summary.noted:
            print(f"{summary.noted} rows have a `note`, which says how the input was altered, probably unintentionally")
        if summary.ignored:
            print(f"{summary.ignored} files of other kinds were skipped")
    if summary.unreadable and not summary.rows:
        raise DataError(f"nothing in {source} could be read; fix what {unreadable} lists, and give a new --output")
