"""Devices that callers ask for, checked before any work is done."""

from typing import overload

import torch

from .errors import ConfigError


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
