"""The HTML report: self-contained, complete, escaped, readable without eyes."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from hydra_ensembles.errors import ConfigError
from hydra_ensembles.report.html import render_report, write_report
from hydra_ensembles.report.svg import round_ticks
from sample_evaluations import CLASSES, costs, evaluation, gallery, kept_heads, methods

VOID = {"meta", "link", "img", "br", "hr", "input"}
FIGURES = ("reliability", "histogram", "roc", "risk", "headmap", "agreement", "bars")


class Page(HTMLParser):
    """Parses a page, holds that every tag is closed in order, and remembers what it saw."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
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

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    def figures(self, css):
        return sum(tag == "figure" and css in (attrs.get("class") or "").split() for tag, attrs in self.tags)


@pytest.fixture(scope="module")
def text() -> str:
    return render_report(methods(), costs=costs())


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


def test_every_figure_is_there(page):
    counted = {css: page.figures(css) for css in FIGURES}
    assert counted == {
        "reliability": 3,
        "histogram": 3,
        "roc": 3,
        "risk": 1,
        "headmap": 1,
        "agreement": 2,
        "bars": 4,
    }
    assert sum(tag == "img" for tag, _ in page.tags) == 10


def test_it_loads_nothing_and_runs_nothing(text, page):
    assert "default-src 'none'" in text
    assert not any(tag in ("script", "iframe", "object", "video") for tag, _ in page.tags)
    for _, attrs in page.tags:
        for name in ("src", "href", "srcset", "data"):
            assert (attrs.get(name) or "data:").startswith("data:")
    assert not re.search(r"url\(|@import|https?://", text)
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)


def test_every_figure_has_a_text_alternative(text, page):
    drawings = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(drawings) == 17
    for attrs in drawings:
        assert attrs["role"] == "img"
        assert len(attrs["aria-label"] or "") > 30
    for attrs in (attrs for tag, attrs in page.tags if tag == "img"):
        assert "predicted" in (attrs["alt"] or "")
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        root = ElementTree.fromstring(drawing)  # well-formed on its own
        assert root[0].tag == "title"
        assert "nan" not in drawing.lower().replace("finance", "")


def test_it_adapts_to_phones_and_dark_mode(text):
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "prefers-color-scheme: dark" in text
    assert 'class="scroll" role="region"' in text


def test_the_table_marks_best_and_second(text):
    assert "<strong>" in text
    assert "<u>" in text
    assert '<tr class="focus"><th scope="row">Hydra</th>' in text


def test_what_came_from_outside_is_escaped():
    evil = '<script>alert("x")</script>'
    runs = [evaluation("Single"), evaluation(evil, members=3, seed=2, items=gallery("text"))]
    text = render_report(runs, costs=costs(), title=evil)
    Page(text)
    assert "<script" not in text
    assert "&lt;script&gt;alert" in text
    assert "dog &amp; &lt;b&gt;fox" in text


def test_content_that_is_no_image_address_is_shown_as_text():
    items = [type(item)(**{**vars(item), "content": "https://example.org/x.png"}) for item in gallery()]
    page = Page(render_report([evaluation(items=items)]))
    assert not any(tag == "img" for tag, _ in page.tags)


def test_the_verdict_comes_first(text):
    lead, table = text.index('class="lead"'), text.index("<table>")
    assert lead < table
    assert "numbers measured" in text[lead:table]


def test_one_evaluation_without_ood_makes_a_report():
    page = Page(render_report([evaluation(ood=False, shift=False)]))
    assert page.figures("roc") == 0
    assert page.figures("agreement") == 0
    assert page.figures("reliability") == 1
    assert page.figures("headmap") == 1


def test_many_members_are_shaded_instead_of_striped():
    run = evaluation("Crowd", members=9, heads=kept_heads(9))
    page = Page(render_report([run]))
    assert page.figures("headmap") == 1
    assert not any((attrs.get("class") or "") == "chip" for _, attrs in page.tags)
    assert any("the darker, the more members keep it" in word for word in page.words)


def test_selective_shift_and_provenance_are_told(text):
    assert "With its calibrated threshold (msp ≤ 0.5) Hydra answers" in text
    assert "Does it know when conditions get worse?" in text
    assert "made for a test" in text
    assert "converted → pruned" in text
    assert "median of 20 runs of a batch of 4 on NVIDIA H200" in text


def test_focus_and_baseline_can_be_chosen():
    text = render_report(methods(), focus="Deep Ensemble", baseline="Hydra")
    assert "How good is Deep Ensemble?" in text
    assert "vs Hydra" in text
    with pytest.raises(ConfigError, match="focus='Hidra' is not among the methods"):
        render_report(methods(), focus="Hidra")
    with pytest.raises(ConfigError, match="baseline="):
        render_report(methods(), baseline="None")


def test_it_is_written_whole_and_again_the_same(tmp_path, text):
    path = write_report(tmp_path / "new" / "report.html", methods(), costs=costs())
    assert path.read_text() == text
    assert len(text) < 400_000


def test_several_runs_show_a_spread():
    runs = [evaluation("Single"), *(evaluation("Hydra", members=3, seed=seed) for seed in (2, 3))]
    assert " ± " in render_report(runs)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.02, 0.87), (-12.5, 3.0), (0, 1e-4), (5, 5), (0, 12345)])
def test_ticks_are_round_and_inside(low, high):
    ticks = round_ticks(low, high)
    assert len(ticks) <= 7
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks) or low == high
    assert ticks == sorted(set(ticks))


def test_classes_without_names_are_numbered():
    text = render_report([evaluation(items=gallery())])
    assert "ant" in text
    assert CLASSES == 4
