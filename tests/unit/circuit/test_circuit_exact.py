"""The naive method against an independent reference, and the exact method against the naive one, integers equal."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor

from circuit_models import SCORES, Problem, evidence, random_problem, searches
from hydra_ensembles.circuit.scores import NO_HEAD, Objective, Score
from hydra_ensembles.heads.masking import prune
from hydra_ensembles.heads.ranking import HeadRanking
from hydra_ensembles.model.config import EnsembleConfig, PatchStemConfig, ReadoutConfig
from hydra_ensembles.model.ensemble import Ensemble
from random_ensembles import CLASSES, HEADS, LAYERS, encoder

pytestmark = pytest.mark.filterwarnings("ignore::hydra_ensembles.HydraWarning")  # ID and OOD share samples on purpose


def plain_score(model: Ensemble, problem: Problem, score: Score) -> float:
    """Accuracy, AUROC or their mean, by scikit-learn, independent of the library's counting."""
    inside, outside = (
        [model.predict(inputs) for inputs, _ in batches] for batches in (problem.id_batches, problem.ood_batches)
    )
    labels = torch.cat([labels for _, labels in problem.id_batches])
    accuracy = float((torch.cat([answer.label for answer in inside]) == labels).double().mean())
    uncertainty = [torch.cat([answer.score("msp") for answer in answers]) for answers in (inside, outside)]
    foreign = [0] * len(uncertainty[0]) + [1] * len(uncertainty[1])
    auroc = float(roc_auc_score(foreign, torch.cat(uncertainty).numpy()))
    return {"acc": accuracy, "ood": auroc, "avg": (accuracy + auroc) / 2}[score]


def likelihood(model: Ensemble, problem: Problem) -> float:
    """Log-likelihood of the labels, summed and rounded to 1e-6."""
    with torch.no_grad():
        found = [model(inputs)[0].log_softmax(-1)[torch.arange(len(y)), y].sum() for inputs, y in problem.id_batches]
    return round(float(sum(found)), 6)


@pytest.mark.parametrize(
    ("shape", "score", "ties"),
    [
        ("image-cls", "acc", "order"),
        ("image-cls", "ood", "order"),
        ("text-end-of-text", "acc", "likelihood"),
        ("image-cls", "avg", "likelihood"),
    ],
)
def test_naive_choices_and_scores(shape: str, score: Score, ties: str) -> None:
    problem = random_problem(shape, id_sizes=(6, 5), ood_sizes=(5, 2))
    ranking = problem.extract(method="naive", score=score, budget=2, ties=ties, layers=[0, 2])
    left = [(layer, head) for layer in (0, 2) for head in range(4)]
    removed: list[tuple[int, int]] = []
    for head, achieved in zip(ranking.heads, ranking.scores, strict=True):
        models = {one: prune(problem.model, [*removed, one]) for one in left}
        scores = {one: plain_score(model, problem, score) for one, model in models.items()}
        highest = max(scores.values())
        tied = [one for one, value in scores.items() if value > highest - 1e-12]
        if ties == "likelihood":
            best = min(tied, key=lambda one: (-likelihood(models[one], problem), one))
        else:
            best = min(tied)
        assert (head[:2], achieved) == (best, pytest.approx(highest, abs=1e-12))
        left.remove(best)
        removed.append(best)
    start = plain_score(problem.model, problem, score)
    assert ranking.provenance["start"] == pytest.approx(start, abs=1e-12)
    passes = 1 + 8 + 7  # the full model, then every remaining head at each step
    assert ranking.provenance["model_forwards"] == pytest.approx(passes)


def assert_same_choices(problem: Problem, **options: object) -> HeadRanking:
    naive, exact = (problem.extract(method=method, **options) for method in ("naive", "exact"))
    assert evidence(exact) == evidence(naive)
    return exact


GONE = [(layer, head) for layer in range(LAYERS) for head in (1, 2)]  # half of the heads


@pytest.mark.parametrize(("shape", "score"), [*(("image-cls", score) for score in SCORES), ("text-post-norm", "avg")])
def test_ties_between_samples_down_to_the_last_head(shape: str, score: Score) -> None:
    problem = random_problem(shape, id_sizes=(3, 2), ood_sizes=(3,), ties=True)
    few = replace(problem, model=prune(problem.model, GONE))
    assert_same_choices(few, score=score, budget=LAYERS * HEADS - len(GONE))


def test_several_sources_count_alike() -> None:
    problem = random_problem(id_sizes=(6, 5), ood_sizes=(7, 2, 3), seed=4)
    first, *others = problem.ood_batches

    def of(ood: Any) -> Problem:
        return Problem(problem.model, problem.id_batches, ood)

    sources = of({"first": [first], "others": others})
    found = assert_same_choices(sources, score="ood", budget=3)
    assert found.provenance["ood_sources"] == {"ood_batches['first']": 7, "ood_batches['others']": 5}
    model = prune(problem.model, found.heads)
    areas = [plain_score(model, of(one), "ood") for one in ([first], others)]
    assert found.scores[-1] == pytest.approx(sum(areas) / 2, abs=1e-12)
    assert found.scores != problem.extract(score="ood", budget=3).scores


def test_batches_and_memory_change_the_work_and_nothing_else() -> None:
    problem = random_problem("image-mean-layerscale", id_sizes=(15,), ood_sizes=(12,))
    (inputs, labels) = problem.id_batches[0]
    expected = evidence(problem.extract(method="naive", budget=2, batch_size=4))
    problem.id_batches[:] = [(inputs[part], labels[part]) for part in (slice(0, 4), slice(4, 5), slice(5, 15))]
    for max_memory in (3e4, 60_000):
        assert evidence(problem.extract(budget=2, max_memory=max_memory)) == expected
    poor, rich = (problem.extract(score="ood", budget=3, max_memory=room) for room in (1, 10**9))
    assert rich.provenance["model_forwards"] < 0.9 * poor.provenance["model_forwards"]
    assert len(set(rich.scores)) > 2  # otherwise the comparisons above prove nothing


def test_some_layers_of_a_pruned_model() -> None:
    problem = random_problem(seed=5)
    pruned = replace(problem, model=prune(problem.model, [(0, 1), (1, 0), (2, 3), (0, 0), (1, 2)]))
    chosen = assert_same_choices(pruned, budget=4, layers=[2, 0]).heads
    assert {head.layer for head in chosen} <= {0, 2}


@st.composite
def tiny_problems(draw: st.DrawFn) -> Problem:
    config = encoder(
        layers=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        norm_first=draw(st.booleans()),
        layer_scale=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    pool = draw(st.sampled_from(["cls", "mean", "cls_mean"]))
    readout = ReadoutConfig(pool=pool, num_classes=draw(st.integers(2, CLASSES)))
    stem = PatchStemConfig(patch_size=(2, 2), grid=(1, 2))
    model = Ensemble(EnsembleConfig(stem, config, readout)).double()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)

    def some(minimum: int) -> list[tuple[Tensor, Tensor]]:
        made = []
        for _ in range(draw(st.integers(1, 2))):
            images = torch.randn(draw(st.integers(minimum, 5)), 3, 2, 4, generator=generator, dtype=torch.float64)
            labels = torch.randint(readout.num_classes, (len(images),), generator=generator)
            labels[:2] = torch.tensor([0, 1])[: len(labels)]
            made.append((images, labels))
        return made

    return Problem(model, some(2), some(1))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(problem=tiny_problems(), score=st.sampled_from(SCORES), data=st.data())
def test_any_tiny_model(problem: Problem, score: Score, data: st.DataObject) -> None:
    total = problem.model.num_layers * problem.model.num_heads
    options: dict[str, Any] = {"ties": data.draw(st.sampled_from(["likelihood", "order"]))}
    if data.draw(st.booleans()):
        sources = {str(index): [batch] for index, batch in enumerate(problem.ood_batches)}
        problem = Problem(problem.model, problem.id_batches, sources)
    assert_same_choices(problem, score=score, budget=data.draw(st.integers(1, total)), **options)


def test_in_single_precision_choices_are_within_rounding() -> None:
    naive, exact, heads = searches(random_problem(id_sizes=(20, 12), ood_sizes=(32,)), "avg", torch.float32)
    for _ in range(3):  # avg uses both integers
        chosen = exact.choose(heads).head
        assert naive.evaluate(chosen).value - naive.choose(heads).value <= 4
        for search in (naive, exact):
            search.remove(chosen)
        heads.remove(chosen)


def test_many_sources_of_odd_sizes_do_not_overflow() -> None:
    sizes = (997, 991, 983, 977, 971, 967, 953, 947)
    objective = Objective("ood", 1000, sizes)
    assert objective.balanced > 2**64
    worst = objective.result(NO_HEAD, [0, *(2 * 1000 * size for size in sizes)])
    assert objective.achieved(0, worst.discordance) == 0
    better = objective.result(NO_HEAD, [0, *(2 * 1000 * size for size in sizes[:-1]), 2 * 1000 * sizes[-1] - 1])
    assert better < worst
