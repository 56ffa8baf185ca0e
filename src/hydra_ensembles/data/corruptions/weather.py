"""Snow, frost, fog and brightness. Images are `[H, W, 3]` in 0..255."""

import math

import numpy as np

from ..._utils import require
from .fields import Pixels, clip_to_bytes, clipped_zoom, gaussian_blur, motion_blur, plasma
from .parameters import Values

_LUMA = np.array([0.299, 0.587, 0.114])
_ICE_DARK = np.array([38.0, 58.0, 88.0])
_ICE_LIGHT = np.array([232.0, 243.0, 255.0])


def snow(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Flakes driven by the wind, over a whitened image.

    The original blurs the flakes with ImageMagick; `fields.motion_blur` follows the same definition.
    """
    mean, deviation, zoom, threshold, radius, sigma, weight = values
    pixels = image / 255.0
    flakes = clipped_zoom(rng.normal(mean, deviation, size=image.shape[:2])[..., None], zoom)[..., 0]
    flakes = np.floor(np.clip(np.where(flakes < threshold, 0.0, flakes), 0, 1) * 255.0)
    flakes = np.rint(motion_blur(flakes, radius, sigma, rng.uniform(-135.0, -45.0)))[..., None] / 255.0
    grey = (pixels @ _LUMA)[..., None]
    whitened = weight * pixels + (1.0 - weight) * np.maximum(pixels, grey * 1.5 + 0.5)
    return clip_to_bytes(whitened + flakes + np.rot90(flakes, k=2))


def frost(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Ice crystals on the lens.

    The original lays random crops of five photographs of frost over the image. No photograph is shipped here:
    `ice` draws a picture of ice instead, laid over with the published weights and reduced to the published
    scale. Severities compare with one another, but not number for number with ImageNet-C.
    """
    image_weight, frost_weight, scale = values
    overlay = ice(image.shape[0], image.shape[1], scale, rng)
    return np.clip(image_weight * image + frost_weight * overlay, 0, 255)


def fog(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """A cloud field added to the image, which is then scaled back to its range."""
    strength, decay = values
    pixels = image / 255.0
    brightest = float(pixels.max())
    clouds = plasma(image.shape[0], image.shape[1], decay, rng)[..., None]
    return clip_to_bytes((pixels + strength * clouds) * brightest / (brightest + strength))


def brightness(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Add to the value of HSV, at constant hue and saturation.

    At constant hue and saturation the colour is proportional to the value, so no conversion is needed: the
    colour is scaled by new value / old value (black has no hue and becomes grey).
    """
    del rng
    (added,) = values
    pixels = image / 255.0
    value = pixels.max(axis=-1, keepdims=True)
    brighter = np.minimum(value + added, 1.0)
    scaled = np.where(value > 0, pixels * (brighter / np.where(value > 0, value, 1.0)), brighter)
    return clip_to_bytes(scaled)


def ice(height: int, width: int, scale: float, rng: np.random.Generator) -> Pixels:
    """Draw a picture of frost, `[height, width, 3]` in 0..255.

    Long needles with short branches, along axes about 60 degrees apart, grow where a rough cloud field says
    that the ice is thick; the rest is nearly clear. The light is coloured from dark blue glass to white.
    `scale` below one draws a larger picture and reduces it, for small images.
    """
    rows, columns = math.ceil(height / scale), math.ceil(width / scale)
    thickness = plasma(rows, columns, 1.7, rng)
    thickness = 1.0 / (1.0 + np.exp(-12.0 * (thickness - np.median(thickness))))
    first_angle = rng.uniform(0.0, 60.0)
    crystals = np.zeros((rows, columns))
    for density, length in ((0.0008, 80), (0.004, 30)):
        needles = gaussian_blur(_needles(rows, columns, density, length, first_angle, rng), 0.8)
        crystals += 0.4 * np.sqrt(needles / max(float(needles.max()), 1e-9))
    light = 0.08 + 0.5 * thickness + crystals * (0.25 + 0.75 * thickness)
    light += rng.normal(scale=0.03, size=light.shape)
    picture: Pixels = _ICE_DARK + np.clip(light, 0, 1)[..., None] * (_ICE_LIGHT - _ICE_DARK)
    if (rows, columns) == (height, width):
        return picture
    image_module = require("PIL.Image", extra="data")
    reduced = image_module.fromarray(picture.astype(np.uint8)).resize((width, height), image_module.Resampling.BILINEAR)
    return np.asarray(reduced, dtype=np.float64)


def _needles(
    rows: int, columns: int, density: float, length: int, first_angle: float, rng: np.random.Generator
) -> Pixels:
    """Lines that fade from random seeds, each along one of six axes 60 degrees apart."""
    count = max(1, round(6 * density * rows * columns))
    axes = rng.integers(0, 6, count)
    angles = np.radians(first_angle + 60.0 * axes + rng.uniform(-12.0, 12.0, count))[:, None]
    steps = np.arange(length)[None, :]
    # Where each needle passes, [count, length]
    row = np.rint(rng.uniform(0, rows, count)[:, None] + steps * np.sin(angles)).astype(np.int64)
    column = np.rint(rng.uniform(0, columns, count)[:, None] + steps * np.cos(angles)).astype(np.int64)
    brightness_along = np.broadcast_to(np.exp(-((steps / (0.35 * length)) ** 2) / 2.0), row.shape)
    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    field = np.zeros((rows, columns))
    np.maximum.at(field, (row[inside], column[inside]), brightness_along[inside])
    return field
