"""The same server on Ray Serve: one deployment accepts requests, replicas of another run the model in batches.

Replicas start and stop with the load, on all machines of a cluster.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from .._utils import library
from ..errors import ConfigError, RequestError
from ..files import expanded
from ..model.ensemble import Ensemble
from .app import make_app
from .batcher import ServeSettings, device_failed, each_alone, key_from_environment, warm_runner
from .protocol import Answer
from .rows import Row


def ray_app(
    model: str | Path,
    settings: ServeSettings | None = None,
    *,
    min_replicas: int = 1,
    max_replicas: int = 4,
    cpus: float = 1.0,
    gpus: float = 0.0,
) -> Any:
    """An application of Ray Serve: `ray.serve.run(ray_app("my-hydra"))`, with the routes of `hydra-ensembles serve`.

    Args:
        model: A saved classifier, by a folder or hub id that every machine can read.
        settings: Batches and limits. Tell Ray where to listen: `serve.start(http_options=...)`.
            A key in HYDRA_API_KEY is read in the process that calls this.
        min_replicas: Minimum number of replicas of the model.
        max_replicas: Maximum number of replicas, under load.
        cpus: CPUs of a replica.
        gpus: GPUs of a replica; a part of one is enough for a small model.
    """
    serve = library("ray.serve", extra="ray")
    used = settings or ServeSettings()
    if max_replicas < min_replicas:
        raise ConfigError(f"max_replicas is {max_replicas}, less than min_replicas, {min_replicas}; raise it")
    if expanded(model).is_dir():
        model = expanded(model).resolve()  # replicas have another working directory

    class Replica(_Replica):
        answer = serve.batch(max_batch_size=used.max_batch, batch_wait_timeout_s=used.max_wait / 1e3)(_Replica.answer)

    scaled = {"min_replicas": min_replicas, "max_replicas": max_replicas, "target_ongoing_requests": used.max_batch}
    replicas = serve.deployment(
        name="Model",
        max_ongoing_requests=2 * used.max_batch,  # one batch runs while the next one fills
        max_queued_requests=used.max_queue,
        autoscaling_config=scaled,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        graceful_shutdown_timeout_s=used.timeout,
    )(Replica)
    front = serve.deployment(
        name="Front", max_ongoing_requests=2 * used.max_queue, ray_actor_options={"num_cpus": 0}
    )(serve.ingress()(_Front))  # fmt: skip
    key = key_from_environment()  # a running cluster has its own environment
    return front.bind(replicas.bind(model, used, "cuda" if gpus else None), model, used, key)


class _Replica:
    """One copy of the model."""

    def __init__(self, model: str | Path, settings: ServeSettings, device: str | None) -> None:
        self._runner = warm_runner(Ensemble.from_pretrained(model, device=device), settings)
        self._failure: Exception | None = None

    async def ready(self) -> None:
        """Return at once, which shows that the model is loaded and warm."""

    def check_health(self) -> None:
        """Raise if the device has failed for good: Ray then starts another replica."""
        if self._failure is not None:
            raise self._failure

    async def answer(self, rows: list[Row]) -> list[Answer | Exception]:
        """One answer per row, or its exception: a bad row does not affect the others."""
        return await asyncio.to_thread(self._answered, rows)

    def _answered(self, rows: list[Row]) -> list[Answer | Exception]:
        answers = each_alone(self._runner.answers, rows)
        self._failure = next((one for one in answers if isinstance(one, Exception) and device_failed(one)), None)
        return answers


class _Front:
    """Accepts, decodes and checks requests; of the model it loads only what stands in its config."""

    def __init__(self, replicas: Any, model: str | Path, settings: ServeSettings, key: str | None) -> None:
        outline = Ensemble.from_pretrained(model, device="meta")
        self._app = make_app(outline, settings, engine=_Replicas(replicas), key=key)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app


class _Replicas:
    """The engine behind `_Front`: Ray routes each row to a free replica."""

    def __init__(self, handle: Any) -> None:
        self._handle, self.waiting, self.ready = handle, 0, False

    async def start(self) -> None:
        """Wait for a replica; requests accepted earlier would wait for it and time out."""
        await self._call(self._handle.ready.remote)
        self.ready = True

    async def close(self) -> None:
        self.ready = False

    async def answer(self, rows: Sequence[Row]) -> Sequence[Answer]:
        self.waiting += len(rows)
        try:
            return await asyncio.gather(*map(self._answer_to, rows))
        finally:
            self.waiting -= len(rows)

    async def _answer_to(self, row: Row) -> Answer:
        answer: Answer | Exception = await self._call(self._handle.answer.remote, row)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _call(self, method: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """Call a replica; if it is busy, or dies with the call unanswered, the client is told to ask again."""
        died, serving = library("ray.exceptions", extra="ray"), library("ray.serve.exceptions", extra="ray")
        lost = died.RayActorError, serving.DeploymentUnavailableError, serving.ReplicaUnavailableError
        try:
            return await method(*arguments)
        except (serving.BackPressureError, *lost) as error:
            raise RequestError("no replica of the model has time for it; try again later", 503, 1) from error
