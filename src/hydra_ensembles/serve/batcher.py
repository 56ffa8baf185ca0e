"""Rows in batches: `Runner` answers rows of any shapes; `Batcher` gathers those of many requests for it.

The batcher's thread runs the group of equal shapes that is full or has waited longest. Cancelled rows (the deadline has
passed, or the client has disconnected) are not run. If the model fails on one row, the other rows of its batch still
get answers; if its device fails, nothing is tried again: only a new process can use it.
"""

import asyncio
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from .._utils import collect_warnings
from ..errors import ConfigError, DataError, HydraError, RequestError
from ..model.ensemble import Ensemble
from ..optimize.runner import USUAL_SHAPES, OptimizedEnsemble
from ..settings import Checked, Range
from .protocol import Answer, columns
from .rows import Reader, Row, doubling
from .telemetry import log

API_KEY = "HYDRA_API_KEY"
"""Environment variable with the key that clients must send; a command line would be visible to all local users."""

SMOOTHING = 0.1  # weight of the last batch in the moving average of seconds per row
LONGEST = 60  # seconds after which a client is told to come back


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


class Runner:
    """A model as a function from rows to answers, in batches of a few sizes, for which plans are measured.

    On a GPU a batch is filled up to the next size, which takes no longer than a smaller one; on a CPU it is split.
    """

    def __init__(self, model: Ensemble | OptimizedEnsemble, most: int) -> None:
        """Run `model` on at most so many rows at once."""
        self.model, self.sizes = model, doubling(1, most)
        self._fills = model.device.type != "cpu"

    def warm_up(self, examples: Sequence[Row]) -> None:
        """Run every size of every shape once."""
        for row in examples:
            for size in self.sizes:
                self.answers([row] * size)

    def answers(self, rows: Sequence[Row]) -> list[Answer | HydraError]:
        """For each row its answer, or why it has none."""
        found: list[Answer | HydraError | None] = [row.error for row in rows]
        groups: dict[Hashable, list[int]] = {}
        for index, row in enumerate(rows):
            if row.error is None:
                groups.setdefault(row.shape, []).append(index)
        for piece in (piece for indices in groups.values() for piece in self._pieces(indices)):
            for index, answer in zip(piece, self._run([rows[index] for index in piece]), strict=True):
                found[index] = answer
        return [one for one in found if one is not None]

    def _pieces(self, indices: list[int]) -> Iterator[list[int]]:
        while indices:
            size = max(size for size in self.sizes if size <= len(indices))
            if self._fills and len(indices) < self.sizes[-1]:
                size = len(indices)
            yield indices[:size]
            indices = indices[size:]

    def _run(self, rows: list[Row]) -> list[Answer | HydraError]:
        size = next(size for size in self.sizes if size >= len(rows))
        filled = [*rows, *rows[-1:] * (size - len(rows))]  # on a CPU there is nothing to fill
        with collect_warnings():  # what there is to say was noted when the rows were read
            arrays = columns(self.model.predict(stacked(filled), check_finite=False))
        finite: Any = np.isfinite(arrays["member_logits"]).all(axis=(1, 2))  # [B]
        return [
            {name: column[index] for name, column in arrays.items()} if finite[index] else self._no_number()
            for index in range(len(rows))
        ]

    def _no_number(self) -> HydraError:
        kind = str(self.model.dtype).removeprefix("torch.")
        return DataError(f"its answer is NaN or infinite: its values are too large, or overflow in {kind}")


def stacked(rows: Sequence[Row]) -> Tensor | dict[str, Tensor]:
    """Rows of one shape as a batch, `[B, …]`."""
    batch = {name: torch.stack([row.inputs[name] for row in rows]) for name in rows[0].inputs}
    return next(iter(batch.values())) if len(batch) == 1 else batch


@dataclass(frozen=True)
class _Waiting:
    row: Any
    future: Future[Any]
    since: float


class Batcher:
    """Runs rows of many callers in batches, on one thread.

    Attributes:
        waiting: Rows in the queue.
        failure: The error of a device that no further call can use; None while all is well.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], Sequence[Any]],
        group: Callable[[Any], Hashable],
        *,
        max_batch: int,
        max_wait: float,
        max_queue: int,
        observe: Callable[[int, float], None] = lambda rows, seconds: None,
    ) -> None:
        """Start the thread; it calls `run` with a batch, which returns an answer or an error for each row.

        `group` returns what the rows of a batch must share: their shape. While the thread is idle, a row waits up to
        `max_wait` seconds for others. `observe` is called with the number of rows and the seconds of every batch.
        """
        self.waiting = 0
        self.failure: Exception | None = None
        self._run, self._group, self._observe = run, group, observe
        self._max_batch, self._max_wait, self._max_queue = max_batch, max_wait, max_queue
        self._groups: dict[Hashable, deque[_Waiting]] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._seconds_per_row = 0.0
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    def submit(self, rows: Sequence[Any]) -> list[Future[Any]]:
        """Queue all of these rows, or none: `RequestError` (503) if there is no room for them, and after `close`."""
        with self._changed:
            if self.failure is not None:
                raise RequestError("the device of the model has failed, and this server must be restarted", 503)
            if self._closing:
                raise RequestError("this server is shutting down; try another, or try later", 503, retry_after=1)
            if self.waiting + len(rows) > self._max_queue:
                seconds = math.ceil(self.waiting * self._seconds_per_row)
                raise RequestError("too many samples are waiting; try again later", 503, min(max(seconds, 1), LONGEST))
            now = time.monotonic()
            futures = [Future[Any]() for _ in rows]
            for row, future in zip(rows, futures, strict=True):
                self._groups.setdefault(self._group(row), deque()).append(_Waiting(row, future, now))
            self.waiting += len(rows)
            self._changed.notify()
        return futures

    def close(self) -> None:
        """Accept no more rows, answer the queued ones, and stop the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next():
            self._answer(batch)

    def _next(self) -> list[_Waiting]:
        """Wait for the next batch; empty when the batcher is closing and the queue is empty."""
        with self._changed:
            while True:
                now = time.monotonic()
                key = self._due(now)
                if key is not None:
                    if batch := self._take(key):
                        return batch
                elif self._groups:
                    self._changed.wait(min(rows[0].since for rows in self._groups.values()) + self._max_wait - now)
                elif self._closing:
                    return []
                else:
                    self._changed.wait()

    def _due(self, now: float) -> Hashable | None:
        """The oldest group that is full or has waited long enough; None if there is none."""
        oldest = {
            key: rows[0].since
            for key, rows in self._groups.items()
            if self._closing or len(rows) >= self._max_batch or rows[0].since + self._max_wait <= now
        }
        return min(oldest, key=lambda key: oldest[key]) if oldest else None

    def _take(self, key: Hashable) -> list[_Waiting]:
        """Remove up to `max_batch` rows of a group from the queue, skipping cancelled ones."""
        rows = self._groups[key]
        batch = list[_Waiting]()
        while rows and len(batch) < self._max_batch:
            waiting = rows.popleft()
            self.waiting -= 1
            if waiting.future.set_running_or_notify_cancel():
                batch.append(waiting)
        if not rows:
            del self._groups[key]
        return batch

    def _answer(self, batch: list[_Waiting]) -> None:
        started = time.monotonic()
        rows = [waiting.row for waiting in batch]
        answers = each_alone(self._run, rows) if self.failure is None else [self.failure] * len(rows)
        self.failure = next((one for one in answers if isinstance(one, Exception) and device_failed(one)), None)
        seconds = time.monotonic() - started
        before = self._seconds_per_row or seconds / len(batch)
        self._seconds_per_row = (1 - SMOOTHING) * before + SMOOTHING * seconds / len(batch)
        self._observe(len(batch), seconds)
        for waiting, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                waiting.future.set_exception(answer)
            else:
                waiting.future.set_result(answer)


def each_alone(run: Callable[[list[Any]], Sequence[Any]], rows: list[Any]) -> list[Any]:
    """What `run` returns for these rows; if it fails on one of them, that one has its error, and the others answers."""
    try:
        return list(run(rows))
    except Exception as error:
        if len(rows) == 1 or device_failed(error):
            return [error] * len(rows)
        return [answer for row in rows for answer in each_alone(run, [row])]


def device_failed(error: Exception) -> bool:
    """Whether a device has failed in a way that stays: every later call of this process would fail, too."""
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)  # of memory it says "CUDA out of"


def warm_runner(ensemble: Ensemble, settings: ServeSettings) -> Runner:
    """The model with its plans, which have run once for every shape that is known in advance."""
    dtype: torch.dtype | None = None if settings.precision is None else getattr(torch, settings.precision)
    examples = Reader(ensemble).examples()
    shapes = max(len(examples) * settings.max_batch.bit_length() + len(examples), USUAL_SHAPES)
    plans = ensemble.optimize(dtype=dtype, compile=settings.compile, shapes=shapes)
    runner = Runner(plans, settings.max_batch)
    runner.warm_up(examples)
    return runner


class Engine:
    """A model thread of this process, fed from one queue."""

    def __init__(self, ensemble: Ensemble, settings: ServeSettings) -> None:
        self._ensemble, self._settings = ensemble, settings
        self.observe: Callable[[int, float], None] = lambda rows, seconds: None
        self._runner: Runner | None = None
        self._batcher: Batcher | None = None

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
