"""The member logits of every set of an evaluation, and the file they are stored in."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from ..errors import DataError
from ..files import expanded, parse_json, write_atomically
from ..fingerprints import tensors_digest
from ..metrics.inputs import at_least_float32


class LabelledLogits(NamedTuple):
    """Member logits `[M, B, C]` of a set with labels `[B]`."""

    logits: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class MemberLogits:
    """The member logits of every set of one evaluation, before any temperature; OOD sets by group and name."""

    id: LabelledLogits
    ood: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    shift: Mapping[str, LabelledLogits] = field(default_factory=dict)

    def save(self, path: str | Path, dtype: torch.dtype = torch.float16) -> str:
        """Write one safetensors file, with logits in `dtype`, or in their own dtype if they overflow it.

        Half precision changes a metric in about its fourth digit. Returns the digest that is stored in the file.
        """
        tensors = {"id/logits": self.id.logits, "id/labels": self.id.labels}
        for group, sets in self.ood.items():
            tensors |= {f"ood/{group}/{name}": logits for name, logits in sets.items()}
        for name, (logits, labels) in self.shift.items():
            tensors |= {f"shift/logits/{name}": logits, f"shift/labels/{name}": labels}
        order = json.dumps(list(tensors))  # safetensors does not preserve order, and tables need it
        stored = {key: _stored(tensor, dtype) for key, tensor in tensors.items()}
        digest = tensors_digest(stored)
        write_atomically(expanded(path), to_bytes(stored, metadata={"order": order, "digest": digest}))
        return digest

    @classmethod
    def load(cls, path: str | Path) -> "MemberLogits":
        """Read what `save` wrote: half precision comes back as float32, float64 as it is.

        Raises:
            DataError: The file is missing, was changed, or holds something else.
        """
        return cls.read(expanded(path))[0]

    @classmethod
    def read(cls, path: Path, most: float = math.inf) -> tuple["MemberLogits", str]:
        """Read a file of at most `most` bytes; returns the logits and the digest of the content."""
        try:
            if not path.is_file():
                raise DataError("there is no such file")
            if path.stat().st_size > most:
                raise DataError(f"it has {path.stat().st_size} bytes, the samples of the evaluation need {most}")
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                order = parse_json(header.get("order", "[]").encode(), "the order of its tensors")
                listed = order if isinstance(order, list) else []
                keys = sorted(file.keys(), key=lambda key: listed.index(key) if key in listed else len(listed))
                tensors = {key: file.get_tensor(key) for key in keys}
            digest = tensors_digest(tensors)
            if header.get("digest", digest) != digest:  # older files have none
                raise DataError("it was changed after it was written; evaluate again with keep_logits=True")
            return cls._of_tensors(tensors), digest
        except (OSError, ValueError, SafetensorError, MemoryError, RuntimeError) as error:  # torch maps the file
            raise DataError(f"{path} cannot be read as stored member logits: {error}") from error

    @classmethod
    def _of_tensors(cls, tensors: Mapping[str, Tensor]) -> "MemberLogits":
        """Rebuild the sets from tensors named as in `save`."""

        def logits_of(key: str) -> Tensor:
            logits = tensors.get(key)
            if logits is None or logits.ndim != 3 or not logits.is_floating_point():
                fault = "missing" if logits is None else f"{logits.dtype} {list(logits.shape)}, not logits [M, B, C]"
                raise DataError(f"{key!r} is {fault}; it has {sorted(tensors)}")
            return at_least_float32(logits)

        def labelled(key: str, labels: str) -> LabelledLogits:
            logits = logits_of(key)
            targets = tensors.get(labels)
            if targets is None or targets.shape != logits.shape[1:2] or targets.is_floating_point():
                raise DataError(f"{labels!r} needs a whole number for each of the {logits.shape[1]} samples of {key!r}")
            return LabelledLogits(logits, targets)

        ood: dict[str, dict[str, Tensor]] = {}
        shift: dict[str, LabelledLogits] = {}
        id_set = labelled("id/logits", "id/labels")
        for key in tensors:
            part, _, path = key.partition("/")
            group, _, name = path.partition("/")  # a name may contain slashes
            if part == "ood":
                ood.setdefault(group, {})[name] = logits_of(key)
            elif part == "shift" and group == "logits":
                shift[name] = labelled(key, f"shift/labels/{name}")
        return cls(id_set, ood, shift)


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast logits to `dtype` unless they overflow; labels are kept. A contiguous copy, as safetensors requires."""
    smaller = tensor.to(dtype) if tensor.is_floating_point() else tensor
    stored = smaller if bool(torch.isfinite(smaller).all()) else tensor
    return stored.cpu().clone(memory_format=torch.contiguous_format)
