"""Child processes for tests, threads that act as ranks, and functions patched to count calls or to interrupt a run."""

import os
import pickle
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import TCPStore

LIMIT = 600  # seconds, a safety net: nothing here depends on the clock


def environment(**changes: str) -> dict[str, str]:
    """Environment for a child that finds modules where the parent does, however the parent was started."""
    threads = str(torch.get_num_threads())  # as many as here, otherwise sums round differently
    return {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changes}


def _started(work: Callable[[], object]) -> int:
    """Fork this process to do some work and return the child's pid; the child exits with 0 on success."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # warns that other threads may hold locks
        child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the other OpenMP threads were not copied; the child would wait for them forever
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def _status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_a_child(work: Callable[[], object]) -> int:
    """Exit status of a fork of this process that does some work and exits without cleanup."""
    return _status(_started(work))


def launch(work: Callable[[], object], processes: int = 2) -> list[int]:
    """Exit statuses of forks set up as torchrun would start them; the store chooses a free port."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }

    def one(rank: int) -> None:
        os.environ.update(common, RANK=str(rank), LOCAL_RANK=str(rank))
        work()

    return [_status(child) for child in [_started(lambda rank=rank: one(rank)) for rank in range(processes)]]


def by_two_ranks(work: Callable[[int], Any]) -> list[Future[Any]]:
    """Run a function of the rank in two threads that synchronise as two processes would; other threads have no rank."""
    barrier, given, own = threading.Barrier(2, timeout=LIMIT), [b"", b""], threading.local()

    def exchange(found: list[Any], item: Any) -> None:
        given[own.rank] = pickle.dumps(item)
        barrier.wait()
        found[:] = [pickle.loads(one) for one in given]
        barrier.wait()

    def as_rank(rank: int) -> Any:
        own.rank = rank
        return work(rank)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(distributed, "is_initialized", lambda: hasattr(own, "rank"))
        patch.setattr(distributed, "get_rank", lambda: own.rank)
        patch.setattr(distributed, "get_world_size", lambda: 2)
        patch.setattr(distributed, "all_gather_object", exchange)
        patch.setattr(distributed, "barrier", barrier.wait)
        return [pool.submit(as_rank, rank) for rank in range(2)]


def count_calls(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    done: Callable[[], object],
    fatal: Callable[[], bool] = lambda: False,
) -> None:
    """Patch a function to call `done` on every call, and to raise KeyboardInterrupt once `fatal` returns true."""
    original = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        done()
        if fatal():
            raise KeyboardInterrupt
        return original(*arguments, **options)

    patch.setattr(owner, name, counted)


def watch_replacements(act: Callable[[Path], None]) -> Callable[..., None]:
    """A replacement for `os.replace`, the last step of every write of the library, that calls `act` first."""
    original = os.replace

    def replace(source: Any, target: Any, **options: Any) -> None:
        act(Path(target))
        original(source, target, **options)

    return replace
