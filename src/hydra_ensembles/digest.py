"""Digests that recognise values, data sets and single samples.

`digest` is for anything that a result depends on: settings, tensors, models. `digest_batches` is for data that are read
in batches. `row_digests` compares the samples of sets that must differ, as those of ID and OOD.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ._utils import warn
from .batches import Batches, Inputs, first_epoch, iterate, length_of
from .errors import ConfigError, DataError
from .settings import to_plain

_VALUES = 4096  # of a sample that `row_digests` reads, evenly spaced


def digest(value: Any) -> str:
    """SHA-256 of tensors, modules (their `state_dict`), settings, mappings, sequences, text, bytes, numbers and None.

    It does not depend on the order of a mapping, on the device of a tensor, or on the machine.
    """
    found = hashlib.sha256()
    _update(found, value)
    return found.hexdigest()


def _update(found: Any, value: Any) -> None:
    """Hash a value: its type and size first, so that no two values have the same bytes."""
    if isinstance(value, nn.Module):
        value = value.state_dict()
    elif dataclasses.is_dataclass(value):
        value = to_plain(value)
    elif hasattr(value, "__array_interface__"):  # also a picture
        value = torch.from_numpy(np.array(value, order="C"))
    if isinstance(value, Tensor):
        found.update(f"tensor {value.dtype} {list(value.shape)}:".encode())
        found.update(hashlib.blake2b(_bytes_of(value)).digest())  # the faster hash on most CPUs
    elif isinstance(value, Mapping):
        found.update(f"mapping {len(value)}:".encode())
        for key in sorted(value, key=str):
            _update(found, str(key))
            _update(found, value[key])
    elif isinstance(value, list | tuple):
        found.update(f"list {len(value)}:".encode())
        for item in value:
            _update(found, item)
    elif value is None or isinstance(value, str | bytes | bool | int | float):
        content = value if isinstance(value, bytes) else str(value).encode()
        found.update(f"{type(value).__name__} {len(content)}:".encode() + content)
    else:
        raise ConfigError(f"a {type(value).__name__} has no digest; give tensors, settings, lists, text or numbers")


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, whatever its device, dtype and strides."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def digest_batches(batches: Batches, name: str = "data") -> str:
    """SHA-256 of all batches in order; `name` is for error messages."""
    return digest([digest([inputs, labels]) for _, inputs, labels in iterate(batches, name)])


def source_digest(batches: Batches, name: str, seed: int) -> str:
    """Recognises data too large to read twice, by their length and their first batch in the order of a seed."""
    with first_epoch(batches, seed):
        first = next(iter(batches), None)
    if first is None:
        raise DataError(f"{name} has no batches; check the loader")
    return digest([length_of(batches), first])


def row_digests(inputs: Inputs | list[Any]) -> list[bytes]:
    """A short digest of every sample `[B]`, equal for equal samples: of up to 4,096 of its values, evenly spaced.

    Texts are recognised by their tokens, whatever their padding on the right.
    """
    if isinstance(inputs, list):
        return [bytes.fromhex(digest(row))[:16] for row in inputs]
    if isinstance(inputs, Tensor):
        rows = inputs
    elif (ids := inputs.get("input_ids")) is not None:
        mask = inputs.get("attention_mask")
        rows = (ids if mask is None or mask.shape != ids.shape else ids * (mask != 0))[:, :_VALUES]
        return [hashlib.blake2b(row.tobytes().rstrip(b"\0"), digest_size=16).digest() for row in rows.cpu().numpy()]
    else:
        rows = next((tensor for tensor in inputs.values() if tensor.dim() > 1), next(iter(inputs.values())))
    flat = rows.detach().reshape(len(rows), -1)  # [B, n]
    flat = flat[:, :: math.ceil(flat.shape[1] / _VALUES) or 1].contiguous().cpu()
    return [hashlib.blake2b(_bytes_of(row), digest_size=16).digest() for row in flat]


def require_other_samples(name: str, known: Sequence[bytes], others: Mapping[str, Sequence[bytes]]) -> None:
    """Refuse sets that consist of samples of the set `name`, or of another of these sets; warn of a partial overlap.

    Sets are given by their `row_digests`: ID data given as OOD data have an AUROC of one half whatever the model.
    """
    earlier = {name: set(known)}
    for title, rows in others.items():
        distinct = set(rows)
        for other, theirs in earlier.items():
            shared = len(distinct & theirs)
            if rows and shared == len(distinct):
                raise DataError(f"every sample of {title} is also in {other}; give other data, or none")
            if shared and other == name:
                warn(f"{shared} of {len(distinct)} samples of {title} are also in {name}; leave them out of one")
        earlier[title] = distinct
