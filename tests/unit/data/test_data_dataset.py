import pickle

import numpy as np
import pytest

from hydra_ensembles.data.dataset import TextDataset
from hydra_ensembles.errors import DataError


@pytest.fixture
def letters() -> TextDataset:
    return TextDataset(list("abcdef"), [0, 1, 2, 0, 1, 2], ["x", "y", "z"], "letters")


def test_knows_items_labels_and_names(letters: TextDataset) -> None:
    assert len(letters) == 6
    assert letters[4] == ("e", 1)
    assert letters[-1] == ("f", 2)
    assert list(letters)[:2] == [("a", 0), ("b", 1)]
    assert letters.class_names == ("x", "y", "z")
    assert letters.labelled
    assert letters.kind == "text"
    assert repr(letters) == "TextDataset('letters', 6 items, 3 classes)"


@pytest.mark.parametrize("index", [6, -7])
def test_a_position_outside_is_an_index_error(letters: TextDataset, index: int) -> None:
    with pytest.raises(IndexError, match="letters has 6 items"):
        letters[index]


def test_select_keeps_the_order_given_and_remembers_source_rows(letters: TextDataset) -> None:
    twice = letters.select([5, 3, 1]).select([2, 0])
    assert [item for item, _ in twice] == ["b", "f"]
    assert twice.rows.tolist() == [1, 5]
    assert twice.labels.tolist() == [1, 2]
    assert len(letters) == 6
    with pytest.raises(DataError, match=r"positions must lie in 0\.\.1, got 0\.\.2"):
        twice.select([0, 2])


def test_relabel_needs_every_label_that_occurs(letters: TextDataset) -> None:
    chosen = letters.select([2, 0, 5]).relabel({2: 0, 0: 1}, ["z", "x"])
    assert chosen.labels.tolist() == [0, 1, 0]
    assert chosen.class_names == ("z", "x")
    with pytest.raises(DataError, match=r"no new label given for labels \[1\]"):
        letters.relabel({2: 0, 0: 1}, ["z", "x"])


def test_labels_must_fit() -> None:
    with pytest.raises(DataError, match="3 items but 2 labels"):
        TextDataset(list("abc"), [0, 1])
    with pytest.raises(DataError, match="label 2 in row 1, but there are only 2 class names"):
        TextDataset(list("ab"), [0, 2], ["x", "y"])
    with pytest.raises(DataError, match="label -2 in row 0"):
        TextDataset(list("ab"), [-2, 0])
    assert not TextDataset(list("ab"), [-1, 0]).labelled


def test_labels_cannot_be_written(letters: TextDataset) -> None:
    with pytest.raises(ValueError, match="read-only"):
        letters.labels[0] = 5


def test_the_given_labels_are_copied() -> None:
    given = np.array([0, 1])
    dataset = TextDataset(list("ab"), given)
    given[0] = 9
    assert dataset.labels.tolist() == [0, 1]


def test_survives_pickling(letters: TextDataset) -> None:
    again = pickle.loads(pickle.dumps(letters.select([3, 1])))
    assert list(again) == [("d", 0), ("b", 1)]
