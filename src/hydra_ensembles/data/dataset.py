"""Data sets of labelled images and texts, their subsets and splits."""

import hashlib
import io
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset as TorchDataset

from .._utils import require, warn
from ..arguments import checked
from ..classes import a_few, same_names
from ..errors import CheckpointError, DataError, StorageError
from ..files import read_file
from ..overlap import splitmix64
from ..preprocessing import to_rgb
from ..schema import short

if TYPE_CHECKING:
    from PIL.Image import Image

Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)
Picture: TypeAlias = "Image"
Text = str | tuple[str, str]
LabelArray = npt.NDArray[np.int64]

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_BESIDE = (".csv", ".db", ".ini", ".json", ".md", ".txt", ".xml", ".yaml", ".yml")  # expected next to images
LOOKED_AT = 1000  # about how many items `shared_with` looks for in the other set
UNLABELLED = -1
"""Label of an item that has none; only data sets loaded with `labels="optional"` hold it."""


class Items(Protocol[Item_co]):
    """Anything with a length that returns an item by position, such as a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Item_co: ...


@dataclass(frozen=True)
class Rows(Generic[Item]):
    """A source that reads each item on access."""

    count: int
    read: Callable[[int], Item]
    stored: Callable[[int], bytes | Path | None] | None = None  # an item's stored bytes or file, if known

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int, /) -> Item:
        return self.read(row)


class Dataset(TorchDataset[tuple[Item, int]], Generic[Item]):
    """Items with integer labels, read one at a time from a source.

    A subset is another `Dataset` over the same source, so selecting rows copies no data. Use the subclasses
    `ImageDataset` and `TextDataset`.

    Attributes:
        name: What reports and error messages call the data set.
        class_names: Names of the classes, in label order; empty if they are not known.
        labels: Label of every item, `[N]`; `-1` if an item has none.
        rows: Row of the source behind every item, `[N]`.
    """

    kind: ClassVar[Literal["image", "text"]]

    @checked
    def __init__(
        self,
        source: Items[Item],
        labels: npt.ArrayLike,
        class_names: Sequence[str] = (),
        name: str = "data",
        rows: npt.ArrayLike | None = None,
    ) -> None:
        """Wrap a source with a label for each of its rows, restricted to `rows` in the order given (default: all).

        Raises:
            DataError: The labels do not fit the source or the class names.
        """
        readable = hasattr(type(source), "__len__") and hasattr(type(source), "__getitem__")
        if not readable or getattr(source, "ndim", 1) == 0 or isinstance(source, str | bytes | dict):
            raise DataError(f"{name}: items need a length and positions, as a list has; got {short(source)}")
        self.name = name
        self.class_names = tuple(map(str, class_names))
        self._source = source.to_numpy() if hasattr(source, "iloc") else source  # type: ignore[attr-defined] # pandas
        self._source_labels = self._whole(labels, "labels")
        self._check_labels()
        self.rows: LabelArray = np.arange(len(source)) if rows is None else self._positions(rows, len(source))
        self.labels: LabelArray = self._source_labels[self.rows]
        for array in (self.rows, self.labels, self._source_labels):
            array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Item, int]:
        """Read the item at a position and its label; negative positions count from the end."""
        if not hasattr(type(index), "__index__"):
            raise DataError(f"{self.name}: a position is a whole number, got {short(index)}; for several use select()")
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} items, position {index} is outside it")
        return self._source[int(self.rows[index])], int(self.labels[index])

    def __iter__(self) -> Iterator[tuple[Item, int]]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self)} items, {len(self.class_names)} classes)"

    @property
    def labelled(self) -> bool:
        """Whether every item has a label."""
        return bool((self.labels >= 0).all())

    def shared_with(self, other: "Dataset[Any]") -> tuple[int, int]:
        """Count items that are also in another set: `(shared, checked)`, on a sample of about `LOOKED_AT` items.

        Compares all rows if both share a source, else stored bytes (re-encoded images differ), skipping unstored items.
        """
        if self._source is other._source:
            return int(np.isin(self.rows, other.rows).sum()), len(self)
        indices = range(0, len(self), max(1, len(self) // LOOKED_AT))
        looked_at = {stored for index in indices if (stored := self._stored(index)) is not None}
        sizes = {_size(stored) for stored in looked_at}
        digests = {_content(stored) for stored in looked_at}
        shared = set[Any]()
        for index in range(len(other)):
            stored = other._stored(index)
            if stored is not None and _size(stored) in sizes:  # quicker to find out than the content
                shared.add(_content(stored))
        return len(shared & digests), len(digests)

    def _stored(self, index: int) -> bytes | Path | Text | None:
        """Stored bytes, file or text of an item; None if unknown."""
        source, row = self._source, int(self.rows[index])
        if isinstance(source, Rows) and source.stored is not None:
            return source.stored(row)
        item: Any = source[row] if self.kind == "text" else None
        return item

    @checked
    def select(self, indices: npt.ArrayLike | Iterable[int], name: str | None = None) -> Self:
        """Return a data set of the items at these positions, in this order, or of those where a mask is True."""
        rows = self.rows[self._positions(indices, len(self))]
        return type(self)(self._source, self._source_labels, self.class_names, name or self.name, rows)

    @checked
    def relabel(self, new_labels: dict[int, int], class_names: Sequence[str]) -> Self:
        """Map every label that occurs to a new one, with class names in the new order."""
        missing = sorted(set(self.labels.tolist()) - set(new_labels))
        if missing:
            raise DataError(f"{self.name}: no new label given for labels {missing}")
        labels = [new_labels.get(int(label), UNLABELLED) for label in self._source_labels]
        return type(self)(self._source, labels, class_names, self.name, self.rows)

    @checked
    def with_classes(self, class_names: Sequence[str]) -> Self:
        """Return the same items with classes numbered in the order of these names, such as a model's `metadata.labels`.

        Raises:
            DataError: A class that occurs is not among these names.
        """
        numbers = {UNLABELLED: UNLABELLED, **same_names(self.class_names, class_names)}
        unknown = [label for label in np.unique(self.labels).tolist() if label not in numbers]
        if unknown:
            lacking = a_few([self.class_names[label] if self.class_names else str(label) for label in unknown])
            way = "rename them, or leave their items out (data.only_classes)"
            raise DataError(f"{self.name} has the classes {lacking}, not among {a_few(class_names)}; {way}")
        return self.relabel(numbers, class_names)

    def _positions(self, indices: npt.ArrayLike | Iterable[int], count: int) -> LabelArray:
        positions = self._whole(indices, "positions", np.arange(count))
        outside = positions[(positions < 0) | (positions >= count)]
        if len(outside):
            raise DataError(f"{self.name} has {count} items; positions must lie in 0..{count - 1}, got {outside[0]}")
        return positions

    def _whole(self, values: Any, name: str, masked: LabelArray | None = None) -> LabelArray:
        """Flatten to int64; raise for values that are not numbers or would have to be rounded."""
        try:
            array = np.array(values)
            array = masked[array] if masked is not None and array.dtype == bool else array
            whole = array.reshape(-1).astype(np.int64)
            if array.size and (array.dtype.kind not in "iufb" or (whole != array.reshape(-1)).any()):
                raise ValueError("a value is not a whole number")
        except (TypeError, ValueError, OverflowError, RuntimeError, IndexError) as error:
            raise DataError(f"{self.name}: {name} must be whole numbers, got {short(values)} ({error})") from error
        return whole

    def _check_labels(self) -> None:
        labels, count, classes = self._source_labels, len(self._source), len(self.class_names)
        if len(labels) != count:
            raise DataError(f"{self.name}: {count} items but {len(labels)} labels; give one label per item")
        if count and labels.min() < UNLABELLED:
            raise DataError(f"{self.name}: label {labels.min()} in row {int(labels.argmin())}; labels start at 0")
        if count and classes and labels.max() >= classes:
            row = f"label {labels.max()} in row {int(labels.argmax())}"
            raise DataError(f"{self.name}: {row}, but there are only {classes} class names; give them all")


def _size(stored: bytes | Path | Text) -> int:
    """Size of an item, available without reading it: equal items have equal sizes."""
    if isinstance(stored, Path):
        return stored.stat().st_size if stored.is_file() else -1
    return len(stored) if isinstance(stored, bytes | str) else sum(map(len, stored))


def _content(stored: bytes | Path | Text) -> bytes | Text:
    """Identity of an item: the text itself, or a digest of the bytes."""
    if isinstance(stored, Path):
        stored = read_file(stored, most=None) if stored.is_file() else b""
    return hashlib.blake2b(stored, digest_size=16).digest() if isinstance(stored, bytes) else stored


class ImageDataset(Dataset[Picture]):
    """Images (PIL, always RGB) with labels."""

    kind = "image"


class TextDataset(Dataset[Text]):
    """Strings, or pairs of strings, with labels."""

    kind = "text"


AnyDataset = ImageDataset | TextDataset
SomeDataset = TypeVar("SomeDataset", bound=Dataset[Any])


def decode_image(content: bytes, where: str, formats: Sequence[str] | None = None) -> "Image":
    """Decode the bytes of an image file to RGB; errors name `where` if the bytes are no image or truncated.

    Only `formats` (Pillow's names) are tried; None tries all.
    """
    pillow = require("PIL.Image", extra="data")
    try:
        image = pillow.open(io.BytesIO(content), formats=formats)
        image.load()  # Pillow reads lazily; a truncated file must fail here, where its name is known
        if getattr(image, "is_animated", False) and image.format != "MPO":  # MPO frames all show the same scene
            warn("an image file has several frames or pages; only the first is read")
        return to_rgb(image)
    except (OSError, SyntaxError, ValueError, EOFError, struct.error) as error:
        why = "unknown format" if isinstance(error, pillow.UnidentifiedImageError) else error  # hides an address
        size = len(content)
        raise DataError(f"{where} cannot be decoded as an image ({size} bytes): {why}; repair or remove it") from error


def read_image(path: Path, where: str | None = None, formats: Sequence[str] | None = None) -> "Image":
    """Read an image file as RGB; a `DataError` if it is missing or no image. `formats` as in `decode_image`."""
    try:
        content = read_file(path, most=None)
    except CheckpointError as error:
        raise DataError(f"image file {error}") from error
    return decode_image(content, where or f"image file {path}", formats)


def is_litter(name: str) -> bool:
    """Whether a file or folder of this name is litter: hidden, or added to archives by macOS."""
    return name.startswith((".", "__MACOSX"))


def called_image(file: Path) -> bool:
    """Whether a file has an image suffix."""
    return file.suffix.lower() in IMAGE_SUFFIXES


def is_image(file: Path) -> bool:
    """Whether this is a regular file with an image suffix, and not litter."""
    return called_image(file) and not is_litter(file.name) and file.is_file()


def files_below(folder: Path, without: Path | None = None) -> list[Path]:
    """List the regular files below a folder, at any depth, sorted by path; skips litter files and litter folders.

    Links to folders are followed, and each folder is read once. `without`, a resolved path, is a folder to leave out.
    An unreadable folder raises an error and broken links give a warning, because their files would be missing.
    """
    files, lost = list[Path](), list[Path]()
    seen = set() if without is None or without == folder.resolve() else {without}
    for path, folders, names in os.walk(folder, onerror=_unreadable, followlinks=True):
        parent = Path(path)
        if parent.resolve() in seen:  # a link to a parent folder, or to one already read
            folders.clear()
            continue
        seen.add(parent.resolve())
        folders[:] = sorted(name for name in folders if not is_litter(name))
        present = [parent / name for name in names if not is_litter(name)]
        files += filter(Path.is_file, present)
        lost += (file for file in present if file.is_symlink() and not file.exists())
    if lost:
        warn(f"broken links below {folder} are left out: {len(lost)}, the first {lost[0]}")
    return sorted(files, key=lambda file: file.relative_to(folder).parts)


def _unreadable(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # a class may have no folder
        raise StorageError(f"{error.filename} cannot be read ({error.strerror}); check the disk and the permissions")


def images_below(folder: Path) -> list[Path]:
    """List the images below a folder, recognised by suffix; warns about the files that are left out."""
    files = files_below(folder)
    warn_of_others(folder, files)
    return list(filter(called_image, files))


def warn_of_others(folder: Path, files: Iterable[Path]) -> None:
    """Warn about files whose suffix is not an image's but that may be images all the same."""
    kinds = Counter(file.suffix.lower() for file in files if not called_image(file))
    listed = ", ".join(f"{n} with {kind or 'no suffix'}" for kind, n in kinds.most_common() if kind not in _BESIDE)
    if listed:
        warn(f"files below {folder} are left out, because they have no image suffix: {listed}; convert them")


# --- subsets and splits ----------------------------------------------------------------------------------


@checked
def subset(dataset: SomeDataset, n: int, seed: int, stratified: bool = False) -> SomeDataset:
    """Draw `n` items without replacement; they keep their order, and the same seed draws the same items.

    Args:
        dataset: What to draw from.
        n: Number of items; a `DataError` if there are fewer.
        seed: Seed of the draw.
        stratified: Whether to keep the proportions of the classes.

    Examples:
        >>> from hydra_ensembles import data
        >>> texts = data.TextDataset(["good", "bad", "fine", "awful"], [1, 0, 1, 0], class_names=["no", "yes"])
        >>> sorted(data.subset(texts, 2, seed=0, stratified=True).labels.tolist())
        [0, 1]
    """
    if not 0 <= n <= len(dataset):
        raise DataError(f"cannot draw {n} items from {dataset.name}, which has {len(dataset)}; lower n")
    groups = _groups(dataset, seed, stratified)
    exact = [n * len(group) / max(len(dataset), 1) for group in groups]
    counts = [math.floor(share) for share in exact]
    order = sorted(range(len(groups)), key=lambda index: (counts[index] - exact[index], index))  # by remainder
    for index in order[: n - sum(counts)]:
        counts[index] += 1
    return _joined(dataset, [group[:count] for group, count in zip(groups, counts, strict=True)])


@checked
def split(
    dataset: SomeDataset, fractions: float | Sequence[float], seed: int, stratified: bool = False
) -> tuple[SomeDataset, ...]:
    """Split into disjoint parts; the items of each keep their order, and the same seed gives the same parts.

    One fraction gives two parts, that one and the rest; several give a part each, and must not add up to more than one
    (a `DataError`).

    Args:
        dataset: What to split.
        fractions: One fraction, or one for each part.
        seed: Seed of the split.
        stratified: Whether every class is split in these proportions.

    Examples:
        >>> from hydra_ensembles import data
        >>> texts = data.TextDataset(["good", "bad", "fine", "awful"], [1, 0, 1, 0], class_names=["no", "yes"])
        >>> half, rest = data.split(texts, 0.5, seed=0, stratified=True)
        >>> sorted(half.labels.tolist()), sorted(rest.labels.tolist())
        ([0, 1], [0, 1])
    """
    shares = [fractions, 1.0 - fractions] if isinstance(fractions, int | float) else list(fractions)
    if not shares or min(shares) < 0 or math.fsum(shares) > 1.0 + 1e-9:
        raise DataError(f"fractions must not be negative or add up to more than 1, got {fractions}")
    groups = _groups(dataset, seed, stratified)
    parts = []
    for start, stop in pairwise([0.0, *np.cumsum(shares).tolist()]):
        drawn = [group[cut_position(start, len(group)) : cut_position(stop, len(group))] for group in groups]
        parts.append(_joined(dataset, drawn))
    return tuple(parts)


def cut_position(fraction: float, count: int) -> int:
    """Where a fraction of `count` items ends, rounded to the nearest item (halves up)."""
    return min(count, math.floor(fraction * count + 0.5 + 1e-9))


@checked
def without_classes(dataset: SomeDataset, classes: Collection[Any], relabel: bool = False) -> SomeDataset:
    """Leave out the items of some classes, given by name or number.

    Args:
        dataset: What to choose from.
        classes: Names or numbers.
        relabel: Whether to number the remaining classes from zero; else labels and class names stay as they are.

    Examples:
        >>> from hydra_ensembles import data
        >>> texts = data.TextDataset(["good", "bad", "fine", "awful"], [1, 0, 1, 0], class_names=["no", "yes"])
        >>> [text for text, _ in data.without_classes(texts, ["no"])]
        ['good', 'fine']
    """
    left_out = _class_numbers(dataset, classes)
    chosen = dataset.select(np.flatnonzero(~np.isin(dataset.labels, left_out)))
    kept = [number for number in _all_classes(dataset) if number not in left_out]
    return _renumbered(chosen, kept) if relabel else chosen


@checked
def only_classes(dataset: SomeDataset, classes: Sequence[Any], relabel: bool = False) -> SomeDataset:
    """Keep the items of some classes, given by name or number.

    Args:
        dataset: What to choose from.
        classes: Names or numbers.
        relabel: Whether to number them in the order given; else labels and class names stay as they are.

    Examples:
        >>> from hydra_ensembles import data
        >>> texts = data.TextDataset(["good", "bad", "fine", "awful"], [1, 0, 1, 0], class_names=["no", "yes"])
        >>> data.only_classes(texts, ["yes"], relabel=True).class_names
        ('yes',)
    """
    kept = _class_numbers(dataset, classes)
    chosen = dataset.select(np.flatnonzero(np.isin(dataset.labels, kept)))
    return _renumbered(chosen, kept) if relabel else chosen


def keyed_order(count: int, *key: int) -> LabelArray:
    """Return a permutation of `0..count-1` that depends only on the key: the same on every machine and version.

    Positions are sorted by their hashes. Published results depend on it: subsets, splits and batches use this order.
    """
    with np.errstate(over="ignore"):
        steps = np.arange(1, count + 1, dtype=np.uint64) * _STEP
        return np.argsort(splitmix64(steps + np.uint64(hash_key(*key))), kind="stable").astype(np.int64)


def hash_key(*key: int) -> int:
    """Hash integers (a seed, an epoch, a position) to one 64-bit integer."""
    state = 0
    for part in key:
        state = int(splitmix64(np.array([(state ^ part) & _MASK], dtype=np.uint64) + _STEP)[0])
    return state


_MASK = (1 << 64) - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)


def _groups(dataset: Dataset[Any], seed: int, stratified: bool) -> list[LabelArray]:
    """Positions in the order in which they are drawn: all in one group, or one group per class."""
    order = keyed_order(len(dataset), seed)
    if not stratified:
        return [order]
    labels = dataset.labels[order]
    return [order[labels == label] for label in np.unique(labels)]


def _joined(dataset: SomeDataset, groups: list[LabelArray]) -> SomeDataset:
    return dataset.select(np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *groups])))


def _renumbered(dataset: SomeDataset, kept: list[int]) -> SomeDataset:
    names = [dataset.class_names[number] if dataset.class_names else str(number) for number in kept]
    return dataset.relabel({old: new for new, old in enumerate(kept)}, names)


def _all_classes(dataset: Dataset[Any]) -> list[int]:
    return list(range(len(dataset.class_names))) or np.unique(dataset.labels[dataset.labels >= 0]).tolist()


def _class_numbers(dataset: Dataset[Any], classes: Collection[Any]) -> list[int]:
    names = dataset.class_names
    numbers: dict[Any, int] = {name: names.index(name) for name in names} | {n: n for n in _all_classes(dataset)}
    unknown = [entry for entry in classes if not isinstance(entry, Hashable) or entry not in numbers]
    if unknown:
        raise DataError(f"{dataset.name} has no classes {unknown}; it has {list(names) or list(numbers)}")
    return [numbers[entry] for entry in classes]
