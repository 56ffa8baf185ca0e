"""The HTML report: self-contained, complete, escaped; differences by the paired bootstrap; other formats."""

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch.nn.functional import one_hot

from hydra_ensembles.model.metadata import Calibration
from hydra_ensembles.report.html import write_report
from sample_evaluations import TARGETS, costs, evaluated, evaluation, methods

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
    return lambda evaluations, **about: write_report(evaluations, path, **about).read_text()


@pytest.fixture(scope="module")
def text(render) -> str:
    return render(methods(), costs=costs())


def test_every_figure_is_there_with_a_text_alternative_and_nothing_is_loaded_or_run(text):
    page = Page(text)
    assert page.figures() == {
        "reliability": 3, "histogram": 3, "risk": 1
    }  # fmt: skip
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == 7
    assert all(len(attrs["alt"]) > 30 for attrs in images)
    assert "default-src 'none'" in text
    assert not any(tag in ("script", "iframe", "object", "video") for tag, _ in page.tags)
    for _, attrs in page.tags:
        for name in ("src", "href", "srcset", "data"):
            assert (attrs.get(name) or "data:").startswith("data:")
        assert not any(name.startswith("on") or ":" in name for name in attrs)
    assert not re.search(r"url\(|@import|https?://", text)


def test_what_came_from_outside_is_escaped(render):
    evil = '<script>alert("x")</script>{{ 7 * 7 }}$\\frac'
    run = evaluation(evil, members=3, seed=2)
    run = replace(run, id_name=evil, sets={evil: run.sets["own"], f"ood.{evil}": run.sets["ood.close"]},
                  provenance={**run.provenance, "hardware": evil})  # fmt: skip
    rows = [replace(cost, name=evil, device=evil) for cost in costs()[:1]]
    text = render([run], costs=rows, title=evil)
    assert "<script" not in text
    assert "&lt;script&gt;alert" in text
    assert "{{ 7 * 7 }}" in text  # content is not rendered as a template


def test_one_evaluation_without_sets_makes_a_report_and_several_runs_show_a_spread(render):
    text = render([evaluation("Crowd", members=9, ood=False, shift=False)])
    assert Page(text).figures() == {"reliability": 1, "risk": 1}
    runs = [evaluation(name, seed=seed, ood=False) for seed, name in enumerate("ABA")]
    text = render(runs, focus="A", baseline="B")
    assert all(words in text for words in (" ± ", "of the first run of each method", "vs B"))


def test_both_thresholds_and_what_they_decline_are_said(render):
    run = evaluation("Hydra", members=3, threshold=0.5)
    familiar = {"familiar": torch.arange(len(TARGETS)) >= 16}
    known = replace(run.sets["own"], columns={**run.sets["own"].columns, **familiar})
    both = replace(run, sets={**run.sets, "own": known})
    page = render([both])
    assert "thresholds Hydra answers" in page
    assert "90.0&nbsp;% are familiar enough)" in page


def test_a_difference_is_marked_if_its_paired_interval_excludes_zero(render):
    labels = torch.arange(2000) % 5
    errors = torch.arange(2000) < 200

    def answering(name, wrong):
        return evaluated(one_hot(torch.where(wrong, labels + 1, labels) % 5, 5)[None] * 9.0, labels, name=name)

    base = answering("A", errors)
    repaired, same = answering("B", errors & (torch.arange(2000) >= 30)), answering("B", errors.roll(1))
    assert '<span class="better">+1.50 vs A</span>' in render([base, repaired])
    assert '<span class="worse">−1.50 vs B</span>' in render([base, repaired], focus="A", baseline="B")
    assert '<span class="">+0.00 vs A</span>' in render([base, same])
    warm = replace(repaired.model, calibration=Calibration(temperature=1.3))  # uncalibrated ECE is not comparable
    assert render([base, replace(repaired, model=warm)]).count("vs A") == 1
