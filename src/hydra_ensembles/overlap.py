"""Find samples that two sets share but should not, by their values.

A set used twice makes metrics meaningless: ID data given as OOD data have an AUROC of 0.5, and validation data that
were trained on are predicted too well. Clear mistakes are refused, other overlaps give a warning.

Sets used earlier are recognised by marks: digests of a few of their samples, stored with what was fitted on them.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset, TensorDataset

from ._distributed import with_batches
from ._utils import warn
from .batches import Batches, Inputs, first_epoch, read_batch
from .errors import DataError

Keys = npt.NDArray[np.int64]
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer types by the bytes of a floating-point type
_COPIES = 0.05  # share of samples that may be copies of others, as short texts are, without a warning
_ROWS = 256  # samples hashed at a time
MARKS = 1024  # samples by which a set is recognised; 64 in older files
_LOOKED_AT, _AT_ONCE = 256, 32  # training items read again for marks, and how many per batch
FITTED_MOST = 0.5  # largest share of samples fitted before that may set a threshold, with a warning
_ENOUGH = 3  # recognised marks from which on chance is an unlikely explanation


def sample_keys(inputs: Inputs) -> Keys:
    """A hash for each sample `[B]`, equal for equal values; for texts independent of padding on the right.

    That needs the attention mask. A text padded on the left has another key for each length. One-dimensional entries
    next to the inputs, such as row numbers, are ignored.
    """
    if isinstance(inputs, Tensor):
        return _keys(inputs)
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is not None:
        return _keys(ids if mask is None or mask.shape != ids.shape else ids * (mask != 0))
    names = [name for name in sorted(inputs) if inputs[name].dim() > 1] or sorted(inputs)
    return np.sum([_keys(inputs[name]) for name in names], axis=0, dtype=np.int64)


def _keys(values: Tensor) -> Keys:
    """Sums `[B]` of the values, reinterpreted as integers, times an odd factor per position, modulo 2^64."""
    rows = torch.view_as_real(values) if values.is_complex() else values.detach()
    rows = (rows[:, None] if rows.dim() == 1 else rows.flatten(1)).contiguous()  # [B, n]
    if rows.is_floating_point() and rows.element_size() in _BITS:
        rows = rows.view(_BITS[rows.element_size()])
    mixing = _mixed if values.dtype in (torch.float64, torch.complex128) else Tensor.long
    factors = _factors(rows.shape[1]).to(rows.device)
    sums = [(mixing(some) * factors).sum(1) for some in rows.split(_ROWS)]
    return np.asarray(torch.cat(sums).cpu().numpy(), dtype=np.int64)


def _mixed(bits: Tensor) -> Tensor:
    """Mix bits of float64 numbers, one to one: sums would lose high ones where low ones are zero, as in 1 and 255."""
    bits = (bits ^ (bits >> 32 & 0xFFFFFFFF)) * 0x1E3779B97F4A7C15
    return bits ^ (bits >> 32 & 0xFFFFFFFF)


@lru_cache(maxsize=8)
def _factors(count: int) -> Tensor:
    return torch.from_numpy((np.random.PCG64(0).random_raw(count) | 1).view(np.int64))


def names_of(keys: Keys) -> list[str]:
    """Keys as stored in files: 16 hexadecimal digits each."""
    return [f"{key:016x}" for key in keys.view(np.uint64).tolist()]


def with_smallest_hashes(keys: Keys) -> Keys:
    """The keys by which a set is recognised: the 1,024 distinct keys with the smallest hashes (a min-hash).

    They are a uniform draw from the distinct samples, and the marks of a union follow from those of its parts.
    """
    different = np.unique(keys)
    return different[np.argsort(splitmix64(different.view(np.uint64)))[:MARKS]]


def splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijective hash of 64-bit integers: SplitMix64, Steele et al. 2014."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def marks_of(keys: Keys) -> tuple[str, ...]:
    """The marks of a set as stored in files."""
    return tuple(names_of(with_smallest_hashes(keys)))


class FittedSet(NamedTuple):
    """What is stored about a set used for fitting: marks of some of its samples, and its size."""

    marks: tuple[str, ...] = ()
    samples: int = 0


def union_of(sets: Sequence[FittedSet]) -> FittedSet:
    """The union of sets that fitted the same thing: its marks, and its estimated number of distinct samples.

    Each set's share of the union's marks estimates its share of the union, and so the size of the union (a min-hash),
    rather too large than too small.
    """
    names = np.array([int(name, 16) for name in {name for one in sets for name in one.marks}], dtype=np.uint64)
    marks = marks_of(names.view(np.int64))
    shares = [(one.samples, len(set(marks).intersection(one.marks)) / len(marks)) for one in sets if one.marks]
    return FittedSet(marks, max((round(samples / share) for samples, share in shares if share), default=0))


class Reused(NamedTuple):
    """The share of a new set that is also in a fitted set, and the number of recognised marks."""

    share: float
    recognised: int
    by_few: bool  # too few to rule out chance, though each stands for many samples if the fitted set is large

    @property
    def mostly(self) -> bool:
        """Whether more than half is reused, judging by three marks or more, or by marks of more than half the set."""
        return not self.by_few and self.share > FITTED_MOST

    def __str__(self) -> str:
        return about(self.share) + (f" (judging by only {self.recognised} of them)" if self.by_few else "")


def reused_of(keys: Keys, fitted: FittedSet) -> Reused:
    """Estimate the share of a new set, given by its keys, that is also in a set used for fitting.

    The marks estimate which share of the fitted set is in the new one, and its size converts that to samples. If a
    share f of the fitted set is in the new one, all of its n marks are missed with probability (1 - f)^n: 1,000 of
    300,000 fitted samples in 3 of 100 cases with 1,024 marks, and in 81 with the 64 marks of older files. Copies in the
    fitted set count, so its share is rather over- than underestimated. Samples are compared by their values as the
    model receives them: augmented samples, and those of another size or dtype, do not match.
    """
    recognised = len(set(fitted.marks).intersection(names_of(keys)))
    samples = len(np.unique(keys))
    share = min(1.0, recognised / len(fitted.marks) * fitted.samples / samples) if recognised else 0.0
    return Reused(share, recognised, recognised < _ENOUGH and recognised <= FITTED_MOST * samples)


def about(share: float) -> str:
    """Format an estimated share above 0."""
    return f"about {100 * share:.0f} %" if share >= 0.01 else "less than 1 %"


def warn_if_fitted(name: str, keys: Keys, fitted: Mapping[str, FittedSet]) -> float | None:
    """Warn if samples of an evaluated set were used to make the model; `fitted` maps what was done to the set used.

    Returns the largest share of the set's samples that was used for any of these; None if there are no marks.
    """
    found = {use: reused_of(keys, fitted_set) for use, fitted_set in fitted.items() if fitted_set.marks}
    remarks = [f"{reused} {use}" for use, reused in found.items() if reused.share]
    if remarks:
        remark = f"of the samples of {name}, {' and '.join(remarks)}"
        warn(f"{remark}: the numbers look better than on new data; evaluate on other samples")
    return max((reused.share for reused in found.values()), default=None)


class Known(NamedTuple):
    """A source of samples, and their keys if it is in memory."""

    source: Any
    keys: Keys | None

    @classmethod
    def of(cls, batches: Batches | None) -> "Known":
        """Describe a source without reading it from disk."""
        return cls(batches, keys_in_memory(batches))


def keys_in_memory(batches: Batches | None) -> Keys | None:
    """Keys of a source in memory that is read whole: batches in a list, or a loader of a `TensorDataset`; else None."""
    if isinstance(batches, list | tuple) and batches:
        return np.concatenate([sample_keys(read_batch(batch, labelled=False)[0]) for batch in batches])
    data = _read_whole(batches)
    in_memory = type(batches) is DataLoader and type(data) is TensorDataset and len(data)
    return sample_keys(data.tensors[0]) if in_memory else None


def trained_set(batches: Batches) -> FittedSet:
    """What is stored about training data: marks of samples in memory, or of some items of a data set read whole.

    Empty for other sources, and if these items cannot be read: finished training must not fail for this. Images that a
    loader augments at random differ in every pass, and are not recognised.
    """
    keys, data = keys_in_memory(batches), _read_whole(batches)
    if keys is not None:
        return FittedSet(marks_of(keys), len(keys))
    if _places(data) is None:
        return FittedSet()
    rows = np.unique(np.linspace(0, len(data) - 1, _LOOKED_AT).astype(int)).tolist()
    turns = [rows[start : start + _AT_ONCE] for start in range(0, len(rows), _AT_ONCE)]
    try:
        with first_epoch(batches, 0):
            drawn = (read_batch(batch, "train", labelled=False)[0] for batch in _drawn(batches, data, turns))
            read = list(map(sample_keys, drawn))
    except Exception:  # user data may raise anything
        return FittedSet()
    return FittedSet(marks_of(np.concatenate(read)), len(data)) if read else FittedSet()


def _drawn(batches: Any, data: Any, turns: list[list[int]]) -> Iterator[Any]:
    """Batches of these rows, made as the source makes its own (by its workers if any); empty for unknown sources."""
    if isinstance(batches, DataLoader):
        yield from with_batches(batches, turns) if batches.batch_sampler is not None else ()
    elif preprocess := getattr(batches, "preprocess", None):
        yield from ((preprocess([data[row][0] for row in turn]),) for turn in turns)


def _read_whole(batches: Any) -> Any:
    """The data set that a source reads, or is; None if a sampler may select from it."""
    if isinstance(batches, DataLoader):
        usual = type(batches.sampler) in (SequentialSampler, RandomSampler)
        if not usual or type(batches.batch_sampler) not in (BatchSampler, NoneType):
            return None
    return getattr(batches, "dataset", batches)


def _places(data: Any) -> list[Any] | None:
    """Identifiers of the items of a data set: files (torchvision), or data set and row; None for others."""
    if isinstance(data, Subset):
        inner = _places(data.dataset)
        return None if inner is None else [inner[row] for row in data.indices]
    if isinstance(data, list | tuple) or not all(hasattr(type(data), name) for name in ("__len__", "__getitem__")):
        return None
    if any(kind.__module__.startswith("torchvision.") for kind in type(data).__mro__):  # others call anything `imgs`
        files = getattr(data, "imgs", ())  # for ImageFolder: path and label
        if len(files) == len(data):
            return list(files)
    return [(id(data), row) for row in range(len(data))]


def require_unlike(name: str, id_keys: Keys, ood: Mapping[str, Keys]) -> None:
    """Refuse OOD sets that consist of ID samples or equal another set; warn of partial overlap and single samples."""
    earlier: dict[str, Keys] = {}
    for title, keys in ood.items():
        shared = int(np.isin(keys, id_keys).sum())
        same = [other for other, theirs in earlier.items() if np.array_equal(np.sort(keys), np.sort(theirs))]
        if shared == len(keys) or same:
            which = name if shared == len(keys) else same[0]
            raise DataError(f"{title} has the same samples as {which}, all {len(keys)}; give other data, or none")
        if shared:
            warn(f"{shared} of {len(keys)} samples of {title} are also samples of {name}; leave them out of one")
        warn_of_one_sample(title, len(keys))
        earlier[title] = keys


def warn_of_one_sample(title: str, samples: int) -> None:
    """Warn of an OOD set with a single sample."""
    if samples == 1:
        warn(f"{title} has one sample: whether it is detected says nothing about others; give more")


def warn_of_copies(name: str, samples: int, different: int, why: str) -> None:
    """Warn of a set in which many samples are copies of others; `why` says why that matters."""
    again = samples - different
    if again > _COPIES * samples:
        warn(f"{again} of the {samples} samples of {name} are copies of others: {why}; give every sample once")


def warn_if_shared(name: str, data: Known, title: str, other: Known, why: str) -> None:
    """Warn if the set `title` shares samples with another; `why` says why that matters.

    Samples are compared by value if both sets are in memory. Otherwise items of data sets that are read whole are
    compared: by stored content (ours, see `shared_with`), by file, or by row of the same data set.
    """
    shared, looked_at = _in_common(data, other)
    if shared:
        some = " that were looked at" if data.keys is None or other.keys is None else ""
        warn(f"{shared} of {looked_at} samples of {title}{some} are also samples of {name}: {why}")


def _in_common(data: Known, other: Known) -> tuple[int, int]:
    """How many samples of `other` are also in `data`, out of how many compared; (0, 0) if unknown."""
    if data.keys is not None and other.keys is not None:
        return int(np.isin(other.keys, data.keys).sum()), len(other.keys)
    first, second = _read_whole(data.source), _read_whole(other.source)
    if hasattr(first, "shared_with") and hasattr(second, "shared_with"):
        return second.shared_with(first)
    known, looked_at = _places(first), _places(second)
    return (0, 0) if known is None or looked_at is None else (len({*known} & {*looked_at}), len(looked_at))
