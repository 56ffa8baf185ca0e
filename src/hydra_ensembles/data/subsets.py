"""Deterministic subsets and splits, the same on every machine and with every version of numpy.

The order in which items are drawn comes from a hash of the seed and the position (SplitMix64, integer
arithmetic only), not from a random generator whose stream a new release may change. Two consequences are
useful: with one seed, a smaller subset is contained in a larger one, and the parts of a split never overlap.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .dataset import Dataset, Labels

SomeDataset = TypeVar("SomeDataset", bound=Dataset[Any])

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # SplitMix64, Steele et al. 2014


def hash_key(*key: int) -> int:
    """Hash integers (a seed, an epoch, a position) to one 64-bit integer."""
    state = 0
    for part in key:
        mixed = _mix(np.array([(state ^ (part & _MASK)) & _MASK], dtype=np.uint64) + np.uint64(_STEP))
        state = int(mixed[0])
    return state


def keyed_order(count: int, *key: int) -> Labels:
    """Give a permutation of `0..count-1` that depends on nothing but the key."""
    with np.errstate(over="ignore"):
        steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)
        hashes = _mix(steps + np.uint64(hash_key(*key)))
    return np.argsort(hashes, kind="stable").astype(np.int64)


def subset(dataset: SomeDataset, n: int, seed: int, stratified: bool = False) -> SomeDataset:
    """Draw `n` items without replacement; they keep their order.

    Args:
        dataset: What to draw from.
        n: How many items.
        seed: Same seed, same items.
        stratified: Keep the class proportions (the remainder goes to the classes that it was taken from most).

    Raises:
        DataError: There are fewer than `n` items.
    """
    if not 0 <= n <= len(dataset):
        raise DataError(f"cannot draw {n} items from {dataset.name}, which has {len(dataset)}; lower n")
    if not stratified:
        return dataset.select(np.sort(keyed_order(len(dataset), seed)[:n]))
    groups = _groups(dataset, seed)
    exact = [n * len(group) / max(len(dataset), 1) for group in groups]
    counts = [math.floor(share) for share in exact]
    # Largest remainders first; ties go to the lower class.
    order = sorted(range(len(groups)), key=lambda index: (counts[index] - exact[index], index))
    for index in order[: n - sum(counts)]:
        counts[index] += 1
    return dataset.select(_joined([group[:count] for group, count in zip(groups, counts, strict=True)]))


def split(
    dataset: SomeDataset, fractions: float | Sequence[float], seed: int, stratified: bool = False
) -> tuple[SomeDataset, ...]:
    """Split into disjoint parts; the items of each keep their order.

    Args:
        dataset: What to split.
        fractions: One fraction gives two parts, that one and the rest; several give a part each, and must not
            add up to more than one.
        seed: Same seed, same parts.
        stratified: Split every class in these proportions.

    Raises:
        DataError: The fractions are not fractions.
    """
    shares = [fractions, 1.0 - fractions] if isinstance(fractions, (int, float)) else list(fractions)
    if not shares or min(shares) < 0 or math.fsum(shares) > 1.0 + 1e-9:
        raise DataError(f"fractions must not be negative nor add up to more than 1, got {fractions}")
    bounds = np.concatenate([[0.0], np.cumsum(shares)])
    parts: list[list[Labels]] = [[] for _ in shares]
    for group in _groups(dataset, seed) if stratified else [keyed_order(len(dataset), seed)]:
        cuts = [cut_position(float(bound), len(group)) for bound in bounds]
        for part, start, stop in zip(parts, cuts, cuts[1:], strict=False):
            part.append(group[start:stop])
    return tuple(dataset.select(_joined(part)) for part in parts)


def cut_position(fraction: float, count: int) -> int:
    """Where a fraction of `count` items ends, rounded to the nearest item (halves up)."""
    return min(count, math.floor(fraction * count + 0.5 + 1e-9))


def without_classes(dataset: SomeDataset, classes: Collection[str | int], relabel: bool = False) -> SomeDataset:
    """Leave out the items of some classes, given by name or number.

    Labels and class names stay as they are, unless `relabel` numbers the remaining classes from zero.

    Raises:
        DataError: A class does not exist.
    """
    left_out = _class_numbers(dataset, classes)
    kept = [number for number in _all_classes(dataset) if number not in left_out]
    return _with_classes(dataset, ~np.isin(dataset.labels, sorted(left_out)), kept, relabel)


def only_classes(dataset: SomeDataset, classes: Sequence[str | int], relabel: bool = False) -> SomeDataset:
    """Keep the items of some classes, given by name or number.

    Labels and class names stay as they are, unless `relabel` numbers the kept classes in the order given.

    Raises:
        DataError: A class does not exist.
    """
    numbers = _class_numbers(dataset, classes)
    return _with_classes(dataset, np.isin(dataset.labels, numbers), numbers, relabel)


def _with_classes(dataset: SomeDataset, mask: npt.NDArray[np.bool_], kept: list[int], relabel: bool) -> SomeDataset:
    chosen = dataset.select(np.flatnonzero(mask))
    if not relabel:
        return chosen
    names = [dataset.class_names[number] if dataset.class_names else str(number) for number in kept]
    return chosen.relabel({old: new for new, old in enumerate(kept)}, names)


def _all_classes(dataset: Dataset[Any]) -> list[int]:
    if dataset.class_names:
        return list(range(len(dataset.class_names)))
    return sorted(set(dataset.labels[dataset.labels >= 0].tolist()))


def _class_numbers(dataset: Dataset[Any], classes: Collection[str | int]) -> list[int]:
    known = {name: number for number, name in enumerate(dataset.class_names)}
    if isinstance(classes, str):
        raise DataError(f"classes must be a collection of names or numbers, got the string {classes!r}")
    unknown = [
        entry
        for entry in classes
        if (entry not in known if isinstance(entry, str) else entry not in _all_classes(dataset))
    ]
    if unknown:
        raise DataError(f"{dataset.name} has no classes {unknown}; it has {list(known) or _all_classes(dataset)}")
    return [known[entry] if isinstance(entry, str) else int(entry) for entry in classes]


def _groups(dataset: Dataset[Any], seed: int) -> list[Labels]:
    """Positions of each class, in the order in which they are drawn."""
    order = keyed_order(len(dataset), seed)
    labels = dataset.labels[order]
    return [order[labels == label] for label in np.unique(labels)]


def _joined(parts: list[Labels]) -> Labels:
    return np.sort(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
