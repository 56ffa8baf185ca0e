"""Dataclasses to plain data and back: what is accepted, what is refused, and how the error names the place."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_models import CONFIGS, metadata_for
from hydra_ensembles.errors import ConfigError, HydraError
from hydra_ensembles.model.config import EnsembleConfig
from hydra_ensembles.model.metadata import Metadata
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
    assert plain == {
        "shape": {"kind": "square", "side": 3},
        "colour": "blue",
        "size": [4, 5],
        "points": [[1], [], [2, 3]],
        "title": "a",
        "filled": True,
        "weights": {"x": 0.5},
        "scale": 2.5,
        "extra": [1],
    }
    assert from_plain(Drawing, json.loads(json.dumps(plain)), complete=True) == FULL


def test_numbers_of_numpy_become_plain() -> None:
    plain = to_plain({"a": np.float32(0.5), "b": (np.int64(2), np.float64(0.1), True)})
    assert json.dumps(plain) == '{"a": 0.5, "b": [2, 0.1, true]}'
    assert [type(item) for item in (plain["a"], plain["b"][0], plain["b"][2])] == [float, int, bool]


def test_defaults_fill_gaps_unless_the_data_must_be_complete() -> None:
    plain = {"shape": {"kind": "square"}}
    assert from_plain(Drawing, plain) == Drawing(Square(1))
    with pytest.raises(ConfigError, match=r"config lacks the fields \['colour', 'size'"):
        from_plain(Drawing, plain, complete=True)
    with pytest.raises(ConfigError, match=r"config\.shape lacks the fields \['side'\]"):
        from_plain(Drawing, to_plain(FULL) | plain, complete=True)


def test_a_whole_number_is_a_float() -> None:
    radius = from_plain(Circle, {"radius": 2}).radius
    assert radius == 2.0
    assert isinstance(radius, float)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": None}, r"config\.shape must not be null"),
        ({"shape": {"side": 1}}, r"config\.shape\.kind must be one of \['circle', 'square'\], got None"),
        ({"shape": {"kind": "star"}}, r"got 'star'"),
        ({"shape": {"kind": ["square"]}}, r"got \['square'\]"),
        ({"shape": [1]}, r"config\.shape\.kind must be one of"),
        ({"shape": {"kind": "circle"}}, r"config\.shape lacks the fields \['radius'\]"),
        ({"shape": {"kind": "circle", "radius": 10**400}}, r"config\.shape\.radius must be a finite number"),
        ({"shape": {"kind": "circle", "radius": float("nan")}}, r"must be a finite number, got nan"),
        ({"shape": {"kind": "circle", "radius": True}}, r"must be of type float, got True"),
        ({"shape": {"kind": "square", "side": 1.0}}, r"config\.shape\.side must be of type int, got 1\.0"),
        ({"shape": {"kind": "square", "side": True}}, r"must be of type int, got True"),
        ({"colour": "green"}, r"config\.colour must be one of \['red', 'blue'\], got 'green'"),
        ({"colour": ["red"]}, r"config\.colour must be one of"),
        ({"size": [1]}, r"config\.size must have 2 entries, got 1"),
        ({"size": "12"}, r"config\.size must be a list, got '12'"),
        ({"size": [1, "2"]}, r"config\.size\[1\] must be of type int, got '2'"),
        ({"points": [[1], [2, None]]}, r"config\.points\[1\]\[1\] must be of type int, got None"),
        ({"title": 3}, r"config\.title must be of type str, got 3"),
        ({"filled": 1}, r"config\.filled must be of type bool, got 1"),
        ({"filled": "x" * 200}, r"got 'x+\.\.\.$"),
        ({"weights": [1]}, r"config\.weights must be an object, got \[1\]"),
        ({"weights": {"a": "b"}}, r"config\.weights\.a must be of type float, got 'b'"),
        ({"scale": "x"}, r"must be of type int, got 'x'; or .*must be of type float"),
        ({"texture": 1, "z": 2}, r"unknown fields \['texture', 'z'\]; known are \['colour', 'extra'"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_plain(Drawing, to_plain(FULL) | change)


@pytest.mark.parametrize("data", [None, [], "text", 3, True])
def test_a_dataclass_needs_an_object(data: object) -> None:
    with pytest.raises(ConfigError, match="here must be an object with named fields"):
        from_plain(Drawing, data, "here")


def test_a_wrong_kind_is_refused_without_a_union() -> None:
    with pytest.raises(ConfigError, match=r"config\.kind is 'circle', expected 'square'"):
        from_plain(Square, {"kind": "circle", "side": 1})


@pytest.mark.parametrize("name", CONFIGS)
def test_real_configurations_come_back(name: str) -> None:
    config = CONFIGS[name]()
    assert from_plain(EnsembleConfig, json.loads(json.dumps(to_plain(config))), complete=True) == config
    metadata = metadata_for(config)
    assert from_plain(Metadata, json.loads(json.dumps(to_plain(metadata))), complete=True) == metadata


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(to_plain(FULL))), inner),
    max_leaves=12,
)


OPTIONAL = sorted(to_plain(FULL).keys() - {"shape"})


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(data=JSON | st.fixed_dictionaries({"shape": JSON}, optional=dict.fromkeys(OPTIONAL, JSON)))
def test_any_data_is_read_or_refused(data: Any) -> None:
    try:
        drawing = from_plain(Drawing, data)
    except HydraError:
        return
    assert from_plain(Drawing, to_plain(drawing)) == drawing or drawing.extra is not None
    assert type(drawing.filled) is bool
    assert all(type(number) is int for number in drawing.size)
