"""Run many cases in worker processes, and count their outcomes.

A check is a function of one case. It returns "same" (accepted, with the right answer), "other" (accepted, with a wrong
one), or "apart" (a different answer after an edit that no format can detect); a `HydraError` is a refusal, any other
exception a defect. It runs in a separate process: a crash is counted, and a new process continues.
"""

import multiprocessing
import os
import resource
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from hydra_ensembles.errors import HydraError

Case = TypeVar("Case")

SECONDS = 10.0  # CPU time per case
BYTES = 1 << 30  # memory per case, above what the process held before
PATIENCE = 120.0  # wall-clock seconds until a case counts as hanging
CEILING = 8 << 30  # bytes: an attack must not exhaust the machine
EXAMPLES = 5  # failures reported per kind
START = "forkserver"  # processes are forked from a clean server

OUTCOMES = ("refused", "same", "other", "raw", "crash", "slow", "apart")
FAILURES = ("other", "raw", "crash", "slow")


@dataclass(frozen=True)
class Row:
    """Outcomes of the cases of one kind; each is counted once."""

    what: str
    cases: int
    refused: int = 0  # with a HydraError
    same: int = 0  # accepted, with the right answer
    other: int = 0  # accepted, with a wrong answer and no warning
    raw: int = 0  # any other exception
    crash: int = 0  # the process died
    slow: int = 0  # over 10 s or 1 GB
    apart: int = 0  # a different answer after an edit with a valid digest: no format can detect it
    examples: tuple[str, ...] = ()  # the first few failures of each kind

    @property
    def failures(self) -> int:
        """Number of cases with an unacceptable outcome."""
        return self.other + self.raw + self.crash + self.slow

    @classmethod
    def of(cls, what: str, found: Sequence[tuple[object, str, str]]) -> "Row":
        """Count `(case, outcome, message)`."""
        outcomes = [outcome for _, outcome, _ in found]
        examples = []
        for failure in FAILURES:
            told = [f"{failure}: {case}: {said}" for case, outcome, said in found if outcome == failure]
            told = [text.replace(sys.prefix, "…") for text in told]  # hides where Python is installed
            told = [text.encode("utf-8", "backslashreplace").decode() for text in told[:EXAMPLES]]  # lone surrogates
            examples += [text if len(text) < 400 else text[:400] + "…" for text in told]
        return cls(what, len(found), **{name: outcomes.count(name) for name in OUTCOMES}, examples=tuple(examples))


def count(
    what: str,
    check: Callable[[Case], str],
    cases: Sequence[Case],
    *,
    workers: int | None = None,
    ready: Callable[[], object] | None = None,
) -> Row:
    """Run `check` on every case, in order, and count the outcomes.

    Args:
        what: Name of the row.
        check: A picklable function: of a module, or a `functools.partial` of one.
        cases: Its arguments, one per case; plain data whose `repr` suffices to repeat it.
        workers: Number of processes; None for one per core available to this process.
        ready: Called once in every process before timing starts, for imports and what all cases share.
    """
    started: list[_Worker] = []
    own = threading.local()  # every thread has a process of its own

    def tried(case: Case) -> tuple[Case, str, str]:
        if not hasattr(own, "worker") or not own.worker.process.is_alive():
            own.worker = _Worker(check, ready)
            started.append(own.worker)
        return case, *own.worker.run(case)

    try:
        with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as threads:
            return Row.of(what, list(threads.map(tried, cases)))
    finally:
        for worker in started:
            worker.end()


class _Worker:
    """A process that runs one case after the other."""

    def __init__(self, check: Callable[[Any], str], ready: Callable[[], object] | None) -> None:
        context: Any = multiprocessing.get_context(START)
        context.set_forkserver_preload(["hydra_ensembles", "torch._dynamo"])  # imported once, nothing is run
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, check, ready), daemon=True)
        self.process.start()
        theirs.close()
        with suppress(EOFError):  # a crash before the first case counts for it
            self.pipe.recv()

    def run(self, case: object) -> tuple[str, str]:
        """The outcome of a case and the message; after a crash, or if it hangs, the process has ended."""
        try:
            self.pipe.send(case)
            if self.pipe.poll(PATIENCE):
                outcome, said = self.pipe.recv()
                return outcome, said
        except (EOFError, ConnectionError):
            self.process.join()
            return "crash", f"exit status {self.process.exitcode}"
        self.end()
        return "slow", f"not done after {PATIENCE:.0f} s"

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _work(pipe: Connection, check: Callable[[Any], str], ready: Callable[[], object] | None) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    limit = _memory("VmSize") + CEILING
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with Path(os.devnull).open("w") as nothing:  # progress bars; a crash leaves only its status
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    if ready is not None:
        ready()
    pipe.send("ready")
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        pipe.send(outcome_of(check, case))


def outcome_of(check: Callable[[Case], str], case: Case) -> tuple[str, str]:
    """Run one case in this process: its outcome and the message."""
    os.pwrite(_opened("clear_refs", os.getpid()), b"5", 0)  # resets the peak of memory
    memory, begun = _memory("VmRSS"), time.process_time()
    said = ""
    try:
        outcome = check(case)
        if outcome not in ("same", "other", "apart"):
            raise AssertionError(f"a check says same, other or apart, not {outcome!r}")
    except HydraError as error:
        outcome, said = "refused", str(error)
    except Exception as error:
        outcome, said = "raw", f"{type(error).__name__}: {error}"
    seconds, taken = time.process_time() - begun, _memory("VmHWM") - memory
    if seconds > SECONDS or taken > BYTES:
        return "slow", f"{outcome} after {seconds:.1f} s of computing and {taken >> 20} MB"
    return outcome, said


def _memory(name: str) -> int:
    """Bytes of this process, as counted by the kernel."""
    return int(os.pread(_opened("status", os.getpid()), 1 << 14, 0).partition(name.encode() + b":")[2].split()[0]) << 10


@cache
def _opened(name: str, process: int) -> int:
    """A file of the kernel about a process, kept open: it is read twice a case."""
    return os.open(f"/proc/{process}/{name}", os.O_WRONLY if name == "clear_refs" else os.O_RDONLY)
