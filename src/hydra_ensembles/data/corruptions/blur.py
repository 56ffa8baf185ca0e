"""The four blurs. Images are `[H, W, 3]` in 0..255; parameters as `parameters.MEANING` says."""

import math

import numpy as np

from ..._utils import require
from .fields import Pixels, clip_to_bytes, clipped_zoom, gaussian_blur
from .fields import motion_blur as blur_along
from .parameters import Values


def defocus_blur(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Out of focus: every point becomes a disc."""
    del rng
    ndimage = require("scipy.ndimage", extra="data")
    kernel = _disc(*values)
    channels = [ndimage.correlate(image[..., channel] / 255.0, kernel, mode="mirror") for channel in range(3)]
    return clip_to_bytes(np.stack(channels, axis=-1))


def glass_blur(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Frosted glass: blur, scatter pixels locally, blur again.

    The published code means to swap two pixels, but swaps views of one array, which copies the second pixel
    over the first and leaves it in place. ImageNet-C holds the result of that, so this copies as well.
    """
    sigma, reach, rounds = values[0], int(values[1]), int(values[2])
    height, width = image.shape[:2]
    blurred = np.floor(gaussian_blur(image / 255.0, sigma) * 255.0)
    source = list(range(height * width))  # which pixel each place shows; a list, because the loop is sequential
    rows, columns = range(height - reach, reach, -1), range(width - reach, reach, -1)
    for _ in range(rounds):
        shifts = rng.integers(-reach, reach, size=(len(rows), len(columns), 2))
        offsets = (shifts[..., 1] * width + shifts[..., 0]).tolist()
        for row, row_offsets in zip(rows, offsets, strict=True):
            start = row * width
            for column, offset in zip(columns, row_offsets, strict=True):
                place = start + column
                source[place] = source[place + offset]
    scattered = blurred.reshape(height * width, -1)[source].reshape(image.shape)
    return clip_to_bytes(gaussian_blur(scattered / 255.0, sigma))


def motion_blur(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """The camera moves along a random direction within 45° of the horizontal.

    The original calls ImageMagick; `fields.motion_blur` follows the same definition.
    """
    radius, sigma = values
    return np.rint(blur_along(image, radius, sigma, rng.uniform(-45.0, 45.0)))


def zoom_blur(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """The camera moves towards the scene: the mean of several enlargements."""
    del rng
    end, step = values
    pixels = image / 255.0
    factors = np.arange(1, end, step)
    total = sum((clipped_zoom(pixels, float(factor)) for factor in factors), start=np.zeros_like(pixels))
    return clip_to_bytes((pixels + total) / (len(factors) + 1))


def _disc(radius: float, sigma: float) -> Pixels:
    """Disc of ones with a softened rim; sums to one."""
    ndimage = require("scipy.ndimage", extra="data")
    reach, rim = (8, 1) if radius <= 8 else (int(radius), 2)
    places = np.arange(-reach, reach + 1)
    disc = (places[:, None] ** 2 + places[None, :] ** 2 <= radius**2).astype(np.float64)
    disc /= disc.sum()
    rim_weights = np.array([math.exp(-(place**2) / (2.0 * sigma**2)) for place in range(-rim, rim + 1)])
    rim_weights /= rim_weights.sum()
    for axis in (0, 1):
        disc = ndimage.correlate1d(disc, rim_weights, axis=axis, mode="mirror")
    return disc
