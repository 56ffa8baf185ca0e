"""Run the attack, print the outcomes, and save them as a table.

PYTHONPATH=tests python -m attack                   # a tenth of the samples, for a look
PYTHONPATH=tests ATTACK=full python -m attack       # all; results/tables/attack.csv
PYTHONPATH=tests python -m attack --only files      # one part
"""

import argparse
import csv
import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from . import altered_models, files, inputs, kills, threads
from .counting import OUTCOMES, Row

PARTS: dict[str, ModuleType] = {
    "files": files, "inputs": inputs, "altered_models": altered_models, "kills": kills, "threads": threads,
}  # fmt: skip
"""Modules with `CASES`, as many as a whole run has, and `run(cases, seed) -> list[Row]`, which runs about so many."""

SHARE = 1.0 if os.environ.get("ATTACK") == "full" else 0.1
TABLE = Path(__file__).resolve().parents[2] / "results" / "tables" / "attack.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=PARTS, action="append", help="one part, or more")
    parser.add_argument("--output", type=Path, default=TABLE)
    given = parser.parse_args()
    found: list[tuple[str, Row]] = []
    for name in given.only or PARTS:
        for row in PARTS[name].run(max(1, round(PARTS[name].CASES * SHARE)), given.seed):
            found.append((name, row))
            ends = (f"{end} {getattr(row, end)}" for end in OUTCOMES if getattr(row, end))
            print(f"{row.what}: {row.cases} cases, {', '.join(ends)}", *row.examples, sep="\n  ", flush=True)
    if given.only is None:
        write(given.output, found)
    sys.exit(1 if any(row.failures for _, row in found) else 0)


def write(path: Path, found: list[tuple[str, Row]]) -> None:
    """One line for every kind of case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, ["part", "what", "cases", *OUTCOMES], extrasaction="ignore")
        table.writeheader()
        table.writerows({"part": part, **asdict(row)} for part, row in found)


if __name__ == "__main__":
    main()
