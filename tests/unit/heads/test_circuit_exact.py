"""The exact method makes the choices of the naive one, to the last integer."""

import pytest
import torch
from circuit_models import CIRCUIT_SHAPES, SCORES, Problem, evidence, random_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from random_ensembles import CLASSES, HEADS, LAYERS, encoder

from hydra_ensembles.circuit.scores import Score
from hydra_ensembles.model.config import EnsembleConfig, PatchStemConfig, ReadoutConfig, all_heads
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.prune import prune


def assert_same_choices(problem: Problem, **options: object) -> None:
    naive, exact = (problem.extract(method=method, **options) for method in ("naive", "exact"))
    assert evidence(exact) == evidence(naive)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shape", CIRCUIT_SHAPES)
def test_every_shape_of_model(shape: str, score: Score) -> None:
    assert_same_choices(random_problem(shape, (4, 3), (3, 2)), score=score, budget=3)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shape", ["image-cls", "text-post-norm"])
def test_ties_between_samples_down_to_the_last_head(shape: str, score: Score) -> None:
    problem = random_problem(shape, id_sizes=(3, 2), ood_sizes=(3,), ties=True)
    assert_same_choices(problem, score=score, budget=LAYERS * HEADS)


@pytest.mark.parametrize("score", SCORES)
def test_ties_between_heads_go_to_the_first(score: Score) -> None:
    problem = random_problem(seed=3)
    with torch.no_grad():
        for block in problem.model.encoder.layers:
            for name in ("qkv", "qkv_bias", "out"):
                weights = getattr(block.attention, name)
                weights[2:] = weights[:2]  # heads 2 and 3 are heads 0 and 1 again
    assert_same_choices(problem, score=score, budget=6)
    first = problem.extract(score=score, budget=1).heads[0]
    assert first.head in (0, 1)


@pytest.mark.parametrize("method", ["naive", "exact"])
def test_batch_size_changes_nothing(method: str) -> None:
    problem = random_problem("text-mean-post-norm", id_sizes=(4, 2), ood_sizes=(3,))
    expected = evidence(problem.extract(budget=2))
    for batch_size in (1, 3, 7):
        assert evidence(problem.extract(method=method, budget=2, batch_size=batch_size)) == expected


def test_how_samples_are_batched_changes_nothing() -> None:
    together, apart = (random_problem(id_sizes=(11,)), random_problem(id_sizes=(11,)))
    inputs, labels = apart.id_batches[0]
    apart.id_batches[:] = [(inputs[part], labels[part]) for part in (slice(0, 4), slice(4, 5), slice(5, 11))]
    assert evidence(apart.extract(budget=4)) == evidence(together.extract(budget=4))


@pytest.mark.parametrize("memory_budget", [1, 3e4, 60_000])
def test_memory_changes_the_work_and_nothing_else(memory_budget: float) -> None:
    problem = random_problem("image-mean-layerscale", id_sizes=(9, 6), ood_sizes=(12,))
    expected = problem.extract(method="naive", budget=6)
    assert evidence(problem.extract(method="exact", budget=6, memory_budget=memory_budget)) == evidence(expected)


def test_carried_activations_save_work() -> None:
    problem = random_problem("image-mean-layerscale", id_sizes=(9, 6), ood_sizes=(12,))
    poor, rich = (
        problem.extract(score="ood", budget=6, memory_budget=budget).provenance["model_forwards"]
        for budget in (1, 10**9)
    )
    assert rich < 0.9 * poor


@pytest.mark.parametrize("score", SCORES)
def test_some_layers_some_heads_off_some_pruned(score: Score) -> None:
    problem = random_problem(seed=5)
    pruned = Problem(prune(problem.model, [(0, 1), (1, 0), (2, 3)]), problem.id_batches, problem.ood_batches)
    options = {"score": score, "budget": 4, "layers": [2, 0], "removed": [(0, 0), (1, 2)]}
    assert_same_choices(pruned, **options)
    chosen = set(pruned.extract(**options).heads)
    assert not chosen & {(0, 0, "main"), (0, 1, "main"), (2, 3, "main")}
    assert {head.layer for head in chosen} <= {0, 2}


def test_removed_heads_count_as_off() -> None:
    problem = random_problem(seed=6)
    gone = [(0, 0), (1, 3), (2, 2)]
    cut = Problem(prune(problem.model, gone), problem.id_batches, problem.ood_batches)
    assert evidence(problem.extract(budget=4, removed=gone)) == evidence(cut.extract(budget=4))


def test_a_larger_budget_continues_a_smaller_one() -> None:
    problem = random_problem(seed=7)
    short, long = problem.extract(budget=3), problem.extract(budget=6)
    assert long.heads[:3] == short.heads
    assert long.scores[:3] == short.scores


@st.composite
def tiny_problems(draw: st.DrawFn) -> Problem:
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    settings = encoder(
        layers=layers,
        heads=heads,
        norm_first=draw(st.booleans()),
        layer_scale=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    pool = draw(st.sampled_from(["cls", "mean", "cls_mean"]))
    readout = ReadoutConfig(pool=pool, num_classes=draw(st.integers(2, CLASSES)))
    stem = PatchStemConfig(patch_size=(2, 2), grid=(1, 2))
    model = Ensemble(EnsembleConfig(stem, settings, readout, all_heads(settings))).double()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)

    def some(minimum: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
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
    assert_same_choices(problem, score=score, budget=data.draw(st.integers(1, total)))


def test_the_ensemble_is_left_alone() -> None:
    problem = random_problem()
    model = problem.model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = [parameter.requires_grad for parameter in model.parameters()]
    for method in ("naive", "exact", "screened"):
        problem.extract(method=method, budget=2, screen_size=2)
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert flags == [parameter.requires_grad for parameter in model.parameters()]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_random_ensemble_has_heads_to_choose_from() -> None:
    """The comparisons above would be empty if removing heads changed nothing."""
    problem = random_problem(id_sizes=(20,), ood_sizes=(20,))
    ranking = problem.extract(score="ood", budget=6)
    assert len(set(ranking.scores)) > 3
