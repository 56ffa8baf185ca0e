"""Dynamic batching of rows from many requests: by size, waiting time and shape, from a bounded queue.

Each worker has one thread, which runs the group that has waited longest. Cancelled rows (the deadline has passed, or
the client has disconnected) are not run. If the model fails on one row, the other rows of its batch still get answers.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import RequestError

Row = TypeVar("Row")
Answer = TypeVar("Answer")

SMOOTHING = 0.1  # weight of the last batch in the moving average of seconds per row
LONGEST_RETRY = 60  # seconds


@dataclass(frozen=True)
class _Waiting(Generic[Row, Answer]):
    row: Row
    future: Future[Answer]
    since: float


class Batcher(Generic[Row, Answer]):
    """Runs rows in batches on one thread for each of `runs`.

    Attributes:
        waiting: Rows in the queue.
    """

    def __init__(
        self,
        runs: Sequence[Callable[[list[Row]], Sequence[Answer]]],
        group: Callable[[Row], Hashable],
        *,
        max_batch: int,
        max_wait: float,
        max_queue: int,
        observe: Callable[[int, float], None] = lambda rows, seconds: None,
    ) -> None:
        """Start the threads; each calls one of `runs` with a batch, which returns one answer per row.

        `group` returns what the rows of a batch must share: their shape. While a thread is idle, a row waits up to
        `max_wait` seconds for others. `observe` is called with the number of rows and the seconds of every batch.
        """
        self.waiting = 0
        self._group, self._observe = group, observe
        self._max_batch, self._max_wait, self._max_queue = max_batch, max_wait, max_queue
        self._groups: dict[Hashable, deque[_Waiting[Row, Answer]]] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._seconds_per_row = 0.0
        self._threads = [
            threading.Thread(target=self._work, args=(run,), name=f"model-{index}", daemon=True)
            for index, run in enumerate(runs)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, rows: Sequence[Row]) -> list[Future[Answer]]:
        """Queue all of these rows, or none: `RequestError` (503) if there is no room for them, and after `close`."""
        with self._changed:
            if self._closing:
                raise RequestError("this server is shutting down; try another, or try later", 503, retry_after=1)
            if self.waiting + len(rows) > self._max_queue:
                raise RequestError("too many samples are waiting; try again later", 503, self._retry_after())
            now = time.monotonic()
            futures = [Future[Answer]() for _ in rows]
            for row, future in zip(rows, futures, strict=True):
                self._groups.setdefault(self._group(row), deque()).append(_Waiting(row, future, now))
            self.waiting += len(rows)
            self._changed.notify()
        return futures

    def close(self) -> None:
        """Accept no more rows, answer the queued ones, and stop the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _retry_after(self) -> int:
        """Estimated whole seconds until the queue is empty."""
        seconds = self.waiting * self._seconds_per_row / len(self._threads)
        return min(max(math.ceil(seconds), 1), LONGEST_RETRY)

    def _work(self, run: Callable[[list[Row]], Sequence[Answer]]) -> None:
        while batch := self._next():
            self._answer(run, batch)

    def _next(self) -> list[_Waiting[Row, Answer]]:
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

    def _take(self, key: Hashable) -> list[_Waiting[Row, Answer]]:
        """Remove up to `max_batch` rows of a group from the queue, skipping cancelled ones."""
        rows = self._groups[key]
        batch = list[_Waiting[Row, Answer]]()
        while rows and len(batch) < self._max_batch:
            waiting = rows.popleft()
            self.waiting -= 1
            if waiting.future.set_running_or_notify_cancel():
                batch.append(waiting)
        if not rows:
            del self._groups[key]
        if self._groups and len(self._threads) > 1:
            self._changed.notify()  # wake an idle thread for the remaining rows, of any shape
        return batch

    def _answer(self, run: Callable[[list[Row]], Sequence[Answer]], batch: list[_Waiting[Row, Answer]]) -> None:
        started = time.monotonic()
        try:
            answers = list(zip(batch, run([waiting.row for waiting in batch]), strict=True))
        except Exception as error:
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                return
            for waiting in batch:  # run one by one to find the failing row
                self._answer(run, [waiting])
            return
        seconds = time.monotonic() - started
        before = self._seconds_per_row or seconds / len(batch)
        self._seconds_per_row = (1 - SMOOTHING) * before + SMOOTHING * seconds / len(batch)
        self._observe(len(batch), seconds)
        for waiting, answer in answers:
            waiting.future.set_result(answer)
