"""Rows in batches: `Runner` answers rows of any shapes; `Engine` gathers those of many requests for it.

The group of equal shapes that is full, or has waited longest, runs next, on one thread. Cancelled rows (the deadline
has passed) are not run. If the device fails, nothing is tried again: only a new process can use it.
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch

from .._utils import collect_warnings
from ..cascade import CascadeInputs
from ..errors import ConfigError, DataError, HydraError, RequestError
from ..model.ensemble import Answering
from ..monitor import OnAlarm
from ..optimize.runner import USUAL_SHAPES
from ..prediction import Prediction
from ..settings import Checked, Range
from .protocol import Answer, Arrays, columns
from .rows import Reader, Row, doubling
from .telemetry import log

API_KEY = "HYDRA_API_KEY"
"""Environment variable with the key that clients must send; a command line would be visible to all local users."""


@dataclass(frozen=True)
class ServeSettings(Checked):
    """How a model is served. A key that clients must send is read from `HYDRA_API_KEY` in the environment.

    Attributes:
        host: Address to listen on; 0.0.0.0 for every interface.
        port: Port to listen on, 0 for any free one.
        name: What clients call the model; of a folder of models, each has the name of its own folder.
        max_batch: Maximum number of samples that the model sees at once.
        max_wait: Milliseconds that a sample waits for others to fill a batch.
        max_queue: Maximum number of samples that wait, and of those in a request; others are told to retry (503).
        timeout: Seconds after which a request fails (504).
        precision: Floating type to compute in; that of the model if not given.
        compile: Compile the model for the batch sizes it will see.
        max_body: Maximum size of a request, in megabytes.
        watch: Folder in which the evidence of a monitor is kept over restarts; no monitor without it.
        webhook: URL that is told of an alarm, by a POST of JSON.
        on_alarm: What becomes of answers from an alarm on, as for `Monitor`.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65_535)] = 8000
    name: str = "model"
    max_batch: Annotated[int, Range(1, 4096)] = 16
    max_wait: Annotated[float, Range(0, below=60_001)] = 5.0
    max_queue: Annotated[int, Range(1, 1_000_000)] = 256
    timeout: Annotated[float, Range(0.001, below=86_401)] = 30.0
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    compile: bool = False
    max_body: Annotated[float, Range(0.001, below=4097)] = 16.0
    watch: Path | None = None
    webhook: str = ""
    on_alarm: OnAlarm | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", self.name):
            raise ConfigError(f"name is {self.name!r}; it is part of URLs: use only letters, digits, _ . and -")
        if self.watch is None and (self.webhook or self.on_alarm):
            raise ConfigError("webhook and on_alarm need watch, a folder for the monitor")


@dataclass(frozen=True)
class Batching:
    """How rows become batches: those of equal shape together, in a few sizes, for which plans are measured.

    Attributes:
        sizes: Of batches, growing.
        fills: Whether a batch is filled up to the next size, which on a GPU takes no longer; on a CPU it is split.
    """

    sizes: Sequence[int]
    fills: bool

    def batches(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], Any]]:
        """Inputs of the rows that have no error, with the places of these rows; what fills a batch has no place."""
        groups: dict[Hashable, list[int]] = {}
        for index, row in enumerate(rows):
            if row.error is None:
                groups.setdefault(row.shape, []).append(index)
        for piece in (piece for indices in groups.values() for piece in self._pieces(indices)):
            size = next(size for size in self.sizes if size >= len(piece))
            filled = [*piece, *piece[-1:] * (size - len(piece))]  # on a CPU there is nothing to fill
            yield piece, stacked([rows[index] for index in filled])

    def _pieces(self, indices: list[int]) -> Iterator[list[int]]:
        while indices:
            size = max((size for size in self.sizes if size <= len(indices)), default=len(indices))
            if self.fills and len(indices) < self.sizes[-1]:
                size = len(indices)
            yield indices[:size]
            indices = indices[size:]


class Runner:
    """A model as a function from rows to answers, in batches."""

    def __init__(self, model: Any, most: int, least: int = 1) -> None:
        """Run `model` on at most `most` rows at once, in batches whose sizes double from `least`."""
        self.model = model
        fills = model.device.type != "cpu" and model.front is model  # a cascade would ask for rows twice
        self.batching = Batching(doubling(least if fills else 1, most), fills)
        self.watched: Callable[[Prediction], Prediction] = lambda prediction: prediction

    def warm_up(self, examples: Sequence[Row]) -> None:
        """Run every size of every shape once."""
        for row in examples:
            for size in self.batching.sizes:
                self.model.warm_up(stacked([row] * size))

    def answers(self, rows: Sequence[Row]) -> list[Answer | HydraError]:
        """For each row its answer, or why it has none."""
        found: list[Answer | HydraError | None] = [row.error for row in rows]
        for places, inputs in self.batching.batches(rows):
            arrays, finite = self.run(inputs, len(places))
            for index, place in enumerate(places):
                answer = {name: column[index] for name, column in arrays.items()}
                found[place] = answer if finite[index] else self.overflown
        return [one for one in found if one is not None]

    def run(self, inputs: Any, rows: int) -> tuple[Arrays, Any]:
        """The outputs of the first rows of a batch, and which of them are finite, `[rows]`; others have no answer."""
        with collect_warnings():  # what there is to say was noted when the rows were read
            prediction = self.model.predict(inputs, check_finite=False)[:rows]
            arrays = columns(self.watched(prediction))
        return arrays, np.isfinite(arrays["member_logits"]).all(axis=(1, 2))

    @property
    def overflown(self) -> DataError:
        """Why an answer that is not finite is none."""
        kind = str(self.model.dtype).removeprefix("torch.")
        return DataError(f"its answer is NaN or infinite: its values are too large, or overflow in {kind}")


def stacked(rows: Sequence[Row]) -> Any:
    """Rows of one shape as a batch, `[B, …]`."""
    batch = {name: torch.stack([row.inputs[name] for row in rows]) for name in rows[0].inputs}
    inputs = next(iter(batch.values())) if len(batch) == 1 else batch
    return inputs if rows[0].raw is None else CascadeInputs([row.raw for row in rows], inputs)


def warm_runner(ensemble: Any, settings: ServeSettings) -> Runner:
    """The model with its plans, which have run once for every shape that is known in advance."""
    dtype: torch.dtype | None = None if settings.precision is None else getattr(torch, settings.precision)
    examples = Reader(ensemble).examples()
    shapes = max(len(examples) * settings.max_batch.bit_length() + len(examples), USUAL_SHAPES)
    plans = ensemble.optimize(dtype=dtype, compile=settings.compile, shapes=shapes)
    runner = Runner(plans, settings.max_batch)
    runner.warm_up(examples)
    return runner


@dataclass(frozen=True)
class _Waiting:
    row: Any
    future: asyncio.Future[Answer]
    since: float


class Engine:
    """A model on a thread of this process, fed from one queue, whose rows are answered in batches.

    Attributes:
        waiting: Rows in the queue.
        failure: Of the device, which no further call can use; None while all is well.
        observe: Called with the number of rows and the seconds of every batch.
        watched: Called with every prediction; returns what is answered.
    """

    def __init__(self, ensemble: Answering, settings: ServeSettings, runner: Runner | None = None) -> None:
        self._ensemble, self._settings, self._runner = ensemble, settings, runner
        self.observe: Callable[[int, float], None] = lambda rows, seconds: None
        self.watched: Callable[[Prediction], Prediction] = lambda prediction: prediction
        self.waiting = 0
        self._groups: dict[Hashable, deque[_Waiting]] = {}
        self.failure: Exception | None = None
        self._working: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def ready(self) -> bool:
        """Whether the model is warm, and its device has not failed for good."""
        return self._working is not None and self.failure is None and not self._closing

    def load(self) -> None:
        """Build and warm up the plans, unless that is done."""
        if self._runner is None:
            began = time.monotonic()
            self._runner = warm_runner(self._ensemble, self._settings)
            log("ready", model=self._settings.name, seconds=round(time.monotonic() - began, 2))

    async def start(self) -> None:
        """Load, then run what is queued until `close`."""
        await asyncio.to_thread(self.load)
        assert self._runner is not None
        self._runner.watched = self.watched  # not of the rows that warmed it up
        self._changed, self._thread = asyncio.Event(), ThreadPoolExecutor(1, "model")
        self._working = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Accept no more rows, and answer the queued ones."""
        self._closing = True
        if self._working is not None:
            self._changed.set()
            await self._working
            self._thread.shutdown()

    def require_room(self, rows: int = 1) -> None:
        """Raise `RequestError` (503) if so many rows cannot be queued now; asked before a body is read, too."""
        if self.failure is not None:
            raise RequestError("the device of the model has failed, and this server must be restarted", 503)
        if self._closing:
            raise RequestError("this server is shutting down; try another, or try later", 503, retry_after=1)
        if self.waiting + rows > self._settings.max_queue:
            raise RequestError("too many samples are waiting; try again later", 503, retry_after=1)

    async def answer(self, rows: Sequence[Row]) -> Sequence[Answer]:
        """Queue all of these rows and wait for their answers, if there is room."""
        self.require_room(len(rows))
        loop = asyncio.get_running_loop()
        queued = [_Waiting(row, loop.create_future(), loop.time()) for row in rows]
        for one in queued:
            self._groups.setdefault(one.row.shape, deque()).append(one)
        self.waiting += len(rows)
        self._changed.set()
        try:
            return await asyncio.gather(*(one.future for one in queued))
        finally:
            for one in queued:
                one.future.cancel()

    async def _work(self) -> None:
        wait, most, loop = self._settings.max_wait / 1e3, self._settings.max_batch, asyncio.get_running_loop()
        while self._groups or not self._closing:
            self._changed.clear()
            latest = loop.time() - wait
            due = [
                shape
                for shape, rows in self._groups.items()
                if self._closing or len(rows) >= most or rows[0].since <= latest
            ]
            if due:
                await self._run(self._take(min(due, key=lambda shape: self._groups[shape][0].since)))
            else:
                oldest = min((rows[0].since for rows in self._groups.values()), default=None)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), None if oldest is None else oldest - latest)

    def _take(self, shape: Hashable) -> list[_Waiting]:
        """Remove up to `max_batch` rows of a group from the queue, skipping cancelled ones."""
        rows, batch = self._groups[shape], list[_Waiting]()
        while rows and len(batch) < self._settings.max_batch:
            self.waiting -= 1
            if not (one := rows.popleft()).future.done():
                batch.append(one)
        if not rows:
            del self._groups[shape]
        return batch

    async def _run(self, batch: list[_Waiting]) -> None:
        if not batch:
            return
        assert self._runner is not None
        began, rows = time.monotonic(), [one.row for one in batch]
        answers: Any = [self.failure] * len(rows)
        if self.failure is None:
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._runner.answers, rows)
            except Exception as error:
                lasting = isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)  # not "CUDA out of"
                answers, self.failure = [error] * len(rows), error if lasting else None
        self.observe(len(batch), time.monotonic() - began)
        for one, answer in zip(batch, answers, strict=True):
            if one.future.done():
                continue
            if isinstance(answer, Exception):
                one.future.set_exception(answer)
            else:
                one.future.set_result(answer)
