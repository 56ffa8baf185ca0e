"""The fifteen corruptions of ImageNet-C, five severities each."""

import io
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np
import numpy.typing as npt

from .._utils import require
from ..errors import DataError
from ..preprocessing import to_rgb
from .dataset import ImageDataset, Rows, hash_key

if TYPE_CHECKING:
    from PIL.Image import Image

CorruptionName = Literal[
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
]
ParameterSet = Literal["imagenet", "tinyimagenet", "cifar"]
Bytes = npt.NDArray[np.uint8]
Pixels = npt.NDArray[np.float64]
Values = tuple[float, ...]
FiveSeverities = tuple[Values, Values, Values, Values, Values]
Corruption = Callable[[Pixels, Values, np.random.Generator], Pixels]

CORRUPTIONS: tuple[CorruptionName, ...] = get_args(CorruptionName)
PARAMETER_SETS: tuple[ParameterSet, ...] = get_args(ParameterSet)
SEVERITIES = (1, 2, 3, 4, 5)


@overload
def corrupt(
    image: "Image", name: CorruptionName, severity: int, seed: int, parameters: ParameterSet = "imagenet"
) -> "Image": ...


@overload
def corrupt(
    image: Bytes, name: CorruptionName, severity: int, seed: int, parameters: ParameterSet = "imagenet"
) -> Bytes: ...


def corrupt(
    image: "Image | Bytes",
    name: CorruptionName,
    severity: int,
    seed: int,
    parameters: ParameterSet = "imagenet",
) -> "Image | Bytes":
    """Corrupt an image as ImageNet-C does.

    Motion blur and snow follow ImageMagick's definition of motion blur, and frost is drawn, not photographed
    (see `frost`); everything else follows the published code up to the stream of random numbers.
    Values are truncated to integers, as they were when ImageNet-C was made. ImageNet-C itself was saved once
    more as JPEG of quality 85, which this does not do.

    Args:
        image: A PIL image of any mode, or an array of bytes `[H, W, 3]` or `[H, W]`, of any size.
        name: One of `CORRUPTIONS`.
        severity: 1 to 5.
        seed: Same image, same seed, same result (numpy's PCG64). Give each image a seed of its own.
        parameters: Which published set: `"imagenet"` (made for 224 pixels), `"tinyimagenet"` (64), `"cifar"`
            (32). The numbers are in pixels and are not scaled to the image.

    Returns:
        The corrupted image, RGB, of the same size: a PIL image for a PIL image, else an array `[H, W, 3]`.

    Raises:
        DataError: No such corruption, severity or parameter set, or not an image.
    """
    values = _values(name, severity, parameters)
    pixels, is_pil = _pixels(image)
    rng = np.random.Generator(np.random.PCG64(seed & ((1 << 64) - 1)))
    corrupted = np.clip(FUNCTIONS[name](pixels, values, rng), 0, 255).astype(np.uint8)
    return require("PIL.Image", extra="data").fromarray(corrupted) if is_pil else corrupted


def corrupted(
    dataset: ImageDataset,
    name: CorruptionName,
    severity: int,
    seed: int = 0,
    parameters: ParameterSet = "imagenet",
    prepare: "Callable[[Image], Image] | None" = None,
) -> ImageDataset:
    """Give a data set whose images are corrupted when they are read, each with random numbers of its own.

    The random numbers depend on the seed, the corruption and the row of the image in its source, so subsets
    see the same corrupted images.

    Args:
        dataset: Images.
        name: One of `CORRUPTIONS`.
        severity: 1 to 5.
        seed: Same seed, same images.
        parameters: Which published set; see `corrupt`.
        prepare: Applied before the corruption, such as resizing to 256 and cropping to 224 for ImageNet-C.
    """
    _values(name, severity, parameters)
    read = partial(_read_corrupted, dataset, name, severity, seed, parameters, prepare)
    title = f"{dataset.name} [{name} {severity}]"
    return ImageDataset(Rows(len(dataset), read), dataset.labels, dataset.class_names, title)


def _read_corrupted(
    dataset: ImageDataset,
    name: CorruptionName,
    severity: int,
    seed: int,
    parameters: ParameterSet,
    prepare: "Callable[[Image], Image] | None",
    position: int,
) -> "Image":
    image, _ = dataset[position]
    seed = hash_key(seed, CORRUPTIONS.index(name), int(dataset.rows[position]))
    return corrupt(image if prepare is None else prepare(image), name, severity, seed, parameters)


def _values(name: CorruptionName, severity: int, parameters: ParameterSet) -> Values:
    if name not in CORRUPTIONS:
        raise DataError(f"no corruption {name!r}; choose one of {', '.join(CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise DataError(f"severity must be 1, 2, 3, 4 or 5, got {severity!r}")
    if parameters not in PARAMETER_SETS:
        raise DataError(f"no parameter set {parameters!r}; choose one of {', '.join(PARAMETER_SETS)}")
    return PARAMETERS[parameters][name][severity - 1]


def _pixels(image: Any) -> tuple[Pixels, bool]:
    """Bring an image to `[H, W, 3]` in 0..255, and say whether it was a PIL image."""
    is_pil = hasattr(image, "convert")
    array = np.asarray(to_rgb(image)) if is_pil else image
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8:
        kind = f"an array of {array.dtype}" if isinstance(array, np.ndarray) else f"a {type(image).__name__}"
        raise DataError(f"expected a PIL image or an array of uint8, got {kind}; scale to 0..255 and convert")
    if array.ndim == 2:
        array = np.repeat(array[..., None], 3, axis=-1)
    if array.ndim != 3 or array.shape[-1] != 3 or 0 in array.shape:
        raise DataError(f"expected an image of shape [H, W, 3] or [H, W], got {list(image.shape)}")
    return array.astype(np.float64), is_pil


# --- the corruptions: pixels [H, W, 3] in 0..255, the numbers of a severity, random numbers ------------------


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


def defocus_blur(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Out of focus: every point becomes a disc."""
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

    The original calls ImageMagick; `directional_blur` follows the same definition.
    """
    radius, sigma = values
    return np.rint(directional_blur(image, radius, sigma, rng.uniform(-45.0, 45.0)))


def zoom_blur(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """The camera moves towards the scene: the mean of several enlargements."""
    end, step = values
    pixels = image / 255.0
    factors = np.arange(1, end, step)
    total = sum((clipped_zoom(pixels, float(factor)) for factor in factors), start=np.zeros_like(pixels))
    return clip_to_bytes((pixels + total) / (len(factors) + 1))


def snow(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Flakes driven by the wind, over a whitened image.

    The original blurs the flakes with ImageMagick; `directional_blur` follows the same definition.
    """
    mean, deviation, zoom, threshold, radius, sigma, weight = values
    pixels = image / 255.0
    flakes = clipped_zoom(rng.normal(mean, deviation, size=image.shape[:2])[..., None], zoom)[..., 0]
    flakes = np.floor(np.clip(np.where(flakes < threshold, 0.0, flakes), 0, 1) * 255.0)
    flakes = np.rint(directional_blur(flakes, radius, sigma, rng.uniform(-135.0, -45.0)))[..., None] / 255.0
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
    (added,) = values
    pixels = image / 255.0
    value = pixels.max(axis=-1, keepdims=True)
    brighter = np.minimum(value + added, 1.0)
    scaled = np.where(value > 0, pixels * (brighter / np.where(value > 0, value, 1.0)), brighter)
    return clip_to_bytes(scaled)


def contrast(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Draw every channel towards its mean over the image."""
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
    (scale,) = values
    image_module = require("PIL.Image", extra="data")
    height, width = image.shape[:2]
    small = (max(1, int(width * scale)), max(1, int(height * scale)))
    picture = image_module.fromarray(image.astype(np.uint8)).resize(small, image_module.Resampling.BOX)
    return np.asarray(picture.resize((width, height), image_module.Resampling.BOX), dtype=np.float64)


def jpeg_compression(image: Pixels, values: Values, rng: np.random.Generator) -> Pixels:
    """Save as JPEG and read again."""
    (quality,) = values
    image_module = require("PIL.Image", extra="data")
    stored = io.BytesIO()
    image_module.fromarray(image.astype(np.uint8)).save(stored, "JPEG", quality=int(quality))
    return np.asarray(image_module.open(stored), dtype=np.float64)


# --- what they are made of ----------------------------------------------------------------------------------


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


def directional_blur(image: Pixels, radius: float, sigma: float, angle: float) -> Pixels:
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


def _sample(image: Pixels, rows: Pixels, columns: Pixels, mode: str) -> Pixels:
    """Read an image between its pixels, linearly."""
    ndimage = require("scipy.ndimage", extra="data")
    channels = [
        ndimage.map_coordinates(image[..., channel], (rows, columns), order=1, mode=mode)
        for channel in range(image.shape[-1])
    ]
    return np.stack(channels, axis=-1)


_LUMA = np.array([0.299, 0.587, 0.114])
_ICE_DARK = np.array([38.0, 58.0, 88.0])
_ICE_LIGHT = np.array([232.0, 243.0, 255.0])

FUNCTIONS: dict[CorruptionName, Corruption] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "defocus_blur": defocus_blur,
    "glass_blur": glass_blur,
    "motion_blur": motion_blur,
    "zoom_blur": zoom_blur,
    "snow": snow,
    "frost": frost,
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "elastic_transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg_compression": jpeg_compression,
}

# ImageNet-C multiplies by 244 where its images have 224 pixels; the slip is part of the published data.
_I, _T, _C = 244, 64, 32

PARAMETERS: dict[ParameterSet, dict[CorruptionName, FiveSeverities]] = {
    "imagenet": {
        "gaussian_noise": ((0.08,), (0.12,), (0.18,), (0.26,), (0.38,)),
        "shot_noise": ((60,), (25,), (12,), (5,), (3,)),
        "impulse_noise": ((0.03,), (0.06,), (0.09,), (0.17,), (0.27,)),
        "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
        "snow": (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        "frost": ((1, 0.4, 1), (0.8, 0.6, 1), (0.7, 0.7, 1), (0.65, 0.7, 1), (0.6, 0.75, 1)),
        "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        "brightness": ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
        "contrast": ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
        "elastic_transform": (
            (_I * 2, _I * 0.7, _I * 0.1),
            (_I * 2, _I * 0.08, _I * 0.2),
            (_I * 0.05, _I * 0.01, _I * 0.02),
            (_I * 0.07, _I * 0.01, _I * 0.02),
            (_I * 0.12, _I * 0.01, _I * 0.02),
        ),
        "pixelate": ((0.6,), (0.5,), (0.4,), (0.3,), (0.25,)),
        "jpeg_compression": ((25,), (18,), (15,), (10,), (7,)),
    },
    "tinyimagenet": {
        "gaussian_noise": ((0.04,), (0.08,), (0.12,), (0.15,), (0.18,)),
        "shot_noise": ((250,), (100,), (50,), (30,), (15,)),
        "impulse_noise": ((0.01,), (0.02,), (0.05,), (0.08,), (0.14,)),
        "defocus_blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
        "glass_blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
        "motion_blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
        ),
        "frost": ((1, 0.3, 0.3), (0.9, 0.4, 0.3), (0.8, 0.45, 0.3), (0.75, 0.5, 0.3), (0.7, 0.55, 0.3)),
        "fog": ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
        "brightness": ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
        "contrast": ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
        "elastic_transform": (
            (0, 0, _T * 0.08),
            (_T * 0.05, _T * 0.3, _T * 0.06),
            (_T * 0.1, _T * 0.08, _T * 0.06),
            (_T * 0.1, _T * 0.03, _T * 0.03),
            (_T * 0.16, _T * 0.03, _T * 0.02),
        ),
        "pixelate": ((0.9,), (0.8,), (0.7,), (0.6,), (0.5,)),
        "jpeg_compression": ((65,), (58,), (50,), (40,), (25,)),
    },
    "cifar": {
        "gaussian_noise": ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,)),
        "shot_noise": ((500,), (250,), (100,), (75,), (50,)),
        "impulse_noise": ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)),
        "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        "frost": ((1, 0.2, 0.2), (1, 0.3, 0.2), (0.9, 0.4, 0.2), (0.85, 0.4, 0.2), (0.75, 0.45, 0.2)),
        "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        "brightness": ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)),
        "contrast": ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)),
        "elastic_transform": (
            (0, 0, _C * 0.08),
            (_C * 0.05, _C * 0.2, _C * 0.07),
            (_C * 0.08, _C * 0.06, _C * 0.06),
            (_C * 0.1, _C * 0.04, _C * 0.05),
            (_C * 0.1, _C * 0.03, _C * 0.03),
        ),
        "pixelate": ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)),
        "jpeg_compression": ((80,), (65,), (58,), (50,), (40,)),
    },
}
