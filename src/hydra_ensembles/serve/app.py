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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .._utils import __version__, library
from ..cascade import Cascade
from ..errors import DataError, RequestError, StorageError
from ..files import expanded
from ..model.dual_encoder import load, require_classifier
from ..model.ensemble import Answering
from ..settings import short
from . import protocol
from .batcher import API_KEY, Engine, ServeSettings
from .protocol import Answer, Array, Raw, Served
from .rows import Row, cores, doubling
from .telemetry import Telemetry, Watch, log_failure, log_to_stdout

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

PAGE = Path(__file__).with_name("page.html")
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)  # nothing from elsewhere
CLOSED_BY_CLIENT = 499  # no client receives it; it appears in the log
KEEP_ALIVE = 75  # seconds an idle connection stays open; longer than in proxies, which would lose requests otherwise
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def make_app(
    model: Answering, settings: ServeSettings | None = None, *, engine: Any = None, key: str | None = None
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
    from starlette.exceptions import HTTPException

    settings = settings or ServeSettings()
    running = engine or Engine(require_classifier(model, "make_app"), settings)
    served, name = Served(model, settings.name), settings.name
    telemetry = Telemetry(served, doubling(1, settings.max_batch), lambda: running.waiting)
    running.observe = telemetry.batch
    if isinstance(model, Cascade):
        telemetry.stages(model.faults)
    watch = None
    if settings.watch is not None:
        watch = Watch(model, expanded(settings.watch), name, settings.webhook, settings.on_alarm)
        running.watched = watch.update
        telemetry.watch(watch.monitor)
    pool, most, key = (
        ThreadPoolExecutor(cores(), "decode"),
        int(settings.max_body * 1e6),
        key or os.environ.get(API_KEY),
    )

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        await running.start()
        try:
            yield
        finally:
            await running.close()
            pool.shutdown()
            if watch is not None:
                watch.save()

    async def decoded(work: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *given)

    async def answered(request: Request, rows: list[Row]) -> Sequence[Answer]:
        if len(rows) > settings.max_queue:
            raise RequestError(f"got {len(rows)} samples in one request; at most {settings.max_queue} fit", 413)
        answers: Sequence[Answer] = await running.answer(rows)
        request.state.fields |= {"rows": len(rows), "outcomes": telemetry.answers(answers)}
        return answers

    async def keyed(request: Request) -> None:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if key and not hmac.compare_digest(given.encode("utf-8", "replace"), key.encode()):
            raise RequestError("a key is needed: Authorization: Bearer KEY, or X-API-Key: KEY", 401)

    app: FastAPI = fastapi.FastAPI(
        title=f"hydra-ensembles: {name}",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,  # it would redirect to whatever host the request names
        default_response_class=JSONResponse,
    )
    private: dict[str, Any] = {"dependencies": [fastapi.Depends(keyed)]}

    @app.get("/")
    async def page() -> HTMLResponse:
        """The page to try the model on."""
        headers = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        return HTMLResponse(PAGE.read_bytes(), headers=headers)

    @app.get("/v1/model", **private)
    async def described() -> dict[str, Any]:
        """What is served: kind, classes, members, thresholds, and what the monitor says."""
        return served.facts | {"watch": None if watch is None else watch.monitor.summary()}

    @app.post("/v1/predict", **private)
    async def predict(request: Request) -> JSONResponse:
        """Labels of images or texts, each with its uncertainty and a verdict."""
        rows = await decoded(raw_rows, served, await _raws(request, await _body(request, most), settings.max_queue))
        answers = await answered(request, rows)
        told = [served.plain(answer, row.notes) for row, answer in zip(rows, answers, strict=True)]
        return JSONResponse({"model": name, "predictions": told})

    @app.post("/v1/audit", **private)
    async def audit(request: Request) -> dict[str, Any]:
        """Right labels of a random sample of earlier answers: `{"rows": [{"label", "accept", "right"}, …]}`."""
        if watch is None:
            raise RequestError("this server has no monitor; start it with --watch FOLDER", 404)
        watch.audit(*audited_rows(served, protocol.request_of(await _body(request, most))))
        return watch.monitor.summary()

    @app.get("/metrics", **private)
    async def metrics() -> Response:
        """Counters and histograms, as Prometheus reads them."""
        content, kind = telemetry.exposition()
        return Response(content, media_type=kind)

    @app.get("/v2")
    async def about() -> dict[str, Any]:
        """Metadata of the server."""
        return {"name": "hydra-ensembles", "version": __version__, "extensions": ["binary_tensor_data"]}

    @app.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        """Whether the server runs."""
        return {"live": True}

    async def ready() -> JSONResponse:
        """Whether the model takes requests."""
        return JSONResponse({"ready": running.ready}, 200 if running.ready else 503)

    async def metadata() -> dict[str, Any]:
        """Inputs and outputs of the model, its classes and reasons."""
        return protocol.model_metadata(served)

    async def infer(request: Request) -> Response:
        """Answers as named tensors."""
        body = await _body(request, most)
        message, inputs = await decoded(protocol.read_request, body, request.headers.get(protocol.HEADER))
        outputs = protocol.asked_outputs(message, served)
        tensors = {name: torch.tensor(array) for name, array in inputs.items()}
        rows = await decoded(served.reader.tensors, tensors)
        answers = await answered(request, rows)
        content, headers = protocol.write_answer(message, served, outputs, answers)
        return Response(content, headers=headers)

    app.get("/v2/health/ready")(ready)
    for prefix in (f"/v2/models/{name}", f"/v2/models/{name}/versions/1"):
        app.get(prefix, **private)(metadata)
        app.get(f"{prefix}/ready")(ready)
        app.post(f"{prefix}/infer", **private)(infer)

    async def unknown(request: Request, error: Any) -> Response:
        where = f"{request.method} {request.url.path[:100]}"
        return _refusal(RequestError(f"there is no {where}; see /openapi.json", error.status_code))

    app.add_exception_handler(HTTPException, unknown)
    routes = [route.path for route in app.routes if hasattr(route, "path")]
    app.add_middleware(_Gate, seconds=settings.timeout, telemetry=telemetry, routes=routes)
    return app


class _Gate:
    """Around every request: its deadline, its errors, its number, and its line in the log."""

    def __init__(self, app: Any, seconds: float, telemetry: Telemetry, routes: Sequence[str]) -> None:
        self._app, self._seconds, self._telemetry, self._routes = app, seconds, telemetry, routes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        from starlette.requests import ClientDisconnect, Request

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, request, status, started = time.perf_counter(), Request(scope, receive), CLOSED_BY_CLIENT, False
        header = request.headers.get("x-request-id", "")
        name = header if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", header) else uuid.uuid4().hex[:16]
        request.state.fields = {"id": name}
        route = request.url.path if request.url.path in self._routes else "elsewhere"

        async def named(message: Any) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                own = {"X-Request-Id": name, "X-Content-Type-Options": "nosniff"}
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in own.items())]
            await send(message)

        refusal: RequestError | None = None
        try:
            async with asyncio.timeout(self._seconds):
                await self._app(scope, receive, named)
        except RequestError as error:
            refusal = error
        except DataError as error:  # from preprocessing or the model, which say what is wrong with the input
            refusal = RequestError(str(error), 400)
        except TimeoutError:
            refusal = RequestError(f"no answer within {self._seconds:g} seconds", 504)
        except ClientDisconnect:
            pass
        except Exception as error:
            log_failure(error, id=name, route=route)
            refusal = RequestError(f"internal error; see the log under {name}", 500)
        if refusal is not None and not started:
            await _refusal(refusal)(scope, receive, named)
        self._telemetry.request(route, status, time.perf_counter() - began, **request.state.fields)


async def _body(request: "Request", most: int) -> bytes:
    """The body, up to its maximum size, whatever Content-Length says."""
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise RequestError("compressed bodies are not accepted; send it uncompressed", 415)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise RequestError(f"the body is too large; at most {most} bytes are accepted", 413)
    return bytes(body)


# --- rows of a request -----------------------------------------------------------------------------------------------


def raw_rows(served: Served, raws: Sequence[Raw]) -> list[Row]:
    """Rows of images or of texts."""
    reader, kinds = served.reader, {"image" if isinstance(raw, bytes) else "text" for raw in raws}
    if len(kinds) != 1:
        raise RequestError("the request holds no sample, or images and texts; give some of one kind")
    if reader.kind not in kinds:
        raise RequestError(f"got {kinds.pop()}s, but this model reads {reader.kind}s")
    rows = [reader.read(raw) for raw in raws]
    for index, row in enumerate(rows):
        if row.error is not None:
            status = getattr(row.error, "status", 400)
            raise RequestError(f"{reader.kind} {index}: {row.error}", status) from row.error
    return rows


def audited_rows(served: Served, body: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    """Labels given, right labels and whether answers were accepted, of the rows of an audit."""
    places = {label: place for place, label in enumerate(served.labels)}
    try:
        rows = [(places[one["label"]], places[one["right"]], bool(one["accept"])) for one in body["rows"]]
    except (KeyError, TypeError) as error:
        form = '{"rows": [{"label": the answer, "accept": true, "right": the right label}]}'
        raise RequestError(f"{short(error)} is missing, or no class; send {form}") from error
    given, right, accepted = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return given, right, accepted.astype(bool)


async def _raws(request: "Request", body: bytes, most: int) -> list[Raw]:
    """The images and texts of a body: a form (files in any field, texts in `text`), JSON, or one image."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return protocol.read_named(protocol.request_of(body))
    if kind.startswith("image/") or kind == "application/octet-stream":
        return [body]
    if kind != "multipart/form-data":
        accepted = "multipart/form-data, application/json or image/*"
        raise RequestError(f"content of the type {kind[:100]!r} is not accepted; send {accepted}", 415)
    from starlette.exceptions import HTTPException
    from starlette.requests import Request as Form

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    try:
        form = await Form(request.scope, receive).form(max_files=most, max_fields=most, max_part_size=len(body))
    except HTTPException as error:
        raise RequestError(f"the form cannot be read: {error.detail}") from error
    fields = [(name, value if isinstance(value, str) else await value.read()) for name, value in form.multi_items()]
    await form.close()
    if strange := [name for name, value in fields if isinstance(value, str) and name != "text"]:
        raise RequestError(f"there is no field {short(strange[0])}; in a form, texts are in the field text")
    return [value for _, value in fields]


def _refusal(error: RequestError) -> "Response":
    """An error as a response."""
    from fastapi.responses import JSONResponse

    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    headers |= {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    return JSONResponse({"error": str(error).encode("utf-8", "replace").decode()}, error.status, headers)


# --- running it ------------------------------------------------------------------------------------------------------


def serve(model: Answering | str | Path, settings: ServeSettings | None = None) -> None:
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
    loaded = load(model) if isinstance(model, str | Path) else model
    engine = Engine(require_classifier(loaded, "serve"), settings)
    app = make_app(loaded, settings, engine=engine)
    engine.load()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(settings.timeout) + 5,
        limit_concurrency=4 * settings.max_queue + 64,
    )
    former = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises the signal again when done; exit with 0
    try:
        with _listening(settings) as listener:
            uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:  # raised again in the same way
        pass
    finally:
        signal.signal(signal.SIGTERM, former)


def _listening(settings: ServeSettings) -> socket.socket:
    """The socket of the server, whose address is printed."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise StorageError(f"cannot listen on {where}: {error}; give another address, or stop what uses it") from error
    host, port = listener.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if not os.environ.get(API_KEY) and settings.host not in LOOPBACK:
        print(f"warning: anyone who reaches {where} gets answers; set {API_KEY} to require a key", file=sys.stderr)
    threads = f"threads: {torch.get_num_threads()}"
    print(f"serving {settings.name} at {where} ({threads}); Ctrl-C ends it", file=sys.stderr, flush=True)
    return listener


# --- on a cluster ----------------------------------------------------------------------------------------------------


def ray_app(model: str | Path, settings: ServeSettings | None = None, **options: Any) -> Any:
    """The same server as an application of Ray Serve: `ray.serve.run(ray_app("my-hydra"))`.

    Every replica is a whole server; Ray starts and stops them with the load, and gives each request to one of them.

    Args:
        model: A saved classifier, by a folder or hub id that every machine can read.
        settings: Batches and limits. Tell Ray where to listen: `serve.start(http_options=...)`.
            A key in HYDRA_API_KEY is read in the process that calls this.
        options: Of `ray.serve.deployment`, such as `num_replicas=2`, `autoscaling_config={"max_replicas": 4}` or
            `ray_actor_options={"num_gpus": 1}`.
    """
    deploy, used = library("ray.serve", extra="ray"), settings or ServeSettings()
    if expanded(model).is_dir():
        model = expanded(model).resolve()  # replicas have another working directory
    usual = {"name": "Model", "max_ongoing_requests": 2 * used.max_batch, "graceful_shutdown_timeout_s": used.timeout}
    replicas = deploy.deployment(**{**usual, **options})(deploy.ingress()(_Replica))
    return replicas.bind(model, used, os.environ.get(API_KEY))


class _Replica:
    """A server of one model on Ray."""

    def __init__(self, model: str | Path, settings: ServeSettings, key: str | None) -> None:
        loaded = load(model, device="cuda" if torch.cuda.is_available() else "cpu")
        self._engine = Engine(loaded, settings)
        self._app = make_app(loaded, settings, engine=self._engine, key=key)

    def check_health(self) -> None:
        """Raise if the device has failed for good: Ray then starts another replica."""
        if self._engine.failure is not None:
            raise self._engine.failure

    def __serve_build_asgi_app__(self) -> Any:
        return self._app
