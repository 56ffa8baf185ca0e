"""The three noises. Images are `[H, W, 3]` in 0..255; parameters as `parameters.MEANING` says."""

import numpy as np

from .fields import Pixels, clip_to_bytes
from .parameters import Values


def gaussian_noise(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Noise of low light: a normal deviation on every value."""
    (deviation,) = values
    return clip_to_bytes(image / 255.0 + rng.normal(scale=deviation, size=image.shape))


def shot_noise(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Noise of counting photons: a Poisson count for every value."""
    (photons,) = values
    return clip_to_bytes(rng.poisson(image / 255.0 * photons) / photons)


def impulse_noise(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Salt and pepper: some values become black or white, each with equal probability."""
    (share,) = values
    replaced = rng.random(image.shape) < share
    white = rng.random(image.shape) < 0.5
    return np.where(replaced, np.where(white, 255.0, 0.0), image)
