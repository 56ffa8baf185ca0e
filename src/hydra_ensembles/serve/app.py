"""The HTTP server: routes for people, programs and Open Inference Protocol clients, around one engine.

An abstention is a normal response: status 200, `accept: false`, and the reason. Errors are `{"error": …}` with a
4xx or 5xx status; they contain no path and no stack trace.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import math
import os
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from .._utils import __version__, require
from ..errors import DataError, RequestError
from ..model.ensemble import Ensemble
from ..model.kinds import require_ensemble
from ..model.metadata import Calibration
from ..schema import short
from . import protocol
from .batcher import Batcher
from .service import Answer, Sample, ServeSettings, Service, finite, form_parts, read_form, read_named, text_of
from .telemetry import Telemetry, log, log_failure

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

T = TypeVar("T")

PAGE = Path(__file__).with_name("page.html")
CHARSET = re.compile(r";\s*charset\s*=\s*[\"']?([^\s;\"']*)", re.IGNORECASE)
UTF_8 = ("utf-8", "utf8", "us-ascii", "ascii")
CONTENT = "multipart/form-data, application/json, image/* or text/plain"
_FILE = {"schema": {"type": "string", "format": "binary"}}
_STRINGS = {"type": "array", "items": {"type": "string"}}
_PAIR = _STRINGS | {"minItems": 2, "maxItems": 2}
_TEXTS = {"type": "array", "items": {"anyOf": [{"type": "string"}, _PAIR]}}
_NAMED = {"schema": {"type": "object", "properties": {"images": _STRINGS, "texts": _TEXTS}}}
_TENSORS = {"schema": {"type": "object", "required": ["inputs"]}}
BODIES = {  # request bodies for /openapi.json: this module parses them, not FastAPI
    "predict": {"multipart/form-data": _FILE, "application/json": _NAMED, "image/*": _FILE, "text/plain": _FILE},
    "infer": {"application/json": _TENSORS},
}
CLOSED_BY_CLIENT = 499  # no client receives it; it appears in the log


class Engine(Protocol):
    """Runs the model on rows: threads of this process, or replicas managed by another framework."""

    ready: bool

    @property
    def waiting(self) -> int:
        """Rows in the queue."""

    async def start(self) -> None:
        """Load and warm up; return once the engine is ready."""

    async def answer(self, rows: Sequence[Sample]) -> Sequence[Answer]:
        """One answer per row; cancelled when no client waits for them any more."""

    async def close(self) -> None:
        """Finish all queued rows, then stop."""


class LocalEngine:
    """Model threads of this process, fed from one queue."""

    ready = False

    def __init__(self, service: Service) -> None:
        self.service = service
        self.observe: Callable[[int, float], None] = lambda rows, seconds: None
        self._batcher: Batcher[Sample, Answer] | None = None

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return 0 if self._batcher is None else self._batcher.waiting

    async def start(self) -> None:
        """Build and warm up the plans, then start the threads."""
        settings = self.service.settings
        began = time.monotonic()
        runs = await asyncio.to_thread(self.service.workers)
        self._batcher = Batcher(
            runs,
            lambda row: row.shape,
            max_batch=settings.max_batch,
            max_wait=settings.max_wait / 1e3,
            max_queue=settings.max_queue,
            observe=self.observe,
        )
        self.ready = True
        log("ready", model=settings.name, workers=len(runs), seconds=round(time.monotonic() - began, 2))

    async def answer(self, rows: Sequence[Sample]) -> Sequence[Answer]:
        """Queue the rows and wait for their answers."""
        assert self._batcher is not None
        futures = self._batcher.submit(rows)
        try:
            return await asyncio.gather(*map(asyncio.wrap_future, futures))
        finally:
            for future in futures:
                future.cancel()

    async def close(self) -> None:
        """Finish all queued rows, then stop the threads."""
        self.ready = False
        if self._batcher is not None:
            await asyncio.to_thread(self._batcher.close)


def make_app(
    model: Ensemble | Service, settings: ServeSettings | None = None, engine: Engine | None = None
) -> "FastAPI":
    """The server of a model, as an ASGI application: run it with `hydra-ensembles serve`, or your own server.

    Args:
        model: A classifier.
        settings: Batches and limits; the address and the socket are for `hydra-ensembles serve`.
        engine: Runs the model; None uses threads of this process.

    Examples:
        >>> from hydra_ensembles.demo import load_backbone
        >>> from hydra_ensembles.serve import make_app
        >>> app = make_app(load_backbone())  # for uvicorn or any other ASGI server
        >>> "/v1/predict" in {route.path for route in app.routes if hasattr(route, "path")}
        True
    """
    fastapi = require("fastapi", extra="serve")
    service = model
    if not isinstance(service, Service):
        service = Service(require_ensemble(model, "make_app"), settings or ServeSettings())
    backend: Engine = LocalEngine(service) if engine is None else engine
    server, name = _Server(service, backend), service.settings.name

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        try:
            await backend.start()
        except Exception as error:
            app.state.failure = error  # for the caller: uvicorn reports only that startup failed
            raise
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
        handler_name, answered = handler.__name__, server.guarded(path, handler, locked)
        if method == "GET":  # load balancers send HEAD; FastAPI does not add it to GET routes
            app.router.add_route(path, answered, methods=["HEAD"], include_in_schema=False)
        app.add_api_route(
            path,
            answered,
            methods=[method],
            summary=(handler.__doc__ or "").partition("\n")[0],
            openapi_extra={"requestBody": {"content": BODIES[handler_name]}} if handler_name in BODIES else None,
            response_class=fastapi.Response,
            response_model=None,
        )

    async def elsewhere(request: "Request", error: Any) -> "Response":
        async def refuse(_: "Request") -> "Response":
            text = f"there is no {request.method} here; see /openapi.json"
            named = f"; the model is called {name}" if request.url.path.startswith("/v2/models/") else ""
            raise RequestError(text + named, error.status_code)

        return await server.guarded("elsewhere", refuse, locked=False)(request)

    app.add_exception_handler(404, elsewhere)
    app.add_exception_handler(405, elsewhere)
    return app


class _Server:
    """The route handlers and the code they share."""

    def __init__(self, service: Service, engine: Engine) -> None:
        self.service, self.settings, self.engine = service, service.settings, engine
        self.telemetry = Telemetry(service, lambda: engine.waiting)
        if isinstance(engine, LocalEngine):
            engine.observe = self.telemetry.batch
        self.decoders = ThreadPoolExecutor(os.cpu_count() or 1, "decode")
        self.open = 0  # requests that are being read, decoded or answered
        self._key = self.settings.key
        self._page = PAGE.read_bytes()
        text = self._page.decode()
        script, style = (re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL) for kind in ("script", "style"))
        self._policy = (
            f"default-src 'none'; script-src {_digests(script)}; style-src {_digests(style)}; connect-src 'self'; "
            "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    # --- shared by all routes ----------------------------------------------------------------------------------------

    def guarded(
        self, route: str, handler: "Callable[[Request], Awaitable[Response]]", locked: bool
    ) -> "Callable[[Request], Awaitable[Response]]":
        """Wrap a handler: check the key, enforce limits and the deadline, and turn exceptions into responses."""
        from fastapi import Request, Response
        from python_multipart.exceptions import FormParserError
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
            except (MultiPartException, FormParserError) as error:  # FormParserError: from older Starlette
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
        announced = protocol.byte_count(request.headers.get("content-length", "0"))
        refusal = RequestError(f"the body is too large; at most {most} bytes are accepted", 413)
        if announced is None or announced > most:
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
        """Run `work` in the thread pool; if cancelled before it starts, drop it and the body it holds at once."""
        turns = [work]
        try:
            return await asyncio.get_running_loop().run_in_executor(self.decoders, lambda: turns.pop()())
        finally:
            turns.clear()

    async def _answers(
        self, request: "Request", rows: Callable[[], list[Sample]], timeout: float = math.inf
    ) -> tuple[list[Sample], Sequence[Answer]]:
        """Decode (`rows`, in the pool), queue, wait and count; a client that disconnects ends this like a deadline."""
        from starlette.requests import ClientDisconnect

        loop = asyncio.get_running_loop()
        gone = False

        async def watch(wait: asyncio.Timeout) -> None:
            nonlocal gone
            while (await request.receive())["type"] != "http.disconnect":
                pass
            gone = True
            wait.reschedule(loop.time())

        try:
            async with asyncio.timeout(None if math.isinf(timeout) else timeout) as wait:
                watching = asyncio.create_task(watch(wait))
                try:
                    samples = await self._decoded(rows)
                    answers = await self.engine.answer(samples)
                finally:
                    watching.cancel()
        except TimeoutError as error:
            if gone:
                raise ClientDisconnect from error
            raise RequestError("no answer within the time that was given", 504) from error
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
        headers = {"Content-Security-Policy": self._policy, "Referrer-Policy": "no-referrer"}
        headers |= {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
        return _response(self._page, headers=headers, media_type="text/html")

    async def model(self, request: "Request") -> "Response":
        """What is served: kind, classes, members, thresholds."""
        ensemble = self.service.ensemble
        calibration = ensemble.metadata.calibration or Calibration()
        fitted = None if ensemble.metadata.familiarity is None else ensemble.metadata.familiarity.settings
        facts = {
            "name": self.settings.name,
            "kind": self.service.kind,
            "raw": self.service.preprocessing is not None,
            "labels": list(self.service.labels),
            "members": ensemble.num_members,
            "outputs": {output.name: output.meaning for output in self.service.outputs},
        }
        for name, rule in (("unsure", calibration), ("unfamiliar", fitted)):
            limit = None if rule is None else rule.threshold
            facts[f"{name}_above"] = None if limit is None else finite(limit)
            facts[f"{name}_share"] = None if rule is None or limit is None else round(1.0 - rule.accepted_share, 6)
        return _json(facts)

    async def predict(self, request: "Request") -> "Response":
        """Labels of images or texts, each with its uncertainty and a verdict."""
        async with self._admitted():
            nearest = request.query_params.get("nearest", "").lower() in ("1", "true")
            rows = await self._raw_rows(request, nearest)
            samples, answers = await self._answers(request, rows)
        predictions = [self.service.plain(answer, row.notes) for row, answer in zip(samples, answers, strict=True)]
        return _json({"model": self.settings.name, "predictions": predictions})

    async def _raw_rows(self, request: "Request", nearest: bool) -> Callable[[], list[Sample]]:
        """A function that parses the body into rows: a form, JSON, an image or a text."""
        header = request.headers.get("content-type", "")
        kind, most = header.partition(";")[0].strip().lower(), self.settings.max_queue
        if kind.startswith("image/") or kind == "application/octet-stream":
            image = await request.body()
            return lambda: self._samples([image], [], nearest)
        charset = CHARSET.search(header)
        if charset is not None and charset[1].lower() not in UTF_8:
            raise RequestError(f"the charset {charset[1][:100]!r} is not accepted; send UTF-8", 415)
        if kind == "multipart/form-data":
            pairs = await form_parts(request, most)
            return lambda: self._samples(*read_form(pairs, most), nearest)
        body = await request.body()
        if kind == "application/x-www-form-urlencoded":
            return lambda: self._samples(*read_form(body, most), nearest)
        if kind == "application/json":
            return lambda: self._samples(*read_named(protocol.request_of(body)), nearest)
        if kind == "text/plain":
            return lambda: self._samples([], [text_of(body.strip())], nearest)  # files end with a newline
        raise RequestError(f"content of the type {kind[:100]!r} is not accepted; send {CONTENT}", 415)

    def _samples(self, images: Sequence[bytes], texts: Sequence[str | tuple[str, str]], nearest: bool) -> list[Sample]:
        if images and texts:
            raise RequestError("got images and texts in one request; this model reads one kind")
        if not images and not texts:
            raise RequestError("the request holds no sample; give at least one")
        return self.service.images(images, nearest) if images else self.service.texts(texts, nearest)

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
        return _json(protocol.model_metadata(self.service))

    async def infer(self, request: "Request") -> "Response":
        """Answers as named tensors."""
        async with self._admitted():
            parts = await request.body(), request.headers.get(protocol.HEADER)
            message, inputs = await self._decoded(lambda: protocol.read_request(*parts))
            outputs, deadline = protocol.asked_outputs(message, self.service), protocol.deadline_of(message)
            rows, answers = await self._answers(request, lambda: self._tensor_rows(inputs), deadline)
        notes = [row.notes for row in rows]
        content, headers = protocol.write_answer(message, self.service, outputs, answers, notes)
        return _response(content, headers=headers)

    def _tensor_rows(self, inputs: dict[str, Any]) -> list[Sample]:
        """Rows from named tensors: encoded images, texts, or preprocessed inputs."""
        raw, _ = protocol.RAW[self.service.kind]
        names = [field.name for field in self.service.inputs]
        strange = next((name for name in inputs if name not in (raw, *names)), None)
        if strange is not None or (raw in inputs and len(inputs) > 1):
            raise RequestError(f"got the inputs {short(sorted(inputs))}; give {raw}, or {', '.join(names)}")
        for name, value in inputs.items():
            if isinstance(value, list) != (name == raw):
                raise RequestError(f"input {short(name)} must {'be of the type' if name == raw else 'not be'} BYTES")
        if raw not in inputs:
            return self.service.tensors({name: torch.tensor(array) for name, array in inputs.items()})
        return self._samples(*read_named({f"{raw}s": inputs[raw]}), nearest=False)


def _digests(parts: Sequence[str]) -> str:
    """Content-Security-Policy hashes of the page's scripts or styles; the browser runs no others."""
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _json(content: Any, status: int = 200) -> "Response":
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return _response(body, status, {"X-Content-Type-Options": "nosniff"}, "application/json")


def _response(
    body: bytes, status: int = 200, headers: Mapping[str, str] | None = None, media_type: str | None = None
) -> "Response":
    from fastapi import Response

    return Response(body, status, headers, media_type)
