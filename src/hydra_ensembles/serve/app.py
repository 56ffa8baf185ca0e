"""The HTTP server: routes for people, programs and Open Inference Protocol clients, around one engine.

An abstention is a normal response: status 200, `accept: false`, and the reason. Errors are `{"error": …}` with a
4xx or 5xx status; they contain no path and no stack trace. One process serves one model; put a proxy in front of it
where clients are not trusted.
"""

import asyncio
import hmac
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import torch

from .._utils import __version__, library
from ..errors import DataError, RequestError, StorageError
from ..files import expanded
from ..model.ensemble import Ensemble
from ..model.kinds import require_ensemble
from ..model.metadata import Calibration
from ..settings import short
from . import protocol
from .batcher import API_KEY, Engine, ServeSettings, key_from_environment
from .protocol import Answer, Served, Text, finite
from .rows import Row, cores, doubling
from .telemetry import Telemetry, log_failure, log_to_stdout

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

PAGE = Path(__file__).with_name("page.html")
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)  # nothing from elsewhere
OPEN = ("/", "/v2", "/openapi.json", "/v2/health/live", "/v2/health/ready")  # without a key
CLOSED_BY_CLIENT = 499  # no client receives it; it appears in the log
KEEP_ALIVE = 75  # seconds an idle connection stays open; longer than in proxies, which would lose requests otherwise
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def make_app(
    model: Ensemble, settings: ServeSettings | None = None, *, engine: Any = None, key: str | None = None
) -> "FastAPI":
    """The server of a model, as an ASGI application: run it with `hydra-ensembles serve`, or your own server.

    Args:
        model: A classifier.
        settings: Batches and limits; the address and the socket are for `serve`.
        engine: Runs the model, as `batcher.Engine` does, which is used if it is None.
        key: What clients must send; None takes it from `HYDRA_API_KEY`.

    Examples:
        >>> from hydra_ensembles.demo import load_backbone
        >>> from hydra_ensembles.serve import make_app
        >>> app = make_app(load_backbone())  # for uvicorn or any other ASGI server
        >>> "/v1/predict" in {route.path for route in app.routes if hasattr(route, "path")}
        True
    """
    fastapi = library("fastapi", extra="serve")
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import HTMLResponse, JSONResponse

    settings = settings or ServeSettings()
    running = engine or Engine(require_ensemble(model, "make_app"), settings)
    served, name = Served(model, settings.name), settings.name
    telemetry = Telemetry(served, doubling(1, settings.max_batch), lambda: running.waiting)
    running.observe = telemetry.batch
    intake, pool = _Intake(served, settings), ThreadPoolExecutor(cores(), "decode")

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        await running.start()
        try:
            yield
        finally:
            await running.close()
            pool.shutdown()

    async def decoded(work: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *given)

    async def answered(request: Request, rows: list[Row]) -> Sequence[Answer]:
        answers: Sequence[Answer] = await running.answer(rows)
        request.state.fields |= {"rows": len(rows), "outcomes": telemetry.answers(answers)}
        return answers

    app: FastAPI = fastapi.FastAPI(
        title=f"hydra-ensembles: {name}",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,  # it would redirect to whatever host the request names
        default_response_class=JSONResponse,
    )

    @app.get("/")
    async def page() -> HTMLResponse:
        """The page to try the model on."""
        headers = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        return HTMLResponse(PAGE.read_bytes(), headers=headers)

    @app.get("/v1/model")
    async def described() -> JSONResponse:
        """What is served: kind, classes, members, thresholds."""
        return JSONResponse(_facts(served))

    @app.post("/v1/predict")
    async def predict(request: Request) -> JSONResponse:
        """Labels of images or texts, each with its uncertainty and a verdict."""
        rows = await decoded(intake.rows, *await _raw(request, settings.max_queue))
        answers = await answered(request, rows)
        told = [served.plain(answer, row.notes) for row, answer in zip(rows, answers, strict=True)]
        return JSONResponse({"model": name, "predictions": told})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counters and histograms, as Prometheus reads them."""
        content, kind = telemetry.exposition()
        return Response(content, media_type=kind)

    @app.get("/v2")
    async def about() -> JSONResponse:
        """Metadata of the server."""
        return JSONResponse({"name": "hydra-ensembles", "version": __version__, "extensions": ["binary_tensor_data"]})

    @app.get("/v2/health/live")
    async def live() -> JSONResponse:
        """Whether the server runs."""
        return JSONResponse({"live": True})

    async def ready() -> JSONResponse:
        """Whether the model takes requests."""
        return JSONResponse({"ready": running.ready}, 200 if running.ready else 503)

    async def metadata() -> JSONResponse:
        """Inputs and outputs of the model, its classes and reasons."""
        return JSONResponse(protocol.model_metadata(served))

    async def infer(request: Request) -> Response:
        """Answers as named tensors."""
        parts = await request.body(), request.headers.get(protocol.HEADER)
        message, inputs = await decoded(protocol.read_request, *parts)
        outputs = protocol.asked_outputs(message, served)
        rows = await decoded(intake.tensor_rows, inputs)
        answers = await answered(request, rows)
        content, headers = protocol.write_answer(message, served, outputs, answers, [row.notes for row in rows])
        return Response(content, headers=headers)

    app.get("/v2/health/ready")(ready)
    for prefix in (f"/v2/models/{name}", f"/v2/models/{name}/versions/1"):
        app.get(prefix)(metadata)
        app.get(f"{prefix}/ready")(ready)
        app.post(f"{prefix}/infer")(infer)

    async def unknown(request: Request, error: Any) -> Response:
        where = f"{request.method} {request.url.path[:100]}"
        return _refusal(RequestError(f"there is no {where}; see /openapi.json", error.status_code))

    app.add_exception_handler(404, unknown)
    app.add_exception_handler(405, unknown)
    routes = [route.path for route in app.routes if hasattr(route, "path")]
    app.add_middleware(_Gate, settings=settings, telemetry=telemetry, routes=routes, key=key or key_from_environment())
    return app


class _Gate:
    """Around every request: key, size of the body, open requests, deadline, clients that leave, errors, the log.

    A body is read here, whole and only if there is room for it, so that a client is known to have gone while its rows
    wait: nothing more is run for it.
    """

    def __init__(
        self, app: Any, settings: ServeSettings, telemetry: Telemetry, routes: Sequence[str], key: str | None
    ) -> None:
        self._app, self._settings, self._telemetry, self._routes, self._key = app, settings, telemetry, routes, key
        self._open = 0  # requests that are being read, decoded or answered

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        from starlette.requests import ClientDisconnect, Request

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, request, status = time.perf_counter(), Request(scope, receive), CLOSED_BY_CLIENT
        header = request.headers.get("x-request-id", "")
        name = header if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", header) else uuid.uuid4().hex[:16]
        request.state.fields, request.state.arrived = {"id": name}, False
        route = request.url.path if request.url.path in self._routes else "elsewhere"
        started = False

        async def named(message: Any) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                own = {"X-Request-Id": name, "X-Content-Type-Options": "nosniff"}
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in own.items())]
            await send(message)

        refusal: RequestError | None = None
        try:
            async with asyncio.timeout(self._settings.timeout):
                await self._pass(request, named)
        except RequestError as error:
            refusal = error
        except DataError as error:  # from preprocessing or the model, which say what is wrong with the input
            refusal = RequestError(str(error), 400)
        except TimeoutError:
            what, code = ("no answer", 504) if request.state.arrived else ("the body did not arrive", 408)
            refusal = RequestError(f"{what} within {self._settings.timeout:g} seconds", code)
        except ClientDisconnect:
            pass
        except Exception as error:
            log_failure(error, id=name, route=route)
            refusal = RequestError(f"internal error; see the log under {name}", 500)
        if refusal is not None and not started:
            await _refusal(refusal)(scope, receive, named)
        self._telemetry.request(route, status, time.perf_counter() - began, **request.state.fields)

    async def _pass(self, request: "Request", send: Any) -> None:
        """Check the key, read the body, and let the application answer as long as the client is there."""
        from starlette.requests import ClientDisconnect

        path = request.url.path
        if self._key is not None and path not in OPEN and not (path in self._routes and path.endswith("/ready")):
            scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
            given = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
            if not hmac.compare_digest(given.encode("utf-8", "replace"), self._key.encode()):
                raise RequestError("a key is needed: Authorization: Bearer KEY, or X-API-Key: KEY", 401)
        scope = {**request.scope, "method": "GET" if request.method == "HEAD" else request.method}
        if request.method in ("GET", "HEAD"):
            await self._app(scope, request.receive, send)
            return
        if self._open >= self._settings.max_queue:
            raise RequestError("too many requests are open; try again later", 503, retry_after=1)
        self._open += 1
        working = watching = None
        try:
            messages = [{"type": "http.request", "body": await self._body(request), "more_body": False}]
            request.state.arrived = True

            async def replayed() -> Any:
                return messages.pop() if messages else await asyncio.Event().wait()  # who leaves is noticed below

            async def gone() -> None:
                while (await request.receive())["type"] != "http.disconnect":
                    pass

            working = asyncio.ensure_future(self._app(scope, replayed, send))
            watching = asyncio.ensure_future(gone())
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            working.result()
        finally:
            self._open -= 1
            for task in (working, watching):
                if task is not None:
                    task.cancel()

    async def _body(self, request: "Request") -> bytes:
        """The body, up to its maximum size, whatever Content-Length says."""
        most = int(self._settings.max_body * 1e6)
        refusal = RequestError(f"the body is too large; at most {most} bytes are accepted", 413)
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise RequestError("compressed bodies are not accepted; send it uncompressed", 415)
        announced = request.headers.get("content-length", "0")
        if not announced.isdecimal() or len(announced) > 18 or int(announced) > most:  # too many digits: no number
            raise refusal
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise refusal
        return bytes(body)


class _Intake:
    """Rows from what clients send, within the limits of a request."""

    def __init__(self, served: Served, settings: ServeSettings) -> None:
        self._served, self._settings = served, settings

    def rows(self, images: Sequence[bytes], texts: Sequence[Text]) -> list[Row]:
        """Rows of images or of texts."""
        kind = "image" if images else "text"
        raw: Sequence[bytes | Text] = images or texts
        if images and texts:
            raise RequestError("got images and texts in one request; this model reads one kind")
        if not raw:
            raise RequestError("the request holds no sample; give at least one")
        reader, longest = self._served.reader, self._settings.max_characters
        if kind != reader.kind:
            raise RequestError(f"got {kind}s, but this model reads {reader.kind}s")
        self._require_few(len(raw))
        rows, pixels = list[Row](), self._settings.max_pixels * 1e6
        for index, one in enumerate(raw):
            count = 0 if isinstance(one, bytes) else len(one) if isinstance(one, str) else sum(map(len, one))
            if count > longest:
                raise RequestError(f"text {index} has {count} characters; at most {longest} are accepted", 413)
            row = reader.read(one, pixels)
            if row.error is not None:
                raise RequestError(f"{kind} {index}: {row.error}", getattr(row.error, "status", 400)) from row.error
            pixels -= row.pixels
            rows.append(row)
        return rows

    def tensor_rows(self, inputs: dict[str, Any]) -> list[Row]:
        """Rows from named tensors: encoded images, texts, or preprocessed inputs."""
        reader = self._served.reader
        raw, _ = protocol.RAW[reader.kind]
        names = [field.name for field in reader.inputs]
        strange = next((name for name in inputs if name not in (raw, *names)), None)
        if strange is not None or (raw in inputs and len(inputs) > 1):
            raise RequestError(f"got the inputs {short(sorted(inputs))}; give {raw}, or {', '.join(names)}")
        for name, value in inputs.items():
            if isinstance(value, list) != (name == raw):
                raise RequestError(f"input {short(name)} must {'be of the type' if name == raw else 'not be'} BYTES")
        if raw in inputs:
            return self.rows(*protocol.read_named({f"{raw}s": inputs[raw]}))
        self._require_few(max(len(array) for array in inputs.values()))
        return reader.tensors({name: torch.tensor(array) for name, array in inputs.items()})

    def _require_few(self, count: int) -> None:
        most = self._settings.max_queue
        if count > most:
            raise RequestError(f"got {count} samples in one request; at most {most} are accepted", 413)


async def _raw(request: "Request", most: int) -> tuple[list[bytes], list[Text]]:
    """The images and texts of a body: a form (files in any field, texts in `text`), JSON, or one image."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return protocol.read_named(protocol.request_of(await request.body()))
    if kind.startswith("image/") or kind == "application/octet-stream":
        return [await request.body()], []
    if kind == "application/x-www-form-urlencoded":  # Starlette would take raw UTF-8 for Latin-1
        pairs: list[tuple[str, Any]] = [*parse_qsl(protocol.as_text(await request.body()), keep_blank_values=True)]
    elif kind == "multipart/form-data":
        pairs = await _multipart(request, most)
    else:
        accepted = "multipart/form-data, application/json or image/*"
        raise RequestError(f"content of the type {kind[:100]!r} is not accepted; send {accepted}", 415)
    if strange := [name for name, value in pairs if isinstance(value, str) and name != "text"]:
        raise RequestError(f"there is no field {short(strange[0])}; in a form, texts are in the field text")
    return [value for _, value in pairs if isinstance(value, bytes)], [v for _, v in pairs if isinstance(v, str)]


async def _multipart(request: "Request", most: int) -> list[tuple[str, Any]]:
    """The fields of a form, with the bytes of its files."""
    from starlette.datastructures import UploadFile
    from starlette.formparsers import MultiPartException, MultiPartParser

    class InMemory(MultiPartParser):
        spool_max_size = 0  # never on a disk

    try:
        form = await InMemory(request.headers, request.stream(), max_files=most, max_fields=most).parse()
    except MultiPartException as error:
        raise RequestError(f"the form cannot be read: {error.message}") from error
    pairs = form.multi_items()
    read = [(name, await value.read() if isinstance(value, UploadFile) else value) for name, value in pairs]
    await form.close()
    return read


def _facts(served: Served) -> dict[str, Any]:
    """What a person wants to know of a model."""
    ensemble = served.ensemble
    calibration = ensemble.metadata.calibration or Calibration()
    fitted = None if ensemble.metadata.familiarity is None else ensemble.metadata.familiarity.settings
    facts = {
        "name": served.name,
        "kind": ensemble.kind,
        "raw": served.reader.preprocessing is not None,
        "labels": list(served.labels),
        "members": ensemble.num_members,
        "outputs": {output.name: output.meaning for output in served.outputs},
    }
    for name, rule in (("unsure", calibration), ("unfamiliar", fitted)):
        limit = None if rule is None else rule.threshold
        facts[f"{name}_above"] = None if limit is None else finite(limit)
        facts[f"{name}_share"] = None if rule is None or limit is None else round(1.0 - rule.accepted_share, 6)
    return facts


def _refusal(error: RequestError) -> "Response":
    """An error as a response."""
    from fastapi.responses import JSONResponse

    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    headers |= {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    return JSONResponse({"error": str(error).encode("utf-8", "replace").decode()}, error.status, headers)


# --- running it ------------------------------------------------------------------------------------------------------


def serve(model: Ensemble | str | Path, settings: ServeSettings | None = None) -> None:
    """Serve a classifier, or a folder or hub id of one, until a signal arrives; then finish all accepted requests.

    The model is loaded and warm before the server listens. Its address is printed to standard error, and the log to
    standard output, as lines of JSON.
    """
    settings = settings or ServeSettings()
    for name in ("fastapi", "prometheus_client", "python_multipart"):  # fail before the model is loaded
        library(name, extra="serve")
    uvicorn = library("uvicorn", extra="serve")
    torch.set_num_threads(min(torch.get_num_threads(), cores()))
    log_to_stdout()
    loaded = model if isinstance(model, Ensemble) else Ensemble.from_pretrained(model)
    engine = Engine(require_ensemble(loaded, "serve"), settings)
    app = make_app(loaded, settings, engine=engine)
    engine.load()
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(settings.timeout) + 5,
        limit_concurrency=4 * settings.max_queue + 64,
    )
    former = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises the signal again when done; exit with 0
    try:
        with listening(settings) as listener:
            _announce(listener, settings)
            uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:  # raised again in the same way
        pass
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def listening(settings: ServeSettings) -> Iterator[socket.socket]:
    """The socket of the server; only this user can open a Unix socket, and it goes with the server."""
    path = None if settings.uds is None else expanded(settings.uds)
    try:
        if path is None:
            family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
            listener = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
        else:
            if path.is_socket() and not _answers(path):
                path.unlink()  # left by a killed server
            umask = os.umask(0o177)
            try:
                listener = socket.create_server(str(path), family=socket.AF_UNIX, backlog=2048)
            finally:
                os.umask(umask)
    except OSError as error:
        where = settings.uds or f"{settings.host}:{settings.port}"
        raise StorageError(f"cannot listen on {where}: {error}; give another address, or stop what uses it") from error
    try:
        yield listener
    finally:
        listener.close()
        if path is not None:
            path.unlink(missing_ok=True)


def _answers(path: Path) -> bool:
    """Whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _announce(listener: socket.socket, settings: ServeSettings) -> None:
    if settings.uds is not None:
        where = f"unix:{settings.uds}"
    else:
        host, port = listener.getsockname()[:2]
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if key_from_environment() is None and settings.host not in LOOPBACK:
            print(f"warning: anyone who reaches {where} gets answers; set {API_KEY} to require a key", file=sys.stderr)
    threads = f"threads: {torch.get_num_threads()}"
    print(f"serving {settings.name} at {where} ({threads}); Ctrl-C ends it", file=sys.stderr, flush=True)
