"""Rows in batches: `Runner` answers rows of any shapes; `Batcher` gathers those of many requests for it.

The batcher's thread runs the group of equal shapes that is full or has waited longest. Cancelled rows (the deadline has
passed, or the client has disconnected) are not run. If the model fails on one row, the other rows of its batch still
get answers; if its device fails, nothing is tried again: only a new process can use it.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from .._utils import collect_warnings
from ..errors import DataError, HydraError, RequestError
from ..model.ensemble import Ensemble
from ..optimize.runner import OptimizedEnsemble
from .outputs import columns
from .rows import Row as ReadRow
from .rows import doubling

Row = TypeVar("Row")
Result = TypeVar("Result")
Answer = dict[str, Any]
"""Every output of `output_fields` for one sample, as a NumPy array or scalar."""

MAX_PIXEL = 1e4  # larger than any preprocessed pixel
SMOOTHING = 0.1  # weight of the last batch in the moving average of seconds per row
LONGEST = 60  # seconds after which a client is told to come back


class Runner:
    """A model as a function from rows to answers, in batches of a few sizes, for which plans are measured.

    On a GPU a batch is filled up to the next size, which takes no longer than a smaller one; on a CPU it is split.
    """

    def __init__(self, model: Ensemble | OptimizedEnsemble, most: int) -> None:
        """Run `model` on at most so many rows at once."""
        self.model, self.sizes = model, doubling(1, most)
        self._fills = model.device.type != "cpu"

    def warm_up(self, examples: Sequence[ReadRow]) -> None:
        """Run every size of every shape once."""
        for row in examples:
            for size in self.sizes:
                self.answers([row] * size)

    def answers(self, rows: Sequence[ReadRow]) -> list[Answer | HydraError]:
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

    def _run(self, rows: list[ReadRow]) -> list[Answer | HydraError]:
        size = next(size for size in self.sizes if size >= len(rows))
        filled = [*rows, *rows[-1:] * (size - len(rows))]  # on a CPU there is nothing to fill
        with collect_warnings():  # what there is to say was noted when the rows were read
            arrays = columns(self.model.predict(stacked(filled), check_finite=False))
        finite: Any = np.isfinite(arrays["member_logits"]).all(axis=(1, 2))  # [B]
        return [
            {name: column[index] for name, column in arrays.items()} if finite[index] else self._no_number(row)
            for index, row in enumerate(rows)
        ]

    def _no_number(self, row: ReadRow) -> HydraError:
        """The error for logits that are not finite: the client's if pixels are absurdly large, else the server's."""
        main = next(iter(row.inputs.values()))  # pixels or tokens
        if main.is_floating_point() and float(main.abs().max()) > MAX_PIXEL:
            return DataError("its answer is NaN or infinite: its values are too large for an image")
        kind = str(self.model.dtype).removeprefix("torch.")
        return RequestError(f"its answer is NaN or infinite: the model runs in {kind}, where it may overflow", 500)


def stacked(rows: Sequence[ReadRow]) -> Tensor | dict[str, Tensor]:
    """Rows of one shape as a batch, `[B, …]`."""
    batch = {name: torch.stack([row.inputs[name] for row in rows]) for name in rows[0].inputs}
    return next(iter(batch.values())) if len(batch) == 1 else batch


@dataclass(frozen=True)
class _Waiting(Generic[Row, Result]):
    row: Row
    future: Future[Result]
    since: float


class Batcher(Generic[Row, Result]):
    """Runs rows of many callers in batches, on one thread.

    Attributes:
        waiting: Rows in the queue.
        failure: The error of a device that no further call can use; None while all is well.
    """

    def __init__(
        self,
        run: Callable[[list[Row]], Sequence[Result | Exception]],
        group: Callable[[Row], Hashable],
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
        self._groups: dict[Hashable, deque[_Waiting[Row, Result]]] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._seconds_per_row = 0.0
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    def submit(self, rows: Sequence[Row]) -> list[Future[Result]]:
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
            futures = [Future[Result]() for _ in rows]
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

    def _next(self) -> list[_Waiting[Row, Result]]:
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

    def _take(self, key: Hashable) -> list[_Waiting[Row, Result]]:
        """Remove up to `max_batch` rows of a group from the queue, skipping cancelled ones."""
        rows = self._groups[key]
        batch = list[_Waiting[Row, Result]]()
        while rows and len(batch) < self._max_batch:
            waiting = rows.popleft()
            self.waiting -= 1
            if waiting.future.set_running_or_notify_cancel():
                batch.append(waiting)
        if not rows:
            del self._groups[key]
        return batch

    def _answer(self, batch: list[_Waiting[Row, Result]]) -> None:
        started = time.monotonic()
        try:
            if self.failure is not None:
                raise self.failure
            answers = list(zip(batch, self._run([waiting.row for waiting in batch]), strict=True))
        except Exception as error:
            if device_failed(error):
                self.failure = error
            if len(batch) == 1 or self.failure is not None:
                for waiting in batch:
                    waiting.future.set_exception(error)
                return
            for waiting in batch:  # run one by one to find the failing row
                self._answer([waiting])
            return
        seconds = time.monotonic() - started
        before = self._seconds_per_row or seconds / len(batch)
        self._seconds_per_row = (1 - SMOOTHING) * before + SMOOTHING * seconds / len(batch)
        self._observe(len(batch), seconds)
        for waiting, answer in answers:
            if isinstance(answer, Exception):
                waiting.future.set_exception(answer)
            else:
                waiting.future.set_result(answer)


def device_failed(error: Exception) -> bool:
    """Whether a device has failed in a way that stays: every later call of this process would fail, too."""
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)  # of memory it says "CUDA out of"
