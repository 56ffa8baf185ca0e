"""What `extract_circuit` accepts, refuses, leaves unchanged and reports."""

import pytest
import torch

from circuit_models import Problem, random_problem
from hydra_ensembles.errors import DataError


def test_accuracy_needs_no_ood_data_and_the_other_scores_do() -> None:
    problem = random_problem()
    alone = Problem(problem.model, problem.id_batches, None)
    assert alone.extract(score="acc", budget=3).heads == problem.extract(score="acc", budget=3).heads
    for score in ("ood", "avg"):
        with pytest.raises(DataError, match="ood_batches"):
            alone.extract(score=score, budget=1)


@pytest.mark.parametrize("method", ["naive", "exact"])
def test_a_head_without_which_logits_are_not_finite(method: str) -> None:
    """Two heads cancel out; without one of them the activations overflow float16."""
    problem = random_problem()
    attention = problem.model.encoder.layers[1].attention
    with torch.no_grad():
        for name in ("qkv", "qkv_bias"):
            getattr(attention, name)[1] = getattr(attention, name)[2]
        attention.out[1] = 6e4
        attention.out[2] = -6e4
    with pytest.raises(DataError, match=r"sample 0 of id_batches .* head 1\.[12]"):
        problem.extract(method=method, budget=1, dtype=torch.float16, layers=[1])
