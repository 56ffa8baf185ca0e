"""Recipes: what they say, what they refuse, what tiny makes of them; the decision that a study takes by one."""

from dataclasses import replace
from typing import Any

import pytest
from small_studies import classifier_recipe

from hydra_ensembles.errors import ConfigError
from hydra_ensembles.heads.ranking import Head, HeadRanking
from hydra_ensembles.schema import from_plain
from studies.classifier import candidates, decide
from studies.dual import distinct
from studies.duals import ROWS, rows_of
from studies.methods import HYDRA, HYDRA_TRUNK, MC_DROPOUT, fixed_methods, rate_name
from studies.recipe import CLASSIFIERS, ClassifierRecipe, MemberSet, load_dual_recipe, load_recipe

RECIPE = classifier_recipe()


def classifier(name: str, tiny: bool = False) -> ClassifierRecipe:
    recipe = load_recipe(name, tiny)
    assert isinstance(recipe, ClassifierRecipe)
    return recipe


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_tiny_recipes_have_every_row_and_kind_of_the_real_ones(name: str) -> None:
    recipe, tiny = classifier(name), classifier(name, tiny=True)
    assert {one.heads for one in recipe.explore} == {"circuits", "sampled"} == {one.heads for one in tiny.explore}
    keys = [one.key for one in (recipe.taylor, recipe.random, *recipe.explore, *recipe.explore_trunk)]
    assert len(set(keys)) == len(keys)
    assert list(fixed_methods(tiny)) == list(fixed_methods(recipe))


def test_a_given_model_has_no_rows_that_learn() -> None:
    own = load_dual_recipe(suite="paper", model="folder", tiny=True)
    assert (own.model, own.counts.classes, own.trains_text) == ("folder", 6, False)
    tuned = [name for name in ROWS if name not in rows_of(own)]
    assert {name for name in tuned if "text fine-tuned" not in name} == {"BayesVLM", "ViLU"}
    assert len(tuned) == 4


@pytest.mark.parametrize(
    ("changes", "token"),
    [
        ({"heads": "best"}, "best"),
        ({"prune": 0}, "prune"),
        ({"pool": 30}, "pool"),
        ({"heads": "sampled"}, "pool"),
        ({"heads": "sampled", "pool": 24}, "pool"),
        ({"start": "pretrained", "training": None}, "training"),
    ],
)
def test_member_sets_check_themselves(changes: dict[str, Any], token: str) -> None:
    with pytest.raises(ConfigError, match=token):
        from_plain(MemberSet, {"heads": "circuits", "prune": 24, **changes})


@pytest.mark.parametrize(
    ("changes", "token"),
    [
        ({"explore_seeds": (7,)}, "explore_seeds"),
        ({"trainings": {"backbone": RECIPE.trainings["backbone"]}}, "standard"),  # hours before a run would miss it
        ({"explore": ()}, "at least one choice"),
        ({"explore": (MemberSet("taylor", 24),)}, "among circuits"),
        ({"explore": (MemberSet("circuits", 24, trunk=2),)}, "explore_trunk"),
        ({"paper": MemberSet("circuits", 24, training=None)}, "trained"),
        ({"controls": (RECIPE.controls[-1],) * 2}, "names of their own"),
    ],
)
def test_recipes_check_themselves(changes: dict[str, Any], token: str) -> None:
    with pytest.raises(ConfigError, match=token):
        replace(RECIPE, **changes)


def test_controls_are_rows_with_names_of_their_own() -> None:
    averaged = RECIPE.controls[-1]
    assert fixed_methods(RECIPE)[averaged.name] == ("averaged",)
    with pytest.raises(ConfigError, match="Single"):
        fixed_methods(replace(RECIPE, controls=(replace(averaged, name="Single"),)))


def measured(**better: float) -> dict[str, dict[str, float]]:
    """Half-B numbers in which everything is equal, but for some AUROCs by a part of their name."""
    names = [(method, "") for method in fixed_methods(RECIPE)]
    names += [(MC_DROPOUT, rate_name(rate)) for rate in RECIPE.dropout.rates]
    names += [(method, one.name) for method, one in candidates(RECIPE)]
    found = {}
    for key in (f"{method}|{model}|{score}" for method, model in names for score in RECIPE.scores):
        extra = sum(value for part, value in better.items() if part.replace("_", " ") in key.replace("_", " "))
        found[key] = {"accuracy": 0.9, "auroc": 0.5 + extra, "cost": 1.2}
    return found


def test_the_highest_mean_of_accuracy_and_auroc_wins() -> None:
    decision = decide(RECIPE, [measured(sampled=0.1, apart=0.05, entropy=0.02)])
    assert (decision.hydra.members.heads, decision.hydra.mlp) == ("sampled", "separate")
    assert decision.scores[HYDRA] == decision.scores["Deep Ensembles"] == "entropy"
    winner = max((one for one in decision.candidates if one.method == HYDRA), key=lambda one: one.value)
    assert winner.value == pytest.approx(0.5 * 0.9 + 0.5 * 0.67)
    equal = decide(RECIPE, [measured()])  # the first in the recipe
    assert (equal.hydra.members, equal.hydra.mlp) == (RECIPE.explore[0], RECIPE.fusions[0])
    assert set(equal.scores.values()) == {"msp"}
    assert equal.dropout == RECIPE.dropout.rates[0]
    rate = RECIPE.dropout.rates[-1]
    assert decide(RECIPE, [measured(**{rate_name(rate): 0.2})]).dropout == rate
    over_seeds = decide(RECIPE, [measured(sampled=0.1), measured(circuits=0.3)])
    assert over_seeds.hydra.members.heads == "circuits"


def test_a_trunk_that_costs_too_much_is_not_chosen() -> None:
    recipe = replace(RECIPE, trunk_cost=1.1)
    found = measured(apart=0.3)
    for key, numbers in found.items():
        if key.startswith(HYDRA_TRUNK):
            numbers["cost"] = 1.4 if "apart" in key else 1.0
    assert decide(recipe, [found]).trunk.mlp == "mean"
    found = {key: {**numbers, "cost": 3.0} for key, numbers in found.items()}
    assert decide(recipe, [found]).trunk.mlp == "separate"  # all cost too much: the cheapest, here all of them


def test_circuits_that_agree_part_at_their_last_head() -> None:
    def ranking(*heads: int) -> HeadRanking:
        return HeadRanking(tuple(Head(0, head) for head in heads), (0.5,) * len(heads), "circuit/exact", "avg")

    chosen = distinct([ranking(0, 1, 2, 3), ranking(1, 0, 2, 3), ranking(1, 0, 2, 3)], 2)
    assert [[head.head for head in one] for one in chosen] == [[0, 1], [1, 2], [1, 3]]
    with pytest.raises(ConfigError, match="same 2 heads"):
        distinct([ranking(0, 1), ranking(1, 0)], 2)
