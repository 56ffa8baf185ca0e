"""The screened method: approximate, cheap, and honest about it."""

import pytest
import torch
from circuit_models import SCORES, Problem, random_problem
from trained_vit import id_pictures, ood_pictures, trained_vit

from hydra_ensembles.heads.circuit import Score
from hydra_ensembles.heads.circuit.distributed import Ranks
from hydra_ensembles.heads.circuit.gradients import predicted_log_odds, predicted_values
from hydra_ensembles.heads.circuit.methods import Evaluation, ScreenedMethod
from hydra_ensembles.heads.circuit.samples import read_samples
from hydra_ensembles.heads.circuit.scores import Objective
from hydra_ensembles.heads.circuit.screened import Screen
from hydra_ensembles.heads.circuit.work import Work
from hydra_ensembles.heads.circuit.working_model import working_copy
from hydra_ensembles.heads.mask import existing_heads, masked


@pytest.fixture(scope="module")
def problem() -> Problem:
    images, others = id_pictures(40), ood_pictures(40)
    return Problem(trained_vit(), [images], [others])


def evaluation(problem: Problem, score: Score) -> Evaluation:
    copy = working_copy(problem.model, torch.float64, torch.device("cpu"))
    samples = read_samples(copy, problem.id_batches, None if score == "acc" else problem.ood_batches, 0)
    objective = Objective(score, samples.id_count, samples.ood_count)
    return Evaluation(copy, samples, objective, Ranks(), Work(), 64, 10**9)


@pytest.mark.parametrize("score", SCORES)
def test_it_comes_close_to_the_exact_method(problem: Problem, score: Score) -> None:
    exact = problem.extract(method="exact", score=score, budget=4)
    screened = problem.extract(method="screened", score=score, budget=4)
    assert screened.method == "circuit/screened"
    assert screened.provenance["approximate"]
    assert screened.provenance["audit"]["steps"] == [0, 2]
    assert screened.scores[-1] >= exact.scores[-1] - 0.02


def test_predictions_sort_heads_by_their_effect(problem: Problem) -> None:
    exact = evaluation(problem, "avg")
    heads = list(existing_heads(problem.model.config))
    predicted = torch.tensor(predicted_values(exact.exact(heads, []).current, heads))
    naive = exact.naive([])
    found = torch.tensor([float(naive.evaluate(head).value) for head in heads])
    ranks = torch.stack([predicted.argsort().argsort(), found.argsort().argsort()]).double()
    assert float(torch.corrcoef(ranks)[0, 1]) > 0.5


def test_predictions_are_first_order() -> None:
    """For heads that contribute little, the predicted log-odds are the real ones."""
    problem = random_problem("text-post-norm")
    with torch.no_grad():
        for block in problem.model.encoder.layers:
            block.attention.out *= 1e-4
    setup = evaluation(problem, "ood")
    heads = list(existing_heads(problem.model.config))
    current = setup.exact(heads, []).current
    numbers = torch.arange(setup.objective.samples)
    targets = torch.tensor([0, 1, 2, 3, 0] * 4)
    predicted = predicted_log_odds(current, heads, numbers.numpy(), targets)  # [K, n]
    texts = [inputs for inputs, _ in [*problem.id_batches, *problem.ood_batches]]
    for index, head in enumerate(heads):
        with torch.no_grad(), masked(problem.model, [head]):
            logits = torch.cat([problem.model(text)[0] for text in texts])
        others = logits.scatter(1, targets[:, None], -torch.inf).logsumexp(1)
        real = logits.gather(1, targets[:, None])[:, 0] - others
        assert torch.allclose(predicted[index].double(), real, atol=1e-5)


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
    assert audit["largest_excess"] > 0


def test_an_audit_holds_the_choice_against_the_best_of_all() -> None:
    problem = random_problem(seed=2)
    screened = problem.extract(budget=1, method="screened", screen_size=1, audit_steps=1, score="ood")
    best = problem.extract(budget=1, method="naive", score="ood")
    missed = screened.provenance["discordance"][0] - best.provenance["discordance"][0]
    assert screened.provenance["audit"]["largest_excess"] == missed


def test_screening_in_half_precision(problem: Problem) -> None:
    """What runs on a GPU: bfloat16 chooses, the precise model reports."""
    setup = evaluation(problem, "avg")
    heads = list(existing_heads(problem.model.config))
    coarse = setup.half_precision(heads, [], memory_share=0.5)
    assert coarse.model.ensemble.dtype == torch.bfloat16
    method = ScreenedMethod(setup.exact(heads, [], memory_share=0.5), Screen(coarse, Ranks(), 6))
    naive, off = setup.naive([]), []
    for audit in (True, False, True):
        choice, excess = method.take([head for head in heads if head not in off], audit)
        assert naive.evaluate(choice.head) == choice
        assert (excess is not None) == audit
        assert excess is None or excess >= 0
        naive.remove(choice.head)
        off.append(choice.head)
    assert len(set(off)) == 3


def test_layers_without_heads_are_skipped() -> None:
    problem = random_problem()
    gone = [(1, head) for head in range(4)]
    ranking = problem.extract(method="screened", budget=3, removed=gone, screen_size=2)
    assert all(head.layer != 1 for head in ranking.heads)


def test_a_shortlist_is_in_the_order_of_the_model(problem: Problem) -> None:
    setup = evaluation(problem, "acc")
    heads = list(existing_heads(problem.model.config))
    chosen = Screen(setup.exact(heads, []).current, Ranks(), 5).shortlist(heads)
    assert len(chosen) == 5
    assert chosen == sorted(chosen)
