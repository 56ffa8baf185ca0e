import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hydra_ensembles as he
from hydra_ensembles.data import TextDataset, only_classes, split, subset, without_classes
from hydra_ensembles.data.dataset import cut_position, hash_key, keyed_order
from hydra_ensembles.errors import DataError, HydraError

seeds = st.integers(min_value=-(2**70), max_value=2**70)


@pytest.fixture
def letters() -> TextDataset:
    return TextDataset(list("abcdef"), [0, 1, 2, 0, 1, 2], ["x", "y", "z"], "letters")


def numbered(labels: list[int], names: tuple[str, ...] = ("a", "b", "c", "d")) -> TextDataset:
    return TextDataset([str(row) for row in range(len(labels))], labels, names, "numbers")


def test_select_keeps_the_order_given_and_remembers_source_rows(letters: TextDataset) -> None:
    twice = letters.select([5, 3, 1]).select([2, 0])
    assert [item for item, _ in twice] == ["b", "f"]
    assert (twice.rows.tolist(), twice.labels.tolist()) == ([1, 5], [1, 2])
    assert list(pickle.loads(pickle.dumps(twice))) == [("b", 1), ("f", 2)]
    with pytest.raises(IndexError, match="letters"):  # as Python's loops need
        letters[6]
    masked = letters.select(letters.labels == 1)  # a mask, not positions
    assert (set(masked.labels.tolist()), len(masked)) == ({1}, int((letters.labels == 1).sum()))


def test_rows_of_pandas_are_taken_by_their_place() -> None:
    frame = pytest.importorskip("pandas").DataFrame({"text": list("abcd"), "label": [0, 1, 2, 3]}).iloc[[3, 1, 2]]
    assert list(TextDataset(frame["text"], frame["label"])) == [("d", 3), ("b", 1), ("c", 2)]
    assert he.metrics.accuracy(torch.eye(4)[[3, 1, 0]], frame["label"]) == 2 / 3


def test_labels_must_fit_are_copied_and_cannot_be_written() -> None:
    for labels, names, token in (([0], (), "2 items"), ([0, 2], ("x", "y"), "2 class names")):
        with pytest.raises(DataError, match=token):
            TextDataset(list("ab"), labels, names)
    given = np.array([-1, 1])
    dataset = TextDataset(list("ab"), given)
    given[0] = 9
    assert dataset.labels.tolist() == [-1, 1]
    assert not dataset.labelled
    with pytest.raises(ValueError, match="read-only"):
        dataset.labels[0] = 5


def test_the_order_is_pinned() -> None:
    """These numbers must never change: published results depend on them."""
    assert hash_key(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 seeded with 0
    assert keyed_order(10, 0).tolist() == [5, 7, 8, 2, 9, 0, 3, 1, 6, 4]
    assert keyed_order(10, 1).tolist() == [2, 8, 4, 9, 7, 0, 6, 5, 3, 1]
    assert keyed_order(5, 3, 1).tolist() == [2, 0, 3, 1, 4]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.data(), seeds, st.booleans())
def test_subsets(labels: list[int], data: st.DataObject, seed: int, stratified: bool) -> None:
    dataset = numbered(labels)
    count = data.draw(st.integers(0, len(labels)))
    chosen = subset(dataset, count, seed, stratified=stratified)
    assert (len(chosen), chosen.rows.tolist()) == (count, sorted(set(chosen.rows.tolist())))
    assert chosen.rows.tolist() == subset(dataset, count, seed, stratified=stratified).rows.tolist()
    if stratified:
        for label in range(4):
            exact = count * labels.count(label) / len(labels)
            assert abs((chosen.labels == label).sum() - exact) < 1


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 3), max_size=80), st.lists(st.floats(0, 0.25), min_size=1, max_size=4), seeds, st.booleans()
)
def test_parts_are_disjoint(labels: list[int], fractions: list[float], seed: int, stratified: bool) -> None:
    parts = split(numbered(labels), fractions, seed, stratified=stratified)
    rows = [row for part in parts for row in part.rows.tolist()]
    assert (len(parts), len(rows)) == (len(fractions), len(set(rows)))
    if not stratified:
        sizes = zip(parts, fractions, strict=True)
        assert all(abs(len(part) - fraction * len(labels)) <= 1 for part, fraction in sizes)
    one, rest = split(numbered(labels), fractions[0], seed, stratified=stratified)  # a fraction, and the rest
    assert sorted([*one.rows.tolist(), *rest.rows.tolist()]) == list(range(len(labels)))


def test_halves() -> None:
    dataset = numbered([0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    first, second = split(dataset, 0.5, 3, stratified=True)
    assert np.bincount(first.labels).tolist() == np.bincount(second.labels).tolist() == [2, 3]
    assert cut_position(0.5, 5) == 3
    assert cut_position(0.29, 100) == 29  # 0.29 * 100 is 28.999999999999996
    with pytest.raises(DataError, match="fractions"):
        split(dataset, [0.7, 0.7], 0)


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
    assert without_classes(numbered([0, 5], ()), [5]).labels.tolist() == [0]
    with pytest.raises(DataError, match=r"labels \[1, 2\]"):
        dataset.relabel({3: 0, 0: 1}, ["d", "a"])
    with pytest.raises(HydraError, match=r"\['x', 9\]; it has \['a', 'b'"):
        without_classes(dataset, ["a", "x", 9])
