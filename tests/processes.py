"""Child processes for tests, and functions patched to count calls or to interrupt a run."""

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def environment(**changes: str) -> dict[str, str]:
    """Environment for a child that finds modules where the parent does, however the parent was started."""
    threads = str(torch.get_num_threads())  # as many as here, otherwise sums round differently
    return {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changes}


def in_a_child(work: Callable[[], object]) -> int:
    """Exit status of a fork of this process that does some work and exits without cleanup: 0 on success."""
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
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


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
