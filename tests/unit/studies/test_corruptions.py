import colorsys
import io
import itertools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hydra_ensembles.data.dataset import ImageDataset
from studies import corruptions
from studies.corruptions import CORRUPTIONS, SEVERITIES, corrupted
from studies.suites import read_yaml

SIZES = {"imagenet": 96, "tinyimagenet": 64, "cifar": 32}
FIXED = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"}  # nothing is drawn


def scene(size: int, width: int | None = None) -> np.ndarray:
    """A picture with smooth areas, edges, fine structure and colours that avoid black and white."""
    rows, columns = np.mgrid[:size, : width or size] / size
    red = 90 + 60 * np.sin(9 * columns + 4 * rows)
    green = 110 + 50 * ((rows * 6).astype(int) % 2)
    blue = 100 + 40 * np.sin(70 * rows * columns) + 40 * (columns > rows)
    return np.stack([red, green, blue], axis=-1).astype(np.uint8)


def corrupt(image: np.ndarray, name: str, severity: int, seed: int = 0, parameters: Any = "imagenet") -> np.ndarray:
    return np.asarray(corruptions.corrupt(Image.fromarray(image), name, severity, seed, parameters))


@pytest.mark.parametrize("parameters", SIZES)
def test_distortion_grows_with_severity(parameters: str) -> None:
    numbers, image = read_yaml("corruptions"), scene(SIZES[parameters])
    assert (tuple(numbers), len(CORRUPTIONS)) == (CORRUPTIONS, 15)
    for name in CORRUPTIONS:
        assert len(numbers[name][parameters]) == len(SEVERITIES)
        mild, strong = (corrupt(image, name, severity, 0, parameters).astype(float) for severity in (1, 5))
        apart = name in ("elastic_transform", "frost")  # one shifts the whole image, one hides the darker image below
        least = 0 if apart else 1.2 * ((mild - image) ** 2).mean()
        assert ((strong - image) ** 2).mean() > least, name


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_seed_repeats_and_another_differs_and_any_size_will_do(name: str) -> None:
    image = scene(48)
    first = corrupt(image, name, 3, seed=1)
    assert np.array_equal(image, scene(48))
    assert np.array_equal(first, corrupt(image, name, 3, seed=1))
    assert np.array_equal(first, corrupt(image, name, 3, seed=2)) == (name in FIXED)
    for shape, severity in itertools.product([(33, 57), (1, 1)], (1, 5)):
        result = corrupt(scene(*shape), name, severity)
        assert (result.shape, result.dtype) == ((*shape, 3), np.uint8)


def test_brightness_contrast_pixelate_and_jpeg_are_their_formulas() -> None:
    image = scene(40)
    image[0, 0] = 0  # black has no hue
    bright = corrupt(image, "brightness", 3)  # adds 0.3
    for row, column in itertools.product(range(12), range(12)):
        hue, saturation, value = colorsys.rgb_to_hsv(*(image[row, column] / 255))
        expected = np.array(colorsys.hsv_to_rgb(hue, saturation, min(value + 0.3, 1))) * 255
        assert np.abs(bright[row, column] - expected).max() < 1.001  # values are truncated
    mean = image.reshape(-1, 3).mean(axis=0)
    assert np.abs(corrupt(image, "contrast", 5) + 0.5 - (mean + 0.05 * (image - mean))).max() <= 0.5 + 1e-9
    blocks = np.repeat(np.repeat(image.reshape(10, 4, 10, 4, 3).mean(axis=(1, 3)), 4, axis=0), 4, axis=1)
    assert np.abs(corrupt(image, "pixelate", 5) - blocks).max() <= 1.0  # Pillow rounds after each axis
    stored = io.BytesIO()
    Image.fromarray(image).save(stored, "JPEG", quality=10)
    assert np.array_equal(corrupt(image, "jpeg_compression", 4), np.asarray(Image.open(stored)))


def test_noise_has_the_published_moments() -> None:
    flat = np.full((200, 200, 3), 128, dtype=np.uint8)
    assert (corrupt(flat, "gaussian_noise", 1) / 255).std() == pytest.approx(0.08, rel=0.02)
    counts = corrupt(flat, "shot_noise", 1) / 255 * 60
    assert counts.mean() == pytest.approx(60 * 128 / 255, rel=0.02)
    assert counts.var() == pytest.approx(60 * 128 / 255, rel=0.05)  # Poisson: variance = mean
    impulses = corrupt(flat, "impulse_noise", 5)
    assert [(impulses == value).mean() for value in (255, 0)] == pytest.approx([0.135, 0.135], rel=0.05)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gaussian_noise", "shot_noise", "motion_blur", "snow", "zoom_blur", "contrast"])
def test_corruptions_are_those_of_the_public_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pkg_resources", SimpleNamespace(resource_filename=None))  # gone from setuptools
    public = pytest.importorskip("imagecorruptions")
    for severity in (1, 2, 3):  # above, the package trims zoomed snow at the end, ImageNet-C on both sides
        np.random.seed(severity)
        expected = public.corrupt(scene(96), severity, name)
        values = read_yaml("corruptions")[name]["imagenet"][severity - 1]
        found = corruptions.FUNCTIONS[name](scene(96).astype(float), np.random.RandomState(severity), *values)
        assert np.abs(found - expected).max() < 3.01, severity  # the package truncates, and rounds flakes later


def test_every_row_of_a_corrupted_data_set_has_random_numbers_of_its_own() -> None:
    data = ImageDataset([Image.fromarray(scene(16))] * 4, [0, 1, 0, 1], ["a", "b"], "scenes")
    noisy = corrupted(data, "gaussian_noise", 2, seed=3, parameters="cifar")
    assert (noisy.labels.tolist(), noisy.class_names, noisy.name) == (
        [0, 1, 0, 1],
        ("a", "b"),
        "scenes [gaussian_noise 2]",
    )
    first, second = np.asarray(noisy[0][0]), np.asarray(noisy[1][0])
    assert not np.array_equal(first, second)  # the same picture with other random numbers
    of_subset = corrupted(data.select([1]), "gaussian_noise", 2, seed=3, parameters="cifar")
    assert np.array_equal(np.asarray(of_subset[0][0]), second)
