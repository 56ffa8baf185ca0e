"""How memory for activations is used; exact == naive proves that what is computed from them is right."""

import numpy as np
import pytest
import torch

from hydra_ensembles.circuit import cache
from hydra_ensembles.circuit.cache import CandidateActivations, plan_memory, worthwhile_levels


def activations(capacity: int = 1000) -> CandidateActivations:
    """A store for four candidates in a model of four blocks, and three samples."""
    return CandidateActivations(np.array([0, 0, 1, 2]), 4, torch.empty(3, 2, 5, dtype=torch.float64), capacity)


def pairs(candidates: list[int], rows: list[int]) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    values = torch.tensor([[10.0 * c + r] for c, r in zip(candidates, rows, strict=True)], dtype=torch.float64)
    return np.array(candidates), np.array(rows), values[:, :, None].expand(-1, 2, 5)[None]


def test_room_that_is_given_back_is_used_again() -> None:
    store = activations(capacity=9)  # three candidates at level 2, for three samples
    assert store.levels == {2}
    for _ in range(5):
        store.save(2, *pairs([0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2] * 3))
        store.save(2, *pairs([3], [0]))  # what does not fit is dropped
        assert [store.holds_all(candidate, 2) for candidate in range(4)] == [True, True, True, False]
        for candidate in range(3):
            store.forget(candidate, above=3)


def test_memory_is_divided() -> None:
    below = [0, 4, 8, 12, 16]  # four candidates in each of the layers 0 to 3
    found = {capacity: worthwhile_levels(below, capacity) for capacity in (1000, 20, 8, 3)}
    assert found == {1000: [1, 2, 3, 4], 20: [1, 3], 8: [2], 3: []}
    assert worthwhile_levels([0, 0, 4, 4], 100) == [2, 3]  # no candidates below level 2
    groups = [torch.empty(3, 2, 5), torch.empty(1, 2, 5)]  # a level takes 160 bytes, a sample 40
    assert plan_memory(10**6, groups, 4)[0] == [0, 1, 2, 3]
    assert plan_memory(640, groups, 4) == ([0, 2], [6, 2])
    assert plan_memory(1, groups, 4) == ([0], [0, 0])


@pytest.mark.parametrize(
    ("free", "ranks", "room"), [(8 << 30, "1", 2 << 30), (8 << 30, "4", 1 << 29), (None, "1", 1 << 30)]
)
def test_the_usual_memory_is_a_quarter_of_what_limits_leave(
    monkeypatch: pytest.MonkeyPatch, free: int | None, ranks: str, room: int
) -> None:
    monkeypatch.setattr(cache, "free_memory", lambda: free)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cache.default_max_memory(torch.device("cpu")) == room
