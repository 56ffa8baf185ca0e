"""Samples of a set as model inputs, in batches that can be iterated repeatedly; on a device if they fit."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from hydra_ensembles.data.dataset import AnyDataset, ImageDataset, TextDataset
from hydra_ensembles.preprocessing import TextPreprocessing

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SMALLEST_CROP = 0.7  # of the side, in training
ALIKE = 8  # images of a batch that RandAugment changes in the same way

Augment = bool | tuple[int, int]
"""Whether samples are augmented; if operations and magnitude of RandAugment are given, it is applied first."""


class Samples(ABC):
    """Labelled inputs of any kind."""

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def batch(self, rows: Tensor, augment: Augment) -> Any:
        """One batch, as models and trainings of the library take it."""


class SampleBatches:
    """Batches of samples: all in order, or for training shuffled by torch's CPU generator and augmented.

    In training the last batch is dropped if it is not full, unless it is the only one. `alike` batches in a row are
    filled by length, so that a batch has texts of similar length, and come in random order.
    """

    def __init__(self, samples: Samples, batch_size: int, training: Augment = False, alike: int = 0) -> None:
        self.samples, self.batch_size, self.training, self.alike = samples, batch_size, training, alike

    def __len__(self) -> int:
        count = len(self.samples)
        return max(count // self.batch_size, 1) if self.training else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        count = len(self.samples)
        order = torch.randperm(count) if self.training else torch.arange(count)
        batches = order.split(self.batch_size)[: len(self)]
        if self.alike and isinstance(self.samples, TextSamples):
            widths = self.samples.widths
            pools = torch.cat(batches).split(self.alike * self.batch_size)
            order = torch.cat([pool[widths[pool].argsort(stable=True)] for pool in pools])
            batches = order.split(self.batch_size)
            batches = tuple(batches[place] for place in torch.randperm(len(batches)))
        for rows in batches:
            yield self.samples.batch(rows, self.training)


def kept(
    dataset: AnyDataset, cache: Path | None, make: Callable[[], npt.NDArray[Any]], by: str = ""
) -> npt.NDArray[Any]:
    """Cache what `make` computes from a data set (with settings `by`) for all processes that share `cache`."""
    if cache is None:
        return make()
    ends = [np.asarray(dataset[row][0]).tobytes() for row in (0, len(dataset) - 1)]
    content = [dataset.name.encode(), dataset.rows.tobytes(), dataset.labels.tobytes(), *ends, by.encode()]
    path = cache / f"{hashlib.sha256(b'|'.join(content)).hexdigest()[:24]}.npy"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            np.save(path.with_suffix(".part.npy"), make())
            path.with_suffix(".part.npy").rename(path)
    return cast(npt.NDArray[Any], np.load(path))


class ImageSamples(Samples):
    """Labelled uint8 images `[N, 3, h, w]` on a device, resized, augmented and normalised there."""

    def __init__(self, pixels: Tensor, labels: Tensor, size: int) -> None:
        self.pixels, self.labels, self.size = pixels, labels, size

    @classmethod
    def read(cls, dataset: ImageDataset, size: int, device: torch.device, cache: Path | None = None) -> "ImageSamples":
        """Decode a data set; if image sizes differ, all are resized to that of the first.

        Decoded images are cached in the folder `cache` for other processes; only one of them decodes.
        """
        pixels = kept(dataset, cache, lambda: decoded(dataset))
        images = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).contiguous()
        return cls(images, torch.from_numpy(dataset.labels.copy()), size)

    def batch(self, rows: Tensor, augment: Augment) -> tuple[Tensor, Tensor]:
        """Inputs `[B, 3, size, size]` on the device and labels `[B]` on the CPU."""
        raw = self.pixels[rows.to(self.pixels.device)]
        pixels = (randomly_changed(raw, augment) if isinstance(augment, tuple) else raw).float() / 255
        sized = augmented(pixels, self.size) if augment else resized(pixels, self.size)
        return normalised(sized), self.labels[rows]


def decoded(dataset: ImageDataset) -> npt.NDArray[np.uint8]:
    """All images `[N, h, w, 3]`, decoded by several threads."""
    size = dataset[0][0].size

    def pixels(row: int) -> npt.NDArray[np.uint8]:
        image = dataset[row][0]
        return np.asarray(image if image.size == size else image.resize(size))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return np.stack(list(pool.map(pixels, range(len(dataset)))))


def randomly_changed(pixels: Tensor, settings: tuple[int, int]) -> Tensor:
    """RandAugment of uint8 images `[B, 3, h, w]`, a few at a time, which is fast on a GPU."""
    change = v2.RandAugment(*settings)
    return torch.cat([change(part) for part in pixels.split(ALIKE)])


def resized(images: Tensor, size: int) -> Tensor:
    """Resize images `[B, 3, h, w]` to `size` by `size`, bicubic."""
    return F.interpolate(images, (size, size), mode="bicubic", antialias=True, align_corners=False)


def augmented(images: Tensor, size: int) -> Tensor:
    """A random square crop of each image, randomly mirrored, at `size` by `size`; uses torch's CPU generator."""
    count = len(images)
    scale = SMALLEST_CROP + (1 - SMALLEST_CROP) * torch.rand(count)
    shift = (1 - scale) * (2 * torch.rand(2, count) - 1)  # of the centre, so that the square stays inside
    flip = torch.where(torch.rand(count) < 0.5, -1.0, 1.0)
    zero = torch.zeros(count)
    theta = torch.stack([torch.stack([scale * flip, zero, shift[0]], 1), torch.stack([zero, scale, shift[1]], 1)], 1)
    grid = F.affine_grid(theta.to(images.device), [count, 3, size, size], align_corners=False)  # [B, size, size, 2]
    return F.grid_sample(images, grid, mode="bicubic", padding_mode="reflection", align_corners=False)


def normalised(images: Tensor) -> Tensor:
    """Normalise images in 0 to 1 for the backbone."""
    mean, std = (torch.tensor(values, device=images.device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (images.clamp(0, 1) - mean) / std


class Unchanged(Samples):
    """Samples that are never augmented."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.labels = samples, samples.labels

    def batch(self, rows: Tensor, augment: Augment) -> Any:
        return self.samples.batch(rows, False)


class TextSamples(Samples):
    """Labelled texts, tokenised once: each input is `[N, T]` on a device; a batch is as wide as its longest text."""

    def __init__(self, inputs: Mapping[str, Tensor], labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels
        self.widths = inputs["attention_mask"].sum(dim=1).cpu()

    @classmethod
    def read(
        cls, dataset: TextDataset, prepare: TextPreprocessing, device: torch.device, cache: Path | None = None
    ) -> "TextSamples":
        """Tokenise a data set; tokens are cached in the folder `cache` for other processes."""
        names = sorted(prepare([dataset[0][0]]))

        def tokenised() -> npt.NDArray[Any]:
            inputs = prepare([dataset[row][0] for row in range(len(dataset))])
            return np.stack([inputs[name].int().numpy() for name in names])

        stacked = torch.from_numpy(kept(dataset, cache, tokenised, repr(prepare))).to(device)
        return cls(dict(zip(names, stacked, strict=True)), torch.from_numpy(dataset.labels.copy()))

    @classmethod
    def packed(cls, inputs: Mapping[str, npt.NDArray[Any]], device: torch.device, share: float) -> "TextSamples":
        """From tokens and `labels` that were read before; a share of them, of every length, for a trial."""
        count = len(inputs["labels"])
        few = np.linspace(0, count - 1, count if share == 1 else min(count, max(64, round(share * count)))).astype(int)
        tensors = {name: torch.from_numpy(array[few].astype(np.int64)) for name, array in inputs.items()}
        labels = tensors.pop("labels")
        return cls({name: tensor.to(device) for name, tensor in tensors.items()}, labels)

    def templated(self, prepare: TextPreprocessing) -> "TextSamples":
        """The same texts in the template of a preprocessing with the same tokenizer."""
        words = Tokenizer.from_str(prepare.tokenizer)
        rows = [ids[:width] for ids, width in zip(self.inputs["input_ids"].tolist(), self.widths.tolist(), strict=True)]
        device = self.inputs["input_ids"].device
        inputs = prepare(words.decode_batch(rows, skip_special_tokens=False))
        return TextSamples({name: one.to(device) for name, one in inputs.items()}, self.labels)

    def by_length(self) -> "TextSamples":
        """The same texts, the shortest first, so that batches in order have little padding."""
        order = self.widths.argsort(stable=True)
        inputs = {name: tokens[order.to(tokens.device)] for name, tokens in self.inputs.items()}
        return TextSamples(inputs, self.labels[order])

    def batch(self, rows: Tensor, augment: Augment) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs `[B, T]` on the device, padded on the right, and labels `[B]` on the CPU; no augmentation."""
        width = int(self.widths[rows].max())
        inputs = {name: tokens[rows.to(tokens.device), :width].long() for name, tokens in self.inputs.items()}
        return inputs, self.labels[rows]


class Prepared(Samples):
    """Images or texts with a preprocessing, read and prepared batch by batch, so that sets of any size fit."""

    def __init__(self, dataset: AnyDataset, prepare: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.prepare = dataset, prepare
        self.labels = torch.from_numpy(dataset.labels.copy())

    def batch(self, rows: Tensor, augment: Augment) -> tuple[Any, Tensor]:
        """The preprocessed rows, and labels `[B]`; no augmentation."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            items = list(pool.map(lambda row: self.dataset[row][0], rows.tolist()))
        return self.prepare(items), self.labels[rows]


class Drawn(Samples):
    """At most `count` samples, the same ones every time."""

    def __init__(self, samples: Samples, count: int) -> None:
        order = np.random.default_rng(0).permutation(len(samples))[:count]
        self.samples = samples
        self.rows = torch.from_numpy(np.sort(order))
        self.labels = samples.labels[self.rows]

    def batch(self, rows: Tensor, augment: Augment) -> Any:
        return self.samples.batch(self.rows[rows], augment)
