"""Preprocessing of images and texts for a model."""

import html
import re
import string
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ._utils import library, warn
from .errors import ConfigError, DataError
from .settings import Checked, Count, Positive, PositiveShare, Range

if TYPE_CHECKING:
    from PIL.Image import Image

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
TextCleaning = Literal["none", "whitespace", "lower", "canonicalize"]
Pixels = Annotated[int, Range(1, 1 << 16)]  # per side of a prepared image
MOST_STORED = 178_956_970  # pixels of a picture, as in Pillow: some kilobytes of a file may be gigabytes of pixels
MAX_ASPECT = 100  # of its sides: the shorter one is scaled up to the input size
TEXT = "{text}"  # where a template takes a text
_FIRST = ("a", "B", "7", "é", "中", ".", "(", '"', " a", "\n")  # beginnings of texts


@dataclass(frozen=True)
class ImagePreprocessing(Checked):
    """Resize, crop and normalise images.

    `resize_mode="shortest"` scales the short side to `size / crop_fraction`, `"squash"` scales both sides to it; then
    the centre is cropped to `size`. Fractions of a pixel are dropped, as in the original libraries; for a `size` that
    is not square, `"shortest"` rounds the other side, as timm and open_clip do. If the crop cannot be centred exactly,
    its corner is rounded half to even (`"round"`: torchvision, timm, open_clip) or down (`"floor"`: transformers).

    Examples:
        >>> import hydra_ensembles as he
        >>> from PIL import Image
        >>> prepare = he.ImagePreprocessing(size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3, crop_fraction=0.9)
        >>> prepare([Image.new("RGB", (64, 48))]).shape
        torch.Size([1, 3, 32, 32])
    """

    kind: ClassVar[str] = "image"

    size: tuple[Pixels, Pixels]
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[Positive, ...] = (0.229, 0.224, 0.225)
    interpolation: Interpolation = "bicubic"
    crop_fraction: PositiveShare = 1.0
    resize_mode: Literal["shortest", "squash"] = "shortest"
    crop_corner: Literal["round", "floor"] = "round"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std):
            got = f"mean and std must have one or three entries each; got {self.mean}, {self.std}"
            raise ConfigError(f"{got}. Images are grey or RGB: a model with other channels takes prepared tensors")

    def __call__(self, images: "Image | Sequence[Image]") -> Tensor:
        """Turn PIL images into a tensor `[B, channels, height, width]`, ready for the model."""
        image_module = library("PIL.Image", extra="data")
        batch = _items(images, image_module.Image, str, np.ndarray)
        if not batch:
            raise DataError("got no images; give at least one")
        pixels = torch.stack(
            [self._pixels(image, f"image {index}") for index, image in enumerate(batch)]
        )  # [B, C, H, W]
        if any(map(_is_rotated, batch)):
            state = "is stored sideways or mirrored (EXIF) and is used as stored"
            warn(f"at least one image {state}: PIL.ImageOps.exif_transpose turns it upright")
        mean, std = (pixels.new_tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return (pixels - mean) / std

    def _pixels(self, image: Any, which: str) -> Tensor:
        """Return the pixels of an image in [0, 1], `[C, H, W]`."""
        pillow = library("PIL.Image", extra="data")
        if not isinstance(image, pillow.Image):
            got = repr(image) if isinstance(image, str) else f"a {type(image).__name__}"
            advice = "give PIL.Image.open(path), or normalised images as one tensor [B, channels, H, W]"
            raise DataError(f"{which} is {got}, expected a PIL image; {advice}")
        long, short = max(image.size), min(image.size)
        if not short or long > MAX_ASPECT * short or long * short > MOST_STORED:
            limits = f"1 to {MOST_STORED:,} pixels, and no side over {MAX_ASPECT} times the other"
            raise DataError(f"{which} has {image.width} x {image.height} pixels; accepted are {limits}")
        try:
            image.load()
            image = to_grey(image) if len(self.mean) == 1 else to_rgb(image)
        except Exception as error:  # Pillow decodes only now: the file may be cut, or closed
            raise DataError(f"{which} cannot be read: {error}") from error
        height, width = self.size
        resized = self._resized(image.width, image.height)
        image = image.resize(resized, pillow.Resampling[self.interpolation.upper()])
        half = round if self.crop_corner == "round" else int
        left, top = half((image.width - width) / 2), half((image.height - height) / 2)
        image = image.crop((left, top, left + width, top + height))
        array = np.asarray(image, dtype=np.float32) / 255.0
        return torch.from_numpy(array).reshape(height, width, -1).permute(2, 0, 1)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the resized image before the crop."""
        # 1e-6 undoes the rounding of fractions such as 224 / 232
        tall, wide = (int(side / self.crop_fraction + 1e-6) for side in self.size)
        if self.resize_mode == "squash":
            return wide, tall
        if tall != wide:  # as `ResizeKeepRatio` of timm and open_clip
            ratio = min(height / tall, width / wide)
            return round(width / ratio), round(height / ratio)
        short = min(width, height)
        return wide * width // short, tall * height // short


@dataclass(frozen=True)
class TextPreprocessing(Checked):
    """Tokenise strings with the `tokenizers` library only.

    `tokenizer` is the content of a `tokenizer.json`. It is saved in a separate file, not in the config. `template` is
    what a text is put into, at `{text}`; a text that is then too long is refused, because cutting it would cut the
    template. `special_tokens` is False if the template has those that the tokenizer would add.
    `cleaning` is what CLIP's tokenizers do to a string first; see `clean_text`. `prefix` are the first tokens of every
    text in its template, which the model has read already: they are left out.

    Examples:
        >>> import hydra_ensembles as he
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "good": 2, "film": 3}, unk_token="[UNK]"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> prepare = he.TextPreprocessing(max_length=8, tokenizer=words.to_str())
        >>> prepare(["good film", "film"])["input_ids"].tolist()
        [[2, 3], [3, 0]]
    """

    kind: ClassVar[str] = "text"

    max_length: Annotated[int, Range(1, 1 << 20)]
    pad_id: Count = 0
    pad_token: str = "[PAD]"
    pad_to_max: bool = False
    attention_mask: bool = True
    segments: bool = False
    cleaning: TextCleaning = "none"
    template: str = ""
    special_tokens: bool = True
    prefix: tuple[Count, ...] = ()
    tokenizer: str = field(default="", repr=False)

    def __call__(self, texts: "str | Sequence[str | tuple[str, str]]") -> dict[str, Tensor]:
        """Turn strings (or pairs of strings) into `input_ids` and the model's other inputs, `[B, T]` each."""
        batch = _items(texts, str)
        if not batch:
            raise DataError("got no texts; give at least one")
        if not self.tokenizer:
            raise DataError("this model was saved without a tokenizer; give token ids instead of strings")
        cleaned = [self._cleaned(text, f"text {index}") for index, text in enumerate(batch)]
        encodings = _tokenizer(self).encode_batch(cleaned, add_special_tokens=self.special_tokens)
        rows = {"input_ids": [encoding.ids for encoding in encodings]}
        if self.attention_mask:
            rows["attention_mask"] = [encoding.attention_mask for encoding in encodings]
        if self.segments:
            rows["token_type_ids"] = [encoding.type_ids for encoding in encodings]
        remarks = set[str]()
        for index, encoding in enumerate(encodings):
            if 1 not in encoding.attention_mask:  # a tokenizer without special tokens
                raise DataError(f"text {index} is {cleaned[index]!r}, which has no tokens; leave it out")
            if encoding.overflowing and self.template:
                most = f"the {self.max_length} tokens that are read, its template included"
                raise DataError(f"text {index} is longer than {most}; shorten it")
            if encoding.overflowing:
                remarks.add(f"is longer than the {self.max_length} tokens that are read: the rest is ignored")
            elif 0 not in encoding.special_tokens_mask:  # only special tokens and padding
                remarks.add("has no words, and gets the same answer as every empty text: leave it out")
            elif 0 in encoding.attention_mask and not self.attention_mask and not self.pad_to_max:
                remarks.add("is padded, and the model reads padding as tokens: give texts of equal length together")
        for remark in sorted(remarks):
            warn(f"at least one text {remark}")
        start = len(self.prefix)
        for index, ids in enumerate(rows["input_ids"]):
            if tuple(ids[:start]) != self.prefix:
                told = f"text {index} becomes one token with the end of the prefix"
                raise DataError(f"{told}; begin it with another letter, or end the prefix with a new line")
        return {name: torch.tensor(ids, device="cpu")[:, start:] for name, ids in rows.items()}  # ignore default device

    def with_prefix(self, text: str) -> "TextPreprocessing":
        """The same with a text before the template, whose tokens up to the place of the text become the prefix."""
        template = text + (self.template or TEXT)
        if self.prefix or template.count(TEXT) != 1:
            raise ConfigError(f"a prefix goes before texts without one, and does not contain {TEXT}")
        whole = replace(self, template=template)
        texts = [template.replace(TEXT, first) for first in _FIRST]
        encodings = _tokenizer(whole).encode_batch(texts, add_special_tokens=self.special_tokens)
        places = zip(*(one.ids for one in encodings), strict=False)
        prefix = tuple(ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, places))
        if not prefix:
            raise ConfigError("there are no tokens before the text: give a prefix, or a template that has some")
        return replace(whole, prefix=prefix)

    def _cleaned(self, text: Any, which: str) -> str | tuple[str, ...]:
        """Clean a text, or both texts of a pair; raises for what is no text, and for lone surrogates."""
        parts = text if isinstance(text, tuple) and len(text) == 2 else (text,)
        if not all(isinstance(part, str) for part in parts):
            advice = "give token ids as one tensor [B, T] or a mapping with 'input_ids', without labels"
            raise DataError(f"{which} is a {type(text).__name__}, expected a string, or a tuple of two; {advice}")
        if self.template and len(parts) == 2:
            raise DataError(f"{which} is a pair, but the template takes one text; join them as it was converted for")
        cleaned = tuple(clean_text(part, self.cleaning) for part in parts)
        if any("\ud800" <= letter <= "\udfff" for part in cleaned if not part.isascii() for letter in part):
            raise DataError(f"{which} has an unpaired surrogate, which is not a character; read it as UTF-8")
        if self.template:
            return self.template.replace(TEXT, cleaned[0])
        return cleaned if len(cleaned) == 2 else cleaned[0]


def _items(inputs: Any, *single: type) -> list[Any]:
    """Inputs as a list; objects of a type in `single`, sets (whose order says nothing) and scalars are single items."""
    several = isinstance(inputs, Iterable) and not isinstance(inputs, (*single, bytes, set, frozenset))
    return list(inputs) if several or (isinstance(inputs, np.ndarray) and inputs.dtype.hasobject) else [inputs]


@lru_cache(maxsize=8)
def _tokenizer(settings: TextPreprocessing) -> Any:
    """Parse a `tokenizer.json` once per setting: parsing takes longer than tokenising a batch."""
    tokenizer = library("tokenizers", extra="text").Tokenizer.from_str(settings.tokenizer)
    side = (tokenizer.truncation or {}).get("direction", "right")  # on which long texts are cut
    tokenizer.enable_truncation(settings.max_length, direction=side)
    length = settings.max_length if settings.pad_to_max else None
    tokenizer.enable_padding(pad_id=settings.pad_id, pad_token=settings.pad_token, length=length)
    return tokenizer


# --- images of any mode --------------------------------------------------------------------------------------

_CONVERTED_FIRST = {"La": "LA", "LAB": "RGB"}  # modes that Pillow does not convert to grey directly
_SIXTEEN_BITS = ("PNG", "PPM")  # formats that Pillow (some releases) opens in mode I if they have 16 bits


def to_rgb(image: "Image") -> "Image":
    """Convert a PIL image of any mode to RGB.

    Greyscale is repeated over the channels, transparency is dropped, palettes are looked up, and 16-bit
    greyscale keeps its upper eight bits (Pillow alone would clip it to white). 32-bit greyscale is refused.
    """
    return image if image.mode == "RGB" else _plain(image).convert("RGB")


def to_grey(image: "Image") -> "Image":
    """Convert a PIL image of any mode to 8-bit greyscale; 16-bit greyscale and transparency as in `to_rgb`."""
    return image if image.mode == "L" else _plain(image).convert("L")


def _plain(image: "Image") -> "Image":
    """Convert the image to a mode that Pillow converts further without clipping or warning."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _SIXTEEN_BITS):
        pixels = np.asarray(image, dtype=np.uint16)
        return library("PIL.Image", extra="data").fromarray((pixels >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(f"the mode {image.mode} is 32-bit greyscale; give 8-bit or 16-bit images")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")
    first = _CONVERTED_FIRST.get(image.mode)
    return image if first is None else image.convert(first)


def _is_rotated(image: "Image") -> bool:
    """Whether the EXIF orientation says that the image is not stored upright."""
    if not image.info.get("exif"):
        return False
    try:
        return image.getexif().get(0x0112, 1) in range(2, 9)  # orientation tag
    except Exception:  # malformed EXIF data
        return False


# --- cleaning texts ------------------------------------------------------------------------------------------

_TERMINAL_ESCAPE = re.compile("\x1b\\[[0-9;]*[a-zA-Z]")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CONTROLS = (*range(0x09), 0x0B, *range(0x0E, 0x20), 0x7F, *range(0x206A, 0x2070), *range(0xFFF9, 0xFFFD), 0xFEFF)
_REPAIRS: dict[int, str | None] = {
    # ligatures and full-width or half-width characters become the letters they stand for
    **{ord(letter): unicodedata.normalize("NFKC", letter) for letter in "ĲĳŉǱǲǳǄǅǆǇǈǉǊǋǌﬀﬁﬂﬃﬄﬆ"},
    ord("ﬅ"): "ſt",
    **{code: unicodedata.normalize("NFKC", chr(code)) for code in (0x3000, *range(0xFF01, 0xFFF0))},
    **{ord(quote): "'" for quote in "\u02bc\u2018\u2019\u201a\u201b"},
    **{ord(quote): '"' for quote in "\u201c\u201d\u201e\u201f"},
    **dict.fromkeys(_CONTROLS),
}


def clean_text(text: str, cleaning: TextCleaning) -> str:
    """Clean a string in one of the ways open_clip's tokenizers know.

    `"none"` leaves it alone; `"whitespace"` repairs it and collapses white space; `"lower"` lower-cases it as well;
    `"canonicalize"` drops ASCII punctuation too.
    """
    if cleaning == "none":
        return text
    text = _TERMINAL_ESCAPE.sub("", html.unescape(html.unescape(text)))
    text = unicodedata.normalize("NFC", text.translate(_REPAIRS))
    if cleaning == "canonicalize":
        text = text.replace("_", " ").translate(_PUNCTUATION)
    text = " ".join(text.split())
    return text if cleaning == "whitespace" else text.lower()
