"""Held-out data: read once, in one order, split into disjoint halves."""

from typing import Any

import pytest
import torch
from build_cases import batches, image_model
from hypothesis import given
from hypothesis import strategies as st

from hydra_ensembles.errors import DataError
from hydra_ensembles.pipeline.build_data import BuildData, ReadBatch, halves, read_data


def numbered(sizes: list[int]) -> list[ReadBatch]:
    """Batches of one-pixel images; each pixel and label is the sample's index."""
    numbers = torch.arange(sum(sizes))
    return [(part.float().view(-1, 1, 1, 1), part) for part in numbers.split(sizes)]


def labels_of(batches: list[ReadBatch]) -> list[int]:
    return torch.cat([labels for _, labels in batches]).tolist()


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 1),
    seed=st.integers(0, 99),
)
def test_halves_share_nothing_and_leave_nothing_out(sizes: list[int], seed: int) -> None:
    first, second = halves(numbered(sizes), seed)
    one, two = labels_of(first), labels_of(second)
    assert sorted(one + two) == list(range(sum(sizes)))
    assert len(one) - len(two) in (0, 1)
    assert (one, two) == (sorted(one), sorted(two))  # samples keep their order
    for inputs, labels in first + second:
        assert torch.equal(inputs.flatten(), labels.float())  # each with its own label
    cut_otherwise = numbered([sum(sizes)])
    assert labels_of(halves(cut_otherwise, seed)[0]) == one  # only the seed matters, not the batches
    assert not cut_otherwise  # samples are not in memory twice


def test_ood_data_comes_from_one_source_from_several_or_from_the_id_data() -> None:
    known, few, many = (batches(count, seed=seed) for count, seed in ((20, 1), (5, 2), (8, 3)))

    def read(ood: Any, seed: int = 0, id: Any = known) -> BuildData:
        return read_data(seed, image_model(), train=None, id=id, ood=ood, validation=None)

    several, one = read({"few": few, "many": many}), read(few)
    assert several.samples() == {"ranking": 10, "validation": 10, "ood['few']": 5, "ood['many']": 8}
    assert set(one.fingerprints()) == {"train", "ranking", "validation", "ood"}
    assert several.fingerprints()["ood['few']"] == one.fingerprints()["ood"]
    made, again, other = (read("synthetic", seed) for seed in (0, 0, 1))
    assert made.samples()["ood"] == 10
    assert made.fingerprints() == again.fingerprints() != other.fingerprints()
    with pytest.raises(DataError, match="give id"):
        read("synthetic", id=None)
    with pytest.raises(DataError, match=r"ood\['few'\]"):
        read({"few": [], "many": many})


def test_validation_replaces_the_second_half() -> None:
    with pytest.raises(DataError, match="at least 2"):
        read_data(0, image_model(), train=None, id=numbered([1]), ood=None, validation=None)
    one = [(torch.zeros(6, 3, 8, 8), torch.arange(6) % 3)]
    other, held = ([(one[0][0] + shift, one[0][1])] for shift in (1, 2))
    both = read_data(0, image_model(), train=None, id=iter(one), ood=iter(other), validation=None)
    assert both.samples() == {"ranking": 3, "validation": 3, "ood": 6}
    given_ = read_data(0, image_model(), train=None, id=one, ood=list(other), validation=held)
    assert given_.samples() == {"ranking": 6, "validation": 6, "ood": 6}
