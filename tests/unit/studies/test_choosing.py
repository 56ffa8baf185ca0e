"""The decision: by which number, within which cost, and that nobody changes it afterwards."""

import json
from pathlib import Path

import pytest
from small_study import small_recipe

from hydra_ensembles.errors import DataError
from hydra_ensembles.heads.ranking import Head, HeadRanking
from studies.choosing import candidates, decide
from studies.decision import Decision, rate_name
from studies.methods import HYDRA, HYDRA_TRUNK, MC_DROPOUT, fixed_methods
from studies.seed_models import distinct

RECIPE = small_recipe()


def measured(**better: float) -> dict:
    """Half-B numbers in which everything is equal, but for some AUROCs by a part of their name."""
    found = {}
    names = [(method, "") for method in fixed_methods(RECIPE)]
    names += [(MC_DROPOUT, rate_name(rate)) for rate in RECIPE.dropout.rates]
    names += [(method, one.name) for method, one in candidates(RECIPE)]
    for method, model in names:
        for score in RECIPE.scores:
            key = f"{method}|{model}|{score}"
            extra = sum(value for part, value in better.items() if part.replace("_", " ") in key.replace("_", " "))
            found[key] = {"accuracy": 0.9, "auroc": 0.5 + extra, "cost": 1.2}
    return found


def test_the_highest_mean_of_accuracy_and_auroc_wins() -> None:
    decision = decide(RECIPE, [measured(sampled=0.1, apart=0.05, entropy=0.02)])
    assert decision.hydra.members.heads == "sampled"
    assert decision.hydra.mlp == "separate"
    assert decision.scores[HYDRA] == "entropy"
    assert decision.scores["Deep Ensembles"] == "entropy"
    winner = max((one for one in decision.candidates if one.method == HYDRA), key=lambda one: one.value)
    assert winner.value == pytest.approx(0.5 * 0.9 + 0.5 * 0.67)


def test_equal_candidates_leave_the_first_in_the_recipe() -> None:
    decision = decide(RECIPE, [measured()])
    assert decision.hydra.members == RECIPE.explore[0]
    assert decision.hydra.mlp == RECIPE.fusions[0]
    assert set(decision.scores.values()) == {"msp"}


def test_the_rate_of_mc_dropout_is_chosen() -> None:
    rates = RECIPE.dropout.rates
    assert len(rates) > 1
    better = {rate_name(rates[-1]): 0.2}
    assert decide(RECIPE, [measured(**better)]).dropout == rates[-1]
    assert decide(RECIPE, [measured()]).dropout == rates[0]


def test_seeds_are_averaged() -> None:
    decision = decide(RECIPE, [measured(sampled=0.1), measured(circuits=0.3)])
    assert decision.hydra.members.heads == "circuits"


def test_a_trunk_that_costs_too_much_is_not_chosen() -> None:
    recipe = small_recipe(trunk_cost=1.1)
    found = measured(apart=0.3)
    for key, numbers in found.items():
        if key.startswith(HYDRA_TRUNK):
            numbers["cost"] = 1.4 if "apart" in key else 1.0
    assert decide(recipe, [found]).trunk.mlp == "mean"
    found = {key: {**numbers, "cost": 3.0} for key, numbers in found.items()}
    assert decide(recipe, [found]).trunk.mlp == "separate"  # all cost too much: the cheapest, here all of them


def test_a_decision_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "decision.json"
    decision = decide(RECIPE, [measured()])
    decision.save(path)
    assert Decision.load(path) == decision
    plain = json.loads(path.read_text())
    plain["decision"]["scores"][HYDRA] = "energy"
    path.write_text(json.dumps(plain))
    with pytest.raises(DataError, match="was changed after it was written"):
        Decision.load(path)


def ranking(*heads: int) -> HeadRanking:
    return HeadRanking(tuple(Head(0, head) for head in heads), (0.5,) * len(heads), "circuit/exact", "avg")


def test_circuits_that_agree_part_at_their_last_head() -> None:
    chosen = distinct([ranking(0, 1, 2, 3), ranking(1, 0, 2, 3), ranking(1, 0, 2, 3)], 2)
    assert [[head.head for head in one] for one in chosen] == [[0, 1], [1, 2], [1, 3]]
