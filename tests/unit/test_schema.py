"""Dataclasses to plain data and back: what is accepted, what is refused, and where the error is."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from hydra_ensembles.errors import ConfigError
from hydra_ensembles.schema import from_plain, to_plain


@dataclass(frozen=True)
class Circle:
    kind: ClassVar[str] = "circle"
    radius: float


@dataclass(frozen=True)
class Square:
    kind: ClassVar[str] = "square"
    side: int = 1


@dataclass(frozen=True)
class Drawing:
    shape: Circle | Square
    colour: Literal["red", "blue"] = "red"
    size: tuple[int, int] = (1, 2)
    points: tuple[tuple[int, ...], ...] = ()
    title: str | None = None
    filled: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)
    scale: int | float = 1
    extra: Any = None


FULL = Drawing(Square(3), "blue", (4, 5), ((1,), (), (2, 3)), "a", True, {"x": 0.5}, 2.5, [1])


def test_plain_data_is_json_and_comes_back() -> None:
    plain = to_plain(FULL)
    assert (plain["shape"], plain["points"]) == ({"kind": "square", "side": 3}, [[1], [], [2, 3]])
    assert from_plain(Drawing, json.loads(json.dumps(plain)), complete=True) == FULL


def test_numbers_of_numpy_become_plain_and_a_whole_number_is_a_float() -> None:
    plain = to_plain({"a": np.float32(0.5), "b": (np.int64(2), np.float64(0.1), True), "c": np.array([["x"]])})
    plain |= to_plain({"d": np.array([0.5], np.longdouble), "e": Fraction(1, 2)})
    assert json.dumps(plain) == '{"a": 0.5, "b": [2, 0.1, true], "c": [["x"]], "d": [0.5], "e": 0.5}'
    radius = from_plain(Circle, {"radius": 2}).radius
    assert [type(item) for item in (plain["a"], plain["b"][0], radius)] == [float, int, float]


def test_defaults_fill_gaps_unless_the_data_must_be_complete() -> None:
    plain = {"shape": {"kind": "square"}}
    assert from_plain(Drawing, plain) == Drawing(Square(1))
    with pytest.raises(ConfigError, match="'colour', 'size'"):
        from_plain(Drawing, plain, complete=True)
    with pytest.raises(ConfigError, match="side"):
        from_plain(Drawing, to_plain(FULL) | plain, complete=True)


@pytest.mark.parametrize(
    ("change", "token"),
    [
        ({"shape": {"kind": "star"}}, "'star'"),
        ({"shape": {"kind": "circle"}}, "['radius']"),
        ({"shape": {"kind": "circle", "radius": float("nan")}}, "got nan"),
        ({"colour": "green"}, "'green'"),
        ({"size": [1]}, "config.size"),
        ({"points": [[1], [2, None]]}, "config.points[1][1]"),
        ({"weights": {"a": "b"}}, "config.weights.a"),
        ({"texture": 1, "z": 2}, "['texture', 'z']"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(change: dict[str, Any], token: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(token)):
        from_plain(Drawing, to_plain(FULL) | change)
