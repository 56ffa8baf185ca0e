"""Random training transforms for images."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import torch
from torch import Tensor

from .._utils import require
from ..errors import ConfigError
from ..preprocessing import to_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class ImageStatistics(Protocol):
    """What a model's preprocessing says of its input."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        ...

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel."""
        ...

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel."""
        ...


@dataclass(frozen=True)
class RandAugment:
    """Settings of RandAugment: this many random operations, each at this magnitude (of 31 steps)."""

    operations: int = 2
    magnitude: int = 12

    def __post_init__(self) -> None:
        """Check the ranges that torchvision accepts."""
        if self.operations < 1 or not 0 <= self.magnitude <= 30:
            raise ConfigError(
                "RandAugment needs at least one operation and a magnitude of 0..30, got "
                f"operations={self.operations}, magnitude={self.magnitude}"
            )


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
    rand_augment: RandAugment | None = RandAugment()
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: Literal["nearest", "bilinear", "bicubic"] = "bilinear"

    def __post_init__(self) -> None:
        """Check every range."""
        if len(self.size) != 2 or min(self.size) < 1:
            raise ConfigError(f"size must be a positive height and width, got {self.size}")
        if len(self.crop_scale) != 2 or not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ConfigError(f"crop_scale must be 0 < smallest <= largest <= 1, got {self.crop_scale}")
        if not 0 <= self.flip_probability <= 1:
            raise ConfigError(f"flip_probability must be in [0, 1], got {self.flip_probability}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ConfigError(f"mean and std must have three entries each, std positive; got {self.mean}, {self.std}")
        if self.interpolation not in ("nearest", "bilinear", "bicubic"):
            raise ConfigError(f"interpolation must be 'nearest', 'bilinear' or 'bicubic', got {self.interpolation!r}")

    @classmethod
    def matching(cls, preprocessing: ImageStatistics, **changes: Any) -> Self:
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
        steps = [
            transforms.RandomResizedCrop(self.size, scale=self.crop_scale, interpolation=mode),
            transforms.RandomHorizontalFlip(self.flip_probability),
        ]
        if self.rand_augment is not None:
            operations, magnitude = self.rand_augment.operations, self.rand_augment.magnitude
            steps.append(transforms.RandAugment(num_ops=operations, magnitude=magnitude))
        steps += [
            transforms.ToImage(),
            transforms.ToDtype(torch.float32, scale=True),
            transforms.Normalize(list(self.mean), list(self.std)),
        ]
        return transforms.Compose(steps)
