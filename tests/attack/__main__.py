"""Run the attack, print the outcome of every case, and save it.

PYTHONPATH=tests python -m attack                          # everything; results/attack.json
PYTHONPATH=tests python -m attack --only files             # one part; the others keep their stored results
PYTHONPATH=tests python -m attack --share 0.1 --seed 7 --output found.json
"""

import argparse
import hashlib
import json
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import safetensors
import torch

import hydra_ensembles as he

from . import altered_models, bad_commands, bad_data, bad_inputs, bad_settings, disk, files, kills, threads, writers
from .counting import OUTCOMES, Row

PARTS: tuple[ModuleType, ...] = (
    *(files, bad_inputs, bad_data, bad_settings, bad_commands, altered_models),
    *(kills, writers, threads, disk),
)
"""Modules with `CASES`, as many as a whole run has, and `run(cases, seed) -> list[Row]`, which runs about so many."""

RESULT = Path(__file__).resolve().parents[2] / "results" / "attack.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of the cases of a whole run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[_name(part) for part in PARTS], action="append", help="one part, or more")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    parts: dict[str, Any] = json.loads(given.output.read_text())["parts"] if given.output.exists() else {}
    found: list[Row] = []
    for part in PARTS:
        if given.only is None or _name(part) in given.only:
            begun = time.monotonic()
            rows = part.run(max(1, round(part.CASES * given.share)), given.seed)
            found += rows
            for row in rows:
                show(row)
            parts[_name(part)] = {
                "rows": [asdict(row) for row in rows],
                "seed": given.seed,
                "share": given.share,
                "minutes": round((time.monotonic() - begun) / 60, 1),
                "source": source_digest(),
                "versions": versions(),
                "hardware": f"{platform.system()} {platform.machine()}, CPU",
            }
            ordered = {_name(one): parts[_name(one)] for one in PARTS if _name(one) in parts}
            given.output.write_text(json.dumps({"parts": ordered}, indent=1, ensure_ascii=False) + "\n")
    sys.exit(1 if any(row.failures for row in found) else 0)


def source_digest() -> str:
    """First digits of the SHA-256 of the library's source: parts with the same digest belong together."""
    root, found = Path(he.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def versions() -> dict[str, str]:
    libraries = {one.__name__: one.__version__ for one in (torch, safetensors, numpy)}
    return {"hydra_ensembles": he.__version__, "python": platform.python_version(), **libraries}


def show(row: Row) -> None:
    """Print the number of cases, their outcomes, and the first failures."""
    ends = (f"{name} {getattr(row, name)}" for name in OUTCOMES if getattr(row, name))
    print(f"{row.what}: {row.cases} cases, {', '.join(ends)}", *row.examples, sep="\n  ", flush=True)


def _name(part: ModuleType) -> str:
    return part.__name__.rpartition(".")[2]


if __name__ == "__main__":
    main()
