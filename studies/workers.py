"""Jobs of a study, one after another or shared by several processes on one device."""

import multiprocessing
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .classifiers import STEPS, Job
from .seed import Seed
from .task import Task

_OWN: dict[str, Any] = {}  # what a process works with: its task, read once, and the folder of the run


class Workers:
    """Processes that share jobs. Each reads the data itself; models that two of them want are made by the first."""

    def __init__(self, task: Task, output: Path, count: int) -> None:
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

    def run(self, jobs: Sequence[Job]) -> None:
        """Do all jobs; one that fails ends the run when the others are done, so that their work is not lost."""
        if self.pool is None:
            for job in jobs:
                _do(job)
            return
        found: list[Future[None]] = [self.pool.submit(_do, job) for job in jobs]
        for one in as_completed(found):
            if one.exception() is not None:
                traceback.print_exception(one.exception())
        for one in found:
            one.result()


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
    print(f"{_OWN['task'].name} {step} {what}, seed {number}: {time.monotonic() - begun:.0f} s", flush=True)
