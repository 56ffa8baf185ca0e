"""Small things that many rooms need: the version, optional libraries, devices, seeds, files, flags."""

import hashlib
import importlib
import os
import random
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, overload

import numpy as np
import torch
from torch import nn

from .errors import CheckpointError, ConfigError, MissingExtraError

__version__ = "0.1.0.dev0"


def require(module: str, extra: str) -> ModuleType:
    """Import an optional library, or say which extra installs it.

    Args:
        module: Dotted name of the module to import.
        extra: Name of the extra of `hydra-ensembles` that brings it.

    Raises:
        MissingExtraError: The library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"this call needs the library {package!r}, which cannot be imported ({error}); "
            f"install it with: pip install 'hydra-ensembles[{extra}]'"
        ) from error


@overload
def require_device(device: torch.device | str) -> torch.device: ...


@overload
def require_device(device: None) -> None: ...


@overload
def require_device(device: torch.device | str | None) -> torch.device | None: ...


def require_device(device: torch.device | str | None) -> torch.device | None:
    """The device of a name, provided it can be used here; None stays None.

    Raises:
        ConfigError: There is no such device; the message lists those there are.
    """
    if device is None:
        return None
    gpus = torch.cuda.device_count()
    try:
        found = torch.device(device)
        if found.type != "cuda":
            torch.empty(0, device=found)
            return found
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ImportError) as error:
        raise _refusal(device, gpus) from error
    # counted, not tried: a process must not take memory of a GPU that another one was given
    if (found.index or 0) >= gpus:
        raise _refusal(device, gpus)
    return found


def _refusal(device: object, gpus: int) -> ConfigError:
    names = [
        "cpu",
        *(f"cuda:{index}" for index in range(gpus)),
        *(["mps"] if torch.backends.mps.is_available() else []),
    ]
    why = " (PyTorch finds no GPU for cuda)" if not gpus and str(device).startswith("cuda") else ""
    return ConfigError(f"device {str(device)!r} cannot be used here; available: {', '.join(names)}{why}")


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary name in the same folder, flush to disk, then rename; the umask is respected."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:  # as any file is made: mkstemp would give it to its owner alone
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
    python_state, numpy_state = random.getstate(), np.random.get_state()
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
    """Evaluation mode inside; afterwards every module, and every part of it, is in the mode it was in before.

    `train` would not do to put the mode back: it sets all parts alike, also those that someone keeps in evaluation
    mode while the rest trains.
    """
    before = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()  # not set by hand: MC Dropout has its own idea of evaluation mode
        yield
    finally:
        for part, training in before:
            part.training = training


_SHOWN = 5  # differences named in an error


def differences(theirs: Any, ours: Any, path: str = "") -> Iterator[str]:
    """What differs between two pieces of plain data, in words, one line for each innermost field."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in sorted(theirs.keys() | ours.keys()):
            yield from differences(theirs.get(key), ours.get(key), f"{path}.{key}" if path else str(key))
    elif theirs != ours:
        yield f"{path or 'the content'} was {_short(theirs)} and is {_short(ours)}"


def require_same_run(theirs: Any, ours: Any, place: Path, what: str) -> None:
    """Refuse to go on with work that was begun with other settings, another model or other data.

    Args:
        theirs: What the stored work was begun with, as plain data.
        ours: What is asked for now, as plain data.
        place: File or folder where the stored work lies.
        what: What lies there, in words: `"a build"`, `"a circuit"`.
    """
    lines = list(differences(theirs, ours))
    if lines:
        more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise CheckpointError(
            f"{place} holds {what} of another run: {'; '.join(lines[:_SHOWN])}{more}. Give another place, or delete "
            "this one to start over"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:16]}…"
