"""The naive method against a reference written without any of the library's own counting."""

import pytest
import torch
from circuit_models import SCORES, Problem, random_problem
from sklearn.metrics import roc_auc_score
from torch import Tensor

from hydra_ensembles.circuit.scores import Score
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.prune import prune


def plain_score(model: Ensemble, problem: Problem, score: Score) -> float:
    """Accuracy, AUROC or their mean, with softmax and scikit-learn."""

    def probabilities(batches: list) -> Tensor:
        with torch.no_grad():
            return torch.cat([model(inputs)[0].softmax(-1) for inputs, _ in batches])

    inside = probabilities(problem.id_batches)
    labels = torch.cat([labels for _, labels in problem.id_batches])
    accuracy = float((inside.argmax(-1) == labels).double().mean())
    if score == "acc":
        return accuracy
    outside = probabilities(problem.ood_batches)
    uncertainty = -torch.cat([inside, outside]).amax(-1)
    auroc = roc_auc_score([0] * len(inside) + [1] * len(outside), uncertainty.numpy())
    return float(auroc) if score == "ood" else (accuracy + float(auroc)) / 2


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shape", ["image-cls", "text-end-of-text"])
def test_greedy_choices_and_scores(shape: str, score: Score) -> None:
    problem = random_problem(shape, id_sizes=(6, 5), ood_sizes=(5, 2))
    ranking = problem.extract(method="naive", score=score, budget=3)
    left = [(layer, head) for layer in range(3) for head in range(4)]
    removed: list[tuple[int, int]] = []
    for head, achieved in zip(ranking.heads, ranking.scores, strict=True):
        scores = {one: plain_score(prune(problem.model, [*removed, one]), problem, score) for one in left}
        highest = max(scores.values())
        best = min(one for one, value in scores.items() if value > highest - 1e-12)
        assert head[:2] == best
        assert achieved == pytest.approx(highest, abs=1e-12)
        left.remove(best)
        removed.append(best)
    assert ranking.provenance["start"] == pytest.approx(plain_score(problem.model, problem, score), abs=1e-12)


def test_it_counts_whole_forwards() -> None:
    problem = random_problem()
    ranking = problem.extract(method="naive", budget=3)
    assert ranking.provenance["model_forwards"] == pytest.approx(1 + 12 + 11 + 10)
    assert ranking.provenance["layer_evaluations"] == (1 + 12 + 11 + 10) * 3 * 20  # layers, samples


def test_what_the_ranking_says_about_itself() -> None:
    problem = random_problem()
    ranking = problem.extract(method="naive", score="avg", budget=2, layers=[1, 2], removed=[(1, 0)], seed=4)
    assert ranking.method == "circuit/naive"
    assert ranking.score == "avg"
    provenance = ranking.provenance
    assert (provenance["id_samples"], provenance["ood_samples"]) == (11, 9)
    assert (provenance["budget"], provenance["layers"], provenance["removed"]) == (2, [1, 2], [[1, 0]])
    assert (provenance["dtype"], provenance["seed"]) == ("torch.float64", 4)
    errors, discordance = provenance["errors"][-1], provenance["discordance"][-1]
    assert ranking.scores[-1] == pytest.approx((2 - errors / 11 - discordance / (2 * 11 * 9)) / 2)
    assert not provenance["approximate"]
    assert len(provenance["model"]) == 64


def test_labels_of_ood_data_are_ignored() -> None:
    problem = random_problem()
    bare = Problem(problem.model, problem.id_batches, [inputs for inputs, _ in problem.ood_batches])
    wild = Problem(problem.model, problem.id_batches, [(x, y + 900) for x, y in problem.ood_batches])
    expected = problem.extract(budget=2).heads
    assert bare.extract(budget=2).heads == wild.extract(budget=2).heads == expected


def test_accuracy_needs_no_ood_data() -> None:
    problem = random_problem()
    alone = Problem(problem.model, problem.id_batches, None)
    assert alone.extract(score="acc", budget=3).heads == problem.extract(score="acc", budget=3).heads
