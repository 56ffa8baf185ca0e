"""The HTTP server: routes for people, programs and Open Inference Protocol clients, around one engine.

An abstention is a normal response: status 200, `accept: false`, and the reason. Errors are `{"error": …}` with a
4xx or 5xx status; they contain no path and no stack trace. One process serves one model; put a proxy in front of it
where clients are not trusted.
"""

import asyncio
import hmac
import json
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
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
from .batcher import Answer
from .engine import API_KEY, Engine, LocalEngine, ServeSettings, key_from_environment
from .protocol import Served, Text, finite
from .rows import Row, cores, doubling
from .telemetry import Telemetry, log_failure, log_to_stdout

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

T = TypeVar("T")

PAGE = Path(__file__).with_name("page.html")
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)  # nothing from elsewhere
CHARSET = re.compile(r";\s*charset\s*=\s*[\"']?([^\s;\"']*)", re.IGNORECASE)
UTF_8 = ("utf-8", "utf8", "us-ascii", "ascii")
CONTENT = "multipart/form-data, application/json, image/* or text/plain"
CLOSED_BY_CLIENT = 499  # no client receives it; it appears in the log
KEEP_ALIVE = 75  # seconds an idle connection stays open; longer than in proxies, which would lose requests otherwise
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def make_app(
    model: Ensemble,
    settings: ServeSettings | None = None,
    *,
    engine: Engine | None = None,
    key: str | None = None,
) -> "FastAPI":
    """The server of a model, as an ASGI application: run it with `hydra-ensembles serve`, or your own server.

    Args:
        model: A classifier.
        settings: Batches and limits; the address and the socket are for `serve`.
        engine: Runs the model; None uses a thread of this process.
        key: What clients must send; None takes it from `HYDRA_API_KEY`.

    Examples:
        >>> from hydra_ensembles.demo import load_backbone
        >>> from hydra_ensembles.serve import make_app
        >>> app = make_app(load_backbone())  # for uvicorn or any other ASGI server
        >>> "/v1/predict" in {route.path for route in app.routes if hasattr(route, "path")}
        True
    """
    fastapi = library("fastapi", extra="serve")
    settings = settings or ServeSettings()
    backend: Engine = LocalEngine(require_ensemble(model, "make_app"), settings) if engine is None else engine
    server, name = _Server(model, settings, backend, key or key_from_environment()), settings.name

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        await backend.start()
        try:
            yield
        finally:
            await backend.close()
            server.decoders.shutdown()

    app: FastAPI = fastapi.FastAPI(
        title=f"hydra-ensembles: {name}",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,  # it would redirect to whatever host the request names
    )
    routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]], bool]] = [
        ("GET", "/", server.page, False),
        ("GET", "/v1/model", server.model, True),
        ("POST", "/v1/predict", server.predict, True),
        ("GET", "/metrics", server.metrics, True),
        ("GET", "/v2", server.about, False),
        ("GET", "/v2/health/live", server.live, False),
        ("GET", "/v2/health/ready", server.is_ready, False),
    ]
    for prefix in (f"/v2/models/{name}", f"/v2/models/{name}/versions/1"):
        routes += [("GET", prefix, server.metadata, True), ("GET", f"{prefix}/ready", server.is_ready, False)]
        routes += [("POST", f"{prefix}/infer", server.infer, True)]
    for method, path, handler, locked in routes:
        answered = server.guarded(path, handler, locked)
        if method == "GET":  # load balancers send HEAD; FastAPI does not add it to GET routes
            app.router.add_route(path, answered, methods=["HEAD"], include_in_schema=False)
        app.add_api_route(
            path,
            answered,
            methods=[method],
            summary=(handler.__doc__ or "").partition("\n")[0],
            response_class=fastapi.Response,
            response_model=None,
        )

    async def elsewhere(request: "Request", error: Any) -> "Response":
        return server.refusal(
            RequestError(f"there is no {request.method} {request.url.path[:100]}; see /openapi.json", error.status_code)
        )

    app.add_exception_handler(404, elsewhere)
    app.add_exception_handler(405, elsewhere)
    return app


class _Server:
    """The route handlers and the code they share."""

    def __init__(self, model: Ensemble, settings: ServeSettings, engine: Engine, key: str | None) -> None:
        self.served, self.settings, self.engine = Served(model, settings.name), settings, engine
        self.telemetry = Telemetry(self.served, doubling(1, settings.max_batch), lambda: engine.waiting)
        if isinstance(engine, LocalEngine):
            engine.observe = self.telemetry.batch
        self.decoders = ThreadPoolExecutor(cores(), "decode")
        self.open = 0  # requests that are being read, decoded or answered
        self._key = key

    # --- shared by all routes ----------------------------------------------------------------------------------------

    def guarded(
        self, route: str, handler: "Callable[[Request], Awaitable[Response]]", locked: bool
    ) -> "Callable[[Request], Awaitable[Response]]":
        """Wrap a handler: check the key, enforce limits and the deadline, and turn exceptions into responses."""
        from fastapi import Request, Response
        from starlette.formparsers import MultiPartException
        from starlette.requests import ClientDisconnect

        async def answered(request: Request) -> Response:
            began = time.perf_counter()
            header = request.headers.get("x-request-id", "")
            name = header if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", header) else uuid.uuid4().hex[:16]
            request.state.fields = {"id": name}
            try:
                if locked:
                    self._require_key(request)
                async with asyncio.timeout(self.settings.timeout):
                    response = await handler(Request(request.scope, self._limited(request)))
            except RequestError as error:
                response = self.refusal(error)
            except DataError as error:  # from preprocessing or the model, which say what is wrong with the input
                response = self.refusal(RequestError(str(error), 400))
            except TimeoutError:
                arrived = getattr(request.state, "arrived", False)
                what, status = ("no answer", 504) if arrived else ("the body did not arrive", 408)
                response = self.refusal(RequestError(f"{what} within {self.settings.timeout:g} seconds", status))
            except MultiPartException as error:
                response = self.refusal(RequestError(f"the form cannot be read: {error}", 400))
            except ClientDisconnect:
                response = _response(b"", CLOSED_BY_CLIENT)
            except Exception as error:
                log_failure(error, id=name, route=route)
                response = self.refusal(RequestError(f"internal error; see the log under {name}", 500))
            response.headers["X-Request-Id"] = name
            seconds = time.perf_counter() - began
            self.telemetry.request(route, response.status_code, seconds, **request.state.fields)
            return response

        return answered

    def refusal(self, error: RequestError) -> "Response":
        """Convert an error to a JSON response."""
        response = _json({"error": str(error)}, error.status)
        if error.retry_after is not None:
            response.headers["Retry-After"] = str(error.retry_after)
        if error.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response

    def _require_key(self, request: "Request") -> None:
        if self._key is None:
            return
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not hmac.compare_digest(key.encode("utf-8", "replace"), self._key.encode()):
            raise RequestError("a key is needed: Authorization: Bearer KEY, or X-API-Key: KEY", 401)

    def _limited(self, request: "Request") -> Callable[[], Awaitable[Any]]:
        """A `receive` that enforces the maximum body size, whatever Content-Length says."""
        most = int(self.settings.max_body * 1e6)
        received = 0
        receive = request.receive
        announced = request.headers.get("content-length", "0")  # too many digits cannot be converted
        refusal = RequestError(f"the body is too large; at most {most} bytes are accepted", 413)
        if not announced.isdecimal() or len(announced) > 18 or int(announced) > most:
            raise refusal
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise RequestError("compressed bodies are not accepted; send it uncompressed", 415)

        async def limited() -> Any:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise refusal
            if message["type"] == "http.request" and not message.get("more_body", False):
                request.state.arrived = True
            return message

        return limited

    async def _decoded(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.decoders, work)

    async def _answers(self, request: "Request", rows: Callable[[], list[Row]]) -> tuple[list[Row], Sequence[Answer]]:
        """Decode (`rows`, in the pool), queue, wait and count; nothing is run for a client that disconnects."""
        from starlette.requests import ClientDisconnect

        async def work() -> tuple[list[Row], Sequence[Answer]]:
            samples = await self._decoded(rows)
            return samples, await self.engine.answer(samples)

        async def disconnected() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        working, watching = asyncio.ensure_future(work()), asyncio.ensure_future(disconnected())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            samples, answers = working.result()
        finally:
            working.cancel()
            watching.cancel()
        request.state.fields |= {"rows": len(samples), "outcomes": self.telemetry.answers(answers)}
        return samples, answers

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        """Reserve one of the `max_queue` request slots before the body is read, which bounds the memory."""
        if self.open >= self.settings.max_queue:
            raise RequestError("too many requests are open; try again later", 503, retry_after=1)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    # --- for people and programs -------------------------------------------------------------------------------------

    async def page(self, request: "Request") -> "Response":
        """The page to try the model on."""
        headers = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        return _response(PAGE.read_bytes(), headers=headers, media_type="text/html")

    async def model(self, request: "Request") -> "Response":
        """What is served: kind, classes, members, thresholds."""
        ensemble = self.served.ensemble
        calibration = ensemble.metadata.calibration or Calibration()
        fitted = None if ensemble.metadata.familiarity is None else ensemble.metadata.familiarity.settings
        facts = {
            "name": self.settings.name,
            "kind": ensemble.kind,
            "raw": self.served.reader.preprocessing is not None,
            "labels": list(self.served.labels),
            "members": ensemble.num_members,
            "outputs": {output.name: output.meaning for output in self.served.outputs},
        }
        for name, rule in (("unsure", calibration), ("unfamiliar", fitted)):
            limit = None if rule is None else rule.threshold
            facts[f"{name}_above"] = None if limit is None else finite(limit)
            facts[f"{name}_share"] = None if rule is None or limit is None else round(1.0 - rule.accepted_share, 6)
        return _json(facts)

    async def predict(self, request: "Request") -> "Response":
        """Labels of images or texts, each with its uncertainty and a verdict."""
        async with self._admitted():
            rows = await self._raw_rows(request)
            samples, answers = await self._answers(request, rows)
        predictions = [self.served.plain(answer, row.notes) for row, answer in zip(samples, answers, strict=True)]
        return _json({"model": self.settings.name, "predictions": predictions})

    async def _raw_rows(self, request: "Request") -> Callable[[], list[Row]]:
        """A function that parses the body into rows: a form, JSON, an image or a text."""
        header = request.headers.get("content-type", "")
        kind = header.partition(";")[0].strip().lower()
        if kind in ("multipart/form-data", "application/x-www-form-urlencoded"):
            fields = await _form(request, self.settings.max_queue)
            return lambda: self._rows(*protocol.read_named(fields))
        body = await request.body()
        if kind.startswith("image/") or kind == "application/octet-stream":
            return lambda: self._rows([body], [])
        charset = CHARSET.search(header)
        if charset is not None and charset[1].lower() not in UTF_8:
            raise RequestError(f"the charset {charset[1][:100]!r} is not accepted; send UTF-8", 415)
        if kind == "application/json":
            return lambda: self._rows(*protocol.read_named(protocol.request_of(body)))
        if kind == "text/plain":
            return lambda: self._rows([], [protocol.text_of(body.strip())])  # files end with a newline
        raise RequestError(f"content of the type {kind[:100]!r} is not accepted; send {CONTENT}", 415)

    def _rows(self, images: Sequence[bytes], texts: Sequence[Text]) -> list[Row]:
        """Rows of images or texts, within the limits of a request."""
        kind = "image" if images else "text"
        raw: Sequence[bytes | Text] = images or texts
        if images and texts:
            raise RequestError("got images and texts in one request; this model reads one kind")
        if not raw:
            raise RequestError("the request holds no sample; give at least one")
        reader, longest = self.served.reader, self.settings.max_characters
        if kind != self.served.ensemble.kind:
            raise RequestError(f"got {kind}s, but this model reads {self.served.ensemble.kind}s")
        self._require_few(len(raw))
        rows, pixels = list[Row](), self.settings.max_pixels * 1e6
        for index, one in enumerate(raw):
            count = 0 if isinstance(one, bytes) else len(one) if isinstance(one, str) else len(one[0]) + len(one[1])
            if count > longest:
                raise RequestError(f"text {index} has {count} characters; at most {longest} are accepted", 413)
            row = reader.read(one, pixels)
            if row.error is not None:
                raise RequestError(f"{kind} {index}: {row.error}", getattr(row.error, "status", 400)) from row.error
            pixels -= row.pixels
            rows.append(row)
        return rows

    def _require_few(self, count: int) -> None:
        most = self.settings.max_queue
        if count > most:
            raise RequestError(f"got {count} samples in one request; at most {most} are accepted", 413)

    async def metrics(self, request: "Request") -> "Response":
        """Counters and histograms, as Prometheus reads them."""
        content, kind = self.telemetry.exposition()
        return _response(content, media_type=kind)

    # --- the Open Inference Protocol ---------------------------------------------------------------------------------

    async def about(self, request: "Request") -> "Response":
        """Metadata of the server."""
        return _json({"name": "hydra-ensembles", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def live(self, request: "Request") -> "Response":
        """Whether the server runs."""
        return _json({"live": True})

    async def is_ready(self, request: "Request") -> "Response":
        """Whether the model takes requests."""
        return _json({"ready": self.engine.ready}, 200 if self.engine.ready else 503)

    async def metadata(self, request: "Request") -> "Response":
        """Inputs and outputs of the model, its classes and reasons."""
        return _json(protocol.model_metadata(self.served))

    async def infer(self, request: "Request") -> "Response":
        """Answers as named tensors."""
        async with self._admitted():
            parts = await request.body(), request.headers.get(protocol.HEADER)
            message, inputs = await self._decoded(lambda: protocol.read_request(*parts))
            outputs = protocol.asked_outputs(message, self.served)
            rows, answers = await self._answers(request, lambda: self._tensor_rows(inputs))
        notes = [row.notes for row in rows]
        content, headers = protocol.write_answer(message, self.served, outputs, answers, notes)
        return _response(content, headers=headers)

    def _tensor_rows(self, inputs: dict[str, Any]) -> list[Row]:
        """Rows from named tensors: encoded images, texts, or preprocessed inputs."""
        reader = self.served.reader
        raw, _ = protocol.RAW[reader.kind]
        names = [field.name for field in reader.inputs]
        strange = next((name for name in inputs if name not in (raw, *names)), None)
        if strange is not None or (raw in inputs and len(inputs) > 1):
            raise RequestError(f"got the inputs {short(sorted(inputs))}; give {raw}, or {', '.join(names)}")
        for name, value in inputs.items():
            if isinstance(value, list) != (name == raw):
                raise RequestError(f"input {short(name)} must {'be of the type' if name == raw else 'not be'} BYTES")
        if raw in inputs:
            return self._rows(*protocol.read_named({f"{raw}s": inputs[raw]}))
        self._require_few(max(len(array) for array in inputs.values()))
        return reader.tensors({name: torch.tensor(array) for name, array in inputs.items()})


async def _form(request: "Request", most: int) -> dict[str, Any]:
    """The images and texts of a form by their plural names; files are images, whatever their field is called."""
    from starlette.datastructures import UploadFile
    from starlette.formparsers import MultiPartParser

    class InMemory(MultiPartParser):
        spool_max_size = 0  # never on a disk

    pairs: list[tuple[str, Any]]
    if request.headers["content-type"].lower().startswith("multipart/"):
        form = await InMemory(request.headers, request.stream(), max_files=most, max_fields=most).parse()
        pairs = form.multi_items()
    else:  # browsers escape what is not ASCII, and others send it in UTF-8, which Starlette would take for Latin-1
        pairs = parse_qsl(protocol.as_text(await request.body()), keep_blank_values=True)
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if isinstance(value, UploadFile):
            fields.setdefault("images", []).append(await value.read())
            await value.close()
        else:
            fields.setdefault(f"{name.removesuffix('s')}s", []).append(value)
    return fields


def _json(content: Any, status: int = 200) -> "Response":
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return _response(body, status, {"X-Content-Type-Options": "nosniff"}, "application/json")


def _response(
    body: bytes, status: int = 200, headers: Mapping[str, str] | None = None, media_type: str | None = None
) -> "Response":
    from fastapi import Response

    return Response(body, status, headers, media_type)


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
    engine = LocalEngine(require_ensemble(loaded, "serve"), settings)
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
