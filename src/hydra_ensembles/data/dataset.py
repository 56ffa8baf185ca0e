"""Data sets of labelled images and texts, their subsets and splits, and batches of them for a model."""

import copy
import io
import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from .._utils import STEP, library, mixed
from ..batches import a_few, same_names
from ..errors import CheckpointError, DataError
from ..files import read_file
from ..preprocessing import ImagePreprocessing, to_grey, to_rgb
from ..settings import Checked, PositiveShare, Share, Whole, require, short

if TYPE_CHECKING:
    from PIL.Image import Image

Item = TypeVar("Item")
Picture: TypeAlias = "Image"
Text = str | tuple[str, str]
LabelArray = npt.NDArray[np.int64]

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
CollatedBatch = tuple[Tensor, Tensor] | dict[str, Tensor]
Preprocess = Callable[[list[Any]], Tensor | Mapping[str, Tensor]]

UNLABELLED = -1
"""Label of an item that has none; only data sets loaded with `labels="optional"` hold it."""


@dataclass(frozen=True)
class Rows(Generic[Item]):
    """A source that reads each item on access."""

    count: int
    read: Callable[[int], Item]

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

    def __init__(
        self,
        source: Any,
        labels: npt.ArrayLike,
        class_names: Sequence[str] = (),
        name: str = "data",
        rows: npt.ArrayLike | None = None,
    ) -> None:
        """Wrap a source with a label for each of its rows, restricted to `rows` in the order given (default: all)."""
        self.name = name
        self.class_names = tuple(map(str, class_names))
        self._source = source.to_numpy() if hasattr(source, "iloc") else source  # pandas
        self._source_labels = _whole(labels, f"labels of {name}")
        found, classes = self._source_labels, len(self.class_names)
        if len(found) != len(source):
            raise DataError(f"{name}: {len(source)} items but {len(found)} labels; give one label per item")
        if len(found) and not UNLABELLED <= found.min() <= found.max() < (classes or np.inf):
            accepted = f"there are {classes} class names" if classes else "they start at 0"
            raise DataError(f"{name} has labels from {found.min()} to {found.max()}, but {accepted}")
        self.rows: LabelArray = np.arange(len(source)) if rows is None else _whole(rows, f"rows of {name}")
        self.labels: LabelArray = found[self.rows]
        for array in (self.rows, self.labels, found):
            array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Item, int]:
        """Read the item at a position and its label; negative positions count from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} items, position {index} is outside it")
        return self._source[int(self.rows[index])], int(self.labels[index])

    def __iter__(self) -> Iterator[tuple[Item, int]]:
        return (self[index] for index in range(len(self)))

    @property
    def labelled(self) -> bool:
        """Whether every item has a label."""
        return bool((self.labels >= 0).all())

    def select(self, indices: npt.ArrayLike | Iterable[int], name: str | None = None) -> Self:
        """Return a data set of the items at these positions, in this order, or of those where a mask is True."""
        chosen = np.array(list(indices) if isinstance(indices, Iterator) else indices)
        chosen = np.flatnonzero(chosen) if chosen.dtype == bool else _whole(chosen, f"positions in {self.name}")
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(self):
            raise DataError(f"{self.name} has {len(self)} items, got positions {chosen.min()} to {chosen.max()}")
        return type(self)(self._source, self._source_labels, self.class_names, name or self.name, self.rows[chosen])

    def relabel(self, new_labels: dict[int, int], class_names: Sequence[str]) -> Self:
        """Map every label that occurs to a new one, with class names in the new order."""
        if missing := sorted(set(self.labels.tolist()) - set(new_labels)):
            raise DataError(f"{self.name}: no new label given for labels {missing}")
        labels = [new_labels.get(int(label), UNLABELLED) for label in self._source_labels]
        return type(self)(self._source, labels, class_names, self.name, self.rows)

    def with_classes(self, class_names: Sequence[str]) -> Self:
        """The same items with classes numbered in the order of these names, such as a model's `metadata.labels`."""
        numbers = {UNLABELLED: UNLABELLED, **same_names(self.class_names, class_names)}
        unknown = [label for label in np.unique(self.labels).tolist() if label not in numbers]
        if unknown:
            lacking = a_few([self.class_names[label] if self.class_names else str(label) for label in unknown])
            way = "rename them, or leave their items out (data.only_classes)"
            raise DataError(f"{self.name} has the classes {lacking}, not among {a_few(class_names)}; {way}")
        return self.relabel(numbers, class_names)


def _whole(values: Any, what: str) -> LabelArray:
    """Flatten to int64; raise for values that would have to be rounded."""
    try:
        array = np.array(values).reshape(-1)
        whole = array.astype(np.int64)
        if (whole != array).any():
            raise ValueError("a value is not a whole number")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise DataError(f"{what} must be whole numbers, got {short(values)} ({error})") from error
    return whole


class ImageDataset(Dataset[Picture]):
    """Images (PIL, always RGB) with labels."""

    kind = "image"


class TextDataset(Dataset[Text]):
    """Strings, or pairs of strings, with labels."""

    kind = "text"


AnyDataset = ImageDataset | TextDataset
SomeDataset = TypeVar("SomeDataset", bound=Dataset[Any])


def decode_image(content: bytes, where: str) -> "Image":
    """Decode the bytes of an image file to RGB (the first of several frames); an error names `where`."""
    pillow = library("PIL.Image", extra="data")
    try:
        image = pillow.open(io.BytesIO(content))
        image.load()  # Pillow reads lazily; a truncated file must fail here, where its name is known
        return to_rgb(image)
    except (OSError, SyntaxError, ValueError, struct.error, pillow.DecompressionBombError) as error:
        raise DataError(f"{where} cannot be decoded as an image: {error}; repair or remove it") from error


def read_image(path: Path, where: str | None = None) -> "Image":
    """Read an image file as RGB; a `DataError` if it is missing or no image."""
    try:
        content = read_file(path)
    except CheckpointError as error:
        raise DataError(f"image file {error}") from error
    return decode_image(content, where or f"image file {path}")


def images_below(folder: Path) -> list[Path]:
    """List the images below a folder at any depth, recognised by suffix, sorted by path; hidden ones are left out."""
    found = (file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
    shown = [file for file in found if not any(map(is_litter, file.relative_to(folder).parts))]
    return sorted(shown, key=lambda file: file.relative_to(folder).parts)


def is_litter(name: str) -> bool:
    """Whether a file or folder of this name is litter: hidden, or added to archives by macOS."""
    return name.startswith((".", "__MACOSX"))


# --- subsets and splits ----------------------------------------------------------------------------------


def subset(dataset: SomeDataset, n: int, seed: int, stratified: bool = False) -> SomeDataset:
    """Draw `n` items without replacement; they keep their order, and the same seed draws the same items.

    With `stratified`, the proportions of the classes are kept. A `DataError` if there are fewer than `n` items.
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


def split(
    dataset: SomeDataset, fractions: float | Sequence[float], seed: int, stratified: bool = False
) -> tuple[SomeDataset, ...]:
    """Split into disjoint parts; the items of each keep their order, and the same seed gives the same parts.

    One fraction gives two parts, that one and the rest; several give a part each, and must not add up to more than one
    (a `DataError`). With `stratified`, every class is split in these proportions.
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


def without_classes(dataset: SomeDataset, classes: Collection[Any], relabel: bool = False) -> SomeDataset:
    """Leave out the items of some classes, given by name or number; with `relabel`, number the others from zero."""
    left_out = _class_numbers(dataset, classes)
    if relabel:
        return only_classes(dataset, [one for one in _all_classes(dataset) if one not in left_out], relabel=True)
    return dataset.select(~np.isin(dataset.labels, left_out))


def only_classes(dataset: SomeDataset, classes: Sequence[Any], relabel: bool = False) -> SomeDataset:
    """Keep the items of some classes, given by name or number; with `relabel`, number them in the order given."""
    kept = _class_numbers(dataset, classes)
    chosen = dataset.select(np.isin(dataset.labels, kept))
    if not relabel:
        return chosen
    names = [dataset.class_names[number] if dataset.class_names else str(number) for number in kept]
    return chosen.relabel({old: new for new, old in enumerate(kept)}, names)


def keyed_order(count: int, *key: int) -> LabelArray:
    """Return a permutation of `0..count-1` that depends only on the key: the same on every machine and version.

    Positions are sorted by their hashes. Published results depend on it: subsets, splits and batches use this order.
    """
    with np.errstate(over="ignore"):
        steps = np.arange(1, count + 1, dtype=np.uint64) * STEP
        return np.argsort(mixed(steps + np.uint64(hash_key(*key))), kind="stable").astype(np.int64)


def hash_key(*key: int) -> int:
    """Hash integers (a seed, an epoch, a position) to one 64-bit integer."""
    state = 0
    for part in key:
        state = int(mixed(np.array([(state ^ part) & ((1 << 64) - 1)], dtype=np.uint64) + STEP)[0])
    return state


def _groups(dataset: Dataset[Any], seed: int, stratified: bool) -> list[LabelArray]:
    """Positions in the order in which they are drawn: all in one group, or one group per class."""
    order = keyed_order(len(dataset), seed)
    if not stratified:
        return [order]
    labels = dataset.labels[order]
    return [order[labels == label] for label in np.unique(labels)]


def _joined(dataset: SomeDataset, groups: list[LabelArray]) -> SomeDataset:
    return dataset.select(np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *groups])))


def _all_classes(dataset: Dataset[Any]) -> list[int]:
    return list(range(len(dataset.class_names))) or np.unique(dataset.labels[dataset.labels >= 0]).tolist()


def _class_numbers(dataset: Dataset[Any], classes: Collection[Any]) -> list[int]:
    names = dataset.class_names
    numbers: dict[Any, int] = {name: names.index(name) for name in names} | {n: n for n in _all_classes(dataset)}
    if unknown := [entry for entry in classes if entry not in numbers]:
        raise DataError(f"{dataset.name} has no classes {unknown}; it has {list(names) or list(numbers)}")
    return [numbers[entry] for entry in classes]


# --- batches ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class BatchLoader:
    """Batches of a data set: an iterable with a length that yields `(inputs, labels)`, labels `[B]` integers.

    If `preprocess` returns a mapping, that mapping is yielded with `labels` added. Every pass over the same epoch
    (`set_epoch`) is identical, in order and in the random augmentations of `preprocess` (if they draw from torch's CPU
    generator), for any number of workers; the state of torch's generators is not changed. Each member that is ranked or
    trained on the loader has its own order and augmentations (`set_stream`).

    Attributes:
        dataset: Returns `(item, label)` by position.
        preprocess: Turns a list of items into a tensor `[B, ...]` or a mapping of such tensors: a model's
            preprocessing, a `TrainTransform`, or any function.
        batch_size: Samples per batch; the last one may have fewer, or is left out with `drop_last`.
        shuffle: Whether each epoch has its own order.
        seed: Seed for order and augmentations.
        num_workers: Worker processes that read and preprocess; with 0 the main process does both.
    """

    dataset: Any
    preprocess: Preprocess
    batch_size: int = 64
    shuffle: bool = False
    seed: int = 0
    num_workers: int = 0
    drop_last: bool = False
    epoch: int = field(default=0, init=False)
    stream: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.batch_size = require("batch_size", self.batch_size, Whole)

    def __len__(self) -> int:
        batches = len(self.dataset) / self.batch_size
        return math.floor(batches) if self.drop_last else math.ceil(batches)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order and the random augmentations of the next pass."""
        self.epoch = epoch

    def set_stream(self, stream: int | None) -> None:
        """Choose one of many sequences of epochs, one for each trained member; None depends on `seed` alone."""
        self.stream = stream

    def with_classes(self, class_names: Sequence[str]) -> Self:
        """Return the same batches with classes numbered in the order of these names, see `Dataset.with_classes`."""
        if not isinstance(self.dataset, Dataset):
            kind = type(self.dataset).__name__
            raise DataError(f"a {kind} cannot be renumbered; let it number its classes as in {a_few(class_names)}")
        other = copy.copy(self)
        other.dataset = self.dataset.with_classes(class_names)
        return other

    def __iter__(self) -> Iterator[CollatedBatch]:
        seed = self.seed if self.stream is None else hash_key(self.seed, self.stream)
        count, size = len(self.dataset), self.batch_size
        order = keyed_order(count, seed, self.epoch).tolist() if self.shuffle else list(range(count))
        positions = [order[start : start + size] for start in range(0, len(self) * size, size)]
        loader: DataLoader[Any] = DataLoader(
            _Pass(self.dataset, self.preprocess, (seed, self.epoch)),  # type: ignore[arg-type]
            batch_size=None,
            sampler=positions,
            collate_fn=_identity,
            num_workers=self.num_workers,
            # Without it, DataLoader draws the workers' base seed from the global generator.
            generator=torch.Generator().manual_seed(hash_key(seed, self.epoch)),
        )
        return iter(loader)


batches = BatchLoader
"""Make batches of a data set; see `BatchLoader`."""


@dataclass(frozen=True)
class _Pass:
    """The batches of one pass over the data, indexed by the positions of their samples."""

    dataset: Any
    preprocess: Preprocess
    key: tuple[int, int]

    def __getitem__(self, positions: list[int]) -> CollatedBatch:
        items, labels = zip(*(self.dataset[position] for position in positions), strict=True)
        # Seed and restore only the CPU generator: `torch.manual_seed` would also reset the generators of the
        # GPUs, and with them the dropout of the model that is being trained.
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(hash_key(*self.key, positions[0]))
        try:
            inputs = self.preprocess(list(items))
        finally:
            torch.set_rng_state(state)
        targets = torch.from_numpy(np.asarray(labels).reshape(len(labels)))  # [B]; some data sets give arrays [1]
        return {**inputs, "labels": targets} if isinstance(inputs, Mapping) else (inputs, targets)


def _identity(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class TrainTransform(Checked):
    """Random resized crop, random flip, optionally RandAugment, then the normalisation of a model's preprocessing.

    The defaults are the paper's fine-tuning transform for ImageNet-1K; for CIFAR-100 the paper omits RandAugment
    (`rand_augment=None`). Draws only from torch's CPU generator.

    Attributes:
        preprocessing: Size, interpolation, mean and standard deviation.
        crop_scale: Smallest and largest share of the image's area that a crop may take.
        flip_probability: Probability of mirroring left and right.
        rand_augment: Operations and magnitude of RandAugment, or None.
    """

    preprocessing: ImagePreprocessing
    crop_scale: tuple[PositiveShare, PositiveShare] = (0.08, 1.0)
    flip_probability: Share = 0.5
    rand_augment: tuple[int, int] | None = (2, 12)

    def __call__(self, images: "Sequence[Image]") -> Tensor:
        """Transform PIL images into a tensor `[B, channels, height, width]`, each image with its own random draws."""
        convert = to_grey if len(self.preprocessing.mean) == 1 else to_rgb
        return torch.stack([self._pipeline(convert(image)) for image in images])

    @cached_property
    def _pipeline(self) -> Any:
        transforms, like = library("torchvision.transforms.v2", extra="data"), self.preprocessing
        interpolation = transforms.InterpolationMode(like.interpolation)
        steps = [
            transforms.RandomResizedCrop(like.size, scale=self.crop_scale, interpolation=interpolation),
            transforms.RandomHorizontalFlip(self.flip_probability),
            *([] if self.rand_augment is None else [transforms.RandAugment(*self.rand_augment)]),
            transforms.ToImage(),
            transforms.ToDtype(torch.float32, scale=True),
            transforms.Normalize(list(like.mean), list(like.std)),
        ]
        return transforms.Compose(steps)
