"""Bad input gets an error that says what is wrong, and where."""

import re

import pytest
import torch
from circuit_models import Problem, random_problem

from hydra_ensembles.errors import ConfigError, DataError, HeadError
from hydra_ensembles.model.config import EnsembleConfig, ReadoutConfig
from hydra_ensembles.model.ensemble import Ensemble

METHODS = ("naive", "exact", "screened")


@pytest.fixture
def problem() -> Problem:
    return random_problem()


def test_several_members(problem: Problem) -> None:
    two = Problem(Ensemble.stack([problem.model, problem.model]), problem.id_batches, problem.ood_batches)
    with pytest.raises(ConfigError, match=r"2 members.*member\(i\)"):
        two.extract(budget=1)


def test_no_classifier(problem: Problem) -> None:
    config = problem.model.config
    bare = Ensemble(EnsembleConfig(config.stem, config.encoder, ReadoutConfig(), config.heads))
    with pytest.raises(ConfigError, match="0 classes"):
        Problem(bare, problem.id_batches, problem.ood_batches).extract(budget=1)


@pytest.mark.parametrize("side", ["id_batches", "ood_batches"])
def test_no_batches(problem: Problem, side: str) -> None:
    getattr(problem, side).clear()
    with pytest.raises(DataError, match=f"{side} has no batches"):
        problem.extract(budget=1)


@pytest.mark.parametrize("side", ["id_batches", "ood_batches"])
def test_no_samples(problem: Problem, side: str) -> None:
    batches = getattr(problem, side)
    images, labels = batches[0]
    batches[:] = [(images[:0], labels[:0])]
    with pytest.raises(DataError, match=f"{side} has no samples"):
        problem.extract(budget=1)


def test_a_single_class(problem: Problem) -> None:
    problem.id_batches[:] = [(images, torch.full_like(labels, 2)) for images, labels in problem.id_batches]
    with pytest.raises(DataError, match="label 2; a circuit needs samples of at least two classes"):
        problem.extract(budget=1)


@pytest.mark.parametrize("label", [-1, 4])
def test_labels_out_of_range(problem: Problem, label: int) -> None:
    problem.id_batches[1][1][0] = label
    with pytest.raises(DataError, match=r"batch 1 of id_batches has labels .*4 classes"):
        problem.extract(budget=1)


def test_no_labels(problem: Problem) -> None:
    problem.id_batches[1] = problem.id_batches[1][0]  # type: ignore[call-overload]
    with pytest.raises(DataError, match="batch 1 of id_batches has no labels"):
        problem.extract(budget=1)


@pytest.mark.parametrize("score", ["ood", "avg"])
def test_no_ood_data(problem: Problem, score: str) -> None:
    with pytest.raises(DataError, match=f'score="{score}".*ood_batches'):
        Problem(problem.model, problem.id_batches, None).extract(score=score, budget=1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("side", ["id_batches", "ood_batches"])
def test_inputs_that_are_not_finite(problem: Problem, side: str, method: str) -> None:
    getattr(problem, side)[1][0][1, 0, 0, 0] = torch.nan
    with pytest.raises(DataError, match=f"batch 1 of {side} gives logits that are NaN"):
        problem.extract(method=method, budget=1)


@pytest.mark.parametrize("method", METHODS)
def test_a_head_without_which_logits_are_not_finite(problem: Problem, method: str) -> None:
    """Two heads cancel out; without one of them the activations leave the range of float16."""
    attention = problem.model.encoder.layers[1].attention
    with torch.no_grad():
        for name in ("qkv", "qkv_bias"):
            getattr(attention, name)[1] = getattr(attention, name)[2]
        attention.out[1] = 6e4
        attention.out[2] = -6e4
    with pytest.raises(DataError, match=r"batch 0 of id_batches gives logits .* head 1\.[12] switched off"):
        problem.extract(method=method, budget=1, dtype=torch.float16, layers=[1])


@pytest.mark.parametrize("budget", [0, -1, 13, 100, True, 2.5, "24", None])
def test_a_budget_there_are_no_heads_for(problem: Problem, budget: int) -> None:
    with pytest.raises(HeadError, match=f"budget is {budget!r}.* 12 heads.*whole number"):
        problem.extract(budget=budget)


def test_a_budget_larger_than_what_layers_and_removed_leave(problem: Problem) -> None:
    with pytest.raises(HeadError, match=r"budget is 4.* 3 heads"):
        problem.extract(budget=4, layers=[1], removed=[(1, 2), (0, 0)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "f1"}, "score must be one of ['acc', 'ood', 'avg'], got 'f1'"),
        ({"method": "fast"}, "method must be one of ['naive', 'exact', 'screened'], got 'fast'"),
        ({"layers": [0, 3]}, "layers must be distinct numbers from 0 to 2"),
        ({"layers": []}, "layers must be distinct numbers from 0 to 2"),
        ({"removed": [(0, 9)]}, "head 0.9 does not exist"),
        ({"removed": [(0, 1), (0, 1)]}, "head 0.1 is listed twice"),
        ({"dtype": torch.int32}, "dtype must be a floating-point type"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"memory_budget": 0}, "memory_budget must be a whole number of at least 1, got 0"),
        ({"screen_size": 0}, "screen_size must be a whole number of at least 1, got 0"),
        ({"audit_steps": -1}, "audit_steps must be a whole number of at least 0, got -1"),
        ({"batch_size": "8"}, "batch_size must be a whole number of at least 1, got '8'"),
        ({"seed": 1.5}, "seed must be a whole number of at least 0, got 1.5"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here; available: cpu"),
    ],
)
def test_settings_that_do_not_exist(problem: Problem, options: dict[str, object], message: str) -> None:
    with pytest.raises((ConfigError, HeadError), match=re.escape(message)):
        problem.extract(**{"budget": 1} | options)
