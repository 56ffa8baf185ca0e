"""The HTTP server: routes for people, programs and Open Inference Protocol clients, around one engine.

An abstention is a normal response: status 200, `accept: false`, and the reason. Errors are `{"error": …}` with a
4xx or 5xx status; they contain no path and no stack trace. One process has one batcher a model; put a proxy in front
of it where clients are not trusted.
"""

import asyncio
import hmac
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .._utils import __version__, library
from ..checkpoint import CONFIG, locate
from ..errors import DataError, RequestError, StorageError
from ..files import expanded
from ..model.dual_encoder import load, require_classifier
from ..model.ensemble import Answering
from ..settings import short
from . import protocol
from .batcher import API_KEY, Engine, ServeSettings
from .protocol import Answer, Array, Raw, Served
from .rows import Row, cores, doubling
from .telemetry import Counts, Telemetry, Watch, log_failure, log_to_stdout

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

PAGE = Path(__file__).with_name("page.html")
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)  # nothing from elsewhere
CLOSED_BY_CLIENT = 499  # no client receives it; it appears in the log
KEEP_ALIVE = 75  # seconds an idle connection stays open; longer than in proxies, which would lose requests otherwise
SWITCH = 0.0005  # seconds that a decoding thread may keep the event loop waiting
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass
class Running:
    """A model that is served, what runs it, its metrics and its monitor."""

    served: Served
    engine: Engine
    counts: Counts
    watch: Watch | None = None


def _running(model: Answering, settings: ServeSettings, telemetry: Telemetry) -> Running:
    """A model with its engine, connected with its metrics and its monitor."""
    engine = Engine(require_classifier(model, "make_app"), settings)
    served = Served(model, settings.name)
    running = Running(served, engine, Counts(telemetry, served, lambda: engine.waiting))
    engine.observe = running.counts.batch
    if settings.watch is not None:
        folder = expanded(settings.watch)
        running.watch = Watch(model, folder, settings.name, settings.webhook, settings.on_alarm)
        engine.watched = running.watch.update
        running.counts.watch(running.watch.monitor)
    return running


def make_app(
    model: Answering | Mapping[str, Answering], settings: ServeSettings | None = None, *, key: str | None = None
) -> "FastAPI":
    """The server of a model, as an ASGI application: run it with `hydra-ensembles serve`, or your own server.

    Args:
        model: A classifier; or several by name, each with its own queue (and below `watch` its own folder). Clients
            choose by `/v1/predict?model=NAME` and `/v2/models/NAME`.
        settings: Batches and limits; the address and the socket are for `serve`.
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
    from fastapi.security import APIKeyHeader, HTTPBearer
    from starlette.exceptions import HTTPException

    settings = settings or ServeSettings()
    telemetry = Telemetry(doubling(1, settings.max_batch))
    if isinstance(model, Mapping):
        own = {name: None if settings.watch is None else settings.watch / name for name in model}
        each = {name: replace(settings, name=name, watch=folder) for name, folder in own.items()}
        models = {name: _running(one, each[name], telemetry) for name, one in model.items()}
    else:
        models = {settings.name: _running(model, settings, telemetry)}
    pool, key = ThreadPoolExecutor(cores(), "decode"), key or os.environ.get(API_KEY)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        for one in models.values():
            await one.engine.start()
        try:
            yield
        finally:
            await asyncio.gather(*(one.engine.close() for one in models.values()))
            pool.shutdown()
            for one in models.values():
                if one.watch is not None:
                    one.watch.save()

    async def decoded(work: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *given)

    async def answered(request: Request, one: Running, rows: list[Row]) -> Sequence[Answer]:
        if len(rows) > settings.max_queue:
            raise RequestError(f"got {len(rows)} samples in one request; at most {settings.max_queue} fit", 413)
        answers: Sequence[Answer] = await one.engine.answer(rows)
        request.state.fields |= {"rows": len(rows), "outcomes": one.counts.answers(answers)}
        return answers

    bearer: Any = fastapi.Depends(HTTPBearer(auto_error=False))
    header: Any = fastapi.Depends(APIKeyHeader(name="X-API-Key", auto_error=False))

    async def keyed(held: Any = bearer, named: Any = header) -> None:
        given = held.credentials.strip() if held else named or ""
        if key and not hmac.compare_digest(given.encode("utf-8", "replace"), key.encode()):
            raise RequestError("a key is needed: Authorization: Bearer KEY, or X-API-Key: KEY", 401)

    async def chosen(model: str | None = None) -> Running:
        name = next(iter(models)) if model is None and len(models) == 1 else model
        if name not in models:
            wrong = "several models are served" if name is None else f"there is no model {short(name)}"
            raise RequestError(f"{wrong}; add ?model=NAME, one of {', '.join(models)}", 404 if name else 400)
        return models[name]

    app: FastAPI = fastapi.FastAPI(
        title=f"hydra-ensembles: {', '.join(models)}",
        version=__version__,
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,  # it would redirect to whatever host the request names
        default_response_class=JSONResponse,
    )
    app.state.models = models
    of_model: Any = fastapi.Depends(chosen)
    answers_of, inferred, refusal = protocol.schemas([one.served for one in models.values()])
    locks = [fastapi.Depends(keyed)] if key else []
    private: dict[str, Any] = {"dependencies": locks, "responses": {"4XX": {"model": refusal}}}

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        """The page to try the model on."""
        headers = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        return HTMLResponse(PAGE.read_bytes(), headers=headers)

    @app.get("/v1/model", **private)
    async def described(one: Running = of_model) -> dict[str, Any]:
        """What is served: kind, classes, members, thresholds, and what the monitor says."""
        return one.served.facts | {"watch": None if one.watch is None else one.watch.monitor.summary()}

    @app.post("/v1/predict", response_model=answers_of, openapi_extra={"requestBody": protocol.SAMPLES}, **private)
    async def predict(request: Request, one: Running = of_model) -> JSONResponse:
        """Labels of images or texts, each with its uncertainty and a verdict."""
        one.engine.require_room()
        raws = await _raws(request, settings.max_queue)
        rows = await decoded(raw_rows, one.served, raws)
        answers = await answered(request, one, rows)
        told = [one.served.plain(answer, row.notes) for row, answer in zip(rows, answers, strict=True)]
        return JSONResponse({"model": one.served.name, "predictions": told})

    @app.post("/v1/audit", **private)
    async def audit(request: Request, one: Running = of_model) -> dict[str, Any]:
        """Right labels of a random sample of earlier answers: `{"rows": [{"label", "accept", "right"}, …]}`."""
        if one.watch is None:
            raise RequestError("this server has no monitor; start it with --watch FOLDER", 404)
        one.watch.audit(*audited_rows(one.served, protocol.request_of(await request.body())))
        return one.watch.monitor.summary()

    @app.get("/metrics", **private)
    async def metrics() -> Response:
        """Counters and histograms, as Prometheus reads them."""
        content, kind = telemetry.exposition()
        return Response(content, media_type=kind)

    @app.get("/v2")
    async def about() -> dict[str, Any]:
        """Metadata of the server."""
        known = {"name": "hydra-ensembles", "version": __version__, "models": list(models)}
        return {**known, "extensions": ["binary_tensor_data"]}

    @app.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        """Whether the server runs."""
        return {"live": True}

    @app.get("/v2/health/ready")
    async def all_ready() -> JSONResponse:
        """Whether every model takes requests."""
        return readiness(*models.values())

    def readiness(*those: Running) -> JSONResponse:
        ready = all(one.engine.ready for one in those)
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    def open_inference(one: Running, prefix: str) -> None:
        @app.get(prefix, **private)
        async def metadata() -> dict[str, Any]:
            """Inputs and outputs of the model, its classes and reasons."""
            return protocol.model_metadata(one.served)

        @app.get(f"{prefix}/ready")
        async def ready() -> JSONResponse:
            """Whether the model takes requests."""
            return readiness(one)

        @app.post(f"{prefix}/infer", response_model=inferred, **private)
        async def infer(request: Request) -> Response:
            """Answers as named tensors."""
            one.engine.require_room()
            header, body = request.headers.get(protocol.HEADER), await request.body()
            message, inputs = await decoded(protocol.read_request, body, header)
            outputs = protocol.asked_outputs(message, one.served)
            tensors = {name: torch.tensor(array) for name, array in inputs.items()}
            rows = await decoded(one.served.reader.tensors, tensors)
            answers = await answered(request, one, rows)
            content, headers = protocol.write_answer(message, one.served, outputs, answers)
            return Response(content, headers=headers)

    for name, one in models.items():
        for version in ("", "/versions/1"):
            open_inference(one, f"/v2/models/{name}{version}")

    async def unknown(request: Request, error: Any) -> Response:
        where = f"{request.method} {request.url.path[:100]}"
        return _refusal(RequestError(f"there is no {where}; see /openapi.json", error.status_code))

    app.add_exception_handler(HTTPException, unknown)
    routes = [route.path for route in app.routes if hasattr(route, "path")]
    app.add_middleware(_Gate, settings=settings, telemetry=telemetry, routes=routes)
    return app


class _Gate:
    """Around every request: its limits, its errors, its number, and its line in the log."""

    def __init__(self, app: Any, settings: ServeSettings, telemetry: Telemetry, routes: Sequence[str]) -> None:
        self._app, self._seconds, self._telemetry, self._routes = app, settings.timeout, telemetry, routes
        self._places, self._most = 4 * settings.max_queue + 64, int(settings.max_body * 1e6)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        from starlette.requests import ClientDisconnect, Request

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, request, status, started = time.perf_counter(), Request(scope, receive), CLOSED_BY_CLIENT, False
        header = request.headers.get("x-request-id", "")
        name = header if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", header) else f"{random.getrandbits(64):016x}"
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
        room, takes = self._most, int(scope["method"] == "POST")

        async def limited() -> Any:
            nonlocal room
            message = await receive()
            room -= len(message.get("body", b""))
            if room < 0:  # whatever Content-Length says
                raise RequestError(f"the body is too large; at most {self._most} bytes are accepted", 413)
            return message

        self._places -= takes
        try:
            if self._places < 0 and takes:
                raise RequestError("too many requests are open; try again later", 503, retry_after=1)
            if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
                raise RequestError("compressed bodies are not accepted; send it uncompressed", 415)
            async with asyncio.timeout(self._seconds):
                await self._app(scope, limited, named)
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
        finally:
            self._places += takes
        if refusal is not None and not started:
            await _refusal(refusal)(scope, receive, named)
        self._telemetry.request(route, status, time.perf_counter() - began, **request.state.fields)


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


async def _raws(request: "Request", most: int) -> list[Raw]:
    """The images and texts of a body: a form (files in any field, texts in `text`), JSON, or one image."""
    from starlette.exceptions import HTTPException

    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return protocol.read_named(protocol.request_of(await request.body()))
    if kind.startswith("image/") or kind == "application/octet-stream":
        return [await request.body()]
    if kind != "multipart/form-data":
        accepted = "multipart/form-data, application/json or image/*"
        raise RequestError(f"content of the type {kind[:100]!r} is not accepted; send {accepted}", 415)
    try:
        async with request.form(max_files=most, max_fields=most, max_part_size=1 << 40) as form:
            items = form.multi_items()
            fields = [(name, value if isinstance(value, str) else await value.read()) for name, value in items]
    except HTTPException as error:
        raise RequestError(f"the form cannot be read: {error.detail}") from error
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


def load_all(source: str | Path, device: Any = None) -> Answering | dict[str, Answering]:
    """The model of a folder or hub id; or of a folder of models all, by the names of their folders."""
    folder = locate(source)
    inside = sorted(one.parent for one in folder.glob(f"*/{CONFIG}"))
    if (folder / CONFIG).exists() or not inside:
        return require_classifier(load(folder, device=device), f"{source}: serving")
    return {one.name: require_classifier(load(one, device=device), f"{one}: serving") for one in inside}


def serve(model: Answering | Mapping[str, Answering] | str | Path, settings: ServeSettings | None = None) -> None:
    """Serve classifiers, as `load_all` and `make_app` take them, until a signal; then finish all accepted requests.

    The model is loaded and warm before the server listens. Its address is printed to standard error, and the log to
    standard output, as lines of JSON.
    """
    settings = settings or ServeSettings()
    for name in ("fastapi", "prometheus_client", "python_multipart"):  # fail before the model is loaded
        library(name, extra="serve")
    uvicorn = library("uvicorn", extra="serve")
    torch.set_num_threads(min(torch.get_num_threads(), cores()))
    sys.setswitchinterval(SWITCH)
    log_to_stdout()
    loaded = load_all(model) if isinstance(model, str | Path) else model
    app = make_app(loaded, settings)
    for one in app.state.models.values():
        one.engine.load()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(settings.timeout) + 5,
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
    print(f"serving at {where} ({threads}); Ctrl-C ends it", file=sys.stderr, flush=True)
    return listener


# --- on a cluster ----------------------------------------------------------------------------------------------------


def ray_app(model: str | Path, settings: ServeSettings | None = None, **options: Any) -> Any:
    """The same server as an application of Ray Serve: `ray.serve.run(ray_app("my-hydra"))`.

    Every replica is a whole server; Ray starts and stops them with the load, and gives each request to one of them.

    Args:
        model: A saved classifier, by a folder or hub id that every machine can read; or a folder of several.
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
        self._app = make_app(load_all(model, "cuda" if torch.cuda.is_available() else "cpu"), settings, key=key)

    def check_health(self) -> None:
        """Raise if the device has failed for good: Ray then starts another replica."""
        for one in self._app.state.models.values():
            if one.engine.failure is not None:
                raise one.engine.failure

    def __serve_build_asgi_app__(self) -> Any:
        return self._app
