"""Choosing members: the right heads, reproducibly, and never the same member twice."""

from typing import Any
from unittest.mock import Mock

import pytest

from hydra_ensembles.errors import HeadError, SameMembersError
from hydra_ensembles.heads.masking import Head
from hydra_ensembles.heads.ranking import (
    CIRCUIT_ORDER,
    TAYLOR_DRAWS,
    HeadRanking,
    circuit_members,
    distinct_taylor,
    random_members,
    sampled_members,
)
from random_ensembles import random_ensemble, without_heads

EVERY = [Head(layer, head) for layer in range(12) for head in range(12)]


def ranking(heads: list[Head], score: str = "avg", **provenance: Any) -> HeadRanking:
    return HeadRanking(tuple(heads), (0.0,) * len(heads), f"test/{score}", score, provenance)


def circuits() -> dict[str, HeadRanking]:
    orders = {"ood": EVERY[::-1], "acc": EVERY[50:] + EVERY[:50], "avg": EVERY}
    return {score: ranking(order, score) for score, order in orders.items()}


def test_circuits_come_in_the_order_avg_acc_ood_and_further_members_from_the_pool_of_avg() -> None:
    rankings = circuits()
    expected = tuple(rankings[score].first(48) for score in CIRCUIT_ORDER)
    for members in (1, 2, 3):
        assert circuit_members(rankings, 48, members) == expected[:members]
    chosen, other = (circuit_members(rankings, 48, 6, pool=100, seed=seed) for seed in (5, 6))
    assert (chosen[:3], len({frozenset(member) for member in chosen})) == (expected, 6)
    assert all(set(member) <= set(EVERY[:100]) and len(member) == 48 for member in chosen[3:])
    assert chosen[3:] != other[3:]
    assert chosen[:5] == circuit_members(rankings, 48, 5, pool=100, seed=5)  # adding a member keeps the others


def test_no_circuit_and_no_draw_repeats_a_circuit() -> None:
    heads = EVERY[:3]
    orders = {"avg": heads, "acc": heads[1:], "ood": EVERY[7:9]}
    rankings = {score: ranking(order, score) for score, order in orders.items()}
    for seed in range(20):  # of the pool's three pairs, one remains
        assert circuit_members(rankings, 2, 4, seed=seed)[3] == (heads[0], heads[2])
    rankings = circuits() | {"ood": ranking(EVERY[1::-1] + EVERY[2:], "ood")}  # the first two swapped
    assert circuit_members(rankings, 2, 3)[2] == (EVERY[1], EVERY[2])  # its last head is replaced by the next
    rankings["ood"] = ranking(EVERY[1::-1], "ood")
    with pytest.raises(HeadError, match=r"'avg' and 'ood' remove the same 2 heads"):
        circuit_members(rankings, 2, 3)


def test_members_are_sampled_from_a_pool_and_the_draw_of_a_seed_never_changes() -> None:
    """The keys of PCG64(42) are 0.77 0.44 0.86 0.70 0.09 0.98, then 0.76 0.79 0.13 0.45 0.37 0.93, and so on."""
    for member in sampled_members(ranking(EVERY), prune=48, pool=100, members=3):
        assert len(member) == 48
        assert set(member) <= set(EVERY[:100])
        assert list(member) == sorted(member, key=EVERY.index)  # removal order
    few = sampled_members(ranking(EVERY[:6]), prune=2, pool=6, members=3, seed=42)
    assert [[str(head) for head in member] for member in few] == [["0.1", "0.4"], ["0.2", "0.4"], ["0.3", "0.5"]]


def test_draws_that_repeat_a_member_are_passed_over_and_enough_of_them_end_it() -> None:
    orders = [EVERY[:3], EVERY[2::-1], EVERY[1:4], EVERY[:3], EVERY[2:5], EVERY[3:6]]
    rank = Mock(side_effect=[ranking(order, "taylor") for order in orders])
    kept = distinct_taylor(rank, 3, 3)
    assert [(draw, one.heads) for draw, one in kept] == [(draw, tuple(orders[draw])) for draw in (0, 2, 4)]
    assert [call.args for call in rank.call_args_list] == [(draw,) for draw in range(5)]
    rank = Mock(return_value=ranking(EVERY[:3], "taylor"))
    with pytest.raises(SameMembersError, match="smaller batches"):
        distinct_taylor(rank, 3, 2)
    assert rank.call_count == 2 * TAYLOR_DRAWS


def test_random_members_are_drawn_from_the_heads_that_are_left() -> None:
    chosen, again, other = (random_members(random_ensemble(), prune=5, members=4, seed=seed) for seed in (3, 3, 4))
    assert len(set(chosen)) == 4
    assert all(len(set(member)) == 5 and list(member) == sorted(member) for member in chosen)
    assert chosen == again != other
    pruned = without_heads(random_ensemble(), {(0, 0), (1, 1), (1, 2)})
    chosen = random_members(pruned, prune=2, members=10, layers=[1, 0])  # all pairs
    drawn = {head for member in chosen for head in member}
    assert drawn == {Head(0, 1), Head(0, 2), Head(0, 3), Head(1, 0), Head(1, 3)}
