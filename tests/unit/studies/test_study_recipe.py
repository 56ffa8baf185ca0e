"""Recipes: what they say, what they refuse, what tiny makes of them."""

from dataclasses import replace

import pytest

from hydra_ensembles.data.suites import suite
from hydra_ensembles.errors import ConfigError
from studies.compact_logits import Storing
from studies.methods import fixed_methods, groups_of
from studies.recipe import STUDIES, load_recipe
from studies.specs import MemberSet

HEADS = 72


@pytest.mark.parametrize("name", STUDIES)
def test_recipes_are_those_of_the_studies(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.members == 3
    assert len(recipe.seeds) >= 3
    assert recipe.paper.prune == {"vision-cifar10": 12, "vision-tinyimagenet": 24, "text-sst2": 36}[name]
    assert {one.heads for one in recipe.explore} == {"circuits", "sampled"}
    assert all(one.prune < HEADS for one in recipe.explore)
    assert suite(recipe.suite).train is not None
    assert "bf16" in {training.precision for training in recipe.trainings.values()}


def test_vision_prunes_twelve_and_twenty_four_heads() -> None:
    for name in STUDIES[:2]:
        assert {one.prune for one in load_recipe(name).explore} >= {12, 24}
    recipe = load_recipe("vision-cifar10")
    first = recipe.controls[0].members
    assert first is not None
    assert {recipe.paper.prune, first.prune} == {12, 24}


def test_controls_are_rows_with_names_of_their_own() -> None:
    recipe = load_recipe("vision-cifar10")
    averaged = recipe.controls[-1]
    assert fixed_methods(recipe)[averaged.name] == ("averaged",)
    assert {one.name for one in recipe.controls} < set(fixed_methods(recipe))
    with pytest.raises(ConfigError, match="names of their own"):
        replace(recipe, controls=(averaged, averaged))
    with pytest.raises(ConfigError, match=r"controls are called \['Single'\]"):
        fixed_methods(replace(recipe, controls=(replace(averaged, name="Single"),)))
    with pytest.raises(ConfigError, match="MLPs apart"):
        replace(averaged, mlp="separate")
    with pytest.raises(ConfigError, match="ood_halves"):
        replace(recipe, ood_halves="samples")  # type: ignore[arg-type]


def test_only_text_has_classifiers_on_a_shared_backbone() -> None:
    with_it = [name for name in STUDIES if "Deep Ensembles (classifiers)" in fixed_methods(load_recipe(name))]
    assert with_it == ["text-sst2"]


@pytest.mark.parametrize("name", STUDIES)
def test_tiny_shrinks_counts_and_keeps_the_methods(name: str) -> None:
    whole, tiny = load_recipe(name), load_recipe(name, tiny=True)
    assert list(fixed_methods(tiny)) == list(fixed_methods(whole))
    assert {one.heads for one in tiny.explore} == {one.heads for one in whole.explore}
    assert all(training.steps == 1 for training in tiny.trainings.values())
    assert tiny.paper.prune < whole.paper.prune
    assert tiny.digest != whole.digest


def test_member_sets_have_names_of_their_own() -> None:
    for name in STUDIES:
        recipe = load_recipe(name)
        sets = [recipe.taylor, recipe.random, *recipe.explore, *recipe.explore_trunk]
        assert len({one.key for one in sets}) == len(sets)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": "best"}, "heads must be one of"),
        ({"prune": 0}, "at least 1"),
        ({"pool": 30}, "need a pool"),
        ({"heads": "sampled"}, "need a pool"),
        ({"heads": "sampled", "pool": 24}, "nothing to choose"),
    ],
)
def test_member_sets_check_themselves(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemberSet(**{"heads": "circuits", "prune": 24, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"explore_seeds": (7,)}, "explore_seeds"),
        ({"name": "vision"}, "studies are"),
        ({"trainings": {}}, "backbone"),
        ({"explore": ()}, "at least one choice"),
        ({"explore": (MemberSet("taylor", 24),)}, "among circuits"),
        ({"explore": (MemberSet("circuits", 24, trunk=2),)}, "explore_trunk"),
        ({"explore": (MemberSet("circuits", 24, training="none"),)}, "needs a training"),
        ({"paper": MemberSet("circuits", 24, trunk=3)}, "without a trunk"),
        ({"accuracy_weight": 2.0}, "accuracy_weight"),
    ],
)
def test_recipes_check_themselves(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(load_recipe("vision-cifar10"), **changes)


def test_logits_of_ood_sets_take_less_room() -> None:
    for name in STUDIES[:2]:
        recipe = load_recipe(name)
        assert recipe.storing("id").keep > recipe.storing("near").keep
    text = load_recipe("text-sst2")
    assert text.storing("id") == text.storing("far") == Storing(1 / 64)
    assert replace(text, keep_classes=5).storing("far").keep == 5
    with pytest.raises(ConfigError, match="a step is positive"):
        replace(text, logit_step=0.0)


def test_rows_that_a_method_needs_belong_together() -> None:
    counts = {"a": 1, "b": 1, "c": 1, "d": 5, "e": 1, "f": 1, "g": 3}
    methods = {"one": ("a",), "three": ("a", "b", "c"), "five": ("d",), "e": ("e",), "both": ("f", "e"), "last": ("g",)}
    assert groups_of(methods, counts) == [3, 5, 2, 3]


def test_unknown_study_is_named() -> None:
    with pytest.raises(ConfigError, match="no study 'imagenet'"):
        load_recipe("imagenet")
