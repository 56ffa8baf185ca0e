"""Small things that many modules need: the version, optional libraries, devices, memory, seeds, flags."""

import contextlib
import hashlib
import importlib
import inspect
import random
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from .errors import CheckpointError, ConfigError, HydraWarning, MissingExtraError

# whose lines nobody looks for a warning at: ours, and those of torch and Python that lie between a caller and ours
_NOT_THE_CALLER = Path(__file__).parent, Path(torch.__file__).parent, Path(contextlib.__file__)
_flags = threading.Lock()
_THREAD = threading.local()  # `notes`: what `noted` collects in this thread
_evaluated: dict[nn.Module, tuple[int, bool]] = {}  # parts in `evaluation_mode`: how often, and their mode before
__version__ = "0.1.0"


def require(module: str, extra: str) -> ModuleType:
    """Import an optional library, or say which extra of `hydra-ensembles` installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"this call needs the library {module.partition('.')[0]!r}, which cannot be imported ({error}); "
            f"install it with: pip install 'hydra-ensembles[{extra}]'"
        ) from error


def require_device(device: torch.device | str) -> torch.device:
    """The device of a name, provided it can be used here."""
    gpus = torch.cuda.device_count()
    cause = None
    try:
        resolved = torch.device(device)
        if resolved.type != "cuda":
            torch.empty(0, device=resolved)
        # counted, not tried: a process must not take memory of a GPU that another one was given
        if resolved.type == "meta":
            raise RuntimeError("it holds no numbers")
        if resolved.type != "cuda" or (resolved.index or 0) < gpus:
            return resolved
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        cause = error
    raise ConfigError(f"device {str(device)!r} cannot be used here; PyTorch finds the CPU and {gpus} GPUs") from cause


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still take: what the host has, and what every control group it is in leaves it.

    A container, or a job of a cluster, is such a group, and whoever takes more than its limit is killed. Cached files
    (those not in use) count as free. None where the system, whose files lie under `root`, does not say.
    """
    free = []
    with contextlib.suppress(OSError, ValueError, LookupError):
        free.append(_numbers(root / "proc/meminfo")["MemAvailable:"] * 1024)
    for folder in _control_groups(root):
        limit, used = ("memory.max", "memory.current")  # version 2 of control groups
        if not (folder / limit).exists():
            limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes")  # version 1: without a limit, a huge one
        with contextlib.suppress(OSError, ValueError, LookupError):  # among them "max": no limit
            stat = _numbers(folder / "memory.stat") if (folder / "memory.stat").exists() else {}
            cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))  # total: with groups inside
            taken = int((folder / used).read_text()) - cached
            free.append(max(0, int((folder / limit).read_text()) - max(0, taken)))
    return min(free, default=None)


def _control_groups(root: Path) -> Iterator[Path]:
    """The folders that may limit this process: of its own control groups for memory, and of all around them."""
    lines = list[str]()
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if not kinds or "memory" in kinds.split(","):  # version 2 has one tree, and names no kind
            mount = root / "sys/fs/cgroup" / ("memory" if kinds else "")
            names = [name for name in path.split("/") if name not in ("", "..")]
            yield from (mount.joinpath(*names[:count]) for count in range(len(names) + 1))


def _numbers(path: Path) -> dict[str, int]:
    """A file of names and numbers, one of each in a line."""
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`, data parallelism, or a mean of weights over steps (torch's, timm's)."""
    parallel, averaged = ("DataParallel", "DistributedDataParallel"), ("AveragedModel", "ModelEmaV2", "ModelEmaV3")
    while type(model).__name__ in ("OptimizedModule", *parallel, *averaged):
        inner: Any = getattr(model, "_orig_mod", None) or model.module
        model = cast(nn.Module, inner)
    return model


@contextmanager
def own_precision() -> Iterator[None]:
    """No autocast of the caller's inside: what is kept (weights, rankings) does not depend on it."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def noted() -> Iterator[list[str]]:
    """What is warned of inside, by this thread, as a list: a server's log is not read by those whom it concerns."""
    outer_notes = getattr(_THREAD, "notes", None)
    notes = list[str]()
    _THREAD.notes = notes
    try:
        yield notes
    finally:
        _THREAD.notes = outer_notes


def warn(message: str) -> None:
    """Warn of something, at the first line that is a caller's; inside `noted`, note it."""
    notes: list[str] | None = getattr(_THREAD, "notes", None)
    if notes is not None:
        notes.append(message)
        return
    level = 1
    frame = inspect.currentframe()
    while frame is not None and any(map(Path(frame.f_code.co_filename).is_relative_to, _NOT_THE_CALLER)):
        level = level + 1
        frame = frame.f_back
    warnings.warn(message, HydraWarning, stacklevel=level)


def few_digits(value: float) -> str:
    """Two digits after the point, or two that count, where a number is so small that the others would be zeros."""
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits that depends on every part and on nothing else, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def torch_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run a block with torch seeded on the CPU and on `device`; afterwards the states are as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def all_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Like `torch_seeded`, with the generators of Python and NumPy too: whatever a data pipeline may use."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch_seeded(seed, device):
            random.seed(seed)
            np.random.seed(seed % (1 << 32))
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def evaluation_mode(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every part is in the mode it was in before (`train` sets all parts alike).

    Threads may do this to one module at a time: who comes last puts the flags back.
    """
    parts = {part for module in modules for part in module.modules()}
    with _flags:
        for part in parts:
            depth, was_training = _evaluated.get(part, (0, part.training))
            _evaluated[part] = depth + 1, was_training
        for module in modules:
            module.eval()
    try:
        yield
    finally:
        with _flags:
            for part in parts:
                depth, was_training = _evaluated.pop(part)
                if depth > 1:
                    _evaluated[part] = depth - 1, was_training
                else:
                    part.training = was_training


def compiled_at_will() -> AbstractContextManager[None]:
    """Inside, code is compiled as often as it is asked for: the compiler's own limits count for all models together."""
    limits = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}
    patch: AbstractContextManager[None] = torch.compiler.config.patch(limits)  # type: ignore[attr-defined]
    return patch


def require_same_run(theirs: Any, ours: Any, path: Path, what: str) -> None:
    """Refuse to go on with work (`what`, stored at `path`) that was begun with `theirs` where `ours` is asked for."""
    lines = list(_differences(theirs, ours))
    if lines:
        raise CheckpointError(
            f"{path} holds {what} of another run: {'; '.join(lines[:5])}{'; …' if len(lines) > 5 else ''}. "
            "Give another place, or delete this one to start over"
        )


def _differences(theirs: Any, ours: Any, path: str = "") -> Iterator[str]:
    """What differs between two pieces of plain data, in words, one line for each innermost field."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in sorted(theirs.keys() | ours.keys()):
            yield from _differences(theirs.get(key), ours.get(key), f"{path}.{key}" if path else str(key))
    elif theirs != ours:
        was, now = (text if len(text) <= 40 else f"{text[:16]}…" for text in map(repr, (theirs, ours)))
        yield f"{path or 'the content'} was {was} and is {now}"
