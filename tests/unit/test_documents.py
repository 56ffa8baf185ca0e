"""Links in documents have targets, and every number is in the glossary; benchmarks' tests check tables and code."""

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
from hydra_ensembles.report import COLUMNS, DIVERSITY

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("notebooks/*.ipynb")]
TEXTS = [path for path in DOCUMENTS if path.suffix == ".md"]
CITING = sorted([*DOCUMENTS, *(ROOT / "results").glob("*.md")])
GLOSSARY = "".join((ROOT / "docs" / name).read_text() for name in ("glossary.md", "columns.md"))


def anchors(path: Path) -> set[str]:
    """Anchors of the headings, as a git host and the site generate them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", sorted(DOCUMENTS), ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target, place in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", path.read_text()):
        found = path.parent / target if target else path
        assert found.exists(), target
        assert not place or place.startswith("hydra_ensembles") or place in anchors(found), f"{target}#{place}"


def test_results_that_are_named_are_there() -> None:
    """Files named in documents exist, or the commit that has them is given."""
    named = [one for path in CITING for one in re.findall(r"`(results/[\w./-]+)`( at [0-9a-f]{7})?", path.read_text())]
    assert not [name for name, commit in named if not commit and not (ROOT / name).exists()]


def test_every_file_of_results_is_listed_with_what_writes_it() -> None:
    listed = (ROOT / "results" / "README.md").read_text()
    names = {one.name if one.is_file() else f"{one.name}/" for one in (ROOT / "results").iterdir()}
    assert not [name for name in names - {"README.md"} if f"`{name}" not in listed]


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


@pytest.mark.parametrize("path", sorted(TEXTS), ids=lambda path: path.name)
def test_code_calls_what_there_is_pictures_say_what_they_show_and_pages_are_short(path: Path) -> None:
    """Called names and keywords exist; complete pieces of code are run elsewhere."""
    text = path.read_text()
    for code in written_code(text):
        for called, keywords in calls(code):
            assert set(keywords) <= known_keywords(called, keywords), f"{called.__qualname__}: {keywords}"
    assert "![](" not in text
    # the sources of numbers count too; longer content belongs in a page's `tables_` file
    assert path.parent == ROOT or path.name.startswith(("tables_", "study_")) or text.count("\n") <= 200


def test_every_number_has_a_line_in_the_glossary() -> None:
    said = set(re.findall(r"`([\w.+]+)(?:\(\))?`", GLOSSARY))
    shown = {column.key.rpartition(".")[2] for column in (*COLUMNS, *DIVERSITY)}
    scores = {name for names in (ScoreName, FamiliarityName, LearnedName) for name in get_args(names)}
    steps = "_per_sample|_of_confidence|_parts|top_label|roc_curve|label_scores|conformal_threshold"  # no numbers
    plain = {name for name in metrics.__all__ if name.islower() and not re.search(steps, name)}
    assert shown | scores | plain <= said


def columns_of_generated_tables() -> set[str]:
    """The parts of their titles: `cifar10 (near)` becomes `SET (near)`, `batch 4, eager` `batch N` and `eager`."""
    tables = "".join(re.findall(r"<!-- table: .*?<!-- end -->", "".join(one.read_text() for one in TEXTS), re.DOTALL))
    titles = "|".join(re.findall(r"^\|(.*)\|\n\|[-:| ]+\|$", tables, re.MULTILINE))
    titles = re.sub(r"[↑↓*]|\(?%\)?", "", titles)
    titles = re.sub(r"(\w+: )?[\w-]+ \((near|far|seen|unseen)\b[^)]*\)", r"SET (\2)", titles)
    titles = re.sub(r"(?<![\w-])\d+(,\d+)*", "N", titles)
    return {part.strip().lower() for part in re.split(r"\||, |: | by (?=\w)", titles) if part.strip()}


def test_every_column_has_a_line_in_the_glossary() -> None:
    cells = re.findall(r"^\| ([^|]+) \|", GLOSSARY, re.MULTILINE)
    said = {name.strip("↑↓ `").lower() for cell in cells for name in re.split(r", |<br>", cell)}
    said |= set(re.findall(r"`([\w-]+)`", GLOSSARY.lower().split("sets and models:")[1].split("\n\n")[0]))
    found = columns_of_generated_tables()
    assert len(found) > 80
    assert not sorted(one for one in found if one not in said and not set(one.split()) <= said)
