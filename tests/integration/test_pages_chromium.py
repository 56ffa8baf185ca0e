"""The report in a real browser: complete, responsive, dark mode, no logged errors."""

from pathlib import Path

import pytest

from chromium import Tab
from hydra_ensembles.report.html import write_report
from sample_evaluations import costs, methods

pillow = pytest.importorskip("PIL.Image")

PHONE, DESK = 390, 1280
DRAWN = """(async () => {
  const drawings = [...document.querySelectorAll("figure img")], box = (one) => one.getBoundingClientRect();
  const images = [...document.images];
  images.forEach((one) => { one.loading = "eager"; });
  await Promise.all(images.map((one) => one.decode()));  // fails where one is broken
  return {
    page: document.documentElement.scrollWidth,
    figures: document.querySelectorAll("figure").length,
    empty: drawings.filter((one) => box(one).width < 100 || box(one).height < 30).length,
    smallest: Math.min(...drawings.map((one) => box(one).width / one.naturalWidth)),
    images: images.filter((one) => one.naturalWidth > 0).length,
  };
})()"""


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "report.html", methods(), costs=costs())


@pytest.mark.parametrize(("width", "dark"), [(PHONE, False), (DESK, True)])
def test_it_fits_follows_colours_and_is_silent(tab: Tab, report: Path, tmp_path: Path, width: int, dark: bool) -> None:
    tab.open(report.as_uri(), width, 1600, dark)
    found = tab.run(DRAWN)
    assert found["page"] <= width  # only tables scroll, inside their frames
    assert (found["figures"], found["images"], found["empty"]) == (17, 10, 0)  # test_html_report.py says which
    assert found["smallest"] > 0.5  # text of 12 pixels stays above 6
    tab.screenshot(tmp_path / "page.png", full=False)
    picture = pillow.open(tmp_path / "page.png").convert("RGB")
    assert picture.width == width
    assert (sum(picture.getpixel((2, 2))) < 150) == dark
    levels = picture.convert("L").histogram()
    readable = sum(levels[170:]) if dark else sum(levels[:90])
    assert readable > 0.01 * picture.width * picture.height  # there is text with enough contrast
    assert not tab.complaints
    assert all(address.startswith(("file:", "data:")) for address in tab.requests)
