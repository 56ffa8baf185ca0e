"""Batches ready for a model, with or without augmentation."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .._utils import library
from ..batches import a_few
from ..errors import ConfigError, DataError
from ..preprocessing import ImagePreprocessing, Interpolation, require_channels, to_grey, to_rgb
from ..settings import Checked, Positive, PositiveShare, Share, Whole, require, short
from .dataset import Dataset, Items, hash_key, keyed_order

if TYPE_CHECKING:
    from PIL.Image import Image

_TAKES = "it gets the items of a batch as a list and returns a tensor [B, ...], as torch.stack([one(x) for x in items])"
CollatedBatch = tuple[Tensor, Tensor] | dict[str, Tensor]
Preprocess = Callable[[list[Any]], Tensor | Mapping[str, Tensor]]


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

    dataset: Items[tuple[Any, Any]]
    preprocess: Preprocess
    batch_size: int = 64
    shuffle: bool = False
    seed: int = 0
    num_workers: int = 0
    drop_last: bool = False
    epoch: int = field(default=0, init=False)
    stream: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if isinstance(self.dataset, str | PathLike | Mapping) or not hasattr(type(self.dataset), "__getitem__"):
            got = f"a data set gives (item, class number) by position, got {short(self.dataset)}"
            raise DataError(f"{got}; data.load(path) reads one from a folder or a table")
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

    dataset: Items[tuple[Any, Any]]
    preprocess: Preprocess
    key: tuple[int, int]

    def __getitem__(self, positions: list[int]) -> CollatedBatch:
        items, labels = zip(*(_pair(self.dataset[position]) for position in positions), strict=True)
        # Seed and restore only the CPU generator: `torch.manual_seed` would also reset the generators of the
        # GPUs, and with them the dropout of the model that is being trained.
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(hash_key(*self.key, positions[0]))
        try:
            inputs = self.preprocess(list(items))
        except (TypeError, AttributeError) as error:
            raise DataError(f"preprocess failed on {len(items)} items ({error}); {_TAKES}") from error
        finally:
            torch.set_rng_state(state)
        targets = torch.tensor(labels, dtype=torch.int64)  # [B]
        for rows in inputs.values() if isinstance(inputs, Mapping) else [inputs]:
            if len(rows) != len(targets) or not isinstance(inputs, Tensor | Mapping):
                made = f"a {type(rows).__name__} of {len(rows)} rows from {len(targets)} items"
                raise DataError(f"preprocess made {made}; {_TAKES}")
        return {**inputs, "labels": targets} if isinstance(inputs, Mapping) else (inputs, targets)


def _pair(row: Any) -> tuple[Any, int]:
    """An item and its label; raises for anything else, such as a label that would have to be rounded."""
    try:
        item, label = row if isinstance(row, tuple | list) else ()
        number = int(label.item() if hasattr(label, "item") else label)  # also of an array [1], as MedMNIST has it
        if number != label and not isinstance(label, str):
            raise ValueError(f"the label is {short(label)}")
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"the data set gives {short(row)}, no (item, class number): {error}") from error
    return item, number


def _identity(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class TrainTransform(Checked):
    """Random resized crop, random flip, optionally RandAugment, then normalisation.

    The defaults are the paper's fine-tuning transform for ImageNet-1K; for CIFAR-100 the paper omits RandAugment
    (`rand_augment=None`). Draws only from torch's CPU generator.

    Attributes:
        size: Height and width of the result.
        crop_scale: Smallest and largest share of the image's area that a crop may take.
        flip_probability: Probability of mirroring left and right.
        rand_augment: Operations and magnitude of RandAugment, or None.
        mean, std: Mean and standard deviation of each channel, for the normalisation; one value each for grey images.
        interpolation: How crops are resized.
    """

    size: tuple[Whole, Whole] = (224, 224)
    crop_scale: tuple[PositiveShare, PositiveShare] = (0.08, 1.0)
    flip_probability: Share = 0.5
    rand_augment: tuple[int, int] | None = (2, 12)
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[Positive, ...] = (0.229, 0.224, 0.225)
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_channels(self.mean, self.std)
        if self.crop_scale[0] > self.crop_scale[1]:
            raise ConfigError(f"crop_scale must be 0 < smallest <= largest <= 1, got {self.crop_scale}")

    @classmethod
    def matching(cls, preprocessing: ImagePreprocessing, **changes: Any) -> Self:
        """Take size, mean, standard deviation and interpolation from a model's preprocessing."""
        names = ("size", "mean", "std", "interpolation")
        return cls(**{**{name: getattr(preprocessing, name) for name in names}, **changes})

    def __call__(self, images: "Image | Sequence[Image]") -> Tensor:
        """Transform PIL images into a tensor `[B, channels, height, width]`, each image with its own random draws."""
        batch = list(images) if isinstance(images, Sequence) else [images]
        convert = to_grey if len(self.mean) == 1 else to_rgb
        return torch.stack([self._pipeline(convert(image)) for image in batch])

    @cached_property
    def _pipeline(self) -> Any:
        transforms = library("torchvision.transforms.v2", extra="data")
        augment = self.rand_augment
        return transforms.Compose(
            [
                transforms.RandomResizedCrop(
                    self.size, scale=self.crop_scale, interpolation=transforms.InterpolationMode(self.interpolation)
                ),
                transforms.RandomHorizontalFlip(self.flip_probability),
                *([] if augment is None else [transforms.RandAugment(*augment)]),
                transforms.ToImage(),
                transforms.ToDtype(torch.float32, scale=True),
                transforms.Normalize(list(self.mean), list(self.std)),
            ]
        )
