"""Child processes of tests, threads in their stead, and calls that are counted or end a run."""

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
    """The environment of a child; modules are found where the parent finds them, however it was started."""
    threads = str(torch.get_num_threads())  # as many as here, or sums would round differently
    return {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changes}


def _started(work: Callable[[], object]) -> int:
    """Number of a copy of this process that does some work; it ends with 0 if it gets to the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads are copied without what they hold
        child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the others of OpenMP were not copied, and would be waited for without end
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
    """Exit status of a copy of this process that does some work; nothing is tidied up."""
    return _status(_started(work))


def launch(work: Callable[[], object], processes: int = 2) -> list[int]:
    """Exit statuses of copies of this process that torchrun might have started; the store's port is not guessed."""
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
    """A function of the rank, run by two threads that meet where two processes would; this thread is alone."""
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
    """Let every call of a function be told to `done`, and end the run where `fatal` says so."""
    original = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        done()
        if fatal():
            raise KeyboardInterrupt
        return original(*arguments, **options)

    patch.setattr(owner, name, counted)


def watch_replacements(act: Callable[[Path], None]) -> Callable[..., None]:
    """A stand-in for `os.replace`, the last act of every write of the library, that calls `act` first."""
    original = os.replace

    def replace(source: Any, target: Any, **options: Any) -> None:
        act(Path(target))
        original(source, target, **options)

    return replace
