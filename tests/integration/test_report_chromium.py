"""The report in a real browser: it shows every figure, fits a phone, follows dark mode, and logs no error."""

from pathlib import Path

import pytest

from chromium import Chromium, find_chromium
from hydra_ensembles.report.html import write_report
from sample_evaluations import costs, methods

pillow = pytest.importorskip("PIL.Image")

PHONE, DESK = 390, 1280


@pytest.fixture(scope="module")
def chromium() -> Chromium:
    return find_chromium()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "report.html", methods(), costs=costs())


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_every_figure_is_drawn_and_nothing_overflows(chromium: Chromium, report: Path, tmp_path, width):
    found = chromium.measure(report, tmp_path, width)
    assert found["page"] <= found["window"]  # only tables scroll, inside their frames
    assert sum(found["figures"].values()) == 17  # which ones, says the test of the page
    assert found["empty"] == 0
    assert found["smallest"] > 0.7  # text of 10.5 units stays above 7 pixels
    assert (found["images"], found["broken"]) == (10, 0)


@pytest.mark.parametrize(("width", "dark"), [(PHONE, False), (DESK, True)])
def test_it_follows_the_colour_scheme_and_logs_no_error(chromium: Chromium, report: Path, tmp_path, width, dark):
    said = chromium.screenshot(report, tmp_path / "page.png", width, 1600, dark)
    assert said == ""
    picture = pillow.open(tmp_path / "page.png").convert("RGB")
    assert picture.width == width
    corner = picture.getpixel((2, 2))
    assert (sum(corner) < 150) == dark
    levels = picture.convert("L").histogram()
    readable = sum(levels[170:]) if dark else sum(levels[:90])
    assert readable > 0.01 * picture.width * picture.height  # there is text, and it stands out
