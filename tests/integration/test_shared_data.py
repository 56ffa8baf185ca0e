"""The studies' suites on the real files next to the checkout: readable, with the documented content."""

import numpy as np
import pytest

from hydra_ensembles.data.loading import load
from shared_paths import shared
from studies.sets import CIFAR10_CLASSES
from studies.suites import overlapping, suite


def test_a_known_image_and_the_papers_sst2_split() -> None:
    cifar = load(shared("data/images/cifar10"), "test")
    assert (cifar.class_names, np.bincount(cifar.labels).tolist()) == (CIFAR10_CLASSES, [1000] * 10)
    assert cifar[0][0].size == (32, 32)
    sst2, chosen = load(shared("data/text/sst2"), "train"), suite("sst2")
    assert sst2[0] == ("hide new secretions from the parental units", 0)
    for ref, rows in ((chosen.validation, range(3000)), (chosen.train, range(3000, 67_349))):
        assert ref.part_of(sst2).rows.tolist() == list(rows)


@pytest.mark.parametrize("pair", [("cifar100", "tinyimagenet"), ("caltech101", "cifar10"), ("scene15", "cifar100")])
def test_overlap_lists_name_real_classes(pair: tuple[str, str]) -> None:
    first, second = (load(shared(f"data/images/{name}"), "test").class_names for name in pair)
    left, right = (overlapping(", ".join(pair), name) for name in pair)
    assert set(left) <= set(first)
    assert set(right) <= set(second)
    # Classes of the same name must be on the list, whatever their spelling.
    plain = {name.lower().replace("_", " ") for name in second}
    assert {name for name in first if name.lower().replace("_", " ") in plain} <= set(left)


PREPARED = ("images/cars", "images/cub200", "images/flowers102")  # from `python -m studies prepare`


@pytest.mark.parametrize(
    ("name", "id_count", "circuit_count", "near", "far"),
    [
        ("cifar10", 10_000, 1760, [10_000, 972, 4400], [1200, 1500, 2000, 2000, 1500]),
        ("cifar100", 10_000, 1500, [10_000], [1200, 1500, 2000, 2500]),
        ("tinyimagenet", 5000, 3000, [6200, 900], [1200, 1200, 2000, 1400, 1500]),
        ("sst2", 872, 2000, [2000, 2000], [2000, 500, 1000, 1000, 2000]),
        ("zero-shot", 5000, 1511, [6200, 900], [1200, 1200, 2000, 1400, 1500]),
        ("zero-shot-cifar100", 10_000, 1511, [5000, 3750], [1200, 700, 2000, 2000, 1500, 2500]),
    ],
)
def test_suites(name: str, id_count: int, circuit_count: int, near: list[int], far: list[int]) -> None:
    root, chosen = shared("data"), suite(name)
    groups = {"near": chosen.near, "far": chosen.far}
    loaded = {group: {one.name: one.load(root) for one in sets} for group, sets in groups.items()}
    assert (len(chosen.id.load(root)), len(chosen.circuit_ood.load(root))) == (id_count, circuit_count)
    assert [len(data) for data in loaded["near"].values()] == near
    assert [len(data) for data in loaded["far"].values()] == far
    for data in (*loaded["near"].values(), *loaded["far"].values()):
        item, _ = data[len(data) // 2]
        assert np.asarray(item).std() > 0 if data.kind == "image" else all(item)
    for ref in (*chosen.apart, *chosen.tasks):
        if ref.source not in PREPARED:
            assert len(ref.load(root)) > 0
