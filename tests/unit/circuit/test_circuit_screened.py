"""The screened method: approximate, cheap, and honest about it."""

import numpy as np
import pytest
import torch

from circuit_models import SCORES, Problem, random_problem
from hydra_ensembles._distributed import Ranks
from hydra_ensembles.circuit.cache import CachedTower
from hydra_ensembles.circuit.scores import Objective, Score, read_samples
from hydra_ensembles.circuit.screened import Shifts, gradient_shifts, predict_shifts
from hydra_ensembles.circuit.search import Exact, Naive, fast_products
from hydra_ensembles.circuit.working_model import Work, WorkingModel
from hydra_ensembles.heads.masking import existing_heads, working_copy
from hydra_ensembles.heads.ranking import Head
from trained_vit import id_pictures, ood_pictures, trained_vit

MOST = [pytest.param(score, marks=pytest.mark.slow) if score == "ood" else score for score in SCORES]  # avg has both


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(trained_vit(), [id_pictures(40)], [ood_pictures(40)])


def searches(problem: Problem, score: Score) -> tuple[Naive, Exact, list[Head]]:
    """Both methods on one problem in float64, and all heads of its model."""
    model = working_copy(problem.model, torch.float64, torch.device("cpu"))
    samples = read_samples(model, problem.id_batches, None if score == "acc" else problem.ood_batches, 0)
    objective, heads = Objective(score, samples.id_count, samples.ood_count), list(existing_heads(model.config))
    naive = Naive(model, samples, objective, Ranks(), Work(), 64)
    tower = CachedTower(WorkingModel(model, [], Work()), samples, heads, heads, 64, 10**9)
    return naive, Exact(tower, objective, Ranks()), heads


@pytest.mark.parametrize("score", MOST)
def test_it_comes_close_to_the_exact_method(problem: Problem, score: Score) -> None:
    exact = problem.extract(method="exact", score=score, budget=3)
    screened = problem.extract(method="screened", score=score, budget=3)
    assert screened.method == "circuit/screened"
    assert screened.provenance["approximate"]
    assert screened.provenance["audit"]["steps"] == [0, 1]
    assert screened.scores[-1] >= exact.scores[-1] - 0.02
    if score == "acc":  # in full precision they are the same method
        assert screened.heads == exact.heads


def test_it_has_gradients_whatever_the_caller_switched_off() -> None:
    problem = random_problem()
    expected = problem.extract(method="screened", budget=2, screen_size=2)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert problem.extract(method="screened", budget=2, screen_size=2) == expected


def measured(exact: Exact) -> Shifts:
    """Shifts of all heads, measured on all samples."""
    shifts = Shifts(exact)
    rows, numbers = np.arange(len(exact.tower.candidates)), np.arange(exact.objective.samples)
    with torch.no_grad():
        exact.tower.run(np.repeat(rows, len(numbers)), np.tile(numbers, len(rows)), shifts.record)
    return shifts


def test_measured_shifts_are_the_results_of_the_naive_method(problem: Problem) -> None:
    naive, exact, heads = searches(problem, "avg")
    estimates = measured(exact).estimates(heads)
    assert estimates == [naive.evaluate(one.head) for one in estimates]
    values = [one.value for one in estimates]
    assert values == sorted(values)
    assert len(set(values)) > 1
    # predicted ones order heads much alike
    shifts = Shifts(exact)
    predict_shifts(shifts, heads, np.arange(exact.objective.samples))
    place = {one.head: index for index, one in enumerate(shifts.estimates(heads))}
    ranks = torch.tensor([[place[one.head] for one in estimates], list(range(len(heads)))]).double()
    assert float(torch.corrcoef(ranks)[0, 1]) > 0.5


def test_predictions_are_first_order() -> None:
    """For heads that contribute little, the predicted shifts are the real ones."""
    problem = random_problem("text-post-norm")
    with torch.no_grad():
        for block in problem.model.encoder.layers:
            block.attention.out *= 1e-4
    _, exact, heads = searches(problem, "avg")
    predicted, real = Shifts(exact), measured(exact)
    numbers, inside = np.arange(exact.objective.samples), exact.objective.id_count
    predict_shifts(predicted, heads, numbers)
    assert torch.allclose(predicted.confidence * predicted.step, real.confidence * real.step, atol=1e-5)
    margins = gradient_shifts(exact.tower, heads, numbers[:inside], exact.tower.samples.labels[:inside])
    assert torch.allclose(margins, real.margin[:, :inside], atol=1e-5)
    wrong = exact.current.wrong[0, :inside]
    assert wrong.any()
    assert torch.allclose(predicted.margin[:, :inside][:, wrong], margins[:, wrong], atol=1e-12)


def test_a_new_prediction_keeps_what_was_measured_beyond_the_last_one(problem: Problem) -> None:
    shifts, rows, numbers = Shifts(searches(problem, "ood")[1]), torch.tensor([0, 2]), np.array([3, 1])
    before = torch.full((2, 2), 1.0, dtype=torch.float64)
    shifts.predict(rows, numbers, before, before)
    shifts.margin[0, 3] += 0.25  # as a measurement would
    shifts.predict(rows, numbers, 2 * before, 2 * before)
    assert shifts.margin[rows][:, numbers].tolist() == [[2.25, 2.0], [2.0, 2.0]]
    assert (shifts.confidence[rows][:, numbers] * shifts.step).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert shifts.margin.count_nonzero() == 4
    shifts.start_step(afresh=True)
    shifts.predict(rows, numbers, before, before)
    assert shifts.margin[rows][:, numbers].tolist() == before.tolist()


def test_audits_report_and_change_nothing() -> None:
    problem = random_problem(seed=2)
    options = {"budget": 4, "method": "screened", "screen_size": 1, "score": "ood"}
    silent, audited = problem.extract(**options, audit_steps=0), problem.extract(**options, audit_steps=4)
    assert audited.heads == silent.heads
    assert audited.scores == silent.scores
    assert silent.provenance["audit"] == {"steps": [], "divergences": 0, "largest_excess": 0}
    audit = audited.provenance["audit"]
    assert audit["steps"] == [0, 1, 2, 3]
    assert 0 < audit["divergences"] <= 4
    best = problem.extract(budget=1, method="naive", score="ood").provenance["discordance"][0]
    first = problem.extract(**options | {"budget": 1}, audit_steps=1).provenance
    assert first["audit"]["largest_excess"] == first["discordance"][0] - best
    assert audit["largest_excess"] >= first["audit"]["largest_excess"] >= 0


@pytest.mark.parametrize("score", MOST)
def test_a_fraction_of_the_naive_work(problem: Problem, score: Score) -> None:
    ranking = problem.extract(method="screened", score=score, budget=16, audit_steps=0, dtype=torch.float32)
    passes = 1 + sum(48 - step for step in range(16))
    assert ranking.provenance["screen_size"] == 16
    assert 10 * ranking.provenance["model_forwards"] <= passes


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_third_of_the_heads_without_much_loss(score: Score, seed: int) -> None:
    problem = Problem(trained_vit(), [id_pictures(64, 10 + seed)], [ood_pictures(64, 20 + seed)])
    exact, screened = (
        problem.extract(method=method, score=score, budget=16, audit_steps=0, dtype=torch.float32)
        for method in ("exact", "screened")
    )
    assert screened.scores[-1] >= exact.scores[-1] - 0.012
    assert sum(screened.scores) >= sum(exact.scores) - 16 * 0.006


def test_reported_scores_are_those_of_the_model(problem: Problem) -> None:
    ranking = problem.extract(method="screened", score="avg", budget=3)
    naive, _, _ = searches(problem, "avg")
    counts = zip(*(ranking.provenance[name] for name in ("errors", "discordance")), strict=True)
    for head, expected in zip(ranking.heads, counts, strict=True):
        naive.remove(head)
        assert naive.result[2:] == expected


def test_products_are_precise_again_after_screening() -> None:
    before = torch.get_float32_matmul_precision()
    with fast_products(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == before
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
