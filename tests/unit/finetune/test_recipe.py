import dataclasses

import numpy as np
import pytest

from hydra_ensembles.errors import ConfigError
from hydra_ensembles.model.config import GROUPS
from hydra_ensembles.schema import from_plain, to_plain
from hydra_ensembles.training.recipe import PRESETS, RandAugment, Recipe

AFTER_PRUNING = ("attention", "mlp", "norms", "readout")


def test_imagenet_base_is_appendix_c12():
    recipe = Recipe.preset("imagenet-base")
    assert (recipe.optimizer, recipe.momentum, recipe.weight_decay, recipe.dropout) == ("sgd", 0.9, 0.0, 0.0)
    assert recipe.grid == (0.003, 0.01, 0.03, 0.06)
    assert (recipe.warmup, recipe.schedule, recipe.steps) == (500, "cosine", 20_000)
    assert recipe.train_groups == GROUPS
    assert recipe.last_blocks is None
    assert "momentum" not in recipe.ours
    assert {"batch_size", "patience", "evaluate_every", "reinit_classifier"} <= set(recipe.ours)


def test_cifar100_base_is_appendix_c13():
    recipe = Recipe.preset("cifar100-base")
    assert (recipe.optimizer, recipe.momentum, recipe.weight_decay, recipe.dropout) == ("sgd", 0.9, 0.0, 0.0)
    assert recipe.grid == (0.001, 0.003, 0.01, 0.03)
    assert (recipe.warmup, recipe.schedule, recipe.steps) == (500, "cosine", 10_000)


def test_sst2_base_is_appendix_c2():
    recipe = Recipe.preset("sst2-base")
    assert (recipe.optimizer, recipe.learning_rate, recipe.weight_decay) == ("adamw", 8e-6, 0.01)
    assert recipe.no_decay_on_bias_and_norm
    assert (recipe.warmup, recipe.schedule, recipe.floor, recipe.clip_norm) == (0.1, "linear", 0.0, 1.0)
    assert (recipe.epochs, recipe.patience, recipe.min_delta) == (7, 2, 5e-4)
    assert recipe.evaluate_every is None
    assert set(recipe.ours) == {"betas", "batch_size"}


def test_imagenet_after_pruning_is_appendix_d2():
    recipe = Recipe.preset("imagenet")
    assert recipe.optimizer == "sgd"
    assert recipe.grid == (0.003, 0.01, 0.03, 0.06)
    assert (recipe.warmup, recipe.schedule, recipe.floor, recipe.steps) == (5_000, "cosine", 1e-5, 120_000)
    assert (recipe.label_smoothing, recipe.dropout) == (0.1, 0.1)
    assert recipe.rand_augment == RandAugment(operations=2, magnitude=12)
    assert recipe.train_groups == AFTER_PRUNING
    assert recipe.reinit_classifier is None
    assert {"momentum", "weight_decay", "batch_size"} <= set(recipe.ours)


@pytest.mark.parametrize("name", ["cifar100-last5", "cifar100-classifier"])
def test_cifar100_after_pruning_is_appendix_d2(name):
    recipe = Recipe.preset(name)
    assert recipe.grid == (0.001, 0.003, 0.01, 0.03)
    assert (recipe.warmup, recipe.schedule, recipe.floor, recipe.steps) == (500, "cosine", 1e-5, 10_000)
    assert (recipe.label_smoothing, recipe.reinit_classifier, recipe.dropout) == (0.1, "zeros", None)
    assert "momentum" in recipe.ours
    if name == "cifar100-last5":
        assert (recipe.last_blocks, recipe.train_groups) == (5, AFTER_PRUNING)
    else:
        assert (recipe.last_blocks, recipe.train_groups) == (None, ("readout",))


def test_sst2_after_pruning_is_appendix_d2():
    recipe = Recipe.preset("sst2")
    assert (recipe.optimizer, recipe.learning_rate, recipe.warmup, recipe.schedule) == ("adamw", 1e-5, 0.1, "linear")
    assert (recipe.floor, recipe.clip_norm, recipe.label_smoothing, recipe.dropout) == (0.0, 1.0, 0.0, None)
    assert recipe.train_groups == AFTER_PRUNING
    assert {"epochs", "weight_decay", "batch_size"} <= set(recipe.ours)


def test_every_preset_marks_batch_size_as_ours_and_survives_json():
    assert set(PRESETS) == {
        "imagenet-base",
        "cifar100-base",
        "sst2-base",
        "imagenet",
        "cifar100-last5",
        "cifar100-classifier",
        "sst2",
    }
    for name in PRESETS:
        recipe = Recipe.preset(name)
        assert "batch_size" in recipe.ours
        assert from_plain(Recipe, to_plain(recipe)) == recipe
        assert hash(recipe) == hash(Recipe.preset(name))


def test_an_unknown_preset_lists_the_names():
    with pytest.raises(ConfigError, match=r"'cifar100'.*cifar100-classifier.*cifar100-last5"):
        Recipe.preset("cifar100")


def test_a_changed_setting_is_no_longer_marked():
    recipe = Recipe.preset("imagenet", momentum=0.8, grid=(), learning_rate=0.01)
    assert recipe.momentum == 0.8
    assert recipe.rates == (0.01,)
    assert "momentum" not in recipe.ours
    assert "weight_decay" in recipe.ours
    with pytest.raises(ConfigError, match=r"no settings \['speed'\]"):
        Recipe.preset("imagenet", speed=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": None}, "exactly one of learning_rate and grid"),
        ({"grid": (0.1,)}, "exactly one of learning_rate and grid"),
        ({"learning_rate": 0.0}, "positive, finite and distinct"),
        ({"learning_rate": None, "grid": (0.1, 0.1)}, "distinct"),
        ({"epochs": 1}, "exactly one of steps and epochs"),
        ({"steps": None}, "exactly one of steps and epochs"),
        ({"steps": 0}, "whole number"),
        ({"steps": 2.5}, r"Recipe\.steps must be of type int, got 2\.5"),
        ({"learning_rate": "1e-3"}, r"Recipe\.learning_rate must be of type float, got '1e-3'"),
        ({"learning_rate": True}, r"Recipe\.learning_rate must be of type float, got True"),
        ({"learning_rate": None, "grid": 0.1}, r"Recipe\.grid must be a list, got 0\.1"),
        ({"learning_rate": None, "grid": ("0.1",)}, r"Recipe\.grid\[0\] must be of type float, got '0\.1'"),
        ({"steps": None, "epochs": 1.5}, r"Recipe\.epochs must be of type int, got 1\.5"),
        ({"warmup": "0.1"}, r"Recipe\.warmup must be of type int, got '0\.1'; or .*float"),
        ({"weight_decay": None}, r"Recipe\.weight_decay must be of type float, got None"),
        ({"no_decay_on_bias_and_norm": "no"}, r"no_decay_on_bias_and_norm must be of type bool, got 'no'"),
        ({"train_groups": "readout"}, r"Recipe\.train_groups must be a list, got 'readout'"),
        ({"rand_augment": 9}, r"Recipe\.rand_augment must be an object with named fields, got 9"),
        ({"optimizer": "lamb"}, "optimizer must be one of"),
        ({"schedule": "step"}, "schedule must be one of"),
        ({"precision": "int8"}, "precision must be one of"),
        ({"reinit_classifier": "ones"}, "reinit_classifier must be one of"),
        ({"warmup": 10}, "leaves nothing"),
        ({"warmup": 1.0}, "below 1"),
        ({"warmup": -1}, "whole number"),
        ({"floor": 1.5}, "fraction of the peak"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"dropout": 1.0}, "dropout"),
        ({"momentum": -0.1}, "momentum"),
        ({"betas": (0.9,)}, "betas"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"train_groups": ()}, "train_groups"),
        ({"train_groups": ("head",)}, "train_groups"),
        ({"train_groups": ("mlp",), "reinit_classifier": "zeros"}, "never learn"),
        ({"last_blocks": 0}, "last_blocks"),
        ({"patience": 0}, "patience"),
        ({"gradient_accumulation": 0}, "gradient_accumulation"),
        ({"seed": -1}, "seed"),
        ({"ours": ("colour",)}, "colour"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    good = {"learning_rate": 0.1, "steps": 10}
    Recipe(**good)
    with pytest.raises(ConfigError, match=message):
        Recipe(**{**good, **changes})


def test_numbers_of_numpy_are_numbers():
    recipe = Recipe(learning_rate=np.float32(0.5), steps=np.int64(10))
    assert (recipe.rates, recipe.updates(None)) == ((0.5,), 10)


def test_rand_augment_checks_itself():
    with pytest.raises(ConfigError, match="magnitude"):
        RandAugment(2, 31)
    with pytest.raises(ConfigError, match=r"RandAugment\.operations must be of type int, got '2'"):
        RandAugment("2", 9)


def test_updates_count_groups_of_batches():
    recipe = Recipe(learning_rate=0.1, epochs=3, gradient_accumulation=4)
    assert recipe.updates(9) == 9  # 3 updates an epoch: 4 + 4 + 1 batches
    assert dataclasses.replace(recipe, epochs=None, steps=5).updates(None) == 5
    with pytest.raises(ConfigError, match="no length"):
        recipe.updates(None)


def test_settings_take_their_annotated_types() -> None:
    given = {"learning_rate": 1, "steps": np.int64(3), "betas": [0.9, 0.99]}
    recipe = Recipe(**given, rand_augment={"operations": 2, "magnitude": 9})
    assert (type(recipe.learning_rate), type(recipe.steps)) == (float, int)
    assert recipe.betas == (0.9, 0.99)
    assert recipe.rand_augment == RandAugment(operations=2, magnitude=9)
