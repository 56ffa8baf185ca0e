"""Building blocks that several corruptions share: blurs along a line, zooms, and random fields."""

import math

import numpy as np
import numpy.typing as npt

from ..._utils import require

Pixels = npt.NDArray[np.float64]


def clip_to_bytes(pixels: Pixels) -> Pixels:
    """Clip values to [0, 1] and scale them to 0..255."""
    clipped: Pixels = np.clip(pixels, 0, 1)
    return clipped * 255.0


def gaussian_blur(image: Pixels, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> Pixels:
    """Blur the two leading axes; a third (the channels) is left alone."""
    ndimage = require("scipy.ndimage", extra="data")
    sigmas = (sigma, sigma, 0)[: image.ndim]
    blurred: Pixels = ndimage.gaussian_filter(image, sigmas, mode=mode, truncate=truncate)
    return blurred


def motion_blur(image: Pixels, radius: float, sigma: float, angle: float) -> Pixels:
    """Blur along a line, as ImageMagick's `MotionBlurImage` does.

    Each pixel becomes a weighted mean of the `2·radius + 1` pixels that start at it and lie in the direction
    of the angle (in degrees), on the nearest whole pixels; weights fall off as one half of a Gaussian. Beyond
    the border the edge repeats.
    """
    width = 2 * math.ceil(radius) + 1
    weights = np.exp(-(np.arange(width) ** 2) / (2.0 * sigma**2))
    weights /= weights.sum()
    direction = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    height, columns = image.shape[:2]
    padding = [(width, width), (width, width)] + [(0, 0)] * (image.ndim - 2)
    padded = np.pad(image, padding, mode="edge")
    blurred = np.zeros(image.shape, dtype=np.float64)
    for step, weight in enumerate(weights):
        left = width + math.ceil(step * direction[0] - 0.5)
        top = width + math.ceil(step * direction[1] - 0.5)
        blurred += weight * padded[top : top + height, left : left + columns]
    return blurred


def clipped_zoom(image: Pixels, factor: float) -> Pixels:
    """Enlarge the middle of an image `[H, W, C]` linearly so that it fills the same size."""
    ndimage = require("scipy.ndimage", extra="data")
    sizes = image.shape[:2]
    crops = [math.ceil(size / factor) for size in sizes]
    starts = [(size - crop) // 2 for size, crop in zip(sizes, crops, strict=True)]
    middle = image[starts[0] : starts[0] + crops[0], starts[1] : starts[1] + crops[1]]
    zoomed = ndimage.zoom(middle, (factor, factor, 1), order=1)
    trims = [(grown - size) // 2 for grown, size in zip(zoomed.shape, sizes, strict=False)]
    result: Pixels = zoomed[trims[0] : trims[0] + sizes[0], trims[1] : trims[1] + sizes[1]]
    return result


def plasma(height: int, width: int, decay: float, rng: np.random.Generator) -> Pixels:
    """Random cloud-like field in [0, 1], by the diamond–square algorithm on a torus.

    Each level halves the grid: first the centres of the squares, then the centres of the diamonds, become the
    mean of their four neighbours plus a uniform deviation. The deviation starts at 100² and shrinks by
    `decay²` a level, so a higher decay gives a smoother field.
    """
    side = max(2, 1 << (max(height, width) - 1).bit_length())
    field = np.zeros((side, side))
    amplitude = 100.0
    step = side
    while step >= 2:
        half = step // 2
        scale = amplitude * amplitude

        def deviation(count: int, scale: float = scale) -> Pixels:
            return rng.uniform(-scale, scale, (count, count))

        corners = field[::step, ::step]
        count = len(corners)
        right = np.roll(corners, -1, axis=1)
        field[half::step, half::step] = (
            corners + right + np.roll(corners, -1, axis=0) + np.roll(right, -1, axis=0)
        ) / 4 + deviation(count)
        centres = field[half::step, half::step]
        field[::step, half::step] = (centres + np.roll(centres, 1, axis=0) + corners + right) / 4 + deviation(count)
        field[half::step, ::step] = (
            centres + np.roll(centres, 1, axis=1) + corners + np.roll(corners, -1, axis=0)
        ) / 4 + deviation(count)
        step = half
        amplitude /= decay
    field -= field.min()
    normalised: Pixels = field / field.max()
    return normalised[:height, :width]
