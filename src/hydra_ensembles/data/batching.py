"""Batches ready for a model, with or without augmentation."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .._utils import require
from ..errors import ConfigError, DataError
from ..preprocessing import ImagePreprocessing, to_rgb
from ..training.recipe import RandAugment
from .dataset import hash_key, keyed_order

if TYPE_CHECKING:
    from PIL.Image import Image

Batch = tuple[Tensor, Tensor] | dict[str, Tensor]
Preprocess = Callable[[list[Any]], Tensor | Mapping[str, Tensor]]


class Labelled(Protocol):
    """Anything with a length that gives `(item, label)` by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]: ...


@dataclass(eq=False)
class BatchLoader:
    """Batches of a data set; `batches` makes one and says what the settings mean."""

    dataset: Labelled
    preprocess: Preprocess
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    num_workers: int = 0
    drop_last: bool = False
    epoch: int = 0
    stream: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.batch_size < 1 or self.num_workers < 0:
            got = f"{self.batch_size} and {self.num_workers}"
            raise DataError(f"batch_size must be at least 1, num_workers 0 (none) or more; got {got}")

    def __len__(self) -> int:
        whole = len(self.dataset) / self.batch_size
        return math.floor(whole) if self.drop_last else math.ceil(whole)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order and random augmentations the next pass has."""
        self.epoch = epoch

    def set_stream(self, stream: int | None) -> None:
        """Choose one of many sequences of epochs, each with orders and random augmentations of its own.

        This is how members that train on the same object come to see different batches: `finetune` gives each a
        stream, made of the recipe's seed and the member's number. None is the sequence of `seed` alone.
        """
        self.stream = stream

    def __iter__(self) -> Iterator[Batch]:
        """Start a pass over the data."""
        seed = self.seed if self.stream is None else hash_key(self.seed, self.stream)
        count = len(self.dataset)
        order = keyed_order(count, seed, self.epoch).tolist() if self.shuffle else list(range(count))
        starts = range(0, len(self) * self.batch_size, self.batch_size)
        loader: DataLoader[Any] = DataLoader(
            _WithPosition(self.dataset),  # type: ignore[arg-type]
            batch_sampler=[order[start : start + self.batch_size] for start in starts],
            collate_fn=partial(_collate, self.preprocess, (seed, self.epoch)),
            num_workers=self.num_workers,
            # the seeds of the workers shall not be drawn from the global generator
            generator=torch.Generator().manual_seed(hash_key(seed, self.epoch)),
        )
        return iter(loader)


Batches = BatchLoader
"""The name of `BatchLoader` in earlier releases."""


def batches(
    dataset: Labelled,
    preprocess: Preprocess,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    num_workers: int = 0,
    drop_last: bool = False,
) -> BatchLoader:
    """Make batches of a data set.

    The result can be iterated any number of times. Every pass over the same epoch is the same, in order and
    in the random augmentations of `preprocess` (as far as they draw from torch's CPU generator), whatever the
    number of workers; `set_epoch` moves on. The state of torch's generators is left as it was. Where members are
    ranked or trained on it, each has orders and augmentations of its own (`set_stream`).

    Args:
        dataset: Gives `(item, label)` by position.
        preprocess: Turns a list of items into a tensor `[B, ...]` or a mapping of such tensors: a model's
            preprocessing, a `TrainTransform`, or any function.
        batch_size: Items a batch; the last one may be smaller.
        shuffle: Whether each epoch has an order of its own.
        seed: Decides order and augmentations.
        num_workers: Worker processes that read and preprocess; 0 does it in this one.
        drop_last: Leave out a last batch that is not full.

    Returns:
        An iterable with a length that yields `(inputs, labels)`, or, where `preprocess` gives a mapping, that
        mapping with `labels` added; labels are `[B]` integers.

    Raises:
        DataError: A setting is out of range; while iterating, what `preprocess` gives has the wrong length.
    """
    return BatchLoader(dataset, preprocess, batch_size, shuffle, seed, num_workers, drop_last)


@dataclass(frozen=True)
class _WithPosition:
    dataset: Labelled

    def __getitem__(self, index: int) -> tuple[int, Any, int]:
        item, label = self.dataset[index]
        return index, item, int(label)


def _collate(preprocess: Preprocess, key: tuple[int, int], entries: Sequence[tuple[int, Any, int]]) -> Batch:
    positions, items, labels = zip(*entries, strict=True)
    # Only the CPU generator is seeded and put back: `torch.manual_seed` would also reset the generators
    # of the GPUs, and with them the dropout of the model that is being trained.
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(hash_key(*key, positions[0]))
    try:
        inputs = preprocess(list(items))
    finally:
        torch.set_rng_state(state)
    targets = torch.tensor(labels, dtype=torch.int64)  # [B]
    for tensor in inputs.values() if isinstance(inputs, Mapping) else [inputs]:
        if len(tensor) != len(targets):
            raise DataError(f"preprocess made {len(tensor)} rows of {len(targets)} items; it must keep one row an item")
    return {**inputs, "labels": targets} if isinstance(inputs, Mapping) else (inputs, targets)


_PAPERS = RandAugment(operations=2, magnitude=12)
_Resampling = Literal["nearest", "bilinear", "bicubic"]


@dataclass(frozen=True)
class TrainTransform:
    """Random resized crop, random flip, optionally RandAugment, then normalisation.

    The defaults are the paper's fine-tuning transform for ImageNet-1K; for CIFAR-100 it leaves RandAugment
    out (`rand_augment=None`). Draws from torch's CPU generator alone.

    Attributes:
        size: Height and width of the result.
        crop_scale: Smallest and largest share of the image's area that a crop may take.
        flip_probability: Probability of mirroring left and right.
        rand_augment: Settings of RandAugment, or `None`.
        mean: Mean of each channel, subtracted last.
        std: Standard deviation of each channel, divided by last.
        interpolation: How the crop is resized.
    """

    size: tuple[int, int] = (224, 224)
    crop_scale: tuple[float, float] = (0.08, 1.0)
    flip_probability: float = 0.5
    rand_augment: RandAugment | None = _PAPERS
    mean: tuple[float, ...] = ImagePreprocessing.mean
    std: tuple[float, ...] = ImagePreprocessing.std
    interpolation: _Resampling = "bilinear"

    def __post_init__(self) -> None:
        """Check every range."""
        crop, three = self.crop_scale, len(self.mean) == len(self.std) == 3
        for name, valid, accepted in (
            ("size", len(self.size) == 2 and min(self.size) > 0, "a positive height and width"),
            ("crop_scale", len(crop) == 2 and 0 < crop[0] <= crop[1] <= 1, "0 < smallest <= largest <= 1"),
            ("flip_probability", 0 <= self.flip_probability <= 1, "in [0, 1]"),
            ("mean", three, "three entries, as std"),
            ("std", three and min(self.std) > 0, "three positive entries"),
            ("interpolation", self.interpolation in get_args(_Resampling), f"one of {get_args(_Resampling)}"),
        ):
            if not valid:
                raise ConfigError(f"{name} must be {accepted}, got {getattr(self, name)!r}")

    @classmethod
    def matching(cls, preprocessing: ImagePreprocessing, **changes: Any) -> Self:
        """Take size, mean and standard deviation from a model's preprocessing."""
        settings = {"size": preprocessing.size, "mean": preprocessing.mean, "std": preprocessing.std}
        return cls(**{**settings, **changes})

    def __call__(self, images: "Image | Sequence[Image]") -> Tensor:
        """Transform PIL images into a tensor `[B, 3, height, width]`, each image with draws of its own."""
        batch = list(images) if isinstance(images, Sequence) else [images]
        return torch.stack([self._pipeline(to_rgb(image)) for image in batch])

    @cached_property
    def _pipeline(self) -> Any:
        transforms = require("torchvision.transforms.v2", extra="data")
        mode = transforms.InterpolationMode[self.interpolation.upper()]
        augment = self.rand_augment
        return transforms.Compose(
            [
                transforms.RandomResizedCrop(self.size, scale=self.crop_scale, interpolation=mode),
                transforms.RandomHorizontalFlip(self.flip_probability),
                *([] if augment is None else [transforms.RandAugment(augment.operations, augment.magnitude)]),
                transforms.ToImage(),
                transforms.ToDtype(torch.float32, scale=True),
                transforms.Normalize(list(self.mean), list(self.std)),
            ]
        )
