"""Images that stay on the device as they were stored, and become inputs there: resized, augmented, normalised."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hydra_ensembles.data.dataset import ImageDataset

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SMALLEST_CROP = 0.7  # of the side, in training


class ImageSamples:
    """Labelled images `[N, 3, h, w]` in eight bits on a device."""

    def __init__(self, pixels: Tensor, labels: Tensor, size: int) -> None:
        self.pixels, self.labels, self.size = pixels, labels, size

    @classmethod
    def read(cls, dataset: ImageDataset, size: int, device: torch.device) -> "ImageSamples":
        """Decode a data set; where its images differ in size, all take that of the first."""
        first = dataset[0][0].size
        arrays = []
        for image, _ in dataset:
            arrays.append(np.asarray(image if image.size == first else image.resize(first)))
        pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
        return cls(pixels.to(device), torch.from_numpy(dataset.labels.copy()), size)

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: Sequence[int]) -> "ImageSamples":
        """Some of the samples, in this order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        return ImageSamples(self.pixels[index.to(self.pixels.device)], self.labels[index], self.size)

    def evaluation(self, batch_size: int) -> "ImageBatches":
        """Batches in order, as they are."""
        return ImageBatches(self, batch_size, augment=False)

    def training(self, batch_size: int) -> "ImageBatches":
        """Batches in random order: random crop and flip, drawn from torch's CPU generator."""
        return ImageBatches(self, batch_size, augment=True)


class ImageBatches:
    """Batches of inputs on the device and labels on the CPU; may be read again and again."""

    def __init__(self, samples: ImageSamples, batch_size: int, augment: bool) -> None:
        self.samples, self.batch_size, self.augment = samples, batch_size, augment

    def __len__(self) -> int:
        """Number of batches; in training, the last one is left out where it is not full."""
        count = len(self.samples)
        return max(count // self.batch_size, 1) if self.augment else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs `[B, 3, size, size]` and labels `[B]`."""
        samples, device = self.samples, self.samples.pixels.device
        order = torch.randperm(len(samples)) if self.augment else torch.arange(len(samples))
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            rows = order[start : start + self.batch_size]
            pixels = samples.pixels[rows.to(device)].float() / 255
            sized = augmented(pixels, samples.size) if self.augment else resized(pixels, samples.size)
            yield normalised(sized), samples.labels[rows]


def resized(images: Tensor, size: int) -> Tensor:
    """Images `[B, 3, h, w]` at `size` by `size`, bicubic."""
    return F.interpolate(images, (size, size), mode="bicubic", antialias=True, align_corners=False)


def augmented(images: Tensor, size: int) -> Tensor:
    """A random square of each image, maybe mirrored, at `size` by `size`; one draw for each image."""
    count = len(images)
    scale = SMALLEST_CROP + (1 - SMALLEST_CROP) * torch.rand(count)
    shift = (1 - scale) * (2 * torch.rand(2, count) - 1)  # of the centre, so that the square stays inside
    flip = torch.where(torch.rand(count) < 0.5, -1.0, 1.0)
    zero = torch.zeros(count)
    theta = torch.stack([torch.stack([scale * flip, zero, shift[0]], 1), torch.stack([zero, scale, shift[1]], 1)], 1)
    grid = F.affine_grid(theta.to(images.device), [count, 3, size, size], align_corners=False)  # [B, size, size, 2]
    return F.grid_sample(images, grid, mode="bicubic", padding_mode="reflection", align_corners=False)


def normalised(images: Tensor) -> Tensor:
    """Images in 0 to 1 as inputs of the backbone."""
    mean, std = (torch.tensor(values, device=images.device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (images.clamp(0, 1) - mean) / std
