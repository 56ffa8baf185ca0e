"""Many cases run in worker processes, and what became of each of them, counted.

A check is a function of one case. It returns "same" (accepted, and the answer is the right one), "other" (accepted, and
it is not), or "apart" (another answer, to an edit that no format can notice); a `HydraError` that it raises is a
refusal, any other exception a defect. It runs in a process of its own: a death is counted, and a new process goes on.
"""

import multiprocessing
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from hydra_ensembles.errors import HydraError

Case = TypeVar("Case")

SECONDS = 10.0  # of computing, for one case
BYTES = 1 << 30  # of memory, above what the process held before the case
PATIENCE = 120.0  # seconds by the clock, for a case that hangs
CEILING = 8 << 30  # bytes: an attack must not take the machine with it
EXAMPLES = 5  # failures told of each kind
START = "forkserver"  # how processes are made: from one that has run nothing yet

OUTCOMES = ("refused", "same", "other", "raw", "crash", "slow", "apart")
FAILURES = ("other", "raw", "crash", "slow")


@dataclass(frozen=True)
class Row:
    """What became of the cases of one kind: each of them is counted once."""

    what: str
    cases: int
    refused: int = 0  # with a HydraError
    same: int = 0  # accepted, with the right answer
    other: int = 0  # accepted, with another answer and without a word
    raw: int = 0  # any other exception
    crash: int = 0  # the process died
    slow: int = 0  # over 10 s or 1 GB
    apart: int = 0  # another answer after an edit that wrote a right digest: no format can notice those
    examples: tuple[str, ...] = ()  # of failures, the first few of each kind

    @property
    def failures(self) -> int:
        """How many cases ended as none may."""
        return self.other + self.raw + self.crash + self.slow

    @classmethod
    def of(cls, what: str, found: Sequence[tuple[object, str, str]]) -> "Row":
        """Count `(case, outcome, what was said)`."""
        outcomes = [outcome for _, outcome, _ in found]
        examples = []
        for failure in FAILURES:
            told = [f"{failure}: {case}: {said}" for case, outcome, said in found if outcome == failure]
            told = [text.replace(sys.prefix, "…") for text in told]  # where Python lies is nobody's business
            told = [text.encode("utf-8", "backslashreplace").decode() for text in told[:EXAMPLES]]  # half characters
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
    """Run `check` on every case, in order of the cases, and count how they ended.

    Args:
        what: Name of the row.
        check: A function that processes can be given: of a module, or a `functools.partial` of one.
        cases: What it is called with, one after another; plain data whose `repr` says how to do it again.
        workers: Processes at a time; None for one on each core that this process may use.
        ready: Called once in every process, before its time counts: for imports, and for what all cases share.
    """
    found: list[tuple[object, str, str]] = [(case, "", "") for case in cases]
    workers = workers or min(len(os.sched_getaffinity(0)), len(cases))
    left = list(range(len(cases)))[::-1]
    running: dict[Connection, _Worker] = {}
    try:
        while left or any(worker.place is not None for worker in running.values()):
            while left and len(running) < workers:
                worker = _Worker(check, ready)
                running[worker.pipe] = worker
            for worker in running.values():
                if worker.place is None and left:
                    worker.begin(left.pop(), cases)
            busy = [pipe for pipe, worker in running.items() if worker.place is not None]
            for pipe in wait(busy, timeout=1.0):
                worker = running[pipe]  # type: ignore[index]
                place, outcome, said = worker.end()
                found[place] = (cases[place], outcome, said)
                if outcome == "crash":
                    del running[worker.pipe]
            for pipe, worker in list(running.items()):
                if worker.place is not None and time.monotonic() - worker.begun > PATIENCE:
                    worker.process.kill()
                    found[worker.place] = (cases[worker.place], "slow", f"not done after {PATIENCE:.0f} s")
                    del running[pipe]
    finally:
        for worker in running.values():
            worker.process.kill()  # it waits for a case, or hangs in one
            worker.process.join()
    return Row.of(what, found)


class _Worker:
    """One process, and the place of the case that it works on."""

    def __init__(self, check: Callable[[Any], str], ready: Callable[[], object] | None) -> None:
        context: Any = multiprocessing.get_context(START)
        context.set_forkserver_preload(["hydra_ensembles", "torch._dynamo"])  # imported once, and nothing is run there
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, check, ready), daemon=True)
        self.process.start()
        theirs.close()
        with suppress(EOFError):  # a death before the first case is counted with it
            self.pipe.recv()
        self.place: int | None = None
        self.begun = 0.0

    def begin(self, place: int, cases: Sequence[object]) -> None:
        self.place, self.begun = place, time.monotonic()
        with suppress(ConnectionError):  # it has died, which `end` will find
            self.pipe.send(cases[place])

    def end(self) -> tuple[int, str, str]:
        """Place of the case, its outcome, and what was said."""
        place, self.place = self.place, None
        assert place is not None
        try:
            return place, *self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return place, "crash", f"exit status {self.process.exitcode}"


def _work(pipe: Connection, check: Callable[[Any], str], ready: Callable[[], object] | None) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    limit = _memory("VmSize") + CEILING
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with Path(os.devnull).open("w") as nothing:  # bars of progress; what a death leaves behind is its status
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
    """Run one case here: its outcome, and what was said."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
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
    """Bytes, as the kernel counts them for this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise KeyError(name)
