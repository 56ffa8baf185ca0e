"""On a model that learned something, the exact method needs far less work; counted, not timed."""

import pytest
import torch
from circuit_models import SCORES, Problem, evidence
from trained_vit import id_pictures, ood_pictures, trained_vit

from hydra_ensembles.circuit.scores import Score
from hydra_ensembles.heads.ranking import HeadRanking

BUDGET = 4


@pytest.fixture(scope="module")
def problem() -> Problem:
    def batches(images: torch.Tensor, labels: torch.Tensor) -> list:
        return list(zip(images.split(30), labels.split(30), strict=True))

    return Problem(trained_vit(), batches(*id_pictures(64)), batches(*ood_pictures(64)))


@pytest.fixture(scope="module")
def naive(problem: Problem) -> HeadRanking:
    return problem.extract(method="naive", score="avg", budget=BUDGET)


@pytest.mark.parametrize("score", SCORES)
def test_a_third_of_the_layer_evaluations_is_enough(problem: Problem, naive: HeadRanking, score: Score) -> None:
    exact = problem.extract(method="exact", score=score, budget=BUDGET)
    if score == "avg":
        assert evidence(exact) == evidence(naive)
    passes = 1 + 48 + 47 + 46 + 45  # the model as it is, and every head that is left at each step
    assert naive.provenance["layer_evaluations"] == passes * 6 * 128  # layers, samples; the same for every score
    samples = 64 if score == "acc" else 128
    assert 3 * exact.provenance["layer_evaluations"] <= passes * 6 * samples
    assert 3 * exact.provenance["model_forwards"] <= passes


@pytest.mark.parametrize("score", SCORES)
def test_in_single_precision_choices_are_within_rounding(problem: Problem, score: Score) -> None:
    options = {"score": score, "budget": 2, "dtype": torch.float32, "audit_steps": 2, "layers": [1, 3]}
    audit = problem.extract(method="exact", **options).provenance["audit"]
    assert audit["steps"] == [0, 1]
    assert 0 <= audit["divergences"] <= 2
    assert audit["largest_excess"] <= 4
