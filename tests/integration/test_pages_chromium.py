"""Report and head atlas in a real browser: complete, responsive, dark mode, no logged errors."""

from pathlib import Path

import pytest

from chromium import Tab
from hydra_ensembles.evaluation.atlas import atlas
from hydra_ensembles.model.config import Sharing
from hydra_ensembles.report.html import write_atlas, write_report
from random_ensembles import random_batches, random_ensemble
from sample_evaluations import costs, methods

pillow = pytest.importorskip("PIL.Image")

PHONE, DESK = 390, 1280
DRAWN = """(async () => {
  const drawings = [...document.querySelectorAll("figure svg")], box = (one) => one.getBoundingClientRect();
  const images = [...document.images];
  images.forEach((one) => { one.loading = "eager"; });
  await Promise.all(images.map((one) => one.decode()));  // fails where one is broken
  return {
    page: document.documentElement.scrollWidth,
    figures: document.querySelectorAll("figure").length,
    empty: drawings.filter((one) => box(one).width < 100 || box(one).height < 30).length,
    smallest: Math.min(...drawings.map((one) => box(one).width / one.viewBox.baseVal.width)),
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
    assert found["smallest"] > 0.7  # text of 10.5 units stays above 7 pixels
    tab.screenshot(tmp_path / "page.png", full=False)
    picture = pillow.open(tmp_path / "page.png").convert("RGB")
    assert picture.width == width
    assert (sum(picture.getpixel((2, 2))) < 150) == dark
    levels = picture.convert("L").histogram()
    readable = sum(levels[170:]) if dark else sum(levels[:90])
    assert readable > 0.01 * picture.width * picture.height  # there is text with enough contrast
    assert not tab.complaints
    assert all(address.startswith(("file:", "data:")) for address in tab.requests)


# --- the head atlas: a click or a key on a head shows its inputs -----------------------------------------------------

NARROW = 360
KEPT = (((0, 1, 2, 3), (0, 2), (0, 1)), ((0, 1, 2, 3), (1, 2), (3,)))  # [member][layer]
SHOWN = "[...document.querySelectorAll('.panels article')].filter((one) => one.offsetHeight).map((one) => one.id)"
COLOURS = "[...document.querySelectorAll('.map a')].map((one) => getComputedStyle(one).backgroundColor)"


@pytest.fixture(scope="module", params=["image-cls", "text-post-norm"])
def page(request, tmp_path_factory) -> Path:
    """The atlas of two members with a trunk of one layer."""
    model = random_ensemble(request.param, KEPT, Sharing(stem=True, mlp=True), trunk=1)
    data = random_batches(model, (12,)), {"odd": random_batches(model, (8,), seed=1)}
    found = atlas(model, *data, name="two", progress=False)
    return write_atlas(tmp_path_factory.mktemp("atlas") / f"{request.param}.html", found)


@pytest.mark.parametrize(("width", "dark"), [(NARROW, True), (DESK, False)])
def test_a_click_on_a_head_shows_its_inputs(tab: Tab, page: Path, width: int, dark: bool) -> None:
    tab.open(page.as_uri(), width, 900, dark)
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert len(tab.run(SHOWN)) == 1  # the most important head
    tab.run("document.querySelector('a[href=\"#head-1-2\"]').click()")
    assert tab.run(SHOWN) == ["head-1-2"]
    assert "kept by all 2 members" in tab.run("document.querySelector('article.shown').innerText")
    seen = "document.querySelectorAll('article.shown .pic').length"
    said = "document.querySelectorAll('article.shown .shelf .text').length"
    assert tab.run(seen if "image" in page.name else said) == 8
    if "image" in page.name:
        assert "data:image/jpeg" in tab.run("getComputedStyle(document.querySelector('.shown .pic')).backgroundImage")
    background = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 150) == dark
    assert not tab.complaints
    assert all(address.startswith(("file:", "data:")) for address in tab.requests)


def test_keys_walk_over_the_map_and_colours_change_with_what_is_asked_for(tab: Tab, page: Path) -> None:
    tab.open(page.as_uri() + "#head-0-0", DESK)
    tab.run("document.querySelector('a[href=\"#head-0-0\"]').focus()")
    walk = {"ArrowDown": "1-0", "ArrowRight": "1-1", "ArrowUp": "0-1", "ArrowLeft": "0-0"}
    for key, shown in walk.items():
        tab.press(key)
        assert tab.run(SHOWN) == [f"head-{shown}"]
    colours = []
    for name in ("accuracy", "auroc"):
        tab.run(f"document.getElementById('by-{name}').click()")
        colours.append(tab.run(COLOURS))
    assert colours[0] != colours[1]
    assert not tab.complaints
