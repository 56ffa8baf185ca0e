"""Batches of images with the texts that belong to them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError


@dataclass(frozen=True)
class PairBatch:
    """Images (or their features), texts and perhaps classes, as many of each; still where the loader put them."""

    images: Any
    texts: Any
    labels: Tensor | None

    def __len__(self) -> int:
        return _count(self.texts)


def read_pairs(raw: Any, name: str, index: int = 0) -> PairBatch:
    """Take `(images, texts, labels)` or `(images, texts)` apart.

    Raises:
        DataError: Something else, or not as many images as texts, or as labels.
    """
    where = f"batch {index} of {name}"
    if not isinstance(raw, list | tuple) or len(raw) not in (2, 3):
        size = f" with {len(raw)} parts" if isinstance(raw, list | tuple) else ""
        raise DataError(
            f"{where} is a {type(raw).__name__}{size}; expected (images, texts, labels), or (images, texts) where "
            "every pair stands alone"
        )
    images, texts = raw[0], raw[1]
    if isinstance(texts, str):
        raise DataError(f"the texts of {where} are one string; give a list of strings, one per image")
    texts = list(texts) if isinstance(texts, tuple) else texts
    counts = {"images": _count(images), "texts": _count(texts)}
    labels = raw[2] if len(raw) == 3 else None
    if labels is not None:
        labels = torch.as_tensor(labels)
        if labels.dim() != 1 or labels.is_floating_point():
            raise DataError(f"labels in {where} must be whole numbers [B], got {labels.dtype} {list(labels.shape)}")
        counts["labels"] = len(labels)
    if len(set(counts.values())) > 1 or not counts["texts"]:
        raise DataError(f"{where} has {_listed(counts)}; every image needs one text, and one label where there are any")
    return PairBatch(images, texts, labels)


def pair_content(raw: Any, name: str, index: int = 0) -> dict[str, Tensor]:
    """The tensors of a batch by name, for its fingerprint; strings as their bytes, pictures as a hash of theirs."""
    batch = read_pairs(raw, name, index)
    content: dict[str, Tensor] = {} if batch.labels is None else {"labels": batch.labels}
    for side, values in (("images", batch.images), ("texts", batch.texts)):
        if isinstance(values, Tensor):
            content[side] = values
        elif isinstance(values, Mapping):
            content |= {f"{side}.{key}": value for key, value in values.items()}
        else:
            parts = [value if isinstance(value, str) else _described(value) for value in values]
            content[side] = torch.frombuffer(bytearray(json.dumps(parts).encode()), dtype=torch.uint8)
    return content


def _described(picture: Any) -> list[Any]:
    """What tells a PIL image from others; of anything else, which no model reads, its type."""
    if not callable(getattr(picture, "tobytes", None)):
        return [type(picture).__name__]
    size, mode = getattr(picture, "size", None), getattr(picture, "mode", None)
    return [str(size), str(mode), hashlib.sha256(picture.tobytes()).hexdigest()]


def _count(values: Any) -> int:
    if isinstance(values, Mapping):
        return len(next(iter(values.values()))) if values else 0
    return len(values)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())
