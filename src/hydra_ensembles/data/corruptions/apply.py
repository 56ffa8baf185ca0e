"""Applying corruptions to images and data sets."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from ..._utils import require
from ...errors import DataError
from ...preprocessing import to_rgb
from ..dataset import ImageDataset
from ..subsets import hash_key
from .blur import defocus_blur, glass_blur, motion_blur, zoom_blur
from .digital import contrast, elastic_transform, jpeg_compression, pixelate
from .fields import Pixels
from .noise import gaussian_noise, impulse_noise, shot_noise
from .parameters import CORRUPTIONS, PARAMETER_SETS, PARAMETERS, SEVERITIES, CorruptionName, ParameterSet, Values
from .weather import brightness, fog, frost, snow

if TYPE_CHECKING:
    from PIL.Image import Image

Corruption = Callable[[Pixels, Values, np.random.Generator], Pixels]
Bytes = npt.NDArray[np.uint8]

FUNCTIONS: Mapping[CorruptionName, Corruption] = MappingProxyType(
    {
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
)


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
    (see `weather.frost`); everything else follows the published code up to the stream of random numbers.
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
    source = _CorruptedSource(dataset, name, severity, seed, parameters, prepare)
    title = f"{dataset.name} [{name} {severity}]"
    return ImageDataset(source, dataset.labels, dataset.class_names, title)


class _CorruptedSource:
    def __init__(
        self,
        dataset: ImageDataset,
        name: CorruptionName,
        severity: int,
        seed: int,
        parameters: ParameterSet,
        prepare: "Callable[[Image], Image] | None",
    ) -> None:
        self._dataset = dataset
        self._settings = (name, severity, parameters)
        self._seed = seed
        self._prepare = prepare

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> "Image":
        image, _ = self._dataset[row]
        if self._prepare is not None:
            image = self._prepare(image)
        name, severity, parameters = self._settings
        seed = hash_key(self._seed, CORRUPTIONS.index(name), int(self._dataset.rows[row]))
        return corrupt(image, name, severity, seed, parameters)


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
