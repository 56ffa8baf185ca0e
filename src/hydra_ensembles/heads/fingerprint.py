"""Short names for a model and for a data set that change when their content does.

A ranking remembers both, and a journal of unfinished work is taken up again only where both still agree.
"""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from ..batches import Batches, Inputs, iterate
from ..model.clip import DualEncoder
from ..model.ensemble import Ensemble
from ..schema import to_plain


def model_fingerprint(model: Ensemble | DualEncoder) -> str:
    """SHA-256 over the configuration and every parameter: same on every device, other in another dtype.

    Metadata (labels, history, calibration) does not count: it changes no logit.
    """
    digest = hashlib.sha256(json.dumps(to_plain(model.config), sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def data_fingerprint(batches: Batches, name: str = "data") -> str:
    """SHA-256 over all samples and labels, in their order; see `DataFingerprint`.

    Args:
        batches: Batches as the rest of the library takes them; a generator is used up.
        name: What to call the data in an error message.
    """
    fingerprint = DataFingerprint()
    for inputs, labels in iterate(batches, name):
        fingerprint.update(inputs, labels)
    return fingerprint.hexdigest()


class DataFingerprint:
    """The fingerprint of data that is read batch by batch for another purpose anyway.

    Order, values, shapes and dtypes of the samples count. Where the batches are cut does not, as long as
    that leaves the samples as they are (padding to the longest of a batch does not).
    """

    def __init__(self) -> None:
        self.samples = 0
        self._digests: dict[str, Any] = {}
        self._layouts: dict[str, list[Any]] = {}

    def update(self, inputs: Inputs, labels: Tensor | None) -> None:
        """Take in one batch, as `read_batch` returns it."""
        tensors = {"inputs": inputs} if isinstance(inputs, Tensor) else {f"inputs.{key}": inputs[key] for key in inputs}
        if labels is not None:
            tensors["labels"] = labels
        for key, tensor in tensors.items():
            self._add(key, tensor)
        self.samples += len(next(iter(tensors.values())))

    def hexdigest(self) -> str:
        """The fingerprint of everything taken in so far."""
        parts = [[key, self._digests[key].hexdigest()] for key in sorted(self._digests)]
        return hashlib.sha256(json.dumps([self.samples, parts]).encode()).hexdigest()

    def _add(self, key: str, tensor: Tensor) -> None:
        """Append to the stream of one field; a change of layout is written into the stream."""
        digest = self._digests.setdefault(key, hashlib.sha256())
        layout = [str(tensor.dtype), list(tensor.shape[1:])]
        if self._layouts.get(key) != layout:
            self._layouts[key] = layout
            digest.update(json.dumps([self.samples, layout]).encode())
        digest.update(tensor_bytes(tensor))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, whatever its device, dtype and strides."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
