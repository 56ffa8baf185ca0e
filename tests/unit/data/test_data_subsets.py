import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ensembles.data.dataset import (
    TextDataset,
    cut_position,
    hash_key,
    keyed_order,
    only_classes,
    split,
    subset,
    without_classes,
)
from hydra_ensembles.errors import DataError

seeds = st.integers(min_value=-(2**70), max_value=2**70)


def numbered(labels: list[int], names: tuple[str, ...] = ("a", "b", "c", "d")) -> TextDataset:
    return TextDataset([str(row) for row in range(len(labels))], labels, names, "numbers")


def test_the_order_is_pinned() -> None:
    """These numbers must never change: results that were published depend on them."""
    assert hash_key(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 seeded with 0
    assert keyed_order(10, 0).tolist() == [5, 7, 8, 2, 9, 0, 3, 1, 6, 4]
    assert keyed_order(10, 1).tolist() == [2, 8, 4, 9, 7, 0, 6, 5, 3, 1]
    assert keyed_order(5, 3, 1).tolist() == [2, 0, 3, 1, 4]


@settings(deadline=None)
@given(st.integers(0, 200), st.lists(seeds, min_size=1, max_size=3))
def test_an_order_is_a_permutation(count: int, key: list[int]) -> None:
    assert sorted(keyed_order(count, *key).tolist()) == list(range(count))


def test_orders_look_random() -> None:
    """Every position is equally likely to come first, within five standard deviations."""
    first = [int(keyed_order(4, seed)[0]) for seed in range(4000)]
    counts = np.bincount(first, minlength=4)
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(4000 * 0.25 * 0.75)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.data(), seeds, st.booleans())
def test_subsets(labels: list[int], data: st.DataObject, seed: int, stratified: bool) -> None:
    dataset = numbered(labels)
    count = data.draw(st.integers(0, len(labels)))
    chosen = subset(dataset, count, seed, stratified=stratified)
    assert len(chosen) == count
    assert chosen.rows.tolist() == sorted(set(chosen.rows.tolist()))
    assert chosen.rows.tolist() == subset(dataset, count, seed, stratified=stratified).rows.tolist()
    if stratified:
        for label in range(4):
            exact = count * labels.count(label) / len(labels)
            assert abs((chosen.labels == label).sum() - exact) < 1


def test_a_smaller_subset_lies_in_a_larger_one() -> None:
    dataset = numbered([0] * 50)
    small, large = subset(dataset, 10, 7), subset(dataset, 30, 7)
    assert set(small.rows) < set(large.rows)
    assert set(small.rows) != set(subset(dataset, 10, 8).rows)


def test_a_subset_cannot_be_larger() -> None:
    with pytest.raises(DataError, match="cannot draw 4 items from numbers, which has 3"):
        subset(numbered([0, 1, 2]), 4, 0)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=80),
    st.lists(st.floats(0, 0.25), min_size=1, max_size=4),
    seeds,
    st.booleans(),
)
def test_parts_are_disjoint(labels: list[int], fractions: list[float], seed: int, stratified: bool) -> None:
    parts = split(numbered(labels), fractions, seed, stratified=stratified)
    rows = [row for part in parts for row in part.rows.tolist()]
    assert len(parts) == len(fractions)
    assert len(rows) == len(set(rows))
    if not stratified:
        assert all(
            abs(len(part) - fraction * len(labels)) <= 1 for part, fraction in zip(parts, fractions, strict=True)
        )


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=80), st.floats(0, 1), seeds, st.booleans())
def test_one_fraction_gives_it_and_the_rest(labels: list[int], fraction: float, seed: int, stratified: bool) -> None:
    one, rest = split(numbered(labels), fraction, seed, stratified=stratified)
    assert sorted([*one.rows.tolist(), *rest.rows.tolist()]) == list(range(len(labels)))


def test_halves() -> None:
    dataset = numbered([0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    first, second = split(dataset, 0.5, 3, stratified=True)
    assert np.bincount(first.labels).tolist() == np.bincount(second.labels).tolist() == [2, 3]
    assert cut_position(0.5, 5) == 3
    assert cut_position(0.29, 100) == 29  # 0.29 * 100 is 28.999999999999996
    with pytest.raises(DataError, match="must not be negative nor add up to more than 1"):
        split(dataset, [0.7, 0.7], 0)
    with pytest.raises(DataError, match="must not be negative"):
        split(dataset, -0.1, 0)


def test_classes_can_be_left_out_or_kept() -> None:
    dataset = numbered([0, 1, 2, 3, 0, 1])
    assert without_classes(dataset, ["b", 3]).rows.tolist() == [0, 2, 4]
    assert without_classes(dataset, ["b", 3]).class_names == ("a", "b", "c", "d")
    assert only_classes(dataset, ["b", 3]).rows.tolist() == [1, 3, 5]
    renamed = only_classes(dataset, ["d", "a"], relabel=True)
    assert renamed.rows.tolist() == [0, 3, 4]
    assert (renamed.labels.tolist(), renamed.class_names) == ([1, 0, 1], ("d", "a"))
    fewer = without_classes(dataset, ["a"], relabel=True)
    assert (fewer.labels.tolist(), fewer.class_names) == ([0, 1, 2, 0], ("b", "c", "d"))


def test_unknown_classes_are_named() -> None:
    dataset = numbered([0, 1])
    with pytest.raises(DataError, match=r"numbers has no classes \['x', 9\]; it has \['a', 'b', 'c', 'd'\]"):
        without_classes(dataset, ["a", "x", 9])
    with pytest.raises(DataError, match="got the string 'ab'"):
        without_classes(dataset, "ab")
    nameless = numbered([0, 5], ())
    assert without_classes(nameless, [5]).labels.tolist() == [0]
    with pytest.raises(DataError, match=r"it has \[0, 5\]"):
        without_classes(nameless, [3])
