"""Forked child processes, and named points in their work at which they can be disturbed.

There are points before and after every rename, in the middle of every write, before files are flushed or removed,
when folders are created, and around every step of long work. So a kill, or another writer, comes exactly there,
independent of the clock.
"""

import ctypes
import functools
import os
import pickle
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors.torch

from hydra_ensembles.errors import HydraError
from hydra_ensembles.store import Store
from hydra_ensembles.training.loop import Learner

KILLED = 9
CAP_DAC_OVERRIDE = 1

Act = Callable[[int, str], None]  # index of the point, and its name


class Ending(NamedTuple):
    """How a child ended: with a result, refused by an error, with another exception, or killed."""

    how: Literal["given", "refused", "raised", "killed"]
    value: Any = None


def forked(work: Callable[[], Any]) -> Ending:
    """Run `work` in a forked copy of this process and wait for its end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            ending = Ending("given", work())
        except HydraError as error:
            ending = Ending("refused", f"{type(error).__name__}: {error}")
        except BaseException:
            ending = Ending("raised", " ".join(traceback.format_exc().splitlines()[-3:]))
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(ending, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == KILLED:
        return Ending("killed")
    if status or not content:
        return Ending("raised", f"the process ended with status {status}")
    found: Ending = pickle.loads(content)
    return found


def confine() -> None:
    """Make file permissions apply to root too; call it in a child, since it cannot be undone."""
    if os.getuid() == 0:
        rights, system = (ctypes.c_uint32 * 6)(), ctypes.CDLL(None, use_errno=True)
        version = struct.pack("Ii", 0x20080522, 0)  # interface version, this process
        if system.capget(version, rights) == 0:
            for place in (0, 1):  # effective, and permitted
                rights[place] &= ~(1 << CAP_DAC_OVERRIDE)
        if system.capset(version, rights):
            raise OSError(ctypes.get_errno(), "the rights of root cannot be given up")


def watch(act: Act) -> None:
    """Call `act` at every point from now on; call it in a child, since it is not undone."""
    points = _Points(act)
    for name in ("replace", "rename"):
        setattr(os, name, points.around(getattr(os, name), "renaming", place=1))
    for name, deed in (("unlink", "removing"), ("rmdir", "removing the folder"), ("mkdir", "making the folder")):
        setattr(os, name, points.around(getattr(os, name), deed))
    os.fsync = points.around(os.fsync, "flushing")  # type: ignore[assignment]
    Path.open = points.halving(Path.open)  # type: ignore[method-assign]
    safetensors.torch.serialize_file = points.around(safetensors.torch.serialize_file, "writing", place=1)
    Store.append = points.around(Store.append, "a step of the circuit")  # type: ignore[method-assign]
    Learner.update = points.around(Learner.update, "an update")  # type: ignore[method-assign]


class _Points:
    def __init__(self, act: Act) -> None:
        self.act, self.reached, self.inside = act, 0, False

    def reach(self, name: str) -> None:
        if not self.inside:  # no points inside `act`
            self.inside = True
            try:
                self.act(self.reached, name)
            finally:
                self.inside = False
            self.reached += 1

    def around(self, function: Callable[..., Any], deed: str, place: int = 0) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            what = f"{deed} {Path(args[place]).name}" if isinstance(args[place], str | os.PathLike) else deed
            self.reach(f"before {what}")
            result = function(*args, **kwargs)
            self.reach(f"after {what}")
            return result

        return watched

    def halving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`Path.open` for files that are written in two parts."""

        def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            file = function(path, mode, *args, **kwargs)
            if not set(mode) & set("wxa"):
                return file
            return _Halves(file, functools.partial(self.reach, f"writing {path.name}"))

        return opened


class _Halves:
    def __init__(self, file: Any, between: Callable[[], None]) -> None:
        self.file, self.between = file, between

    def __enter__(self) -> "_Halves":
        self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, content: Any) -> int:
        half = len(content) // 2
        written: int = self.file.write(content[:half])
        self.file.flush()
        self.between()
        return written + int(self.file.write(content[half:]))


def killed_at(number: int) -> Act:
    """Kill the process at the point of this index, without cleanup."""

    def act(reached: int, name: str) -> None:
        if reached == number:
            os._exit(KILLED)

    return act
