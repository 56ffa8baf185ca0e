"""On a model that learned something, the exact method needs far less work; counted, not timed."""

import pytest
import torch
from circuit_models import SCORES, Problem, evidence
from trained_vit import id_pictures, ood_pictures, trained_vit

from hydra_ensembles.heads.circuit import Score

BUDGET = 6


@pytest.fixture(scope="module")
def problem() -> Problem:
    def batches(images: torch.Tensor, labels: torch.Tensor) -> list:
        return list(zip(images.split(30), labels.split(30), strict=True))

    return Problem(trained_vit(), batches(*id_pictures(80)), batches(*ood_pictures(80)))


@pytest.mark.parametrize("score", SCORES)
def test_a_third_of_the_layer_evaluations_is_enough(problem: Problem, score: Score) -> None:
    naive, exact = (problem.extract(method=method, score=score, budget=BUDGET) for method in ("naive", "exact"))
    assert evidence(exact) == evidence(naive)
    assert 3 * exact.provenance["layer_evaluations"] <= naive.provenance["layer_evaluations"]
    assert 3 * exact.provenance["model_forwards"] <= naive.provenance["model_forwards"]


@pytest.mark.parametrize("score", SCORES)
def test_in_single_precision_choices_are_within_rounding(problem: Problem, score: Score) -> None:
    options = {"score": score, "budget": 3, "dtype": torch.float32, "audit_steps": 3}
    audit = problem.extract(method="exact", **options).provenance["audit"]
    assert audit["steps"] == [0, 1, 2]
    assert audit["largest_excess"] <= 4
    assert audit["divergences"] <= 3
