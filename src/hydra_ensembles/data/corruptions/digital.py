"""Contrast, elastic distortion, pixelation and JPEG. Images are `[H, W, 3]` in 0..255."""

import io

import numpy as np

from ..._utils import require
from .fields import Pixels, clip_to_bytes, gaussian_blur
from .parameters import Values


def contrast(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Draw every channel towards its mean over the image."""
    del rng
    (factor,) = values
    pixels = image / 255.0
    means = pixels.mean(axis=(0, 1), keepdims=True)
    return clip_to_bytes((pixels - means) * factor + means)


def elastic_transform(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Stretch: a random affine map, then a smooth random displacement of every pixel.

    Interpolation is exact where the original's rounds the affine map to 1/32 of a pixel.
    """
    reach, sigma, corner_shift = values
    pixels = image / 255.0
    height, width = image.shape[:2]
    centre = np.array([width // 2, height // 2], dtype=np.float64)
    side = min(height, width) // 3
    corners = centre + np.array([[side, side], [side, -side], [-side, -side]])  # [3, (x, y)]
    moved = corners + rng.uniform(-corner_shift, corner_shift, size=corners.shape)
    rows, columns = np.mgrid[:height, :width].astype(np.float64)
    # The map that takes `moved` back to `corners` says where each pixel of the result comes from.
    back = np.linalg.lstsq(np.column_stack([moved, np.ones(3)]), corners, rcond=None)[0]  # [3, (x, y)]
    from_x = back[0, 0] * columns + back[1, 0] * rows + back[2, 0]
    from_y = back[0, 1] * columns + back[1, 1] * rows + back[2, 1]
    warped = _sample(pixels, from_y, from_x, mode="mirror")
    shifts = [
        gaussian_blur(rng.uniform(-1, 1, size=(height, width)), sigma, mode="reflect", truncate=3) * reach
        for _ in range(2)
    ]
    return clip_to_bytes(_sample(warped, rows + shifts[1], columns + shifts[0], mode="reflect"))


def pixelate(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Reduce to fewer pixels and enlarge again, both with a box filter."""
    del rng
    (scale,) = values
    image_module = require("PIL.Image", extra="data")
    height, width = image.shape[:2]
    small = (max(1, int(width * scale)), max(1, int(height * scale)))
    picture = image_module.fromarray(image.astype(np.uint8)).resize(small, image_module.Resampling.BOX)
    return np.asarray(picture.resize((width, height), image_module.Resampling.BOX), dtype=np.float64)


def jpeg_compression(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Save as JPEG and read again."""
    del rng
    (quality,) = values
    image_module = require("PIL.Image", extra="data")
    stored = io.BytesIO()
    image_module.fromarray(image.astype(np.uint8)).save(stored, "JPEG", quality=int(quality))
    return np.asarray(image_module.open(stored), dtype=np.float64)


def _sample(image: Pixels, rows: Pixels, columns: Pixels, mode: str) -> Pixels:
    """Read an image between its pixels, linearly."""
    ndimage = require("scipy.ndimage", extra="data")
    channels = [
        ndimage.map_coordinates(image[..., channel], (rows, columns), order=1, mode=mode)
        for channel in range(image.shape[-1])
    ]
    return np.stack(channels, axis=-1)
