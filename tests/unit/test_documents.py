"""Links in documents have targets, code in documents calls what there is, and every number is explained."""

import ast
import contextlib
import inspect
import operator
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import hydra_ensembles as he
from hydra_ensembles import metrics
from hydra_ensembles.metrics.distance import FamiliarityName, LearnedName
from hydra_ensembles.prediction import ScoreName

ROOT = Path(__file__).resolve().parents[2]
TEXTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").glob("*.md")])
DOCUMENTS = [*TEXTS, *sorted(ROOT.glob("notebooks/*.ipynb"))]


def anchors(path: Path) -> set[str]:
    """Anchors of the headings, as a git host and the site generate them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_named_results_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    for target, place in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", text):
        found = path.parent / target if target else path
        assert found.exists(), target
        assert not place or place.startswith("hydra_ensembles") or place in anchors(found), f"{target}#{place}"
    assert not [name for name in re.findall(r"`(results/[\w./-]+)`", text) if not (ROOT / name).exists()]


def calls(code: str) -> Iterator[tuple[Any, list[str]]]:
    """Functions that a piece of code calls as `he.…`, `data.…` or `baselines.…`, and the keywords passed."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            named = ast.unparse(node.func)
            if re.match(r"(he|data|baselines)\.[\w.]+$", named):
                called = operator.attrgetter(named.removeprefix("he."))(he)
                yield called, [one.arg for one in node.keywords if one.arg is not None]


def known_keywords(called: Any, given: list[str]) -> set[str]:
    """Keywords that a function accepts; all given ones if it takes unspecified `**kwargs`."""
    known = inspect.signature(called).parameters
    (free,) = [one for one in known.values() if one.kind is inspect.Parameter.VAR_KEYWORD] or [None]
    named = get_args(free.annotation) if free else ()  # such as Unpack[TrainOptions]
    return {*known, *(named[0].__annotations__ if named else given if free else ())}


def written_code(text: str) -> Iterator[str]:
    """Python code blocks, and calls inside sentences and tables."""
    yield from map(textwrap.dedent, re.findall(r"^ *```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE))
    for inline in re.findall(r"`([^`\n]+\))`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        with contextlib.suppress(SyntaxError):  # not Python, such as a formula
            ast.parse(code := inline.replace("…", "..."))
            yield code


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_code_calls_what_there_is(path: Path) -> None:
    """Called names and keywords exist; complete pieces of code are run elsewhere."""
    for code in written_code(path.read_text()):
        for called, keywords in calls(code):
            assert set(keywords) <= known_keywords(called, keywords), f"{called.__qualname__}: {keywords}"


def test_every_number_has_a_line_among_the_concepts() -> None:
    said = set(re.findall(r"`([\w.+]+)(?:\(\))?`", (ROOT / "docs" / "concepts.md").read_text()))
    scores = {name for names in (ScoreName, FamiliarityName, LearnedName) for name in get_args(names)}
    steps = "top_label|conformal_threshold|paired"  # no numbers
    numbers = {name for name in metrics.__all__ if name.islower() and not re.search(steps, name)}
    assert scores | numbers <= said
