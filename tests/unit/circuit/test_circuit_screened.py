"""The screened method: approximate, cheap, and it reports its own error."""

import numpy as np
import pytest
import torch

from circuit_models import SCORES, Problem, random_problem, searches
from hydra_ensembles.circuit.scores import Score, grid_step
from hydra_ensembles.circuit.screened import Shifts, fast_products, gradient_shifts
from trained_vit import id_pictures, ood_pictures, trained_vit

MOST = [pytest.param(score, marks=pytest.mark.slow) if score != "avg" else score for score in SCORES]  # avg covers both


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(trained_vit(), [id_pictures(24)], [ood_pictures(24)])


@pytest.mark.parametrize("score", MOST)
def test_it_comes_close_to_the_exact_method(problem: Problem, score: Score) -> None:
    exact, screened = (
        problem.extract(method=how, score=score, budget=2, layers=[1, 3, 5]) for how in ("exact", "screened")
    )
    assert (screened.method, screened.provenance["audit"]["steps"]) == ("circuit/screened", [0, 1])
    assert screened.scores[-1] >= exact.scores[-1] - 0.02
    if score == "acc":  # in float64 both choose the same heads
        assert screened.heads == exact.heads
    if score == "avg":  # reported scores are measured on the model, not estimated
        naive, _, _ = searches(problem, score)
        counts = zip(*(screened.provenance[name] for name in ("errors", "discordance")), strict=True)
        for head, expected in zip(screened.heads, counts, strict=True):
            naive.remove(head)
            assert naive.result[-2:] == expected


def test_predictions_are_first_order() -> None:
    """For heads that contribute little, the predicted shifts equal the real ones."""
    problem = random_problem("text-post-norm")
    with torch.no_grad():
        for block in problem.model.encoder.layers:
            block.attention.out *= 1e-4
    _, exact, heads = searches(problem, "avg")
    measured, predicted = Shifts(exact), Shifts(exact)
    rows, numbers = np.arange(len(exact.tower.candidates)), np.arange(exact.objective.samples)
    measured.start_step(reset=True)
    with torch.no_grad():
        exact.tower.run(np.repeat(rows, len(numbers)), np.tile(numbers, len(rows)), measured.record)
        predicted.start_step(reset=True)
        predicted.predict(heads, numbers)
    real, found, inside = measured.known, predicted.known, exact.objective.id_count
    assert torch.allclose(found[0] * grid_step(torch.float64), real[0] * grid_step(torch.float64), atol=1e-5)
    margins = gradient_shifts(exact.tower, heads, numbers[:inside], exact.tower.samples.labels[:inside])
    assert torch.allclose(margins, real[1, :, :inside], atol=1e-5)
    wrong = exact.current.wrong[0, :inside]
    assert wrong.any()
    assert torch.allclose(found[1, :, :inside][:, wrong], margins[:, wrong], atol=1e-12)


def test_audits_report_and_change_nothing() -> None:
    problem = random_problem(seed=2)
    options = {"budget": 4, "method": "screened", "screen_size": 1, "score": "ood"}
    silent, audited = problem.extract(**options, audit_steps=0), problem.extract(**options, audit_steps=4)
    assert (audited.heads, audited.scores) == (silent.heads, silent.scores)
    audit = audited.provenance["audit"]
    assert audit["steps"] == [0, 1, 2, 3]
    assert 0 < audit["divergences"] <= 4
    best = problem.extract(budget=1, method="naive", score="ood").provenance["discordance"][0]
    first = problem.extract(**options | {"budget": 1}, audit_steps=1).provenance
    assert first["audit"]["largest_excess"] == first["discordance"][0] - best
    assert audit["largest_excess"] >= first["audit"]["largest_excess"] >= 0


def test_products_are_precise_again_after_screening() -> None:
    before = torch.get_float32_matmul_precision()
    within = fast_products(torch.device("cuda"))
    within.__enter__()
    assert torch.get_float32_matmul_precision() == "high"
    assert not within.__exit__(RuntimeError, RuntimeError("stop"), None)
    assert torch.get_float32_matmul_precision() == before


def test_layers_without_heads_are_skipped() -> None:
    problem = random_problem()
    gone = [(1, head) for head in range(4)]
    ranking = problem.extract(method="screened", budget=3, removed=gone, screen_size=2)
    assert all(head.layer != 1 for head in ranking.heads)


@pytest.mark.parametrize("score", MOST)
def test_a_fraction_of_the_naive_work(problem: Problem, score: Score) -> None:
    options = {"method": "screened", "budget": 10, "audit_steps": 0, "dtype": torch.float32, "ties": "order"}
    ranking = problem.extract(score=score, **options)
    passes = 1 + sum(48 - step for step in range(10))
    assert ranking.provenance["screen_size"] == 16
    assert 10 * ranking.provenance["model_forwards"] <= passes
