"""Concurrent processes: at every point of a job, another of its kind, or a reader, runs completely.

The other process is started at a named point and waited for, so every interleaving is tried deliberately. It must end
as if alone, or be told that the folder is in use; waiting for the first one counts as being told. Readers
see the state before, the state after, or a clear error, but never a mixture.
"""

import fcntl
import os
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from .children import Ending, forked, watch
from .counting import Row, count
from .jobs import JOBS, Job, end_of, folder_of, undisturbed

CASES = 160

Case = tuple[str, str, float]  # a job, the other process, and the fraction of its points
WAITS = 7  # exit status of a process that would wait for the lock
SHARED = ("save", "save, two towers", "save, zero-shot", "evaluate", "report")  # both may write whole files
READ = tuple(name for name, job in JOBS.items() if job.state is not None)


def run(cases: int, seed: int) -> list[Row]:
    random = Random(seed)
    each = max(1, cases // (len(JOBS) + len(READ)))

    def spread(names: tuple[str, ...], who: str) -> list[Case]:
        return [(name, who, round((index + random.random()) / each, 4)) for name in names for index in range(each)]

    return [
        count("a second writer at work", check, spread(tuple(JOBS), "writer")),
        count("a reader at work", check, spread(READ, "reader")),
    ]


def check(case: Case) -> str:
    """Run a job with another process at one of its points; both must end correctly."""
    name, who, place = case
    job, usual = JOBS[name], undisturbed(name)
    number = int(place * len(usual.points))
    with folder_of(job) as folder:
        other: Any = partial(job.state, folder) if who == "reader" else partial(_write, job, folder)  # type: ignore[arg-type]

        def together() -> tuple[str, list[Ending]]:
            met: list[Ending] = []

            def meet(reached: int, point: str) -> None:
                if reached == number:
                    met.append(forked(other))

            watch(meet)
            return job.run(folder), met

        ending = forked(together)
        where = f"with a {who} at {number} ({usual.points[number]})"
        if ending.how == "refused" and who == "writer" and name not in SHARED:
            ending = forked(lambda: (job.run(folder), []))  # the second one came first: nothing is lost
        result, met = ending.value if ending.how == "given" else (ending.value, [])
        for one in met:
            accepted = one.how in ("given", "refused") or f"status {WAITS}" in str(one.value)
            if not accepted or (one.how == "given" and one.value not in (usual.result, *usual.states)):
                raise AssertionError(f"{where}, which ends so: {one.how}: {one.value}")
        return end_of(ending._replace(value=result), name, folder, where)


def _write(job: Job, folder: Path) -> str:
    """Run a job, but exit where it would wait for a lock."""
    lock = fcntl.flock

    def impatient(handle: Any, flags: int) -> None:
        try:
            lock(handle, flags | fcntl.LOCK_NB)
        except BlockingIOError:
            if flags & fcntl.LOCK_NB:
                raise
            os._exit(WAITS)  # otherwise a deadlock: the first one waits for this process

    fcntl.flock = impatient  # type: ignore[assignment]
    return job.run(folder)
