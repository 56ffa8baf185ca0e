"""Samples of a set as a model takes them, in batches that can be read again and again; on a device where they fit."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hydra_ensembles.data.dataset import ImageDataset, TextDataset
from hydra_ensembles.errors import DataError
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.preprocessing import TextPreprocessing

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SMALLEST_CROP = 0.7  # of the side, in training
BUCKET = 32  # training batches whose texts are sorted by length together
TOKENISED_AT_ONCE = 128  # padded together, so few


class Samples(ABC):
    """Labelled inputs of any kind."""

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def batch(self, rows: Tensor, augment: bool) -> Any:
        """One batch, as models and trainings of the library take it."""

    def order(self, batch_size: int, training: bool) -> list[Tensor]:
        """The rows of every batch: all in order, or in random order drawn from torch's CPU generator.

        In training the last batch is left out where it is not full, unless it is the only one.
        """
        if not training:
            return list(torch.arange(len(self)).split(batch_size))
        return list(torch.randperm(len(self)).split(batch_size))[: max(len(self) // batch_size, 1)]


class SampleBatches:
    """Batches of samples: in order and as they are, or shuffled and augmented for training."""

    def __init__(self, samples: Samples, batch_size: int, training: bool = False) -> None:
        self.samples, self.batch_size, self.training = samples, batch_size, training

    def __len__(self) -> int:
        with torch.random.fork_rng(devices=[]):
            return len(self.samples.order(self.batch_size, self.training))

    def __iter__(self) -> Iterator[Any]:
        for rows in self.samples.order(self.batch_size, self.training):
            yield self.samples.batch(rows, self.training)


class ImageSamples(Samples):
    """Labelled images `[N, 3, h, w]` in eight bits on a device, resized, augmented and normalised there."""

    def __init__(self, pixels: Tensor, labels: Tensor, size: int) -> None:
        self.pixels, self.labels, self.size = pixels, labels, size

    @classmethod
    def read(cls, dataset: ImageDataset, size: int, device: torch.device) -> "ImageSamples":
        """Decode a data set; where its images differ in size, all take that of the first."""
        first = dataset[0][0].size
        arrays = [np.asarray(image if image.size == first else image.resize(first)) for image, _ in dataset]
        pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
        return cls(pixels.to(device), torch.from_numpy(dataset.labels.copy()), size)

    def batch(self, rows: Tensor, augment: bool) -> tuple[Tensor, Tensor]:
        """Inputs `[B, 3, size, size]` on the device and labels `[B]` on the CPU."""
        pixels = self.pixels[rows.to(self.pixels.device)].float() / 255
        sized = augmented(pixels, self.size) if augment else resized(pixels, self.size)
        return normalised(sized), self.labels[rows]


def resized(images: Tensor, size: int) -> Tensor:
    """Images `[B, 3, h, w]` at `size` by `size`, bicubic."""
    return F.interpolate(images, (size, size), mode="bicubic", antialias=True, align_corners=False)


def augmented(images: Tensor, size: int) -> Tensor:
    """A random square of each image, maybe mirrored, at `size` by `size`; drawn from torch's CPU generator."""
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


class TextSamples(Samples):
    """Labelled texts: ids and segments `[N, T]` on a device, padded at the end; lengths stay on the CPU."""

    def __init__(self, ids: Tensor, segments: Tensor, lengths: Tensor, labels: Tensor) -> None:
        self.ids, self.segments, self.lengths, self.labels = ids, segments, lengths, labels

    @classmethod
    def read(cls, dataset: TextDataset, preprocessing: TextPreprocessing, device: torch.device) -> "TextSamples":
        """Tokenise a data set with a preprocessing that gives masks and segments."""
        texts = [text for text, _ in dataset]
        starts = range(0, len(texts), TOKENISED_AT_ONCE)
        parts = [preprocessing(texts[start : start + TOKENISED_AT_ONCE]) for start in starts]
        longest = max(part["input_ids"].shape[1] for part in parts)
        ids, segments, mask = (
            torch.cat([F.pad(part[name].to(torch.int32), (0, longest - part[name].shape[1])) for part in parts])
            for name in ("input_ids", "token_type_ids", "attention_mask")
        )
        return cls(ids.to(device), segments.to(device), mask.sum(1), torch.from_numpy(dataset.labels.copy()))

    def order(self, batch_size: int, training: bool) -> list[Tensor]:
        """In training, texts of one batch are of similar length, and every text is there."""
        if not training:
            return super().order(batch_size, training)
        batches: list[Tensor] = []
        for bucket in torch.randperm(len(self)).split(BUCKET * batch_size):
            batches += bucket[self.lengths[bucket].argsort()].split(batch_size)
        return [batches[index] for index in torch.randperm(len(batches)).tolist()]

    def batch(self, rows: Tensor, augment: bool) -> Mapping[str, Tensor]:
        """Ids, mask and segments `[B, T]`, as long as the longest text of the batch, and labels `[B]`."""
        device, longest = self.ids.device, int(self.lengths[rows].max())
        there, places = rows.to(device), torch.arange(longest, device=device)
        return {
            "input_ids": self.ids[there, :longest].long(),
            "attention_mask": (places < self.lengths[rows].to(device)[:, None]).long(),
            "token_type_ids": self.segments[there, :longest].long(),
            "labels": self.labels[rows],
        }


class PreparedImages(Samples):
    """Images by a tower's own preprocessing, decoded and prepared batch by batch, so that sets of any size fit."""

    def __init__(self, images: ImageDataset, tower: Ensemble) -> None:
        self.images, self.tower = images, tower
        self.labels = torch.from_numpy(images.labels.copy())

    def batch(self, rows: Tensor, augment: bool) -> tuple[Tensor, Tensor]:
        """Inputs `[B, 3, H, W]` and labels `[B]`; no augmentation."""
        inputs = self.tower.prepare([self.images[row][0] for row in rows.tolist()])
        if not isinstance(inputs, Tensor):
            raise DataError("the image tower's preprocessing must give pixels; convert the model with processor=")
        return inputs, self.labels[rows]
