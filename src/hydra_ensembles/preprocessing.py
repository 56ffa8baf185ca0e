"""How raw inputs become tensors, saved with the model so that a loaded ensemble can read files and strings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ._extras import require
from .errors import ConfigError, DataError
from .image_modes import to_grey, to_rgb
from .text_cleaning import TextCleaning, clean_text

if TYPE_CHECKING:
    from PIL.Image import Image

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]


@dataclass(frozen=True)
class ImagePreprocessing:
    """Resize, crop and normalise images.

    `resize_mode="shortest"` scales the short side to `size / crop_fraction`, `"squash"` scales both sides to
    it and ignores the aspect ratio; then the centre is cropped to `size`. Fractions of a pixel are cut off, as
    the libraries do that the numbers come from. Where the crop cannot be centred to the pixel, its corner is
    rounded half to even (`"round"`: torchvision, timm, open_clip) or down (`"floor"`: transformers).
    """

    kind: ClassVar[str] = "image"

    size: tuple[int, int]
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: Interpolation = "bicubic"
    crop_fraction: float = 1.0
    resize_mode: Literal["shortest", "squash"] = "shortest"
    crop_corner: Literal["round", "floor"] = "round"

    def __post_init__(self) -> None:
        """Check sizes, channels and the crop."""
        if min(self.size) < 1 or max(self.size) > 1 << 16:
            raise ConfigError(f"preprocessing size must be between 1 and 65536 pixels, got {self.size}")
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise ConfigError(
                f"mean and std must have one or three entries each, std positive; got {self.mean}, {self.std}"
            )
        if not 0.0 < self.crop_fraction <= 1.0:
            raise ConfigError(f"crop_fraction must be in (0, 1], got {self.crop_fraction}")

    def __call__(self, images: "Image | Sequence[Image]") -> Tensor:
        """Turn PIL images into a tensor `[B, channels, height, width]`, ready for the model."""
        image_module = require("PIL.Image", extra="data")
        batch = _items(images, image_module.Image, str, np.ndarray)
        if not batch:
            raise DataError("got no images; give at least one")
        for index, image in enumerate(batch):
            if not isinstance(image, image_module.Image):
                raise DataError(f"item {index} is a {type(image).__name__}, expected a PIL image; {_advice(image)}")
        pixels = torch.stack([self._pixels(image) for image in batch])  # [B, channels, H, W]
        shape = (1, -1, 1, 1)
        return (pixels - torch.tensor(self.mean).view(shape)) / torch.tensor(self.std).view(shape)

    def _pixels(self, image: "Image") -> Tensor:
        resampling = require("PIL.Image", extra="data").Resampling
        method = getattr(resampling, self.interpolation.upper())
        image = to_grey(image) if len(self.mean) == 1 else to_rgb(image)
        height, width = self.size
        image = image.resize(self._resized(image.width, image.height), method)
        half = round if self.crop_corner == "round" else int
        left, top = half((image.width - width) / 2), half((image.height - height) / 2)
        image = image.crop((left, top, left + width, top + height))
        array = np.asarray(image, dtype=np.float32) / 255.0
        return torch.from_numpy(array).reshape(height, width, -1).permute(2, 0, 1)  # [channels, H, W]

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height before the crop, of an image that is `width` wide and `height` high."""
        # the small number undoes the rounding of a fraction such as 224 / 232
        tall, wide = (int(side / self.crop_fraction + 1e-6) for side in self.size)
        if self.resize_mode == "squash":
            return wide, tall
        if tall * width >= wide * height:  # the height is the side that has to grow more
            return tall * width // height, tall
        return wide, wide * height // width


@dataclass(frozen=True)
class TextPreprocessing:
    """Tokenise strings with the `tokenizers` library alone.

    `tokenizer` is the content of a `tokenizer.json`. It is saved as a file of its own, not in the config.
    `cleaning` is what CLIP's tokenizers do to a string before; see `clean_text`.
    """

    kind: ClassVar[str] = "text"

    max_length: int
    pad_id: int = 0
    pad_token: str = "[PAD]"
    pad_to_max: bool = False
    attention_mask: bool = True
    segments: bool = False
    cleaning: TextCleaning = "none"
    tokenizer: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        """Check the length."""
        if not 1 <= self.max_length <= 1 << 20:
            raise ConfigError(f"max_length must be between 1 and 1048576 tokens, got {self.max_length}")
        if self.pad_id < 0:
            raise ConfigError(f"pad_id must not be negative, got {self.pad_id}")
        if self.cleaning not in get_args(TextCleaning):
            raise ConfigError(f"cleaning must be one of {list(get_args(TextCleaning))}, got {self.cleaning!r}")

    def __call__(self, texts: "str | Sequence[str | tuple[str, str]]") -> dict[str, Tensor]:
        """Turn strings (or pairs of strings) into `input_ids` and what else the model takes, `[B, T]` each."""
        batch = _items(texts, str)
        if not batch:
            raise DataError("got no texts; give at least one")
        for index, text in enumerate(batch):
            pair = isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)
            if not pair and not isinstance(text, str):
                raise DataError(
                    f"item {index} is a {type(text).__name__}, expected a string or a pair of strings; give token ids "
                    "as one tensor [B, T] or as a mapping with 'input_ids', and of a labelled batch the inputs alone"
                )
        if not self.tokenizer:
            raise DataError("this model was saved without a tokenizer; give token ids instead of strings")
        length = self.max_length if self.pad_to_max else None
        tokenizer = _tokenizer(self.tokenizer, self.max_length, self.pad_id, self.pad_token, length)
        encodings = tokenizer.encode_batch([self._clean(text) for text in batch])
        encoded = {"input_ids": torch.tensor([encoding.ids for encoding in encodings])}
        if self.attention_mask:
            encoded["attention_mask"] = torch.tensor([encoding.attention_mask for encoding in encodings])
        if self.segments:
            encoded["token_type_ids"] = torch.tensor([encoding.type_ids for encoding in encodings])
        return encoded

    def _clean(self, text: str | tuple[str, str]) -> str | tuple[str, str]:
        if isinstance(text, str):
            return clean_text(text, self.cleaning)
        return clean_text(text[0], self.cleaning), clean_text(text[1], self.cleaning)


def _items(given: Any, *single: type) -> list[Any]:
    """What was given as a list; what is of a type in `single`, or cannot be iterated over, is one item.

    Arrays of objects, as a column of a table gives them, are lists.
    """
    many = isinstance(given, Iterable) and not isinstance(given, single)
    return list(given) if many or (isinstance(given, np.ndarray) and given.dtype.hasobject) else [given]


def _advice(image: object) -> str:
    """How to give what is not a PIL image."""
    if isinstance(image, str | Path):
        return "open the file: PIL.Image.open(path)"
    if isinstance(image, np.ndarray):
        return (
            "make one of height x width x 3 bytes: PIL.Image.fromarray(pixels); give arrays that are resized and "
            "normalised already as one tensor [B, channels, H, W]: torch.from_numpy(batch)"
        )
    if isinstance(image, Tensor):
        return (
            "give images that were resized and normalised as one tensor [B, channels, H, W]: torch.stack(images); "
            "of a batch (images, labels) the images alone"
        )
    return "open image files with PIL.Image.open(path)"


@lru_cache(maxsize=8)
def _tokenizer(content: str, max_length: int, pad_id: int, pad_token: str, length: int | None) -> Any:
    """Parse a `tokenizer.json` once per setting: it takes longer than tokenising a batch."""
    tokenizer = require("tokenizers", extra="text").Tokenizer.from_str(content)
    tokenizer.enable_truncation(max_length)
    tokenizer.enable_padding(pad_id=pad_id, pad_token=pad_token, length=length)
    return tokenizer
