"""Write the tables of the documentation from the files under `results/`.

    python benchmarks/tables.py           # rewrite
    python benchmarks/tables.py --check   # fail when a document is not what the results say

A document marks the place with `<!-- table: NAME -->` and `<!-- end -->`; nothing else in it is touched.
"""

import argparse
import re
import sys

import inference_report
from circuit import circuit_table
from common import RESULTS, ROOT, load
from demo import demo_table
from fusion import fusion_table
from proposition1 import proposition_table
from tower_scores import tower_table

from studies.documents import study_blocks


def tables() -> dict[str, str]:
    """Every table by name."""
    return {
        "circuits": circuit_table("circuit_dinov2_cifar10.json"),
        "scaling": circuit_table("circuit_scaling.json"),
        "fusion": fusion_table(),
        "proposition1": proposition_table(),
        "tower_scores": tower_table(load("zero_shot_tower_scores.json")),
        "demo": demo_table(),
        **inference_report.tables(),
        **{name: make() for name, make in study_blocks(RESULTS / "studies").items()},
    }


def rendered(text: str, made: dict[str, str]) -> str:
    """A document with every marked table written anew."""

    def write(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{made[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", write, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    made, stale = tables(), []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        before = path.read_text()
        after = rendered(before, made)
        if after != before:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(after)
    if check and stale:
        sys.exit(f"not what the results say: {', '.join(stale)}; run python benchmarks/tables.py")


if __name__ == "__main__":
    main()
