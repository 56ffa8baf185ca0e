"""The HTML report: self-contained, complete, escaped, readable without eyes."""

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import matplotlib
import pytest

from hydra_ensembles.errors import ConfigError, MissingExtraError
from hydra_ensembles.report.figures import PALETTE
from hydra_ensembles.report.html import render_report, write_report
from sample_evaluations import costs, evaluation, gallery, kept_heads, methods

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Parses a page, holds that every tag is closed in order, and remembers what it saw."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
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
        names = [attrs["class"] for tag, attrs in self.tags if tag == "figure"]
        return {name: names.count(name) for name in names}


@pytest.fixture(scope="module")
def text() -> str:
    return render_report(methods(), costs=costs())


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


def test_every_figure_is_there(page):
    assert page.figures() == {
        "bars": 4, "reliability": 3, "histogram": 3, "roc": 3, "risk": 1, "headmap": 1, "agreement": 2
    }  # fmt: skip
    assert sum(tag == "img" for tag, _ in page.tags) == 10


def test_it_loads_nothing_and_runs_nothing(text, page):
    assert text.startswith("<!doctype html>")
    assert "default-src 'none'" in text
    assert not any(tag in ("script", "iframe", "object", "video") for tag, _ in page.tags)
    for _, attrs in page.tags:
        for name in ("src", "href", "srcset", "data"):
            assert (attrs.get(name) or "data:").startswith("data:")
        assert not any(name.startswith("on") or ":" in name for name in attrs)
    assert not re.search(r"url\(|@import|https?://", text)
    assert len(text) < 200_000


def test_every_figure_has_a_text_alternative(text, page):
    drawings = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(drawings) == 10
    assert all(attrs["role"] == "img" and len(attrs["aria-label"] or "") > 30 for attrs in drawings)
    assert all("predicted" in (attrs["alt"] or "") for tag, attrs in page.tags if tag == "img")
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        root = ElementTree.fromstring(drawing)  # well-formed on its own
        assert root[0].tag == "title"
        assert "nan" not in drawing.lower()


def test_it_adapts_to_phones_and_dark_mode(text):
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "prefers-color-scheme: dark" in text
    for name, colours in PALETTE.items():
        assert all(f"--{name}:{colour};" in text for colour in colours)
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert not re.search(r"#[0-9a-f]{6}", drawings)  # every colour follows the page
    assert "var(--c2)" in drawings


def test_what_came_from_outside_is_escaped():
    evil = '<script>alert("x")</script>{{ 7 * 7 }}$\\frac'
    addresses = [replace(one, content="https://x.org/x.png") for one in gallery()]  # no images, so shown as text
    run = evaluation(evil, members=3, seed=2, items=[*gallery("text"), *addresses])
    run = replace(run, id_name=evil, ood={evil: run.ood["close"]}, shift={evil: run.shift["fog"]},
                  figures=replace(run.figures, ood_scores={evil: run.figures.ood_scores["close"]}, roc={}),
                  provenance=replace(run.provenance, hardware=evil))  # fmt: skip
    rows = [replace(cost, name=evil, device=evil) for cost in costs()[:1]]
    text = render_report([evaluation("Single"), run], costs=rows, title=evil, allow_mismatch=True)
    page = Page(text)
    assert not any(tag == "img" for tag, _ in page.tags)
    assert "<script" not in text
    assert "&lt;script&gt;alert" in text
    assert "{{ 7 * 7 }}" in text  # what is shown is no template
    assert "dog &amp; &lt;b&gt;fox" in text


def test_one_evaluation_without_ood_makes_a_report():
    assert Page(render_report([evaluation(ood=False, shift=False)])).figures() == {
        "bars": 2, "reliability": 1, "risk": 1, "headmap": 1
    }  # fmt: skip


def test_many_members_are_shaded_instead_of_striped():
    text = render_report([evaluation("Crowd", members=9, heads=kept_heads(9))])
    assert Page(text).figures()["headmap"] == 1
    assert 'class="chip"' not in text
    assert "opacity:0.56" in text  # five of nine


def test_the_first_numbers_stand_against_the_baseline(text):
    single, _, hydra = methods()
    header = text[text.index("<header>") : text.index("</header>")]
    change = (hydra.id.accuracy - single.id.accuracy) * 100
    assert f'<span class="better">{change:+.2f} vs Single</span>' in header
    interval = hydra.intervals["accuracy"]
    assert f"{interval.low * 100:.2f} to {interval.high * 100:.2f}" in header
    assert '<span class="worse">+0.25 vs Single</span>' in header  # latency
    for mark in ("<strong>", "<u>", '<tr class="focus"><th scope="row">Hydra</th>'):
        assert mark in text


def test_selective_shift_and_provenance_are_told(text):
    for words in ("(msp ≤ 0.5) Hydra answers", "when conditions get worse", "made for a test", "converted → pruned",
                  "median of 20 runs of a batch of 4 on NVIDIA H200"):  # fmt: skip
        assert words in text


def test_focus_and_baseline_can_be_chosen_and_several_runs_show_a_spread():
    runs = [*methods(), evaluation("Deep Ensemble", members=3, seed=8)]
    text = render_report(runs, focus="Deep Ensemble", baseline="Hydra")
    assert " ± " in text  # of two runs
    assert "How good is Deep Ensemble?" in text
    assert "vs Hydra" in text
    for wrong in ({"focus": "Hidra"}, {"baseline": "Hidra"}):
        with pytest.raises(ConfigError, match="Hidra"):
            render_report(methods(), **wrong)


def test_it_is_written_the_same_whatever_the_users_own_settings_of_matplotlib(tmp_path, text):
    with matplotlib.rc_context({"text.usetex": True, "axes.facecolor": "red", "font.size": 30, "svg.fonttype": "path"}):
        assert write_report(tmp_path / "new" / "report.html", methods(), costs=costs()).read_text() == text


@pytest.mark.parametrize("library", ["jinja2", "matplotlib"])
def test_without_its_libraries_it_says_what_to_install(monkeypatch, library):
    for module in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=rf"{library}.*\[report\]"):
        render_report([evaluation()])


def test_names_and_numbers_of_figures_are_not_shortened():
    page = render_report([evaluation("lr-0.0001"), evaluation("lr-0.001", strength=1.0)])
    for name in ("lr-0.0001", "lr-0.001"):
        assert re.search(rf'aria-label="[^"]*{name}\b', page)
    assert "lr-0.00 " not in page
