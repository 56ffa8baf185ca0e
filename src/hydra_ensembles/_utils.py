"""Small helpers shared by many modules: version, optional libraries, devices, memory, seeds, module flags."""

import contextlib
import hashlib
import importlib
import inspect
import random
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from .errors import ConfigError, HydraWarning, MissingExtraError

# Code that is never the source of a warning: ours, and frames of torch and contextlib between the caller and us.
_INTERNAL_PATHS = Path(__file__).parent, Path(torch.__file__).parent, Path(contextlib.__file__)
_THREAD = threading.local()  # `notes`: messages collected by `collect_warnings` in this thread
__version__ = "0.1.0"


def library(module: str, extra: str) -> ModuleType:
    """Import an optional library, or say which extra of `hydra-ensembles` installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        advice = f"install it with: pip install 'hydra-ensembles[{extra}]'"
        raise MissingExtraError(f"{module.partition('.')[0]!r} cannot be imported ({error}); {advice}") from error


def require_device(device: torch.device | str) -> torch.device:
    """Return the `torch.device` for `device`, or raise if it cannot be used here."""
    gpus = torch.cuda.device_count()
    try:
        resolved = torch.device(device)
        if resolved.type == "cuda":  # counted, not tried: a process must not use memory of a GPU assigned to another
            usable = (resolved.index or 0) < gpus
            if usable and str(resolved) == "cuda":
                resolved = torch.device("cuda", torch.cuda.current_device())
        else:
            usable = torch.empty(0, device=resolved).device.type != "meta"  # it holds no numbers
    except (RuntimeError, AssertionError, TypeError, ImportError):
        usable = False
    if not usable:
        raise ConfigError(f"device {str(device)!r} cannot be used here; PyTorch finds the CPU and {gpus} GPUs")
    return resolved


def with_float64(device: torch.device) -> torch.device:
    """The device, or the CPU if the device has no float64, like the GPUs of Apple."""
    return torch.device("cpu") if device.type == "mps" else device


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes this process can still allocate, limited by the host and by every control group (cgroup v2) it is in.

    A container or a cluster job is such a group, and a process that exceeds its limit is killed. Inactive cached files
    count as free. None if the system, whose files are under `root`, does not report it.
    """
    free = []
    with contextlib.suppress(OSError, LookupError):
        free.append(_numbers(root / "proc/meminfo")["MemAvailable:"] * 1024)
    own = ""
    with contextlib.suppress(OSError):
        own = (root / "proc/self/cgroup").read_text().rpartition("::")[2].strip()  # the line of version 2
    group = root / "sys/fs/cgroup" / own.lstrip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError, LookupError):  # includes "max", which means no limit
            used = int((folder / "memory.current").read_text()) - _numbers(folder / "memory.stat")["inactive_file"]
            free.append(max(0, int((folder / "memory.max").read_text()) - max(0, used)))
    return min(free, default=None)


def _numbers(path: Path) -> dict[str, int]:
    """Parse a file with one name and one number per line."""
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`, data parallelism, or weight averaging (torch's or timm's)."""
    parallel, averaged = ("DataParallel", "DistributedDataParallel"), ("AveragedModel", "ModelEmaV2", "ModelEmaV3")
    while type(model).__name__ in ("OptimizedModule", *parallel, *averaged):
        model = cast(nn.Module, getattr(model, "_orig_mod", None) or model.module)
    return model


@contextmanager
def without_autocast() -> Iterator[None]:
    """Disable the caller's autocast inside, so that stored results (weights, rankings) do not depend on it."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect this thread's warnings in a list, so that a server can send them to the client that caused them."""
    outer_notes = getattr(_THREAD, "notes", None)
    notes = list[str]()
    _THREAD.notes = notes
    try:
        yield notes
    finally:
        _THREAD.notes = outer_notes


def warn(message: str) -> None:
    """Warn at the first caller outside this library; inside `collect_warnings`, append to its list instead."""
    notes: list[str] | None = getattr(_THREAD, "notes", None)
    if notes is not None:
        notes.append(message)
        return
    level = 1
    frame = inspect.currentframe()
    while frame is not None and any(map(Path(frame.f_code.co_filename).is_relative_to, _INTERNAL_PATHS)):
        level = level + 1
        frame = frame.f_back
    warnings.warn(message, HydraWarning, stacklevel=level)


def few_digits(value: float) -> str:
    """Two decimals, or two significant digits for numbers below 0.1."""
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends only on the parts, and is the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


STEP = np.uint64(0x9E3779B97F4A7C15)  # between the numbers that `mixed` hashes


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijective hash of 64-bit integers: SplitMix64, Steele et al. 2014. Published results depend on it."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


@contextmanager
def torch_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch on the CPU and on `device` inside the block; generators of the CPU and of CUDA are restored after."""
    kind = device.type
    with torch.random.fork_rng(devices=[device] if kind == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if kind == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        elif kind == "mps":
            torch.mps.manual_seed(seed)
        yield


@contextmanager
def all_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Like `torch_seeded`, but also seed Python and NumPy, since a data pipeline may use any of them."""
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
    """Switch to evaluation mode inside; afterwards every part has its own mode again."""
    before = {part: part.training for module in modules for part in module.modules()}
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, was_training in before.items():
            part.training = was_training


def unlimited_recompiles() -> AbstractContextManager[None]:
    """Raise the recompile limits of `torch.compile`, which count for all models together."""
    limits = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}
    return torch.compiler.config.patch(limits)  # type: ignore[attr-defined]
