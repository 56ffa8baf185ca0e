"""Checkouts of public repositories are converted to data sets of the studies."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from typer.testing import CliRunner

from hydra_ensembles.data import load
from studies.__main__ import app
from studies.fetch import CIFAR100_EACH, CIFAR100_OTHERS, as_table, cifar100_names, prepare


def photograph(path: Path, size: tuple[int, int] = (200, 150), shade: int = 90) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 20, 200)).save(path)


def flowers(source: Path) -> None:
    for folder in ("test", "valid"):
        for number in ("1", "2", "10"):
            photograph(source / "flowers" / folder / number / f"{folder}.jpg", shade=20 * int(number))
    names = {"1": "pink primrose", "2": "pocket orchid", "10": "globe thistle"}
    (source / "cat_to_name.json").write_text(json.dumps(names))


def test_a_label_stays_with_its_pictures_which_become_small(tmp_path: Path) -> None:
    flowers(tmp_path / "source")
    found = CliRunner().invoke(app, ["prepare", "flowers102", str(tmp_path / "source"), str(tmp_path / "data")])
    assert found.exit_code == 0, found.output
    data = load(tmp_path / "data" / "images" / "flowers102", "test")
    assert data[0][0].size == (171, 128)
    reds = {data.class_names[label]: round(float(np.asarray(image)[..., 0].mean()), -1) for image, label in data}
    assert reds == {"pink primrose": 20, "pocket orchid": 40, "globe thistle": 200}


def webp(pixels: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "WEBP", lossless=True)
    return content.getvalue()


def test_new_images_of_cifar100_are_not_in_the_other_splits(tmp_path: Path) -> None:
    draws, folder = np.random.default_rng(0), tmp_path / "data" / "images" / "cifar100_full"
    bins = tmp_path / "cifar-100-binary" / "split train bins"
    bins.mkdir(parents=True)
    (bins.parent / "fine_label_names.txt").write_text("apple\nbear\n")
    all_images = draws.integers(0, 256, (2, 2 * CIFAR100_EACH + 4, 32, 32, 3), dtype=np.uint8)
    for label, name in enumerate(cifar100_names(tmp_path)):
        (bins / f"{name}-{label}-train.bin").write_bytes(all_images[label].transpose(0, 3, 1, 2).tobytes())
    folder.mkdir(parents=True)
    for place, split in enumerate(CIFAR100_OTHERS):
        rows = [(webp(all_images[label, place]), label) for label in range(2)]
        pq.write_table(as_table(rows, cifar100_names(tmp_path), split), folder / f"{split}.parquet")
    written = prepare("cifar100_full", tmp_path, tmp_path / "data")
    assert [path.stem for path in written] == ["train-3", "train-4"]
    found = [(np.asarray(image), label) for path in written for image, label in load(path)]
    for label in range(2):
        own = np.stack([pixels for pixels, one in found if one == label])
        assert np.array_equal(own, all_images[label, len(CIFAR100_OTHERS) :])


def test_texts_keep_their_labels_and_doubled_tweets_go(tmp_path: Path) -> None:
    (tmp_path / "source" / "data").mkdir(parents=True)
    parts = {
        "train": [["pay my bill", "pay"], ["wake me", "alarm"]],
        "val": [["bill", "pay"]],
        "test": [["up", "alarm"]],
    }
    parts |= {"oos_train": [["who are you", "oos"]], "oos_val": [], "oos_test": [["sing", "oos"]]}
    (tmp_path / "source" / "data" / "data_full.json").write_text(json.dumps(parts))
    prepare("clinc150", tmp_path / "source", tmp_path)
    prepare("clinc150_oos", tmp_path / "source", tmp_path)
    train = load(tmp_path / "text" / "clinc150", "train")
    assert [(text, train.class_names[label]) for text, label in train] == [("pay my bill", "pay"), ("wake me", "alarm")]
    assert [text for text, _ in load(tmp_path / "text" / "clinc150_oos", "test")] == ["sing"]
    lines = [f"{number},{number % 3},tweet number {number}" for number in range(19_100)]
    lines += ['19100,0,"Tweet,  number 7"', "19101,2,a &amp; b"]
    (tmp_path / "source" / "data" / "labeled_data.csv").write_text("\n".join([",class,tweet", *lines]))
    prepare("tweets", tmp_path / "source", tmp_path)
    found = {
        text: label
        for split in ("train", "validation", "test")
        for text, label in load(tmp_path / "text" / "tweets", split)
    }
    assert len(found) == 19_101
    assert (found["tweet number 7"], found["a & b"]) == (1, 2)
