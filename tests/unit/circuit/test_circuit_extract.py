"""What `extract_circuit` takes, refuses, leaves alone and says about itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from circuit_models import Problem, evidence, random_problem
from hydra_ensembles.errors import ConfigError, DataError, HeadError
from hydra_ensembles.model.config import EnsembleConfig, ReadoutConfig
from hydra_ensembles.model.ensemble import Ensemble

METHODS = ("naive", "exact", "screened")


def test_what_the_ranking_says_about_itself() -> None:
    ranking = random_problem().extract(method="naive", budget=2, layers=[1, 2], removed=[(1, 0)], seed=4)
    assert (ranking.method, ranking.score) == ("circuit/naive", "avg")
    made = ranking.provenance
    assert (made["id_samples"], made["ood_samples"], made["seed"]) == (11, 9, 4)
    assert (made["budget"], made["layers"], made["removed"]) == (2, [1, 2], [[1, 0]])
    assert (made["dtype"], made["approximate"], len(made["model"])) == ("torch.float64", False, 64)
    errors, discordance = made["errors"][-1], made["discordance"][-1]
    assert ranking.scores[-1] == pytest.approx((2 - errors / 11 - discordance / (2 * 11 * 9)) / 2)


def test_the_ensemble_is_left_alone() -> None:
    problem = random_problem()
    model = problem.model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for method in METHODS:
        problem.extract(method=method, budget=2, screen_size=2)
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_ood_labels_are_not_read_and_accuracy_needs_no_ood_data() -> None:
    problem = random_problem()
    named: list[Any] = [[inputs, ("a.png",)] for inputs, _ in problem.ood_batches]
    found, expected = Problem(problem.model, problem.id_batches, named).extract(budget=2), problem.extract(budget=2)
    assert evidence(found) == evidence(expected)
    assert found.provenance["data"] == expected.provenance["data"]
    alone = Problem(problem.model, problem.id_batches, None)
    assert alone.extract(score="acc", budget=3).heads == problem.extract(score="acc", budget=3).heads


# --- bad input ---------------------------------------------------------------------------------------------


def empty(batches: list[Any]) -> None:
    batches[:] = [(inputs[:0], labels[:0]) for inputs, labels in batches]


@pytest.mark.parametrize(
    ("spoil", "token"),
    [
        (lambda problem: problem.id_batches.clear(), "id_batches has no batches"),
        (lambda problem: problem.ood_batches.clear(), "ood_batches has no batches"),
        (lambda problem: empty(problem.id_batches), "id_batches has no samples"),
        (lambda problem: empty(problem.ood_batches), "ood_batches has no samples"),
        (lambda problem: [labels.fill_(2) for _, labels in problem.id_batches], "two classes"),
        (lambda problem: problem.id_batches[1][1].fill_(4), "batch 1 of id_batches"),
        (lambda problem: problem.id_batches.insert(1, problem.id_batches[1][0]), "batch 1 of id_batches"),
    ],
)
def test_data_that_cannot_be_used(spoil: Callable[[Problem], Any], token: str) -> None:
    problem = random_problem()
    spoil(problem)
    with pytest.raises(DataError, match=token):
        problem.extract(budget=1)


@pytest.mark.parametrize(
    ("sources", "token"),
    [
        ({}, "empty"),
        ({"pixel_values": torch.zeros(2, 3, 4, 6)}, "single batch"),
        ({"a": [], "b": [torch.zeros(2, 3, 4, 6)]}, r"ood_batches\['a'\] has no batches"),
        ({"a": [torch.full((2, 3, 4, 6), torch.nan)]}, r"batch 0 of ood_batches\['a'\]"),
    ],
    ids=["none", "a batch", "nothing in one", "not finite"],
)
def test_ood_sources_that_cannot_be_used(sources: Any, token: str) -> None:
    problem = random_problem()
    with pytest.raises(DataError, match=token):
        Problem(problem.model, problem.id_batches, sources).extract(budget=1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("side", ["id_batches", "ood_batches"])
def test_inputs_that_are_not_finite(side: str, method: str) -> None:
    problem = random_problem()
    getattr(problem, side)[1][0][1, 0, 0, 0] = torch.nan
    with pytest.raises(DataError, match=f"batch 1 of {side}"):
        problem.extract(method=method, budget=1)


@pytest.mark.parametrize("method", METHODS)
def test_a_head_without_which_logits_are_not_finite(method: str) -> None:
    """Two heads cancel out; without one of them the activations leave the range of float16."""
    problem = random_problem()
    attention = problem.model.encoder.layers[1].attention
    with torch.no_grad():
        for name in ("qkv", "qkv_bias"):
            getattr(attention, name)[1] = getattr(attention, name)[2]
        attention.out[1] = 6e4
        attention.out[2] = -6e4
    with pytest.raises(DataError, match=r"batch 0 of id_batches .* head 1\.[12]"):
        problem.extract(method=method, budget=1, dtype=torch.float16, layers=[1])


@pytest.mark.parametrize("budget", [0, 13, True, 2.5, "24", None])
def test_a_budget_there_are_no_heads_for(budget: Any) -> None:
    with pytest.raises((ConfigError, HeadError), match=f"budget.*{budget!r}"):
        random_problem().extract(budget=budget)


@pytest.mark.parametrize(
    "options",
    [
        {"score": "f1"},
        {"method": "fast"},
        {"ties": "first"},
        {"max_accuracy_loss": -0.1},
        {"max_accuracy_loss": 1.01},
        {"layers": [0, 3]},
        *({"removed": heads} for heads in ([(0, 9)], [(0, 1), (0, 1)], [(0, 1, "text")])),
        {"budget": 4, "layers": [1], "removed": [(1, 2), (0, 0)]},
        {"dtype": torch.int32},
        {"batch_size": "8"},
        {"max_memory": 0},
        {"screen_size": 0},
        {"audit_steps": -1},
        {"seed": 1.5},
        {"device": "cuda:99"},
        {"class_names": ["a", "b", "c", "d"]},
    ],
    ids=str,
)
def test_settings_that_do_not_exist(options: dict[str, Any]) -> None:
    token = "head" if "removed" in options else next(iter(options))
    with pytest.raises((ConfigError, HeadError), match=token):
        random_problem().extract(**{"budget": 1} | options)


def test_models_and_data_that_do_not_go_together() -> None:
    problem = random_problem()
    config = problem.model.config
    bare = Ensemble(EnsembleConfig(config.stem, config.encoder, ReadoutConfig(), config.heads))
    for model, token in ((Ensemble.stack([problem.model] * 2), "2 members"), (bare, "0 classes")):
        with pytest.raises(ConfigError, match=token):
            Problem(model, problem.id_batches, problem.ood_batches).extract(budget=1)
    for score in ("ood", "avg"):
        with pytest.raises(DataError, match="ood_batches"):
            Problem(problem.model, problem.id_batches, None).extract(score=score, budget=1)
