"""Rankings: what they accept, how they compare, saving and loading; and fingerprints."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from hydra_ensembles.errors import ConfigError, DataError, HeadError
from hydra_ensembles.fingerprints import data_fingerprint, model_fingerprint
from hydra_ensembles.heads.ranking import Head, HeadRanking, as_heads, jensen_shannon, overlap, stability
from hydra_ensembles.model.config import Sharing
from random_ensembles import random_batches, random_ensemble, without_heads


def ranking(*heads: tuple[int, int] | tuple[int, int, str], **changes: Any) -> HeadRanking:
    fields: dict[str, Any] = {"scores": [0.5] * len(heads), "method": "circuit/exact", "score": "avg"}
    return HeadRanking(heads=heads, **(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [Head(2, 3), [2, 3], (2, 3, "main"), (np.int64(2), np.int32(3))])
def test_what_is_a_head(value: Any) -> None:
    (head,) = as_heads([value])
    assert head == Head(2, 3, "main")
    assert [type(part) for part in head] == [int, int, str]
    assert [str(one) for one in as_heads([(1, 0), (1, 0, "text"), value])] == ["1.0", "text:1.0", "2.3"]


@pytest.mark.parametrize("value", [(1,), (1, 2, 3), (1, 2, "a", 4), (1.0, 2), (True, 0), "12", None, ("1", 2)])
def test_what_is_no_head(value: Any) -> None:
    with pytest.raises(HeadError, match="a head is"):
        as_heads([value])


def test_first() -> None:
    made = ranking((2, 1), (0, 0), (1, 3))
    assert made.first(2) == (Head(2, 1), Head(0, 0))
    assert (made.first(0), len(made)) == ((), 3)
    with pytest.raises(ConfigError, match="count"):
        made.first(-1)
    for asked, count, token in (
        (made, 4, "has 3"),
        (ranking((0, 1), (1, 0), only=2), 1, "exactly 2"),
        (ranking((0, 1), provenance={"complete": False}), 2, "max_accuracy_loss"),  # it ended early
    ):
        with pytest.raises(HeadError, match=token):
            asked.first(count)


@pytest.mark.parametrize(
    ("heads", "changes", "token"),
    [
        ([(0, 0), (0, 0)], {}, "twice"),
        ([(0, 0)], {"scores": [1.0, 2.0]}, "got 2 for 1"),
        ([(0, 0)], {"scores": [math.inf]}, "finite"),
        ([(-1, 0)], {}, "from 0"),
        ([(0, 0)], {"only": 2}, "`only`"),
    ],
)
def test_impossible_rankings(heads: list[tuple[int, int]], changes: dict[str, Any], token: str) -> None:
    with pytest.raises(HeadError, match=token):
        ranking(*heads, **changes)


def test_overlap() -> None:
    first, second = ranking((0, 0), (1, 1), (2, 2), (0, 3)), ranking((1, 1), (2, 0), (0, 0), (0, 3, "text"))
    found = [overlap(first, second, count) for count in (1, 2, 3, 4)]
    assert found == pytest.approx([0.0, 0.5, 2 / 3, 0.5])  # the tower is part of a head


def test_stability_is_the_mean_overlap_of_all_pairs() -> None:
    rankings = [ranking((0, 0), (1, 1)), ranking((1, 1), (0, 0)), ranking((0, 0), (2, 2))]
    assert stability(rankings, 2) == pytest.approx((1.0 + 0.5 + 0.5) / 3)
    with pytest.raises(HeadError, match="at least two"):
        stability(rankings[:1], 2)


def test_divergence() -> None:
    # Shares per layer (3/4, 1/4, 0) and (1/4, 1/4, 1/2); their mean is (1/2, 1/4, 1/4).
    first, second = ranking((0, 0), (0, 1), (0, 2), (1, 0)), ranking((2, 0), (1, 3), (2, 1), (0, 0))
    expected = (3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2) + 1 / 2 * math.log(2)) / 2
    assert jensen_shannon(first, second, 4) == pytest.approx(expected, rel=1e-12)
    assert jensen_shannon(second, first, 4) == jensen_shannon(first, second, 4)
    low, high = ranking((0, 0), (0, 1), (0, 2)), ranking((1, 0), (1, 1), (0, 3))
    assert jensen_shannon(low, high, 2) == math.log(2)
    assert jensen_shannon(low, ranking((0, 3), (0, 4), (0, 5)), 3) == 0.0  # same layers, different heads
    assert jensen_shannon(low, ranking((0, 0, "text")), 1) == math.log(2)


def test_every_weight_the_dtype_and_the_configuration_count() -> None:
    ensemble = random_ensemble("text-post-norm")
    first = model_fingerprint(ensemble)
    assert len(first) == 64
    copy = ensemble.member(0).with_metadata(source="elsewhere").train().requires_grad_(False)
    assert model_fingerprint(copy) == first
    others = [ensemble.member(0).float(), ensemble.member(0).bfloat16(), without_heads(ensemble, {(0, 0)})]
    others.append(random_ensemble("text-post-norm", sharing=Sharing(mlp=True)))
    seen = {first, *(model_fingerprint(other) for other in others)}
    assert len(seen) == 5
    for count, parameter in enumerate(ensemble.parameters(), start=6):
        with torch.no_grad():
            parameter.view(-1)[-1] += 1e-12
        seen.add(model_fingerprint(ensemble))
        assert len(seen) == count


def test_what_counts_about_data_and_that_the_cut_into_batches_does_not() -> None:
    ((images, labels),) = random_batches(random_ensemble(), (6,))
    changed = images.clone()
    changed[3, 0, 0, 0] += 1e-9
    batches: list[Any] = [
        (images, labels),
        (changed, labels),
        (images, (labels + 1) % 4),
        (images.flip(0), labels.flip(0)),
        (images[:5], labels[:5]),
        *((other, labels) for other in (images.float(), images.transpose(2, 3), images.reshape(6, 3, 6, 4))),
        images,
        {"pixel_values": images, "labels": labels},
    ]
    names = [data_fingerprint([batch]) for batch in batches]
    assert len(set(names)) == len(names)
    last = images.to(memory_format=torch.channels_last)  # strides do not matter
    assert data_fingerprint([(last[:4], labels[:4]), (last[4:], labels[4:])]) == names[0]
    ((texts, labels),) = random_batches(random_ensemble("text-post-norm"), (6,))
    cut = [{"labels": labels[i : i + 1], **{name: one[i : i + 1] for name, one in texts.items()}} for i in range(6)]
    assert data_fingerprint(cut) == data_fingerprint([{"labels": labels, **texts}])
    with pytest.raises(DataError, match="validation data"):
        data_fingerprint([], "validation data")


def test_a_circuit_of_before_decided_ties_by_order() -> None:
    assert ranking((0, 1)).ties == "order"
    assert ranking((0, 1), provenance={"ties": "likelihood"}).ties == "likelihood"
    assert ranking((0, 1), method="taylor/layer").ties is None
