"""Parameters to `model.safetensors` and back, every name, shape and dtype checked before memory is taken."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..devices import require_device
from ..errors import CheckpointError, ConfigError
from .checksum import verify

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
ACCEPTED = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors (of any device, also views and shared ones) as a safetensors file."""
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.dtype not in DTYPES.values():
            place = "without values (meta device)" if tensor.is_meta else f"{tensor.dtype}"
            raise CheckpointError(
                f"parameter {name!r} is {place}; a checkpoint holds {ACCEPTED}. "
                "Load the values, or convert the model with .to(torch.float32), before saving"
            )
    owned: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        storage = plain.untyped_storage().data_ptr()
        owned[name] = plain.clone() if storage in storages else plain  # the format stores no aliases
        storages.add(storage)
    save_file(owned, path, metadata={"format": "pt"})


def read_weights(
    path: Path,
    checksum: str,
    build: Callable[[], nn.Module],
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    at_least: int = 0,
) -> dict[str, Tensor]:
    """Read the tensors that a model needs, no more and no less.

    Args:
        path: The safetensors file.
        checksum: SHA-256 it must have.
        build: Makes the model; called under the meta device, to learn names and shapes without memory.
        device: Where the tensors go; None for the CPU.
        dtype: Floating type to convert to; None keeps what is stored.
        at_least: Number of tensors below which `build` is not even tried.

    Returns:
        Tensors by name. On the CPU they may still lie in the mapped file: copy them before they are used,
        as `Ensemble.from_state` does.
    """
    place = require_device(device)
    if dtype is not None and dtype not in DTYPES.values():
        raise ConfigError(f"dtype is {dtype}; accepted are {ACCEPTED}, or None for the stored one")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = list(file.keys())
            if len(names) < at_least:
                raise CheckpointError(
                    f"{path} holds {len(names)} tensors, the configuration needs at least {at_least}; "
                    "weights and configuration do not belong together"
                )
            stored = {}
            for name in names:
                part = file.get_slice(name)
                stored[name] = (tuple(part.get_shape()), part.get_dtype())
            _compare(path, stored, _shapes(path, build))
            verify(path, checksum)  # after the cheap checks: it reads the whole file
            return {name: file.get_tensor(name).to(device=place, dtype=dtype) for name in names}
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a valid safetensors file ({error}); it is damaged or incomplete, save or download it again"
        ) from error


def _shapes(path: Path, build: Callable[[], nn.Module]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's parameters, without allocating any of them."""
    try:
        with torch.device("meta"):
            model = build()
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes whose product no tensor can have
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"the configuration beside {path} describes an impossible model: {reason}") from error
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _compare(
    path: Path, stored: Mapping[str, tuple[tuple[int, ...], str]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    problems = [f"lacks {name!r}" for name in sorted(expected.keys() - stored.keys())]
    problems += [f"has the unknown {name!r}" for name in sorted(stored.keys() - expected.keys())]
    for name in sorted(expected.keys() & stored.keys()):
        shape, dtype = stored[name]
        if shape != expected[name]:
            problems.append(f"has {name!r} with shape {list(shape)} instead of {list(expected[name])}")
        elif dtype not in DTYPES:
            problems.append(f"has {name!r} as {dtype}; accepted are {ACCEPTED}")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{path} does not fit its configuration: it {'; it '.join(problems[:5])}{more}. "
            "Save the model again with save_pretrained; the two files must come from one save"
        )
