"""The fifteen corruptions of ImageNet-C, five severities each."""

import io
import math
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, distribution
from operator import index
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage

from hydra_ensembles.data.dataset import ImageDataset, Rows, hash_key
from hydra_ensembles.errors import DataError
from hydra_ensembles.preprocessing import to_rgb

from .suites import read_yaml

ParameterSet = Literal["imagenet", "tinyimagenet", "cifar"]
PixelArray = npt.NDArray[np.float64]
Random = np.random.Generator
Corruption = Callable[..., PixelArray]

SEVERITIES = (1, 2, 3, 4, 5)
FROST = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")  # the published code draws one of five


def corrupt(
    image: Image.Image, name: str, severity: int, seed: int, parameters: ParameterSet = "imagenet"
) -> Image.Image:
    """Corrupt a PIL image as ImageNet-C does; the result is RGB, of the same size, and depends on the seed alone.

    Everything follows the published code up to the stream of random numbers; motion blur and snow, whose original calls
    ImageMagick, as the package `imagecorruptions` does. That package cannot be called instead: it has the parameters
    for 224 pixels only, one global stream of random numbers, and its fog and glass blur fail with NumPy 2. Values are
    truncated to integers, as in ImageNet-C. `parameters` are the published ones made for 224 pixels (`"imagenet"`),
    64 (`"tinyimagenet"`) or 32 (`"cifar"`); they are not scaled to the image.
    """
    values = read_yaml("corruptions")[name][parameters][severity - 1]
    rng = np.random.Generator(np.random.PCG64(index(seed) & ((1 << 64) - 1)))
    pixels = FUNCTIONS[name](np.asarray(to_rgb(image), dtype=np.float64), rng, *values)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def corrupted(
    dataset: ImageDataset,
    name: str,
    severity: int,
    seed: int = 0,
    parameters: ParameterSet = "imagenet",
) -> ImageDataset:
    """A data set whose images are corrupted when they are read, each with random numbers of its own row in its source.

    The data set must give images of the size that the parameters were made for.
    """
    read = partial(_read_corrupted, dataset, name, severity, parameters, (seed, CORRUPTIONS.index(name)))
    title = f"{dataset.name} [{name} {severity}]"
    return ImageDataset(Rows(len(dataset), read), dataset.labels, dataset.class_names, title)


def _read_corrupted(
    dataset: ImageDataset, name: str, severity: int, parameters: ParameterSet, key: tuple[int, int], position: int
) -> Image.Image:
    return corrupt(dataset[position][0], name, severity, hash_key(*key, int(dataset.rows[position])), parameters)


# --- the corruptions: each takes pixels [H, W, 3] in 0..255, a generator, and the parameters of a severity ------


def gaussian_noise(image: PixelArray, rng: Random, deviation: float) -> PixelArray:
    """Low-light noise: add Gaussian noise to every value."""
    return clip_to_bytes(image / 255.0 + rng.normal(scale=deviation, size=image.shape))


def shot_noise(image: PixelArray, rng: Random, photons: float) -> PixelArray:
    """Photon-counting noise: replace every value by a Poisson count."""
    return clip_to_bytes(rng.poisson(image / 255.0 * photons) / photons)


def impulse_noise(image: PixelArray, rng: Random, share: float) -> PixelArray:
    """Salt and pepper: replace a share of the values by black or white, with equal probability."""
    replaced = rng.random(image.shape) < share
    white = rng.random(image.shape) < 0.5
    return np.where(replaced, np.where(white, 255.0, 0.0), image)


def defocus_blur(image: PixelArray, rng: Random, radius: float, sigma: float) -> PixelArray:
    """Out of focus: every point becomes a disc."""
    return clip_to_bytes(ndimage.correlate(image / 255.0, _disc(radius, sigma)[..., None], mode="mirror"))


def glass_blur(image: PixelArray, rng: Random, sigma: float, reach: int, rounds: int) -> PixelArray:
    """Frosted glass: blur, scatter pixels locally (copied, as in the published code, not swapped), blur again."""
    height, width = image.shape[:2]
    blurred = np.floor(gaussian_blur(image / 255.0, sigma) * 255.0)
    source = list(range(height * width))  # source pixel of each position; a list, because the loop is sequential
    rows, columns = range(height - reach, reach, -1), range(width - reach, reach, -1)
    for _ in range(rounds):
        shifts = rng.integers(-reach, reach, size=(len(rows), len(columns), 2))
        offsets = (shifts[..., 1] * width + shifts[..., 0]).tolist()
        for row, row_offsets in zip(rows, offsets, strict=True):
            for column, offset in zip(columns, row_offsets, strict=True):
                source[row * width + column] = source[row * width + column + offset]
    scattered = blurred.reshape(height * width, -1)[source].reshape(image.shape)
    return clip_to_bytes(gaussian_blur(scattered / 255.0, sigma))


def motion_blur(image: PixelArray, rng: Random, radius: float, sigma: float) -> PixelArray:
    """The camera moves along a random direction within 45° of the horizontal."""
    return np.rint(directional_blur(image, radius, sigma, rng.uniform(-45.0, 45.0)))


def zoom_blur(image: PixelArray, rng: Random, end: float, step: float) -> PixelArray:
    """The camera moves towards the scene: the mean of several enlargements."""
    pixels = image / 255.0
    zoomed = [clipped_zoom(pixels, float(factor)) for factor in np.arange(1, end, step)]
    return clip_to_bytes((pixels + sum(zoomed)) / (len(zoomed) + 1))


def snow(image: PixelArray, rng: Random, *numbers: float) -> PixelArray:
    """Wind-driven flakes over a whitened image."""
    mean, deviation, zoom, threshold, radius, sigma, weight = numbers
    pixels = image / 255.0
    flakes = clipped_zoom(rng.normal(mean, deviation, size=image.shape[:2])[..., None], zoom)[..., 0]
    flakes = np.floor(np.clip(np.where(flakes < threshold, 0.0, flakes), 0, 1) * 255.0)
    flakes = np.rint(directional_blur(flakes, radius, sigma, rng.uniform(-135.0, -45.0)))[..., None] / 255.0
    grey = (pixels @ _LUMA)[..., None]
    whitened = weight * pixels + (1.0 - weight) * np.maximum(pixels, grey * 1.5 + 0.5)
    return clip_to_bytes(whitened + flakes + np.rot90(flakes, k=2))


def frost(image: PixelArray, rng: Random, image_weight: float, frost_weight: float, scale: float) -> PixelArray:
    """Ice crystals on the lens: a part of one of ImageNet-C's photographs of frost is laid over the image."""
    height, width = image.shape[:2]
    picture = photograph(FROST[rng.integers(len(FROST))])
    scale = max(scale, (height + 1) / picture.height, (width + 1) / picture.width)
    size = round(picture.width * scale), round(picture.height * scale)
    whole = (0, 0, *picture.size)
    picture = picture.transform(size, Image.Transform.EXTENT, whole, Image.Resampling.BILINEAR)  # as OpenCV resizes
    left, top = (int(rng.integers(max(1, much - little))) for much, little in zip(size, (width, height), strict=True))
    ice = np.asarray(picture.crop((left, top, left + width, top + height)), dtype=np.float64)
    return np.clip(image_weight * image + frost_weight * ice, 0, 255)


def fog(image: PixelArray, rng: Random, strength: float, decay: float) -> PixelArray:
    """A cloud field added to the image, which is then scaled back to its range."""
    pixels = image / 255.0
    brightest = float(pixels.max())
    clouds = plasma(image.shape[0], image.shape[1], decay, rng)[..., None]
    return clip_to_bytes((pixels + strength * clouds) * brightest / (brightest + strength))


def brightness(image: PixelArray, rng: Random, added: float) -> PixelArray:
    """Raise the HSV value at constant hue and saturation: colours are scaled, and black becomes grey."""
    pixels = image / 255.0
    value = pixels.max(axis=-1, keepdims=True)
    brighter = np.minimum(value + added, 1.0)
    return clip_to_bytes(np.where(value > 0, pixels * (brighter / np.where(value > 0, value, 1.0)), brighter))


def contrast(image: PixelArray, rng: Random, factor: float) -> PixelArray:
    """Scale every channel's distance from its mean over the image by `factor`, below one."""
    pixels = image / 255.0
    means = pixels.mean(axis=(0, 1), keepdims=True)
    return clip_to_bytes((pixels - means) * factor + means)


def elastic_transform(image: PixelArray, rng: Random, *shares: float) -> PixelArray:
    """Stretch the image: a random affine map, then a smooth random displacement of every pixel."""
    *numbers, size = shares
    reach, sigma, corner_shift = (size * share for share in numbers)
    pixels = image / 255.0
    height, width = image.shape[:2]
    centre = np.array([width // 2, height // 2], dtype=np.float64)
    side = min(height, width) // 3
    corners = centre + np.array([[side, side], [side, -side], [-side, -side]])  # [3, (x, y)]
    moved = corners + rng.uniform(-corner_shift, corner_shift, size=corners.shape)
    rows, columns = np.mgrid[:height, :width].astype(np.float64)
    # The affine map from `moved` back to `corners` gives the source position of each output pixel.
    back = np.linalg.lstsq(np.column_stack([moved, np.ones(3)]), corners, rcond=None)[0]  # [3, (x, y)]
    from_x, from_y = (back[0, axis] * columns + back[1, axis] * rows + back[2, axis] for axis in (0, 1))
    warped = _sample(pixels, from_y, from_x, mode="mirror")
    noise = [rng.uniform(-1, 1, size=(height, width)) for _ in range(2)]
    shift_x, shift_y = (gaussian_blur(field, sigma, mode="reflect", truncate=3) * reach for field in noise)
    return clip_to_bytes(_sample(warped, rows + shift_y, columns + shift_x, mode="reflect"))


def pixelate(image: PixelArray, rng: Random, scale: float) -> PixelArray:
    """Downsample and upsample again, both with a box filter."""
    height, width = image.shape[:2]
    small = (max(1, int(width * scale)), max(1, int(height * scale)))
    picture = Image.fromarray(image.astype(np.uint8)).resize(small, Image.Resampling.BOX)
    return np.asarray(picture.resize((width, height), Image.Resampling.BOX), dtype=np.float64)


def jpeg_compression(image: PixelArray, rng: Random, quality: int) -> PixelArray:
    """Encode as JPEG and decode again."""
    stored = io.BytesIO()
    Image.fromarray(image.astype(np.uint8)).save(stored, "JPEG", quality=quality)
    return np.asarray(Image.open(stored), dtype=np.float64)


# --- building blocks ----------------------------------------------------------------------------------------


def clip_to_bytes(pixels: PixelArray) -> PixelArray:
    """Clip values to [0, 1] and scale them to 0..255."""
    return np.asarray(np.clip(pixels, 0, 1) * 255.0)


def gaussian_blur(image: PixelArray, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> PixelArray:
    """Blur the two leading axes; a third axis (channels) is not blurred."""
    return np.asarray(ndimage.gaussian_filter(image, (sigma, sigma, 0)[: image.ndim], mode=mode, truncate=truncate))


def directional_blur(image: PixelArray, radius: float, sigma: float, angle: float) -> PixelArray:
    """Blur along a line, as ImageMagick's `MotionBlurImage` does.

    Each pixel becomes the mean of `2·radius + 1` pixels from itself in the direction of the angle (in degrees),
    weighted by one half of a Gaussian.
    """
    width = 2 * math.ceil(radius) + 1
    weights = np.exp(-(np.arange(width) ** 2) / (2.0 * sigma**2))
    weights /= weights.sum()
    direction = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    height, columns = image.shape[:2]
    padded = np.pad(image, [(width, width)] * 2 + [(0, 0)] * (image.ndim - 2), mode="edge")
    blurred = np.zeros(image.shape, dtype=np.float64)
    for step, weight in enumerate(weights):
        left = width + math.ceil(step * direction[0] - 0.5)
        top = width + math.ceil(step * direction[1] - 0.5)
        blurred += weight * padded[top : top + height, left : left + columns]
    return blurred


def clipped_zoom(image: PixelArray, factor: float) -> PixelArray:
    """Crop the centre of an image `[H, W, C]` and resize it linearly to the original size."""
    height, width = image.shape[:2]
    middle = _centre(image, math.ceil(height / factor), math.ceil(width / factor))
    return _centre(ndimage.zoom(middle, (factor, factor, 1), order=1), height, width)


def _centre(image: PixelArray, height: int, width: int) -> PixelArray:
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    return np.asarray(image[top : top + height, left : left + width])


def plasma(height: int, width: int, decay: float, rng: Random) -> PixelArray:
    """Random cloud-like field in [0, 1], by the diamond–square algorithm on a torus.

    The amplitude of the noise starts at 100² and shrinks by `decay²` per level: a higher decay gives a smoother field.
    """
    side = max(2, 1 << (max(height, width) - 1).bit_length())
    field = np.zeros((side, side))
    amplitude, step = 100.0, side
    while step >= 2:
        half, scale = step // 2, amplitude * amplitude
        corners, centres = field[::step, ::step], field[half::step, half::step]  # views
        right, below = np.roll(corners, -1, axis=1), np.roll(corners, -1, axis=0)
        deviation = partial(rng.uniform, -scale, scale, corners.shape)
        centres[:] = (corners + right + below + np.roll(right, -1, axis=0)) / 4 + deviation()
        field[::step, half::step] = (centres + np.roll(centres, 1, axis=0) + corners + right) / 4 + deviation()
        field[half::step, ::step] = (centres + np.roll(centres, 1, axis=1) + corners + below) / 4 + deviation()
        amplitude, step = amplitude / decay, half
    field -= field.min()
    return np.asarray(field / field.max())[:height, :width]


@cache
def photograph(name: str) -> Image.Image:
    """A photograph of frost, from the package that publishes ImageNet-C's; its code is not imported."""
    try:
        path = distribution("imagecorruptions").locate_file(f"imagecorruptions/frost/{name}")
    except PackageNotFoundError:
        raise DataError("frost is photographed: pip install --no-deps imagecorruptions==1.1.2") from None
    return Image.open(str(path)).convert("RGB")


def _disc(radius: float, sigma: float) -> PixelArray:
    """Uniform disc with a softened rim, normalised to sum to one."""
    reach, rim = (8, 1) if radius <= 8 else (int(radius), 2)
    offsets = np.arange(-reach, reach + 1)
    disc = (offsets[:, None] ** 2 + offsets[None, :] ** 2 <= radius**2).astype(np.float64)
    disc /= disc.sum()
    rim_weights = np.exp(-(np.arange(-rim, rim + 1) ** 2) / (2.0 * sigma**2))
    rim_weights /= rim_weights.sum()
    for axis in (0, 1):
        disc = ndimage.correlate1d(disc, rim_weights, axis=axis, mode="mirror")
    return disc


def _sample(image: PixelArray, rows: PixelArray, columns: PixelArray, mode: str) -> PixelArray:
    """Sample an image at fractional positions with linear interpolation."""
    read = partial(ndimage.map_coordinates, coordinates=(rows, columns), order=1, mode=mode)
    return np.stack([read(channel) for channel in np.moveaxis(image, -1, 0)], axis=-1)  # of [C, H, W]


_LUMA = np.array([0.299, 0.587, 0.114])
_NOISE = (gaussian_noise, shot_noise, impulse_noise)
_BLUR = (defocus_blur, glass_blur, motion_blur, zoom_blur)
_WEATHER = (snow, frost, fog, brightness)
_DIGITAL = (contrast, elastic_transform, pixelate, jpeg_compression)
FUNCTIONS: dict[str, Corruption] = {function.__name__: function for function in (*_NOISE, *_BLUR, *_WEATHER, *_DIGITAL)}
CORRUPTIONS: tuple[str, ...] = tuple(FUNCTIONS)
"""Names of the corruptions; the seeds of `corrupted` depend on their order."""
