"""Write what the documentation takes from elsewhere: tables and numbers from `results/`, code from `examples/`.

    python benchmarks/tables.py           # rewrite
    python benchmarks/tables.py --check   # fail if marked parts or figures differ from results and examples

It also fails if a number in a sentence has no source, except on pages that `quoted.UNCHECKED` lists with a reason. Not
checked: words ("twice", "half"), tables without a mark, and numbers in names and powers (ViT-B/16, 1e-5).

A document marks a place with `<!-- table: NAME -->` or `<!-- code: FILE PART -->`, and `<!-- end -->`; numbers in
sentences are rewritten if a comment below names their sources (`quoted.py`). Nothing else is changed. The content is
written into the document itself, so that a git host and the site show the same. Missing figures of analyses are drawn.
All tables of a study, shown or not, are also written as `results/studies/NAME/tables/TABLE.csv`.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import inference_report
import quoted
import result_tables
from circuit import circuit_table
from coverage import coverage_table
from serve import serve_table

from hydra_ensembles import SearchResult
from hydra_ensembles.report import to_markdown
from studies import all_tasks
from studies.analyses.registry import blocks, draw, undrawn
from studies.circuit_draws import draws_table
from studies.results import RESULTS, ROOT, load
from studies.stored import Study, stored_studies
from studies.tower_scores import tower_table


def documents() -> list[Path]:
    """README and all pages."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def studies() -> dict[str, Study]:
    """Every stored study by name."""
    return {study.name: study for study in stored_studies(RESULTS / "studies")}


def tables(stored: Mapping[str, Study], made: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Every table by name in the documents; `made` are those of each study by their own."""
    return {
        "circuits": circuit_table("circuit_dinov2_cifar10.json"),
        "scaling": circuit_table("circuit_scaling.json"),
        "circuit_draws": draws_table(),
        "tower_scores": tower_table(load("zero_shot_tower_scores.json")),
        "serve": serve_table(),
        "coverage": coverage_table(),
        "search": to_markdown(SearchResult.load(RESULTS / "search.json").table()),
        **result_tables.tables(),
        **inference_report.tables(),
        **all_tasks.blocks(stored, made),
        **blocks(RESULTS / "analyses"),
    }


def code(file: str, part: str) -> str:
    """The lines of a script between `# start: PART` and `# end: PART`, without their indent."""
    match = re.search(rf" *# start: {part}\n(.*?) *# end: {part}\n", (ROOT / file).read_text(), re.DOTALL)
    if match is None:
        sys.exit(f"{file} has no part between `# start: {part}` and `# end: {part}`")
    return f"```python\n{textwrap.dedent(match[1]).strip()}\n```"


def rendered(text: str, by_name: Mapping[str, str], stored: Mapping[str, Study]) -> tuple[str, list[str]]:
    """Rewrite all marked parts of a document and the numbers of its sentences; also return what is wrong with it."""

    def write(match: re.Match[str]) -> str:
        kind, name = match.groups()
        return f"<!-- {kind}: {name} -->\n{by_name[name] if kind == 'table' else code(*name.split())}\n<!-- end -->"

    text = re.sub(r"<!-- (table|code): ([^\n]+) -->\n.*?<!-- end -->", write, text, flags=re.DOTALL)
    return quoted.written(text, stored, RESULTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stored = studies()
    stale = list[str]()
    wrong = list[str]()
    made = {name: all_tasks.made(study) for name, study in stored.items()}
    by_name = tables(stored, made)
    for path in documents():
        before = path.read_text()
        after, problems = rendered(before, by_name, stored)
        name = path.relative_to(ROOT).as_posix()
        unbacked = [] if name in quoted.UNCHECKED else quoted.without_source(before)
        wrong += [f"{name}: {problem}" for problem in (*problems, *(f"{number} has no source" for number in unbacked))]
        if after != before:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(after)
    for name, study in stored.items():
        if not all_tasks.filed(study, made[name]):
            stale.append(f"the CSV files of {name}")
            if not check:
                all_tasks.file(study, made[name])
    for result in undrawn(RESULTS / "analyses"):
        stale.append(f"the figure of {result['analysis']}-{result['task']}")
        if not check:
            draw(result)
    if not all_tasks.drawn(list(stored.values())):
        stale.append("the figure of gains against price")
        if not check:
            all_tasks.draw(list(stored.values()))
    if wrong:
        sys.exit("\n".join(["sentences that the results do not bear out:", *wrong]))
    if check and stale:
        sys.exit(f"differs from results and examples: {', '.join(stale)}; run python benchmarks/tables.py")


if __name__ == "__main__":
    main()
