"""Recognise models, data and tensors by digests, which are stored in journals, run folders and saved answers.

| name | of | is the same for | is a |
|---|---|---|---|
| `model_fingerprint` | a model | the same configuration and parameters in the same dtype | SHA-256 |
| `data_fingerprint` | data that are read | the same samples and labels, however cut into batches | SHA-256 |
| `source_fingerprint` | a source of batches | the same content, without reading a whole epoch | 16 digits of one |
| `tensors_digest` | named tensors | the same names, types, shapes and values in the same order | SHA-256 |
| `trace_sets` | sets of an evaluation | the same samples, in any order | 16 digits of each |
| `weights_digest` | a model in memory | the same bits in the same order; fast | CRC-32 |

Single samples are identified by `overlap.sample_keys`. None of these values may change: a run that an earlier release
began could not be resumed.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from .batches import Batches, Inputs, all_parts, first_epoch, iterate, length_of
from .errors import DataError
from .overlap import Keys
from .schema import to_plain

_SOME_BATCHES, _SOME_ROWS = 8, 64  # how many batches of a list and rows of a tensor are hashed, evenly spaced


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, whatever its device, dtype and strides."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors: their order, names, types, shapes and values."""
    digest = hashlib.sha256()
    _update_digest(digest, tensors.items())
    return digest.hexdigest()


def weights_digest(tensors: Iterable[Tensor]) -> int | None:
    """CRC-32 over all bits of some tensors, in order; a fifth of a second for 80 M floats. None on `meta`."""
    digest = 0
    for tensor in tensors:
        if tensor.is_meta:
            return None
        digest = crc32(tensor_bytes(tensor), digest)
    return digest


def model_fingerprint(model: nn.Module) -> str:
    """SHA-256 over the configuration and every parameter in its dtype; device and metadata do not matter."""
    digest = hashlib.sha256(json.dumps(to_plain(model.config), sort_keys=True).encode())
    _update_digest(digest, sorted(model.state_dict().items()))
    return digest.hexdigest()


def _update_digest(digest: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Hash names, types, shapes and values, in the given order."""
    for name, tensor in tensors:
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor_bytes(tensor))


# --- data that are read ------------------------------------------------------------------------------------


def data_fingerprint(batches: Batches, name: str = "data") -> str:
    """SHA-256 over all samples and labels, in order; see `DataFingerprint`. Errors call the data `name`."""
    fingerprint = DataFingerprint()
    for _, inputs, labels in iterate(batches, name):
        fingerprint.update(inputs, labels)
    return fingerprint.hexdigest()


class DataFingerprint:
    """Fingerprint of data read batch by batch: of the samples and their order, whatever the batch boundaries."""

    def __init__(self) -> None:
        self.samples = 0
        self._digests: dict[str, Any] = {}
        self._layouts: dict[str, list[Any]] = {}

    def update(self, inputs: Inputs, labels: Tensor | None) -> None:
        """Add one batch, as `read_batch` returns it."""
        tensors = {"inputs": inputs} if isinstance(inputs, Tensor) else {f"inputs.{key}": inputs[key] for key in inputs}
        if labels is not None:
            tensors["labels"] = labels
        for key, tensor in tensors.items():
            digest = self._digests.setdefault(key, hashlib.sha256())
            layout = [str(tensor.dtype), list(tensor.shape[1:])]
            if self._layouts.get(key) != layout:  # hash every change of layout
                self._layouts[key] = layout
                digest.update(json.dumps([self.samples, layout]).encode())
            digest.update(tensor_bytes(tensor))
        self.samples += len(next(iter(tensors.values())))

    def hexdigest(self) -> str:
        """The fingerprint of everything added so far."""
        parts = [[key, self._digests[key].hexdigest()] for key in sorted(self._digests)]
        return hashlib.sha256(json.dumps([self.samples, parts]).encode()).hexdigest()


# --- sources that are not read -----------------------------------------------------------------------------


def source_fingerprint(batches: Batches, name: str, seed: int) -> str:
    """A short identifier of a data source, without reading an epoch; the state of the source is restored.

    It covers the length, the first batch in the order of the seed, and what is in memory: all labels and row numbers of
    its data set, some rows of a `TensorDataset`, all labels and some batches of a list. Sources that agree in all of
    this have the same identifier.
    """
    digest = hashlib.sha256(f"{length_of(batches)}".encode())
    with first_epoch(batches, seed):
        at_hand = dict(_tensors_in_memory(batches))
        first_batch = next(iter(batches), None)
    if first_batch is None:
        raise DataError(f"{name} has no batches; check the loader")
    _update_by_content(digest, _content(first_batch))
    if type(batches) in (list, tuple):  # iterating over a subclass may have side effects
        contents = list(map(_content, batches))
        for index in _spread(len(contents), _SOME_BATCHES):
            _update_by_content(digest, contents[index])
        at_hand |= {f"batch {index}": item["labels"] for index, item in enumerate(contents) if "labels" in item}
    _update_by_content(digest, at_hand)
    return digest.hexdigest()[:16]


def _content(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by name: inputs, texts and labels, or the entries of a mapping; not checked."""
    values: dict[str, Any] = {"inputs": batch}
    if isinstance(batch, Mapping):
        values = {"inputs": batch, "labels": batch.get("labels", batch.get("label"))}
    elif isinstance(batch, list | tuple):
        names = ("inputs", "texts", "labels") if len(batch) == 3 else ("inputs", "labels")
        values = dict(zip(names, batch, strict=False))
    tensors: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            tensors |= {str(key): item for key, item in value.items() if isinstance(item, Tensor) and key != "label"}
        elif (tensor := _as_tensor(value)) is not None:
            tensors[name] = tensor
    return tensors


def _tensors_in_memory(batches: Batches) -> Iterator[tuple[str, Tensor]]:
    """Tensors that a source holds in memory and that distinguish its items, by name."""
    for number, part in enumerate(all_parts(batches)):
        for attribute in ("labels", "targets", "rows", "indices"):
            values = _as_tensor(getattr(part, attribute, None))
            if values is not None:
                yield f"{attribute} {number}", values
        if isinstance(part, TensorDataset):
            for column, tensor in enumerate(part.tensors):
                rows = tensor if tensor.dim() == 1 else tensor[_spread(len(tensor), _SOME_ROWS)]
                yield f"column {number} {column}", rows


def _as_tensor(values: Any) -> Tensor | None:
    """Numbers, strings or images of one size as a tensor; None for anything else."""
    if isinstance(values, Tensor) or not isinstance(values, np.ndarray | list | tuple | range):
        return values if isinstance(values, Tensor) else None
    if isinstance(values, list | tuple) and values and isinstance(values[0], str):
        values = np.frombuffer("\x1f".join(map(str, values)).encode(), np.uint8)
    try:
        return torch.from_numpy(np.array(values))
    except (TypeError, ValueError):  # objects, ragged lists
        return None


def _spread(count: int, some: int) -> list[int]:
    """At most `some` positions out of `count`, evenly spaced from the first to the last."""
    return sorted({round(position) for position in np.linspace(0, max(count - 1, 0), min(count, some)).tolist()})


def _update_by_content(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor_bytes(tensor))


# --- traces of the sets of an evaluation ------------------------------------------------------------------


@dataclass(frozen=True)
class SetTrace:
    """Digests of the samples of a set, independent of their order, stored by an evaluation; empty if unknown.

    Different labels prove different samples. Different inputs do not: models with another image size, normalisation or
    tokenizer get different numbers for the same image or text.
    """

    labels: str = ""  # of the sorted class counts, since models may number the classes differently
    inputs: str = ""  # of all samples as the model received them; empty if only logits were given


class TraceMismatch(NamedTuple):
    """Names of sets that two evaluations share but whose traces do not match, by the kind of mismatch."""

    labels: list[str]  # certainly different samples
    inputs: list[str]  # different samples, or the same with different preprocessing
    unknown: list[str]  # at least one has no trace of its inputs


def trace_sets(labels: Mapping[str, Tensor], keys: Mapping[str, Keys] = MappingProxyType({})) -> dict[str, SetTrace]:
    """The trace of each set by name, from labels `[B]` (empty for OOD sets) and from `sample_keys` `[B]`."""
    traces = {}
    for name, targets in labels.items():
        counts = np.sort(np.bincount(targets.numpy()))
        traces[name] = SetTrace(_digest(counts[counts > 0]), _digest(np.sort(keys[name])) if name in keys else "")
    return traces


def _digest(values: npt.NDArray[np.int64]) -> str:
    return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()[:16] if len(values) else ""


def compare_traces(ours: Mapping[str, SetTrace], theirs: Mapping[str, SetTrace], names: list[str]) -> TraceMismatch:
    """Compare the traces of the sets that two evaluations share."""
    differing = TraceMismatch([], [], [])
    for name in names:
        trace = ours.get(name, SetTrace())
        other = theirs.get(name, SetTrace())
        if trace.labels and other.labels and trace.labels != other.labels:
            differing.labels.append(name)
        elif not (trace.inputs and other.inputs):
            differing.unknown.append(name)
        elif trace.inputs != other.inputs:
            differing.inputs.append(name)
    return differing
