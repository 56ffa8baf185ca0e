from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch

from hydra_ensembles.errors import ConfigError
from hydra_ensembles.settings import Checked, Positive, Range, Share, Whole, from_plain, nearest, to_plain


@dataclass(frozen=True)
class Circle(Checked):
    kind: ClassVar[str] = "circle"
    radius: Positive = 1.0


@dataclass(frozen=True)
class Square(Checked):
    kind: ClassVar[str] = "square"
    side: Positive = 1.0


@dataclass(frozen=True)
class Drawing(Checked):
    size: tuple[Whole, Whole]
    shapes: tuple[Circle | Square, ...] = ()
    mode: Literal["line", "fill"] = "line"
    seed: int | None = None
    weights: Mapping[str, Share] | None = None
    warmup: int | float = 0


def test_settings_survive_json_and_numbers_become_pythons() -> None:
    drawing = Drawing(
        size=(np.int64(3), 4), shapes=(Square(np.float32(2)), Circle()), weights={"a": 1}, warmup=torch.tensor(0.5)
    )
    assert type(drawing.size[0]) is int
    assert type(drawing.shapes[0].side) is float  # type: ignore[union-attr]
    assert from_plain(Drawing, to_plain(drawing)) == drawing


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"size": [1]}, "config.size"),
        ({"size": [1, 0]}, "config.size[1]"),
        ({"size": [1, True]}, "whole number"),
        ({"shapes": [{"kind": "cone"}]}, "config.shapes[0].kind"),
        ({"shapes": [{"kind": "circle", "radius": 0}]}, "config.shapes[0].radius"),
        ({"mode": "dots"}, "'fill'"),
        ({"weights": {"a": 2}}, "config.weights.a"),
        ({"weights": {"a": float("nan")}}, "finite"),
        ({"seeds": 1}, "seed?"),
    ],
)
def test_a_wrong_value_is_named_by_its_path(change: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_plain(Drawing, {"size": [3, 4], **change})
    assert told in str(error.value)


def test_ranges_and_suggestions() -> None:
    assert (0.0 in Range(0, below=1), 1.0 in Range(0, below=1), float("inf") in Range(0)) == (True, False, False)
    assert str(Range(above=0, most=1)) == "above 0 and at most 1"
    assert nearest("size", ["image_size", "crop"]) == ["image_size"]
    assert to_plain({1: Path("a"), "b": (np.bool_(True), np.arange(2))}) == {"1": "a", "b": [True, [0, 1]]}
