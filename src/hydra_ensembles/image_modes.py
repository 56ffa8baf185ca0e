"""Turning images of any mode into RGB or greyscale, the same way in data sets and in a model's preprocessing."""

from typing import TYPE_CHECKING

import numpy as np

from ._extras import require

if TYPE_CHECKING:
    from PIL.Image import Image


def to_rgb(image: "Image") -> "Image":
    """Convert a PIL image of any mode to RGB.

    Greyscale is repeated over the channels, transparency is dropped, palettes are looked up, and 16-bit
    greyscale keeps its upper eight bits (Pillow alone would clip it to white).
    """
    return image if image.mode == "RGB" else _plain(image).convert("RGB")


def to_grey(image: "Image") -> "Image":
    """Convert a PIL image of any mode to 8-bit greyscale; 16-bit greyscale and transparency as in `to_rgb`."""
    return image if image.mode == "L" else _plain(image).convert("L")


def _plain(image: "Image") -> "Image":
    """The image in a mode that Pillow converts without clipping or warning."""
    if image.mode.startswith("I;16"):
        upper_bits = (np.asarray(image, dtype=np.uint16) >> 8).astype(np.uint8)
        grey: Image = require("PIL.Image", extra="data").fromarray(upper_bits)
        return grey
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")
    return image
