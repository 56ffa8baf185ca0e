"""Finding samples that two sets have in common and should not, by their values.

A set given twice makes numbers that mean nothing: ID data as OOD data have an AUROC of 0.5, and validation data that
were trained on are predicted well. What cannot be meant is refused, the rest is warned of.

A set that is gone is known again by its marks: names of a few of its samples, which travel with what was fitted on it.
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

from ._distributed import drawing
from ._utils import warn
from .batches import Batches, Inputs, first_epoch, read_batch
from .errors import DataError

Keys = npt.NDArray[np.int64]
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers as wide as floating-point numbers of so many bytes
_COPIES = 0.05  # share of samples that may be copies of others, as short texts are, without a word
_ROWS = 256  # samples whose values are multiplied at a time
MARKS = 1024  # samples of a set that it is known again by; in older files, 64
_LOOKED_AT, _AT_ONCE = 256, 32  # items of training data that are read again to be marked, and how many together
FITTED_MOST = 0.5  # share of the samples that set a threshold that may have fitted the statistics, with a warning
_ENOUGH = 3  # marks that are known again, from which on their number is hardly chance


def sample_keys(inputs: Inputs) -> Keys:
    """A number for each sample `[B]`, the same where all values are; that of a text however far padded on the right.

    For that it takes the attention mask. A text that is padded on the left is another one with each length. One number
    for each sample beside its inputs, such as that of its row, does not count.
    """
    if isinstance(inputs, Tensor):
        return _keys(inputs)
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is not None:
        return _keys(ids if mask is None or mask.shape != ids.shape else ids * (mask != 0))
    names = [name for name in sorted(inputs) if inputs[name].dim() > 1] or sorted(inputs)
    return np.sum([_keys(inputs[name]) for name in names], axis=0, dtype=np.int64)


def _keys(values: Tensor) -> Keys:
    """Sums `[B]` of the values, seen as integers, each times an odd number of its place; int64 wraps around."""
    rows = torch.view_as_real(values) if values.is_complex() else values.detach()
    rows = (rows[:, None] if rows.dim() == 1 else rows.flatten(1)).contiguous()  # [B, n]
    if rows.is_floating_point() and rows.element_size() in _BITS:
        rows = rows.view(_BITS[rows.element_size()])
    factors = _factors(rows.shape[1]).to(rows.device)
    sums = [(some.long() * factors).sum(1) for some in rows.split(_ROWS)]
    return np.asarray(torch.cat(sums).cpu().numpy(), dtype=np.int64)


@lru_cache(maxsize=8)
def _factors(count: int) -> Tensor:
    return torch.from_numpy((np.random.PCG64(0).random_raw(count) | 1).view(np.int64))


def names_of(keys: Keys) -> list[str]:
    """Keys as files hold them: 16 hexadecimal digits each."""
    return [f"{key:016x}" for key in keys.view(np.uint64).tolist()]


def marked(keys: Keys) -> Keys:
    """Those of the keys that a set is known again by: of all different ones the 1,024 first when mixed.

    Mixed, keys are in no order that has to do with the samples (a min-hash): the marks are drawn evenly from the whole
    set, in whatever order and however often it has them, and marks of parts taken together give those of the whole.
    """
    different = np.unique(keys)
    return different[np.argsort(mixed(different.view(np.uint64)))[:MARKS]]


def mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Numbers in which nothing of the values is to be seen, each its own: SplitMix64, Steele et al. 2014."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def marks_of(keys: Keys) -> tuple[str, ...]:
    """The marks of a set as files hold them."""
    return tuple(names_of(marked(keys)))


class FittedSet(NamedTuple):
    """What is kept of a set that something was fitted on: marks of some of its samples, and how many it had."""

    marks: tuple[str, ...] = ()
    samples: int = 0


def together(sets: Sequence[FittedSet]) -> FittedSet:
    """What is kept of sets that fitted one thing: marks of all of them as of one, and how many different samples.

    Of the first when mixed of all samples, each set has its share of all, which tells their number (a min-hash). Where
    one has marks of a smaller part of its samples than another, that number, and so the share of a new set, is too
    large rather than too small.
    """
    names = np.array([int(name, 16) for name in {name for one in sets for name in one.marks}], dtype=np.uint64)
    marks = marks_of(names.view(np.int64))
    shares = [(one.samples, len(set(marks).intersection(one.marks)) / len(marks)) for one in sets if one.marks]
    return FittedSet(marks, max((round(samples / share) for samples, share in shares if share), default=0))


class Reused(NamedTuple):
    """How much of a new set is also in one that something was fitted on, and how many marks tell it."""

    share: float
    recognised: int
    by_few: bool  # so few that they may be there by chance, and stand for many samples where the fitted set is large

    @property
    def mostly(self) -> bool:
        """Whether it is more than a half, by three marks at least, or by marks that are more than a half themselves."""
        return not self.by_few and self.share > FITTED_MOST

    def __str__(self) -> str:
        return about(self.share) + (f", told by {self.recognised} of them alone," if self.by_few else "")


def reused_of(keys: Keys, fitted: FittedSet) -> Reused:
    """What of a new set, by the keys of its samples, is also in a set that something was fitted on.

    It is estimated: the marks tell which share of the fitted set is here, and its size how many samples that is. Where
    a share f of the fitted set is here, none of its n marks is, and nothing is said, with probability (1 - f)^n,
    however much of the new set that is: 1,000 of 300,000 fitted samples are passed over in 3 of 100 cases by 1,024
    marks, and in 81 by the 64 of files of before.

    Copies in the fitted set count, so that of such a set the share comes out too large rather than too small. Samples
    are known by their values as a model is given them: those that are augmented, or come in another size or dtype, are
    others.
    """
    recognised = len(set(fitted.marks).intersection(names_of(keys)))
    samples = len(np.unique(keys))
    share = min(1.0, recognised / len(fitted.marks) * fitted.samples / samples) if recognised else 0.0
    return Reused(share, recognised, recognised < _ENOUGH and recognised <= FITTED_MOST * samples)


def about(share: float) -> str:
    """An estimated share above 0 in words."""
    return f"about {100 * share:.0f} %" if share >= 0.01 else "less than 1 %"


def warn_if_fitted(name: str, keys: Keys, fitted: Mapping[str, FittedSet]) -> float | None:
    """Warn of a set that is measured on where samples of it made the model; `fitted` says, by deed, which did.

    The largest share of the samples of the set that had a part in one of these; None where there are no marks.
    """
    found = {deed: reused_of(keys, fitted_set) for deed, fitted_set in fitted.items() if fitted_set.marks}
    remarks = [f"{reused} {deed}" for deed, reused in found.items() if reused.share]
    if remarks:
        warn(
            f"of the samples of {name}, {' and '.join(remarks)}: numbers are then better than on new data; "
            "evaluate on others"
        )
    return max((reused.share for reused in found.values()), default=None)


class Known(NamedTuple):
    """A source of samples, and their keys where it lies in memory."""

    source: Any
    keys: Keys | None

    @classmethod
    def of(cls, batches: Batches | None) -> "Known":
        """What is known of a source that is not read."""
        return cls(batches, keys_at_hand(batches))


def keys_at_hand(batches: Batches | None) -> Keys | None:
    """Keys of a source that lies in memory and is read whole in every pass; None for any other.

    That is a list of batches, or a `DataLoader` over a `TensorDataset`, shuffled or not.
    """
    if isinstance(batches, list | tuple) and batches:
        return np.concatenate([sample_keys(read_batch(batch, labelled=False)[0]) for batch in batches])
    data = _read_whole(batches)
    in_memory = type(batches) is DataLoader and type(data) is TensorDataset and len(data)
    return sample_keys(data.tensors[0]) if in_memory else None


def trained_set(batches: Batches) -> FittedSet:
    """What is kept of training data: marks of those in memory, or of some items of a data set that is read whole.

    Nothing of other sources, nor where these items cannot be read: a training that did not need them is not lost for
    it. Images that a loader changes at random are others in every pass, and not known again.
    """
    keys, data = keys_at_hand(batches), _read_whole(batches)
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
    except Exception:  # whatever somebody's data may raise
        return FittedSet()
    return FittedSet(marks_of(np.concatenate(read)), len(data)) if read else FittedSet()


def _drawn(batches: Any, data: Any, turns: list[list[int]]) -> Iterator[Any]:
    """Batches of these rows, made as a source makes its own (where it has workers, by them); none of unknown ones."""
    if isinstance(batches, DataLoader):
        yield from drawing(batches, turns) if batches.batch_sampler is not None else ()
    elif preprocess := getattr(batches, "preprocess", None):
        yield from ((preprocess([data[row][0] for row in turn]),) for turn in turns)


def _read_whole(batches: Any) -> Any:
    """The data set that a source reads, or is; None where a sampler may choose from it."""
    if isinstance(batches, DataLoader) and (
        type(batches.sampler) not in (SequentialSampler, RandomSampler)
        or type(batches.batch_sampler) not in (BatchSampler, NoneType)
    ):
        return None
    return getattr(batches, "dataset", batches)


def _places(data: Any) -> list[Any] | None:
    """What tells the items of a data set apart: their files (torchvision), or the set and the row; None for others."""
    if isinstance(data, Subset):
        inner = _places(data.dataset)
        return None if inner is None else [inner[row] for row in data.indices]
    if isinstance(data, list | tuple) or not all(hasattr(type(data), name) for name in ("__len__", "__getitem__")):
        return None
    if any(kind.__module__.startswith("torchvision.") for kind in type(data).__mro__):  # others call anything `imgs`
        files = getattr(data, "imgs", ())  # of ImageFolder: path and label
        if len(files) == len(data):
            return list(files)
    return [(id(data), row) for row in range(len(data))]


def require_unlike(name: str, id_keys: Keys, ood: Mapping[str, Keys]) -> None:
    """Refuse OOD sets whose samples are all ID samples, or those of another set; warn of some, and of a single one."""
    earlier: dict[str, Keys] = {}
    for title, keys in ood.items():
        shared = int(np.isin(keys, id_keys).sum())
        same = [other for other, theirs in earlier.items() if np.array_equal(np.sort(keys), np.sort(theirs))]
        if shared == len(keys) or same:
            which = name if shared == len(keys) else same[0]
            raise DataError(
                f"{title} has the same samples as {which} (all {len(keys)} of them are there); OOD detection tells "
                "different data apart: give other data, or leave it out"
            )
        if shared:
            warn(f"{shared} of {len(keys)} samples of {title} are samples of {name}, too; leave them out of one")
        warn_of_one_sample(title, len(keys))
        earlier[title] = keys


def warn_of_one_sample(title: str, samples: int) -> None:
    """Warn of an OOD set that is none."""
    if samples == 1:
        warn(f"{title} has one sample: whether it is detected says nothing about others; give more")


def warn_of_copies(name: str, samples: int, different: int, why: str) -> None:
    """Warn of a set in which many of the samples are copies of others; `why` says what comes of it."""
    again = samples - different
    if again > _COPIES * samples:
        warn(
            f"{again} of the {samples} samples of {name} are copies of others, as from drawing with replacement: "
            f"{why}; give every sample once"
        )


def warn_if_shared(name: str, data: Known, title: str, other: Known, why: str) -> None:
    """Warn of a set, `title`, with samples of another; `why` says what comes of it.

    Samples are known by their values where both sets lie in memory. Else items are, of data sets that are read whole:
    by what is stored of them (ours, see `shared_with`), by their file, or by their row of one data set.
    """
    shared, looked_at = _in_common(data, other)
    if shared:
        some = " that were looked at" if data.keys is None or other.keys is None else ""
        warn(f"{shared} of {looked_at} samples of {title}{some} are samples of {name}, too: {why}")


def _in_common(data: Known, other: Known) -> tuple[int, int]:
    """How many of so many samples of another set are in a set, too; none where that is not known."""
    if data.keys is not None and other.keys is not None:
        return int(np.isin(other.keys, data.keys).sum()), len(other.keys)
    first, second = _read_whole(data.source), _read_whole(other.source)
    if hasattr(first, "shared_with") and hasattr(second, "shared_with"):
        shared: tuple[int, int] = second.shared_with(first)
        return shared
    known, looked_at = _places(first), _places(second)
    return (0, 0) if known is None or looked_at is None else (len({*known} & {*looked_at}), len(looked_at))
