"""Rankings: what they accept, and how they compare."""

import math
from typing import Any

import numpy as np
import pytest

from hydra_ensembles.errors import HeadError
from hydra_ensembles.heads.masking import Head, as_heads
from hydra_ensembles.heads.ranking import HeadRanking, jensen_shannon, overlap


def ranking(*heads: tuple[int, int] | tuple[int, int, str], **changes: Any) -> HeadRanking:
    fields: dict[str, Any] = {"scores": [0.5] * len(heads), "method": "circuit/exact", "score": "avg"}
    return HeadRanking(heads=heads, **(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [Head(2, 3), [2, 3], (2, 3, "main"), (np.int64(2), np.int32(3))])
def test_what_is_a_head(value: Any) -> None:
    (head,) = as_heads([value])
    assert head == Head(2, 3, "main")
    assert [type(part) for part in head] == [int, int, str]
    assert [str(one) for one in as_heads([(1, 0), (1, 0, "text"), value])] == ["1.0", "text:1.0", "2.3"]


def test_first() -> None:
    made = ranking((2, 1), (0, 0), (1, 3))
    assert made.first(2) == (Head(2, 1), Head(0, 0))
    for asked, count, token in (
        (made, 4, "has 3"),
        (ranking((0, 1), (1, 0), only=2), 1, "exactly 2"),
    ):
        with pytest.raises(HeadError, match=token):
            asked.first(count)


def test_overlap() -> None:
    first, second = ranking((0, 0), (1, 1), (2, 2), (0, 3)), ranking((1, 1), (2, 0), (0, 0), (0, 3, "text"))
    found = [overlap(first, second, count) for count in (1, 2, 3, 4)]
    assert found == pytest.approx([0.0, 0.5, 2 / 3, 0.5])  # the tower is part of a head


def test_divergence() -> None:
    # Shares per layer (3/4, 1/4, 0) and (1/4, 1/4, 1/2); their mean is (1/2, 1/4, 1/4).
    first, second = ranking((0, 0), (0, 1), (0, 2), (1, 0)), ranking((2, 0), (1, 3), (2, 1), (0, 0))
    expected = (3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2) + 1 / 2 * math.log(2)) / 2
    assert jensen_shannon(first, second, 4) == pytest.approx(expected, rel=1e-12)
    low, high = ranking((0, 0), (0, 1), (0, 2)), ranking((1, 0), (1, 1), (0, 3))
    assert jensen_shannon(low, high, 2) == math.log(2)
    assert jensen_shannon(low, ranking((0, 3), (0, 4), (0, 5)), 3) == 0.0  # same layers, different heads
    assert jensen_shannon(low, ranking((0, 0, "text")), 1) == math.log(2)
