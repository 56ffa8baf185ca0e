"""The HTML report: self-contained, complete, escaped, accessible to screen readers."""

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from hydra_ensembles.metrics import Interval
from hydra_ensembles.model.metadata import Calibration
from hydra_ensembles.report.html import write_report
from sample_evaluations import costs, evaluation, gallery, methods

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Parses a page, checks that every tag is closed in order, and records its content."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def figures(self):
        return Counter(attrs["class"] for tag, attrs in self.tags if tag == "figure")


@pytest.fixture(scope="module")
def render(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "new" / "report.html"
    return lambda evaluations, **about: write_report(path, evaluations, **about).read_text()


@pytest.fixture(scope="module")
def text(render) -> str:
    return render(methods(), costs=costs())


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


def test_every_figure_is_there_with_a_text_alternative(text, page):
    assert page.figures() == {
        "bars": 4, "reliability": 3, "histogram": 3, "roc": 3, "risk": 1, "headmap": 1, "agreement": 2
    }  # fmt: skip
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == 10
    assert all("predicted" in attrs["alt"] for attrs in images)
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 10
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)  # well-formed by itself
        assert (root.attrib["role"], root[0].tag) == ("img", "title")
        assert len(root.attrib["aria-label"]) > 30
        assert "nan" not in drawing.lower()


def test_it_loads_nothing_and_runs_nothing(text, page):
    assert text.startswith("<!doctype html>")
    assert "default-src 'none'" in text
    assert not any(tag in ("script", "iframe", "object", "video") for tag, _ in page.tags)
    for _, attrs in page.tags:
        for name in ("src", "href", "srcset", "data"):
            assert (attrs.get(name) or "data:").startswith("data:")
        assert not any(name.startswith("on") or ":" in name for name in attrs)
    assert not re.search(r"url\(|@import|https?://", text)


def test_what_came_from_outside_is_escaped(render):
    evil = '<script>alert("x")</script>{{ 7 * 7 }}$\\frac'
    addresses = [replace(one, content="https://x.org/x.png") for one in gallery()]  # not images, so shown as text
    run = evaluation(evil, members=3, seed=2, items=(*gallery("text"), *addresses))
    run = replace(run, id_name=evil, ood={evil: run.ood["close"]}, shift={evil: run.shift["fog"]},
                  figures=replace(run.figures, ood_scores={evil: run.figures.ood_scores["close"]}, roc={}),
                  provenance=replace(run.provenance, hardware=evil))  # fmt: skip
    rows = [replace(cost, name=evil, device=evil) for cost in costs()[:1]]
    text = render([evaluation("Single"), run], costs=rows, title=evil, allow_mismatch=True)
    assert not any(tag == "img" for tag, _ in Page(text).tags)
    assert "<script" not in text
    assert "&lt;script&gt;alert" in text
    assert "{{ 7 * 7 }}" in text  # content is not rendered as a template
    assert "dog &amp; &lt;b&gt;fox" in text


def test_one_evaluation_without_sets_makes_a_report_and_several_runs_show_a_spread(render):
    text = render([evaluation("Crowd", members=9, ood=False, shift=False)])
    assert Page(text).figures() == {"bars": 2, "reliability": 1, "risk": 1, "headmap": 1, "agreement": 1}
    runs = [evaluation(name, seed=seed, ood=False) for seed, name in enumerate("ABA")]
    text = render(runs, focus="A", baseline="B")
    assert all(words in text for words in (" ± ", "of the first run of each method", "vs B"))


def test_both_thresholds_and_what_they_decline_are_said(render):
    single, _, hydra = methods()
    both = replace(hydra.selective, sure=0.95, familiarity="knn", familiarity_threshold=12.5, familiar=0.9)
    page = render([single, replace(hydra, selective=both)])
    assert "thresholds (msp ≤ 0.5, knn ≤ 12.5) Hydra answers" in page
    assert "(95.0&nbsp;% are sure enough, 90.0&nbsp;% are familiar enough)" in page


def test_a_change_within_the_interval_or_without_one_has_no_colour(render):
    """Also not if the baseline's own value may be chance."""
    single, hydra = (evaluation(name, seed=seed, ood=False, bootstrap=50) for name, seed in (("Single", 1), ("H", 2)))
    change = f"{(hydra.id.accuracy - single.id.accuracy) * 100:+.2f}".replace("-", "−")
    assert single.id.accuracy in hydra.intervals["accuracy"]
    assert single.id.accuracy != hydra.id.accuracy
    assert f'<span class="">{change} vs Single</span>' in render([single, hydra])
    narrow, wide = (Interval(0.5, 0.5 - by, 0.5 + by, level=0.95, resamples=50) for by in (0.01, 0.1))
    hydra = replace(hydra, intervals={"accuracy": narrow})
    for of_single, outcome in (({"accuracy": wide}, ""), ({"accuracy": narrow}, "worse")):
        page = render([replace(single, intervals=of_single), hydra])
        assert f'<span class="{outcome}">{change} vs Single</span>' in page, of_single
    warm = replace(hydra.model, calibration=Calibration(temperature=(1.3,)))  # uncalibrated ECE is not comparable
    assert render([single, replace(hydra, model=warm)]).count("vs Single") == 1
