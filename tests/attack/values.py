"""Values that users may pass by mistake, and what a setting accepts, stated independently of the checking code."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Takes = Callable[[Any], bool | None]  # None: may be refused or accepted
LARGE = 2**70

VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1": lambda: 1,
    "2": lambda: 2,
    "2**70": lambda: LARGE,
    "0.5": lambda: 0.5,
    "-0.5": lambda: -0.5,
    "1.5": lambda: 1.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "'2'": lambda: "2",
    "''": lambda: "",
    "'nonsense'": lambda: "nonsense",
    "half a character": lambda: "\ud800",
    "()": lambda: (),
    "[1]": lambda: [1],
    "[None]": lambda: [None],
    "['a', 'b']": lambda: ["a", "b"],
    "{}": dict,
    "{'a': 1}": lambda: {"a": 1},
    "object()": object,
    "numpy 2": lambda: np.int64(2),
    "tensor 2": lambda: torch.tensor(2),
    "tensor [1., 2.]": lambda: torch.tensor([1.0, 2.0]),
    "{1, 2}": lambda: {1, 2},
    "[[0, 0], [0]]": lambda: [[0, 0], [0]],
    "array of objects": lambda: np.array([object()], dtype=object),
    "NaN tensor": lambda: torch.full((2, 3), math.nan),
    "empty tensor": lambda: torch.empty(0),
    "{'near': {'x': None}}": lambda: {"near": {"x": None}},
    "a batch of unknown names": lambda: {"pixels": torch.zeros(6, 3, 8, 8), "label": torch.zeros(6)},
    "int": lambda: int,
    "a function": lambda: lambda *_: None,
    "a module": lambda: torch.nn.Linear(2, 2),
    "a device": lambda: torch.device("meta"),
    "a folder": lambda: Path("folder"),  # which there is
    "a file": lambda: Path("file"),  # likewise, an empty one
}


# --- what a setting accepts ----------------------------------------------------------------------------------


def _plain(value: Any) -> tuple[Any, bool]:
    """A number as a Python number, and whether it came from numpy or torch."""
    foreign = isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1)
    return (value.item() if foreign else value), foreign


def whole(least: int, most: float = math.inf, none: bool = False) -> Takes:
    """An integer in a range; those of numpy and torch, and those above 2**62, may be refused or accepted."""

    def takes(value: Any) -> bool | None:
        if value is None:
            return none
        plain, foreign = _plain(value)
        if type(plain) is not int or not least <= plain <= most:
            return False
        return None if foreign or plain > 2**62 else True

    return takes


def number(low: float, high: float = math.inf, *, above: bool = False, below: bool = True, none: bool = False) -> Takes:
    """A finite number from `low` (or `above` it) to `high` (or `below` it); numpy's and torch's may be refused."""

    def takes(value: Any) -> bool | None:
        if value is None:
            return none
        plain, foreign = _plain(value)
        if type(plain) not in (int, float) or not math.isfinite(plain):
            return False
        inside = (plain > low if above else plain >= low) and (plain < high if below else plain <= high)
        return False if not inside else None if foreign or plain > 2**62 else True

    return takes


def only(*accepted: Any, none: bool = False) -> Takes:
    """These values, of exactly their type; where () is one, other things without an item may be refused or accepted."""

    def takes(value: Any) -> bool | None:
        if value is None:
            return none
        if () in accepted and isinstance(value, Tensor) and not value.numel():
            return None
        return any(type(value) is type(one) and value == one for one in accepted)

    return takes


def text(none: bool = False, empty: bool | None = None) -> Takes:
    def takes(value: Any) -> bool | None:
        if value is None:
            return none
        if not isinstance(value, str):
            return False
        return {"": empty, "\ud800": None}.get(value, True)

    return takes


def nothing(value: Any) -> bool:
    return False


def anything(value: Any) -> None:
    """Whatever may be refused or accepted."""


def either(takes: Takes, *which: Any) -> Takes:
    """Like another, but some values may be refused or accepted."""
    return lambda value: None if any(type(value) is type(w) and value == w for w in which) else takes(value)
