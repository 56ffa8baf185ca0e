"""The images of the zero-shot study: nothing reported was read before, and names say what classes are."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_study import Pictures
from small_zero_shot import small_recipe, small_store

from hydra_ensembles.data import suites as overlaps
from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.errors import ConfigError, DataError
from shared_paths import shared
from studies.store import Store
from studies.zero_shot.joined_images import at_most
from studies.zero_shot.label_names import label_names
from studies.zero_shot.pairs import CIFAR_TRAIN
from studies.zero_shot.recipe import load_zero_shot_recipe
from studies.zero_shot.shared_sets import SharedSets
from studies.zero_shot.sources import NamedImages


def sets() -> SharedSets:
    return SharedSets(small_store(), small_recipe().counts)


def test_circuits_of_the_image_tower_see_both_tasks_once() -> None:
    counts = replace(small_recipe().counts, circuits=12, image_circuits=4)
    both, joint = sets().circuits(), SharedSets(small_store(), counts).image_circuits()
    assert joint.inside.names[: len(both.inside.names)] == both.inside.names
    assert len(set(joint.inside.names)) == len(joint.inside.names)
    assert not set(joint.inside.names) & set(overlaps.left(overlaps.CIFAR100_TINYIMAGENET))
    inside = joint.inside.images
    first = at_most(both.inside.images, 12)  # the images that circuits of both towers read
    assert len(first) == 12
    assert len(inside) == 12 + 4
    assert np.array_equal(inside.labels[: len(first)], first.labels)
    assert inside.labels[len(first) :].min() >= len(both.inside.names)
    assert np.array_equal(np.asarray(inside[0][0]), np.asarray(first[0][0]))
    assert len(joint.outside) == 12


def test_cifar100_images_that_rank_are_not_reported() -> None:
    one = sets()
    ranking, reported = one._cifar100
    assert not set(ranking.rows.tolist()) & set(reported.rows.tolist())
    assert len(ranking) + len(reported) == len(one._load(one._suites["cifar100"].id))
    near = next(iter(one.detections())).near["cifar100"]
    assert set(near.rows.tolist()) <= set(reported.rows.tolist())
    assert not set(near.labels.tolist()) & {
        near.class_names.index(name) for name in overlaps.left(overlaps.CIFAR100_TINYIMAGENET)
    }


def test_halves_rank_and_calibrate_on_different_images() -> None:
    one = sets()
    first, second = one._halves
    assert not set(first.rows.tolist()) & set(second.rows.tolist())
    assert len(one.calibration().images) <= len(second)


@pytest.mark.parametrize(
    ("dataset", "name", "expected"),
    [
        ("caltech101", "car_side", "side of a car"),
        ("caltech101", "grand_piano", "grand piano"),
        ("pets", "Maine_Coon", "Maine Coon cat"),
        ("pets", "shiba_inu", "shiba inu dog"),
        ("dtd10", "banded", "banded texture"),
        ("scene15", "LivingRoom", "living room"),
        ("scene15", "TallBuilding", "tall building"),
        ("eurosat", "AnnualCrop", "annual crop land"),
        ("tinyimagenet", "crane", "construction crane"),
        ("tinyimagenet", "iPod", "iPod"),
        ("cifar100", "maple_tree", "maple tree"),
    ],
)
def test_names_say_what_is_shown(dataset: str, name: str, expected: str) -> None:
    assert label_names(dataset, [name]) == (expected,)


def test_names_are_one_for_each_class() -> None:
    images = ImageDataset(Pictures(np.array([0, 1]), 0), [0, 1], ("a", "b"), "some")
    with pytest.raises(DataError, match="have the same name"):
        NamedImages(images, ("a", "a"))
    with pytest.raises(DataError, match="a name for every label"):
        NamedImages(images, ("a",))


def test_real_sets_have_names_and_do_not_overlap() -> None:
    """On the real data: every class of every task has its own name; test rows of CIFAR-10 are the second half."""
    store = Store(Path(shared("data")).parent)
    real = SharedSets(store, load_zero_shot_recipe().counts)
    tasks = {one.name: one.test for one in real.tasks()}
    assert {name: len(test.names) for name, test in tasks.items()} == {
        "cifar100": 100,
        "caltech101": 101,
        "pets": 37,
        "dtd10": 10,
        "scene15": 15,
        "eurosat": 10,
        "cifar10": 10,
        "tinyimagenet": 200,
    }
    assert len(tasks["cifar100"].images) == 300
    assert tasks["cifar10"].images.rows.min() == 5000
    assert real.circuits().outside.rows.max() < 5000
    assert CIFAR_TRAIN.split == "train-1"
    joint = real.image_circuits()
    assert len(joint.inside.names) == 200 + 100 - len(overlaps.CIFAR100_TINYIMAGENET)
    assert np.bincount(joint.inside.images.labels >= 200).tolist() == [300, 124]
    whole = SharedSets(store, replace(load_zero_shot_recipe().counts, image_circuits=10_000)).image_circuits()
    assert len(whole.inside.images) == len(joint.inside.images)  # the 124 are all there are


@pytest.mark.parametrize("change", [{"prune": 0}, {"members": 2}, {"least_over_chance": 0.5}, {"suite": "paper"}])
def test_recipes_check_themselves(change: dict) -> None:
    with pytest.raises(ConfigError):
        small_recipe(**change)


def test_both_recipes_can_be_read() -> None:
    paper = load_zero_shot_recipe("paper")
    assert (paper.prune, paper.more, paper.taylor_prune) == (24, 6, 24)
    assert paper.tune is None
    assert load_zero_shot_recipe("paper", tiny=True).counts.classes is not None
    assert load_zero_shot_recipe().digest != load_zero_shot_recipe(tiny=True).digest
