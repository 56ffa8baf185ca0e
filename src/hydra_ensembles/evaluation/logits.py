"""Member logits kept beside an evaluation, so that it can be made again on a CPU, or with other settings."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from .._utils import write_atomically
from ..errors import DataError


@dataclass(frozen=True, eq=False)
class LabelledLogits:
    """Member logits `[M, B, C]` of a set with labels `[B]`."""

    logits: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class MemberLogits:
    """The member logits of every set of one evaluation, before any temperature.

    Attributes:
        id: In-distribution set.
        ood: OOD sets by group and name, each `[M, B, C]`.
        shift: Labelled sets under distribution shift, by name.
    """

    id: LabelledLogits
    ood: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    shift: Mapping[str, LabelledLogits] = field(default_factory=dict)

    def save(self, path: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Write one safetensors file.

        Args:
            path: Where to.
            dtype: How logits are stored. Half precision moves a metric in about its fourth digit; logits too
                large for it are stored as they are.
        """
        tensors = {"id/logits": _stored(self.id.logits, dtype), "id/labels": self.id.labels}
        for group, sets in self.ood.items():
            tensors |= {f"ood/{group}/{name}": _stored(logits, dtype) for name, logits in sets.items()}
        for name, labelled in self.shift.items():
            tensors[f"shift/logits/{name}"] = _stored(labelled.logits, dtype)
            tensors[f"shift/labels/{name}"] = labelled.labels
        # the format takes contiguous tensors only, and no two that share memory
        stored = {key: value.cpu().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
        order = json.dumps(list(stored))  # the format itself keeps no order, and tables should
        write_atomically(Path(path), to_bytes(stored, metadata={"order": order}))

    @classmethod
    def load(cls, path: str | Path) -> "MemberLogits":
        """Read what `save` wrote: half precision comes back as float32, float64 as it is.

        Raises:
            DataError: The file is missing, damaged, or holds something else.
        """
        try:
            with safe_open(path, framework="pt") as file:
                order = json.loads((file.metadata() or {}).get("order", "[]"))
                keys = sorted(file.keys(), key=lambda key: order.index(key) if key in order else len(order))
                tensors = {key: file.get_tensor(key) for key in keys}
        except (OSError, ValueError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read as stored member logits: {error}") from error
        ood: dict[str, dict[str, Tensor]] = {}
        shift: dict[str, LabelledLogits] = {}
        try:
            for key, tensor in tensors.items():
                part, _, rest = key.partition("/")
                group, _, name = rest.partition("/")
                if part == "ood":
                    ood.setdefault(group, {})[name] = _loaded(tensor)
                elif part == "shift" and group == "logits":
                    shift[name] = LabelledLogits(_loaded(tensor), tensors[f"shift/labels/{name}"])
            return cls(LabelledLogits(_loaded(tensors["id/logits"]), tensors["id/labels"]), ood, shift)
        except KeyError as error:
            raise DataError(f"{path} holds no member logits: {error} is missing; found {sorted(tensors)}") from error


def _stored(logits: Tensor, dtype: torch.dtype) -> Tensor:
    converted = logits.to(dtype)
    return converted if bool(torch.isfinite(converted).all()) else logits


def _loaded(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
