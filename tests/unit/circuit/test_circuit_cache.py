"""The working model and the activations that are kept, one by one."""

import numpy as np
import pytest
import torch

from circuit_models import random_problem
from hydra_ensembles.circuit.cache import CandidateActivations, plan_memory, worthwhile_levels
from hydra_ensembles.circuit.working_model import Work, WorkingModel, few_queries
from hydra_ensembles.heads.masking import masked
from hydra_ensembles.heads.ranking import Head
from random_ensembles import ALL_SHAPES, random_ensemble


def working(shape: str) -> WorkingModel:
    return WorkingModel(random_ensemble(shape), [], Work())


@pytest.mark.parametrize("masked_keys", [False, True])
def test_few_queries_are_plain_attention(masked_keys: bool) -> None:
    attention = random_ensemble("image-cls").encoder.layers[0].attention
    x = torch.randn(5, 7, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(7)[None] < torch.tensor([7, 3, 1, 5, 2])[:, None] if masked_keys else None
    with torch.no_grad():
        expected = attention.mix(x[None], mask, slice(0, 2))
        assert torch.allclose(few_queries(attention, x, mask, x[:, 0:2]), expected, atol=1e-12)


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_blocks_give_the_logits_of_the_ensemble(shape: str) -> None:
    problem, model = random_problem(shape), working(shape)
    inputs, _ = problem.id_batches[0]
    ids, mask, segments = problem.model.unpack(inputs, None, None)
    with torch.no_grad():
        x, key_mask = model.ensemble.embed(ids, mask, segments)
        for layer in range(model.layers):
            x = model.block(layer, x, key_mask)
        assert torch.allclose(model.classify(model.pool(x, key_mask, ids)), problem.model(inputs)[0], atol=1e-12)


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_taking_a_head_off_is_masking_it(shape: str) -> None:
    problem, model = random_problem(shape), working(shape)
    ids, mask, segments = problem.model.unpack(problem.id_batches[0][0], None, None)
    rows = torch.tensor([2, 0, 1, 1])
    with torch.no_grad():
        x, key_mask = model.ensemble.embed(ids, mask, segments)
        for layer in range(model.layers):
            runs = [(1, slice(0, 1)), (3, slice(1, 4))]
            found = model.block_without(layer, x, key_mask, rows, runs)
            for head, run in runs:
                with masked(model.ensemble, [Head(layer, head)]):
                    expected = model.block(layer, x, key_mask)
                assert torch.allclose(found[:, run], expected[:, rows[run]], atol=1e-12)
            x = model.block(layer, x, key_mask)


def test_dropping_heads_is_masking_them() -> None:
    problem, model = random_problem(), working("image-cls")
    heads = [Head(0, 2), Head(2, 0), Head(0, 0), Head(0, 1), Head(0, 3)]
    for head in heads:
        model.drop(head)
    assert model.kept == [[], [0, 1, 2, 3], [1, 2, 3]]
    images = problem.id_batches[0][0]
    with torch.no_grad(), masked(problem.model, heads):
        x, _ = model.ensemble.embed(images)
        for layer in range(3):
            x = model.block(layer, x, None)
        assert torch.allclose(model.classify(model.pool(x, None, None)), problem.model(images)[0], atol=1e-12)


def activations(capacity: int = 1000) -> CandidateActivations:
    """Of four candidates in a model of four blocks, for three samples."""
    return CandidateActivations(np.array([0, 0, 1, 2]), 4, torch.empty(3, 2, 5, dtype=torch.float64), capacity)


def pairs(candidates: list[int], rows: list[int]) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    values = torch.tensor([[10.0 * c + r] for c, r in zip(candidates, rows, strict=True)], dtype=torch.float64)
    return np.array(candidates), np.array(rows), values[:, :, None].expand(-1, 2, 5)[None]


def test_what_is_saved_is_loaded() -> None:
    store = activations()
    for level in (1, 2, 3):
        store.save(level, *pairs([0, 1, 0], [2, 0, 1]))
    store.save(3, *pairs([2], [1]))
    assert store.deepest[[0, 1, 1, 2], [2, 0, 1, 1]].tolist() == [3, 3, 0, 3]
    assert store.load(2, np.array([1, 0]), np.array([0, 2]))[0, :, 0, 0].tolist() == [10.0, 2.0]


def test_what_lies_above_a_removed_head_is_forgotten() -> None:
    store = activations()
    for level in (1, 2, 3):
        store.save(level, *pairs([0, 1], [2, 0]))
    store.forget_above(2)
    assert store.deepest[np.array([0, 1, 1]), np.array([2, 0, 1])].tolist() == [2, 2, 0]
    store.forget_candidate(0)
    assert store.deepest[np.array([0, 1]), np.array([2, 0])].tolist() == [0, 2]
    store.forget_above(0)
    assert store.deepest[np.array([1]), np.array([0])].tolist() == [0]


def test_room_that_is_given_back_is_used_again() -> None:
    store = activations(capacity=6)  # two candidates at level 1, for three samples
    assert store.levels == {1}
    for _ in range(5):
        store.save(1, *pairs([0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]))
        store.save(1, *pairs([2], [0]))  # what does not fit is left out
        assert [store.holds_all(candidate, 1) for candidate in (0, 1, 2)] == [True, True, False]
        store.forget_candidate(0)
        store.forget_candidate(1)


def test_levels_to_hold() -> None:
    below = [0, 4, 8, 12, 16]  # four candidates in each of the layers 0 to 3
    assert worthwhile_levels(below, 1000) == [1, 2, 3, 4]
    assert worthwhile_levels(below, 3) == []
    for capacity in (5, 9, 13, 20, 30):
        levels = worthwhile_levels(below, capacity)
        assert levels
        assert sum(below[level] for level in levels) <= capacity
    assert worthwhile_levels([0, 0, 4, 4], 100) == [2, 3]  # no candidates below level 2


def test_memory_is_divided() -> None:
    groups = [torch.empty(3, 2, 5), torch.empty(1, 2, 5)]  # a level takes 160 bytes, a sample 40
    assert plan_memory(10**6, groups, 4)[0] == [0, 1, 2, 3]
    assert plan_memory(640, groups, 4) == ([0, 2], [6, 2])
    assert plan_memory(1, groups, 4) == ([0], [0, 0])
