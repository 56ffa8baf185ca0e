"""Pictures of any kind and texts of any kind as inputs; `convert/test_processors.py` compares values with libraries."""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from hydra_ensembles.errors import DataError
from hydra_ensembles.preprocessing import ImagePreprocessing, TextPreprocessing, to_grey, to_rgb

LEVELS, IN_BYTES = np.array([[0, 0x1234], [0x8000, 0xFFFF]]), [[0, 0x12], [0x80, 0xFF]]


def plain(channels: int = 3) -> ImagePreprocessing:
    """Preprocessing that only changes the range of values."""
    return ImagePreprocessing((2, 2), mean=(0.0,) * channels, std=(1.0,) * channels, interpolation="nearest")


def of_numbers(pixels: Any, dtype: Any) -> Image.Image:
    return Image.fromarray(np.array(pixels, dtype=dtype))


def opened_as_numbers(pixels: Any, format: str) -> Image.Image:
    image = of_numbers(pixels, np.int32)
    image.format = format
    return image


def said(call: Any) -> tuple[Any, list[str]]:
    """The result of a call, and its warnings."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        return call(), [str(one.message) for one in caught]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.frombytes("I;16", (2, 2), LEVELS.astype("<u2").tobytes()), IN_BYTES),
        (Image.frombytes("I;16B", (2, 2), LEVELS.astype(">u2").tobytes()), IN_BYTES),
        (opened_as_numbers([[0, 7], [128, 255]], "PPM"), [[0, 0], [0, 0]]),
    ],
)
def test_numbers_of_other_ranges_are_scaled_not_clipped(image: Image.Image, expected: Any, channels: int) -> None:
    pixels = plain(channels)(image)[0] * 255
    assert pixels.round().int().tolist() == [expected] * channels


@pytest.mark.parametrize("mode", ["La", "LAB"])
def test_modes_that_pillow_does_not_convert_at_once_are_converted(mode: str) -> None:
    grey = Image.new("LA", (2, 2), (200, 255))
    image = grey.convert("La") if mode == "La" else Image.new("LAB", (2, 2), (200, 0, 0))
    assert list(to_grey(image).tobytes()) == list(to_rgb(image).convert("L").tobytes())
    assert mode != "La" or list(to_rgb(image).tobytes()) == [200] * 12


def stored(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


def as_file(image: Image.Image, format: str = "JPEG", **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **settings)
    return file.getvalue()


def cut(path: Path) -> Image.Image:
    return stored(as_file(of_numbers(np.random.default_rng(0).integers(0, 255, (64, 64, 3)), np.uint8))[:800])


@pytest.mark.parametrize(
    ("make", "token"),
    [
        (lambda path: Image.new("RGB", (0, 5)), "0 x 5 pixels"),
        (lambda path: Image.new("RGB", (8000, 1)), "8000 x 1 pixels.*100 times"),
        (lambda path: Image.new("1", (20_000, 10_000)), "20000 x 10000 pixels"),
        (lambda path: of_numbers([[0, 255]], np.float32), "8-bit or 16-bit"),
        (cut, "cannot be read"),
        (lambda path: "photo.jpg", r"'photo\.jpg'.*PIL\.Image\.open"),
    ],
)
def test_a_picture_that_cannot_be_used_is_refused_by_its_number(make: Any, token: str, tmp_path: Path) -> None:
    """Bombs, narrow pictures (the shorter side is scaled up), cut and closed files."""
    with pytest.raises(DataError, match=f"image 1 .*{token}"):
        plain()([Image.new("RGB", (2, 2)), make(tmp_path / "picture")])


# --- texts -------------------------------------------------------------------------------------------------------


def test_texts_that_are_cut_or_without_a_word_are_warned_of() -> None:
    """A tokenizer with special tokens makes tokens from an empty text, and models answer it."""
    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "cat": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 2)])
    prepare = TextPreprocessing(max_length=2, tokenizer=words.to_str())
    found, messages = said(lambda: prepare(["cat", " ", "", "cat cat"]))
    assert found["input_ids"].tolist() == [[2, 3], [2, 0], [2, 0], [2, 3]]
    assert [message[:21] for message in messages] == ["at least one text has", "at least one text is "]
    assert said(lambda: prepare(["cat cat", "cat"]))[1] == messages[1:]  # the same in every batch: shown once
    assert said(lambda: prepare(["cat"]))[1] == []
