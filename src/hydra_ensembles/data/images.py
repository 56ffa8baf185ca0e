"""Turning stored bytes into RGB images, the same way for every kind of file."""

import io
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from .._utils import require
from ..errors import DataError
from ..preprocessing import to_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def decode_image(content: bytes, where: str) -> "Image":
    """Decode the bytes of an image file.

    Args:
        content: The bytes.
        where: What an error message calls them, such as `row 3 of test.parquet`.

    Raises:
        DataError: The bytes are not an image, or only part of one.
    """
    try:
        image = require("PIL.Image", extra="data").open(io.BytesIO(content))
        image.load()  # Pillow reads lazily; a truncated file must fail here, where its place is known
        return to_rgb(image)
    except (OSError, SyntaxError, ValueError, EOFError, struct.error) as error:
        raise DataError(
            f"{where} cannot be decoded as an image ({len(content)} bytes): {error}; repair or remove it"
        ) from error


def read_image(path: Path, where: str | None = None) -> "Image":
    """Read an image file as RGB.

    Raises:
        DataError: The file is missing or not an image.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"image file {path} cannot be read: {error.strerror or error}") from error
    return decode_image(content, where or f"image file {path}")
