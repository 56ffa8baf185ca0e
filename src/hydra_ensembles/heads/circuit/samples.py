"""The data of an extraction, read once and kept where it is evaluated."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..._utils import torch_seeded
from ...batches import Batches, begin_epoch, borrowed, iterate, move, require_labels
from ...errors import DataError
from ...model.config import PatchStemConfig
from ...model.ensemble import Ensemble
from ..fingerprint import DataFingerprint

IntArray = npt.NDArray[np.int64]
_Inputs = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True, eq=False)
class SampleGroup:
    """Samples whose inputs have one shape, so that they can share a batch whatever batches they came in.

    Texts keep the padding they came with: another one would be the same model on other inputs.

    Attributes:
        numbers: `[g]`, which sample each row is.
        inputs: Images `[g, channels, H, W]` or token ids `[g, T]`.
        attention_mask: `[g, T]` or None.
        token_type_ids: `[g, T]` or None.
    """

    numbers: IntArray
    inputs: Tensor
    attention_mask: Tensor | None
    token_type_ids: Tensor | None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.numbers)


@dataclass(frozen=True, eq=False)
class Samples:
    """All samples, numbered in the order they were read: ID first, then OOD.

    Attributes:
        groups: The samples by shape of their inputs.
        labels: `[n]`, -1 for OOD samples.
        id_count: Number of ID samples.
        ood_count: Number of OOD samples.
        group_of: `[n]`, index of the group of each sample.
        row_of: `[n]`, its row there.
        origin: `[n, 2]`, source (0 for ID, 1 for OOD) and batch each sample came from.
        fingerprint: Changes with any sample, label, or their order.
    """

    groups: tuple[SampleGroup, ...]
    labels: Tensor
    id_count: int
    ood_count: int
    group_of: IntArray
    row_of: IntArray
    origin: IntArray
    fingerprint: str

    def batch_of(self, sample: int) -> str:
        """Where a sample came from, for error messages."""
        source, batch = self.origin[sample]
        return f"batch {batch} of {_NAMES[source]}"


_NAMES = ("id_batches", "ood_batches")


def read_samples(model: Ensemble, id_batches: Batches, ood_batches: Batches | None, seed: int) -> Samples:
    """Read all batches, check them, and move them to the device and dtype of the model.

    PyTorch's random numbers and those of the sources start from `seed` meanwhile and are put back afterwards (see
    `reading_order`), so a shuffling loader gives the same samples again when an interrupted run is resumed, and on
    every rank.
    """
    pieces: dict[tuple[object, ...], list[tuple[IntArray, _Inputs]]] = {}
    labels: list[Tensor] = []
    origin: list[tuple[int, int]] = []
    fingerprints = []
    counts = []
    with torch_seeded(seed, model.device), ExitStack() as sources:
        for source, batches in enumerate((id_batches, ood_batches)):
            if batches is not None:
                sources.enter_context(borrowed(batches))
                begin_epoch(batches, 0, seed)
            fingerprint = DataFingerprint()
            start = len(origin)
            pairs = () if batches is None else iterate(batches, _NAMES[source], labelled=source == 0)
            for index, (inputs, given) in enumerate(pairs):
                known = require_labels(given, model.num_classes, _NAMES[source], index) if source == 0 else None
                fingerprint.update(inputs, known)
                parts = model.unpack(inputs, None, None)
                size = len(parts[0])
                numbers = np.arange(len(origin), len(origin) + size)
                pieces.setdefault(_shape(parts), []).append((numbers, _moved(parts, model)))
                labels.append(torch.full((size,), -1) if known is None else known.cpu())
                origin += [(source, index)] * size
            fingerprints.append(fingerprint.hexdigest())
            counts.append(len(origin) - start)
            if batches is not None and not counts[-1]:
                raise DataError(f"{_NAMES[source]} has no samples; check the loader")
    answers = torch.cat(labels)
    _require_two_classes(answers[: counts[0]])
    group_of, row_of = np.zeros(len(origin), np.int64), np.zeros(len(origin), np.int64)
    groups = tuple(_join(list_) for list_ in pieces.values())
    for index, group in enumerate(groups):
        group_of[group.numbers], row_of[group.numbers] = index, np.arange(len(group))
    return Samples(
        groups=groups,
        labels=answers.to(model.device),
        id_count=counts[0],
        ood_count=counts[1],
        group_of=group_of,
        row_of=row_of,
        origin=np.array(origin, np.int64),
        fingerprint="+".join(fingerprints if ood_batches is not None else fingerprints[:1]),
    )


def parts(count: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` that cover `count` items."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def tokens_of(model: Ensemble, group: SampleGroup) -> int:
    """Tokens of the samples of a group, prefix tokens included."""
    stem = model.config.stem
    if not isinstance(stem, PatchStemConfig):
        return group.inputs.shape[1]
    height, width = group.inputs.shape[2:]
    return stem.prefix_tokens + (height // stem.patch_size[0]) * (width // stem.patch_size[1])


def _shape(parts: _Inputs) -> tuple[object, ...]:
    return tuple(None if part is None else (part.dtype, *part.shape[1:]) for part in parts)


def _moved(parts: _Inputs, model: Ensemble) -> _Inputs:
    inputs, mask, segments = (None if part is None else move(part, model.device, model.dtype) for part in parts)
    assert isinstance(inputs, Tensor)
    return inputs, mask, segments  # type: ignore[return-value]


def _join(pieces: list[tuple[IntArray, _Inputs]]) -> SampleGroup:
    def column(index: int) -> Tensor | None:
        tensors = [inputs[index] for _, inputs in pieces]
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    inputs = column(0)
    assert inputs is not None
    numbers = np.concatenate([numbers for numbers, _ in pieces])
    return SampleGroup(numbers, inputs, column(1), column(2))


def _require_two_classes(labels: Tensor) -> None:
    if labels.min() == labels.max():
        raise DataError(
            f"all {len(labels)} samples of id_batches have the label {int(labels[0])}; a circuit needs samples of "
            "at least two classes"
        )
