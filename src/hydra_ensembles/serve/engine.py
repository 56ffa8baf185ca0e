"""How a model is served, and what runs it: settings, plans warmed for every shape, one thread fed from one queue."""

import asyncio
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch

from ..errors import ConfigError
from ..model.ensemble import Ensemble
from ..optimize.runner import USUAL_SHAPES
from ..settings import Checked, Range
from .batcher import Answer, Batcher, Runner
from .rows import Reader, Row
from .telemetry import log

API_KEY = "HYDRA_API_KEY"
"""Environment variable with the key that clients must send; a command line would be visible to all local users."""


@dataclass(frozen=True)
class ServeSettings(Checked):
    """How a model is served. A key that clients must send is read from `HYDRA_API_KEY` in the environment.

    Attributes:
        host: Address to listen on; 0.0.0.0 for every interface.
        port: Port to listen on, 0 for any free one.
        uds: Unix socket to listen on instead, which only this user can open.
        name: What clients call the model.
        max_batch: Maximum number of samples that the model sees at once.
        max_wait: Milliseconds that a sample waits for others to fill a batch.
        max_queue: Maximum number of samples, and of requests, accepted at once; further ones are told to retry (503).
        timeout: Seconds after which a request fails (504).
        precision: Floating type to compute in; that of the model if not given.
        compile: Compile the model for the batch sizes it will see.
        max_body: Maximum size of a request, in megabytes.
        max_pixels: Maximum size of the images of a request, in megapixels.
        max_characters: Maximum length of a text, in characters.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65_535)] = 8000
    uds: str | None = None
    name: str = "model"
    max_batch: Annotated[int, Range(1, 4096)] = 16
    max_wait: Annotated[float, Range(0, below=60_001)] = 5.0
    max_queue: Annotated[int, Range(1, 1_000_000)] = 256
    timeout: Annotated[float, Range(0.001, below=86_401)] = 30.0
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    compile: bool = False
    max_body: Annotated[float, Range(0.001, below=4097)] = 16.0
    max_pixels: Annotated[float, Range(0.001, below=1001)] = 50.0
    max_characters: Annotated[int, Range(1, 100_000_000)] = 100_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_queue < self.max_batch:
            raise ConfigError(f"max_queue is {self.max_queue}, less than max_batch, {self.max_batch}; raise it")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", self.name):
            raise ConfigError(f"name is {self.name!r}; it is part of URLs: use only letters, digits, _ . and -")


def key_from_environment() -> str | None:
    """The key that clients must send; None if none is required."""
    key = os.environ.get(API_KEY)
    if key is not None and (len(key) < 8 or not key.isascii() or not key.isprintable() or key != key.strip()):
        raise ConfigError(f"{API_KEY} has fewer than 8 characters, or some that HTTP headers cannot hold")
    return key


def warm_runner(ensemble: Ensemble, settings: ServeSettings) -> Runner:
    """The model with its plans, which have run once for every shape that is known in advance."""
    dtype: torch.dtype | None = None if settings.precision is None else getattr(torch, settings.precision)
    examples = Reader(ensemble).examples()
    shapes = max(len(examples) * settings.max_batch.bit_length() + len(examples), USUAL_SHAPES)
    plans = ensemble.optimize(dtype=dtype, compile=settings.compile, shapes=shapes)
    runner = Runner(plans, settings.max_batch)
    runner.warm_up(examples)
    return runner


class Engine(Protocol):
    """Runs the model on rows: a thread of this process, or replicas managed by another framework."""

    @property
    def ready(self) -> bool:
        """Whether the model answers."""

    @property
    def waiting(self) -> int:
        """Rows in the queue."""

    async def start(self) -> None:
        """Return once the engine is ready."""

    async def answer(self, rows: Sequence[Row]) -> Sequence[Answer]:
        """One answer per row; cancelled when no client waits for them any more."""

    async def close(self) -> None:
        """Finish all queued rows, then stop."""


class LocalEngine:
    """A model thread of this process, fed from one queue."""

    def __init__(self, ensemble: Ensemble, settings: ServeSettings) -> None:
        self._ensemble, self._settings = ensemble, settings
        self.observe: Callable[[int, float], None] = lambda rows, seconds: None
        self._runner: Runner | None = None
        self._batcher: Batcher[Row, Answer] | None = None

    @property
    def ready(self) -> bool:
        """Whether the model is warm, and its device has not failed for good."""
        return self._batcher is not None and self._batcher.failure is None

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return 0 if self._batcher is None else self._batcher.waiting

    def load(self) -> None:
        """Build and warm up the plans, unless that is done."""
        if self._runner is None:
            began = time.monotonic()
            self._runner = warm_runner(self._ensemble, self._settings)
            log("ready", model=self._settings.name, seconds=round(time.monotonic() - began, 2))

    async def start(self) -> None:
        """Load, then start the thread."""
        await asyncio.to_thread(self.load)
        assert self._runner is not None
        settings = self._settings
        self._batcher = Batcher(
            self._runner.answers,
            lambda row: row.shape,
            max_batch=settings.max_batch,
            max_wait=settings.max_wait / 1e3,
            max_queue=settings.max_queue,
            observe=self.observe,
        )

    async def answer(self, rows: Sequence[Row]) -> Sequence[Answer]:
        """Queue the rows and wait for their answers."""
        assert self._batcher is not None
        futures = self._batcher.submit(rows)
        try:
            return await asyncio.gather(*map(asyncio.wrap_future, futures))
        finally:
            for future in futures:
                future.cancel()

    async def close(self) -> None:
        """Finish all queued rows, then stop the thread."""
        batcher, self._batcher = self._batcher, None
        if batcher is not None:
            await asyncio.to_thread(batcher.close)
