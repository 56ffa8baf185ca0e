"""torchvision's own data sets, on stand-in files in its formats."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torchvision
from PIL import Image
from stand_ins import picture

from hydra_ensembles.data.loading import load
from hydra_ensembles.errors import DataError


def write_mnist(root: Path, prefix: str, count: int) -> None:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    pixels = np.arange(count * 28 * 28, dtype=np.int64).astype(np.uint8)
    (raw / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + pixels.tobytes())
    labels = bytes(number % 10 for number in range(count))
    (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels)


def test_a_set_that_takes_train(tmp_path: Path) -> None:
    write_mnist(tmp_path, "train", 12)
    write_mnist(tmp_path, "t10k", 5)
    data = load("torchvision:MNIST", "test", root=tmp_path)
    assert len(data) == 5
    assert len(load("torchvision:MNIST", "train", root=tmp_path)) == 12
    assert data.class_names[3] == "3 - three"
    image, label = data[2]
    assert (image.mode, image.size, label) == ("RGB", (28, 28), 2)
    assert np.asarray(image)[0, 1, 0] == (2 * 28 * 28 + 1) % 256
    with pytest.raises(DataError, match=r"has the splits \['test', 'train'\], got 'validation'"):
        load("torchvision:MNIST", "validation", root=tmp_path)


def test_a_set_that_takes_split(tmp_path: Path) -> None:
    base = tmp_path / "dtd" / "dtd"
    (base / "labels").mkdir(parents=True)
    lines = []
    for class_name in ("banded", "woven"):
        (base / "images" / class_name).mkdir(parents=True)
        picture(len(lines)).save(base / "images" / class_name / "0.jpg")
        lines.append(f"{class_name}/0.jpg")
    (base / "labels" / "test1.txt").write_text("\n".join(lines) + "\n")
    data = load("torchvision:DTD", "test", root=tmp_path)
    assert (data.class_names, data.labels.tolist()) == (("banded", "woven"), [0, 1])
    with pytest.raises(DataError, match=r"torchvision:DTD \(split 'dev'\) cannot be loaded"):
        load("torchvision:DTD", "dev", root=tmp_path)


def test_a_set_without_splits(tmp_path: Path) -> None:
    folder = tmp_path / "eurosat" / "2750" / "River"
    folder.mkdir(parents=True)
    picture(0).save(folder / "River_1.jpg")
    assert load("torchvision:EuroSAT", root=tmp_path).class_names == ("River",)
    with pytest.raises(DataError, match="torchvision:EuroSAT has no splits, got split='test'"):
        load("torchvision:EuroSAT", "test", root=tmp_path)


def test_labels_are_read_one_by_one_where_there_is_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, row: int) -> tuple[Image.Image, int]:
            return picture(row), 2 - row

    monkeypatch.setattr(torchvision.datasets, "Plain", Plain, raising=False)
    data = load("torchvision:Plain")
    assert data.labels.tolist() == [2, 1, 0]
    assert data.class_names == ()


def test_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be loaded from .*Dataset not found.*pass download=True"):
        load("torchvision:CIFAR10", "test", root=tmp_path)
    with pytest.raises(DataError, match=r"torchvision has no data set 'CIFAR11'.*CIFAR10"):
        load("torchvision:CIFAR11", "test", root=tmp_path)
