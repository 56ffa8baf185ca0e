"""Jobs of a study, one after another or shared by several processes on one device."""

import multiprocessing
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .classifiers import STEPS, Job
from .seed import Seed
from .task import Task

_OWN: dict[str, Any] = {}  # what a process works with: its task, read once, and the folder of the run


class Failures:
    """What went wrong while other work went on: said at once, and raised when all else is done."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    @contextmanager
    def noted(self, what: str) -> Iterator[None]:
        """Do a piece of work without which the rest can go on."""
        try:
            yield
        except Exception as error:
            traceback.print_exception(error)
            print(f"FAILED: {what}: {error}", flush=True)
            self.first = self.first or error

    def raise_first(self) -> None:
        """Raise the first error, if there was one."""
        if self.first is not None:
            raise self.first


class Workers:
    """Processes that share jobs. Each reads the data itself; models that two of them want are made by the first.

    A job that fails stops no other one, nor the stages after it: the rows that it belongs to will be missing, and the
    block ends with its error.
    """

    def __init__(self, task: Task, output: Path, count: int) -> None:
        self.failed = Failures()
        given = (type(task), task.name, task.settings, task.source, task.device, task.share, task.cache)
        _begin(task, output)
        context = multiprocessing.get_context("spawn")
        self.pool = (
            ProcessPoolExecutor(count, context, initializer=_begin_apart, initargs=(*given, output))
            if count > 1
            else None
        )

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=kind is None, cancel_futures=True)
        if kind is None:
            self.failed.raise_first()

    def run(self, jobs: Sequence[Job]) -> None:
        """Do all jobs."""
        if self.pool is None:
            for job in jobs:
                with self.failed.noted(_named(job)):
                    _do(job)
            return
        found: dict[Future[None], Job] = {self.pool.submit(_do, job): job for job in jobs}
        for one in as_completed(found):
            with self.failed.noted(_named(found[one])):
                one.result()


def _named(job: Job) -> str:
    step, number, what = job
    return f"{step} {what}, seed {number}"


def _begin(task: Task, output: Path) -> None:
    torch.set_float32_matmul_precision("high")
    _OWN.update(task=task, output=output)


def _begin_apart(*given: Any) -> None:
    torch.set_num_threads(1)
    kind, *parts, output = given
    _begin(kind(*parts), output)


def _do(job: Job) -> None:
    step, number, what = job
    begun = time.monotonic()
    STEPS[step](Seed(_OWN["task"], number, _OWN["output"]), what)
    print(f"{_OWN['task'].name} {_named(job)}: {time.monotonic() - begun:.0f} s", flush=True)
