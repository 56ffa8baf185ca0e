"""Figures show the numbers that are stored and those that the paper prints, each where it belongs."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from studies.analyses import drawing
from studies.analyses.drawing import Panel
from studies.results import pyplot


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    pyplot().close("all")


def found(**rows: list[float | None]) -> dict[str, Any]:
    """What an analysis found: accuracies of rows by seed, None where a row lacks one."""
    count = len(next(iter(rows.values())))
    by_row = [{row: {"accuracy": values[seed]} for row, values in rows.items()} for seed in range(count)]
    seeds = [{row: one for row, one in every.items() if one["accuracy"] is not None} for every in by_row]
    return {"seeds": {str(number): {"rows": one} for number, one in enumerate(seeds)}}


def marks(place: Any) -> Mapping[str, list[tuple[float, float]]]:
    """What stands in a field, by the form of its marks."""
    seen: dict[str, list[tuple[float, float]]] = {}
    for line in place.lines:
        seen.setdefault(line.get_marker(), []).extend(zip(*map(list, line.get_data()), strict=True))
    return seen


def test_rows_have_their_mean_their_seeds_and_the_papers_number() -> None:
    one = drawing.panel(
        found(Single=[0.9, 0.8], Taylor=[0.5, None]), "accuracy", "", ["Single", "Taylor"], "4", "SST-2"
    )
    assert one.ours == {"Single": [90.0, 80.0], "Taylor": [50.0, None]}
    figure = drawing.rows_figure([one], {"Single": "whole", "Taylor": "Taylor"}, "here", "paper")
    shown = marks(figure.axes[0])
    assert shown["o"] == [(85.0, 0), (50.0, 1)]
    assert shown["|"] == [(90.0, 0), (80.0, 0)]  # one seed alone is the mean
    assert shown["D"] == [(92.55, 0), (90.6, 1)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["here", "its seeds", "paper"]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["whole", "Taylor"]


def test_gains_are_taken_seed_by_seed_and_of_the_papers_own_base() -> None:
    one = Panel("", {"base": [1.0, 2.0, None], "a": [4.0, None, 9.0]}, {"base": 10.0, "a": 12.5})
    less = drawing.gains(one, "gained", "base")
    assert less == Panel("gained", {"a": [3.0, None, None]}, {"a": 2.5}, line=0.0)
    assert drawing.means(less) == {"a": 3.0}
    assert drawing.gains(Panel("", one.ours, {"a": 12.5}), "", "base").paper == {}  # without a base nothing to hold


def test_a_cloud_has_every_point() -> None:
    _, ((place,),) = drawing.fields(1, 1, 1.0)
    points = [[float(index), float(index % 7)] for index in range(200)]  # more than matplotlib leaves unsimplified
    drawing.cloud(place, points, drawing.OURS, "ID")
    (line,) = place.lines
    corners = [point for point, _ in line.get_path().iter_segments(simplify=None)]
    drawn = {(float(x), float(y)) for x, y in corners}
    assert {(x, y) for x, y in points} <= drawn
