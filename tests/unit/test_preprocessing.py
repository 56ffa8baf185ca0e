"""Images of unusual modes, and settings that check themselves; values are held against libraries in test_processors."""

import io
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from checkpoint_models import TOKENIZER
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.preprocessing import ImagePreprocessing, TextPreprocessing, to_grey
from zero_shot_models import word_tokenizer

LEVELS = np.array([[0, 0x1234], [0x8000, 0xFFFF]], dtype=np.uint16)


def plain(channels: int) -> ImagePreprocessing:
    """Preprocessing that changes nothing but the range of the numbers."""
    return ImagePreprocessing((2, 2), mean=(0.0,) * channels, std=(1.0,) * channels, interpolation="nearest")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_sixteen_bit_grey_is_scaled_not_clipped(channels: int, order: str) -> None:
    mode = "I;16" if order == "<u2" else "I;16B"
    image = Image.frombytes(mode, (2, 2), LEVELS.astype(order).tobytes())
    pixels = plain(channels)(image)[0] * 255
    assert pixels.shape == (channels, 2, 2)
    for channel in pixels:
        assert channel.round().int().tolist() == [[0, 0x12], [0x80, 0xFF]]


@pytest.mark.parametrize(
    ("pixels", "expected"),
    [
        (np.array([[0, 0x1234], [0x8000, 0xFFFF]], dtype=np.int32), [[0, 0x12], [0x80, 0xFF]]),
        (np.array([[0, 7], [128, 255]], dtype=np.int32), [[0, 7], [128, 255]]),
        (np.array([[0, 7], [128, 255]], dtype=np.float32), [[0, 7], [128, 255]]),
        (np.array([[0, 0.2], [0.5, 1]], dtype=np.float32), None),
        (np.array([[0, 7], [128, 256]], dtype=np.float32), None),
        (np.array([[0, np.nan], [128, 255]], dtype=np.float32), None),
        (np.array([[0, -1], [128, 255]], dtype=np.int32), None),
        (np.array([[0, 1], [128, 65536]], dtype=np.int32), None),
    ],
)
def test_numbers_of_other_ranges_are_scaled_or_refused_not_clipped(pixels: Any, expected: Any) -> None:
    for channels in (1, 3):
        if expected is None:
            with pytest.raises(DataError, match="8-bit"):
                plain(channels)(Image.fromarray(pixels))
        else:
            assert (plain(channels)(Image.fromarray(pixels))[0, -1] * 255).round().int().tolist() == expected


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "LA", "CMYK"])
def test_other_modes_become_grey_as_pillow_does_it(mode: str) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(colours).convert(mode)
    assert np.array_equal(np.asarray(to_grey(image)), np.asarray(image.convert("L")))


@pytest.mark.parametrize(("words", "said"), [(3, False), (40, True)])
def test_texts_that_are_cut_are_warned_of(words: int, said: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokens = replace(word_tokenizer(mask=True), max_length=8)(["a cat", " ".join(["cat"] * words)])
    assert tokens["input_ids"].shape[1] <= 8
    assert ["text 1" in str(one.message) for one in caught] == [True] * said


@pytest.mark.parametrize(("orientation", "said"), [(6, True), (1, False), (None, False), (b"broken", False)])
def test_images_stored_on_their_side_are_warned_of(orientation: Any, said: bool) -> None:
    stored, exif = io.BytesIO(), Image.Exif()
    if isinstance(orientation, int):
        exif[0x0112] = orientation
    image = Image.fromarray(np.zeros((2, 2, 3), dtype=np.uint8))
    image.save(stored, "PNG", exif=orientation if isinstance(orientation, bytes) else exif)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain(3)([image, Image.open(stored)])
    assert ["image 1" in str(one.message) for one in caught] == [True] * said


def test_a_transparent_palette_gives_no_warning() -> None:
    image = Image.fromarray(np.arange(4, dtype=np.uint8).reshape(2, 2)).convert("P")
    image.info["transparency"] = bytes([0, 128] + [255] * 254)
    for channels in (1, 3):
        assert plain(channels)(image).shape == (1, channels, 2, 2)


def test_nothing_and_texts_without_tokenizer_are_refused() -> None:
    for preprocessing, given in ((plain(3), []), (TextPreprocessing(5), []), (TextPreprocessing(5), ["a"])):
        with pytest.raises(DataError, match=r"no images|no texts|without a tokenizer"):
            preprocessing(given)  # type: ignore[arg-type]


def _needs_an_unknown_token(content: dict[str, Any]) -> None:
    content["model"]["unk_token"] = "[NOWHERE]"


def _makes_rows_of_other_lengths(content: dict[str, Any]) -> None:
    content["post_processor"]["single"] *= 2


def _lacks_a_special_token(content: dict[str, Any]) -> None:
    del content["post_processor"]["special_tokens"]["[END]"]  # a panic in some releases of the library


@pytest.mark.parametrize("spoil", [_needs_an_unknown_token, _makes_rows_of_other_lengths, _lacks_a_special_token])
def test_a_tokenizer_that_fails_at_a_text_is_named(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    good = word_tokenizer(mask=True)
    content = json.loads(good.tokenizer)
    spoil(content)
    with pytest.raises(ConfigError, match="cannot use this tokenizer"):
        replace(good, tokenizer=json.dumps(content))(["a photo of a cat", "xyzzy"])


def test_images_without_a_pixel_and_texts_that_cannot_be_read_are_refused() -> None:
    images, texts = plain(3), TextPreprocessing(max_length=5, tokenizer=TOKENIZER)
    for size in ((0, 0), (0, 5), (5, 0)):
        with pytest.raises(DataError, match="image 1 is"):
            images([Image.new("RGB", (2, 2)), Image.new("RGB", size)])
    for text, token in (("", "no tokens"), ("  ", "no tokens"), ("", "text 1"), ("a \ud83d b", "surrogate")):
        with pytest.raises(DataError, match=token):
            texts(["hello", text])
        with pytest.raises(DataError, match=token):
            texts([("hello", "hello"), ("", text)])
    repaired = TextPreprocessing(max_length=5, tokenizer=TOKENIZER, cleaning="whitespace")
    assert repaired("hello \ud83d")["input_ids"].tolist() == [[1, 0]]  # as open_clip reads it


def test_preprocessing_does_not_follow_the_usual_type_of_tensors() -> None:
    """Code for large language models often makes bfloat16 the default, in which the mean of ImageNet is another one."""
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    expected = ImagePreprocessing((4, 4))(image)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = ImagePreprocessing((4, 4))(image)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("given", ["photo.jpg", ["photo.jpg"], Path("photo.jpg")])
def test_a_path_is_refused_with_the_call_that_opens_it(given: Any) -> None:
    with pytest.raises(DataError, match=r"PIL\.Image\.open\('photo\.jpg'\)"):
        plain(3)(given)
