import colorsys
import io
import itertools
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hydra_ensembles.data import corruptions
from hydra_ensembles.data.corruptions import CORRUPTIONS, SEVERITIES, corrupted, published_numbers
from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.errors import DataError

SIZES = {"imagenet": 96, "tinyimagenet": 64, "cifar": 32}


def scene(size: int, width: int | None = None) -> np.ndarray:
    """A picture with smooth areas, edges, fine structure and colours that avoid black and white."""
    rows, columns = np.mgrid[:size, : width or size] / size
    red = 90 + 60 * np.sin(9 * columns + 4 * rows)
    green = 110 + 50 * ((rows * 6).astype(int) % 2)
    blue = 100 + 40 * np.sin(70 * rows * columns) + 40 * (columns > rows)
    return np.stack([red, green, blue], axis=-1).astype(np.uint8)


def corrupt(image: np.ndarray, name: str, severity: int, seed: int = 0, parameters: Any = "imagenet") -> np.ndarray:
    return np.asarray(corruptions.corrupt(Image.fromarray(image), name, severity, seed, parameters))


def test_published_numbers() -> None:
    numbers = published_numbers()
    assert (tuple(numbers), len(CORRUPTIONS)) == (CORRUPTIONS, 15)
    assert {len(severities) for name in CORRUPTIONS for severities in numbers[name].values()} == {5}
    assert numbers["gaussian_noise"]["imagenet"] == [[0.08], [0.12], [0.18], [0.26], [0.38]]
    assert numbers["snow"]["imagenet"][2] == [0.55, 0.3, 4, 0.9, 12, 8, 0.7]


@pytest.mark.parametrize("parameters", SIZES)
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_distortion_grows_with_severity(name: str, parameters: str) -> None:
    """With exceptions: some published settings trade one parameter for another."""
    noise, plain = {"gaussian_noise", "shot_noise", "impulse_noise"}, {"defocus_blur", "zoom_blur", "fog"}
    one_parameter_grows = {*noise, *plain, "brightness", "contrast"}
    image = scene(SIZES[parameters])
    results = [corrupt(image, name, severity, 0, parameters) for severity in SEVERITIES]
    errors = [float(((result.astype(float) - image) ** 2).mean()) for result in results]
    assert min(errors) > 0
    if name == "elastic_transform":
        return  # low severities shift the whole image, high ones distort it locally: not ordered by this measure
    assert errors[4] > errors[0] * 1.2
    assert errors[3] + errors[4] > errors[0] + errors[1]
    if name in one_parameter_grows:
        assert all(later > earlier for earlier, later in itertools.pairwise(errors))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_seed_repeats_and_another_differs_and_any_size_will_do(name: str) -> None:
    image = scene(48)
    first = corrupt(image, name, 3, seed=1)
    assert np.array_equal(image, scene(48))
    assert np.array_equal(first, corrupt(image, name, 3, seed=1))
    deterministic = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"}
    assert np.array_equal(first, corrupt(image, name, 3, seed=2)) == (name in deterministic)
    for shape, severity in itertools.product([(33, 57), (1, 1)], (1, 5)):
        result = corrupt(scene(*shape), name, severity)
        assert (result.shape, result.dtype) == ((*shape, 3), np.uint8)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_brightness_is_the_hsv_formula_and_contrast_shrinks_to_the_mean(severity: int) -> None:
    image = scene(12)
    image[0, 0] = 0  # black has no hue
    image[0, 1] = (255, 0, 17)
    added, factor = (published_numbers()[name]["imagenet"][severity - 1][0] for name in ("brightness", "contrast"))
    result = corrupt(image, "brightness", severity)
    for row, column in itertools.product(range(12), range(12)):
        hue, saturation, value = colorsys.rgb_to_hsv(*(image[row, column] / 255))
        expected = np.array(colorsys.hsv_to_rgb(hue, saturation, min(value + added, 1))) * 255
        # Values are truncated, so rounding errors may change one by 1.
        assert np.abs(result[row, column] - expected).max() < 1.001
    image = scene(30)
    mean = image.reshape(-1, 3).mean(axis=0)
    expected = mean + factor * (image - mean)
    assert np.abs(corrupt(image, "contrast", severity) + 0.5 - expected).max() <= 0.5 + 1e-9


def test_pixelate_averages_blocks_and_jpeg_is_pillows() -> None:
    image = scene(40)
    blocks = image.reshape(10, 4, 10, 4, 3).mean(axis=(1, 3))
    expected = np.repeat(np.repeat(blocks, 4, axis=0), 4, axis=1)
    result = corrupt(image, "pixelate", 5)  # scale 0.25: blocks of 4 by 4
    # Pillow filters the two axes in turn and rounds after each.
    assert np.abs(result - expected).max() <= 1.0
    assert np.array_equal(result[:4, :4], np.broadcast_to(result[0, 0], (4, 4, 3)))
    stored = io.BytesIO()
    Image.fromarray(image).save(stored, "JPEG", quality=10)
    assert np.array_equal(corrupt(image, "jpeg_compression", 4), np.asarray(Image.open(stored)))


def test_noise_has_the_published_moments() -> None:
    flat = np.full((200, 200, 3), 128, dtype=np.uint8)
    noise = corrupt(flat, "gaussian_noise", 1) / 255 - 128 / 255
    assert noise.std() == pytest.approx(0.08, rel=0.02)
    counts = corrupt(flat, "shot_noise", 1) / 255 * 60
    assert counts.mean() == pytest.approx(60 * 128 / 255, rel=0.02)
    assert counts.var() == pytest.approx(60 * 128 / 255, rel=0.05)  # Poisson: variance = mean
    impulses = corrupt(flat, "impulse_noise", 5)
    for value in (255, 0):
        assert (impulses == value).mean() == pytest.approx(0.135, rel=0.05)
    assert set(np.unique(impulses)) == {0, 128, 255}


def test_a_corrupted_data_set_and_what_is_refused() -> None:
    pictures = [Image.fromarray(scene(16))] * 4
    data = ImageDataset(pictures, [0, 1, 0, 1], ["a", "b"], "scenes")
    noisy = corrupted(data, "gaussian_noise", 2, seed=3, parameters="cifar")
    assert (len(noisy), noisy.labels.tolist(), noisy.class_names) == (4, [0, 1, 0, 1], ("a", "b"))
    assert noisy.name == "scenes [gaussian_noise 2]"
    first, second = np.asarray(noisy[0][0]), np.asarray(noisy[1][0])
    assert not np.array_equal(first, second)  # the same picture with other random numbers
    assert np.array_equal(first, np.asarray(noisy[0][0]))
    of_subset = corrupted(data.select([1]), "gaussian_noise", 2, seed=3, parameters="cifar")
    assert np.array_equal(np.asarray(of_subset[0][0]), second)
    with pytest.raises(DataError, match="severity"):
        corrupted(data, "fog", 6)
