"""Recipes: the paper's presets, refused settings, the schedule, and which parameters train at which rate."""

import math
from dataclasses import replace

import pytest
from training_cases import LAYERS, batches, tiny

from hydra_ensembles.errors import ConfigError
from hydra_ensembles.training.recipe import DataRecipe, Recipe, presets, read_recipe


def test_the_plan_counts_updates_and_warm_up():
    recipe = Recipe(learning_rate=0.1, epochs=3, gradient_accumulation=4)
    assert recipe.plan(9) == (9, 0)  # 3 updates per epoch: 4 + 4 + 1 batches
    assert replace(recipe, epochs=None, steps=5).plan(None) == (5, 0)
    for share, total, warmup in ((0.1, 100, 10), (0.07, 100, 7), (0.1, 101, 11)):  # rounded up
        assert Recipe(learning_rate=0.1, steps=total, warmup=share).plan(None) == (total, warmup)


def factors(steps, total, warmup, **settings):
    recipe = Recipe(learning_rate=0.1, steps=total, **settings)
    return [recipe.rate_factor(step, total, warmup) for step in steps]


def test_warmup_is_linear_and_the_rate_falls_as_the_schedule_says():
    assert factors(range(5), 100, 4, schedule="cosine") == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors(range(3), 100, 2, schedule="constant", warmup_from=0.1) == pytest.approx([0.55, 1.0, 1.0])
    floor, total, warmup = 1e-5, 120_000, 5_000
    steps = (warmup, warmup + 1, 62_500, total - 1, total)
    shares = [(step - warmup) / (total - warmup) for step in steps]
    expected = [floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share)) for share in shares]
    assert factors(steps, total, warmup, schedule="cosine", floor=floor) == pytest.approx(expected, rel=1e-12)
    assert factors((0, 5, 9, 10, 11), 10, 0, schedule="linear") == pytest.approx([1.0, 0.5, 0.1, 0.0, 0.0])
    assert factors((99,), 100, 10, schedule="constant", floor=0.5) == [1.0]


def test_dropout_of_the_recipe():
    config = tiny(dropout=0.2).config
    deep = replace(config, encoder=replace(config.encoder, drop_path=(0.0, 0.5)))
    none, off, some = (Recipe(learning_rate=0.1, steps=1, dropout=rate).with_dropout(deep) for rate in (None, 0.0, 0.1))
    assert none == deep
    assert off == tiny().config  # stochastic depth is off as well
    encoder = some.encoder
    assert (encoder.projection_dropout, encoder.activation_dropout, encoder.output_dropout) == (0.1, 0.1, 0.1)
    assert (encoder.attention_dropout, encoder.drop_path) == (0.0, (0.0, 0.5))


@pytest.mark.parametrize(
    ("changes", "token"),
    [
        ({"grid": (0.1, 0.2), "learning_rate": None}, r"^Recipe\(grid=\(0.1, 0.2\)\) needs validation"),
        ({"last_blocks": LAYERS + 1}, "last_blocks"),
        ({"steps": None, "epochs": 1, "warmup": 6}, "warmup"),
    ],
)
def test_what_does_not_fit_model_and_data_is_refused(changes, token):
    recipe = Recipe(**{"learning_rate": 0.1, "steps": 4, **changes})
    with pytest.raises(ConfigError, match=token):
        recipe.check(tiny(), batches(), None)


def test_a_recipe_is_read_from_a_name_or_settings() -> None:
    assert read_recipe("none") is read_recipe(None) is None
    assert {name for name in presets() if DataRecipe.preset(name).plan(10**6)} == set(presets())  # each is a recipe
    assert read_recipe("imagenet") == DataRecipe.preset("imagenet")
    read = read_recipe({"preset": "imagenet", "learning_rate": 0.01, "epochs": 2, "batch_size": 64, "warmup": 10})
    assert (read.grid, read.learning_rate, read.steps, read.epochs, read.batch_size) == ((), 0.01, None, 2, 64)
    with pytest.raises(ConfigError, match="learning_rate"):
        read_recipe({"learning_rat": 0.1, "steps": 1})
    with pytest.raises(ConfigError, match="batch_size"):  # `finetune` would not use it
        Recipe.preset("imagenet", batch_size=64)
