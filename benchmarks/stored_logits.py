"""What the compact storage of logits does to the tables: every number from full logits, and from stored ones.

    python benchmarks/stored_logits.py --study vision-tinyimagenet --runs FOLDER

Needs the run folder of a study with one evaluated seed, where the full logits of the test sets still are. For every
metric the largest difference over all methods and sets is written down, with where it was found. Studies measured
earlier stay in the results file.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from studies import results, rows
from studies.compact_logits import CompactSet
from studies.recipe import load_recipe
from studies.stored_results import StoredResults
from studies.zero_shot import results as zero_shot_results
from studies.zero_shot import rows as zero_shot_rows
from studies.zero_shot.methods import families_of
from studies.zero_shot.recipe import ZERO_SHOT, load_zero_shot_recipe

Numbers = Callable[[Any, str, int], dict[str, float]]


def full_sets(study: StoredResults, files: Sequence[Path], seed: int) -> dict[str, CompactSet]:
    """All sets of one seed as they were computed, from the files of its units in their order."""
    parts: dict[str, list[npt.NDArray[np.float32]]] = {}
    for file in files:
        with np.load(file) as computed:
            for name in computed.files:
                parts.setdefault(f"{seed}.{name}", []).append(computed[name])
    return {name: replace(study.sets[name], values=np.concatenate(found), groups=()) for name, found in parts.items()}


def compare(study: StoredResults, full: StoredResults, seed: int, numbers: Numbers) -> dict[str, Any]:
    """By metric, the largest difference of a table's number, and where it is."""
    found: dict[str, dict[str, Any]] = {}
    for method in study.methods:
        stored, exact = numbers(study, method, seed), numbers(full, method, seed)
        for place, value in exact.items():
            metric = place.rpartition(".")[2]
            gap = abs(stored[place] - value)
            if gap >= found.get(metric, {"difference": 0.0})["difference"]:
                found[metric] = {
                    "difference": round(gap, 6),
                    "method": method,
                    "place": place,
                    "full": round(value, 6),
                    "stored": round(stored[place], 6),
                }
    return found


def opened(name: str, runs: Path, seed: int) -> tuple[StoredResults, list[Path], Numbers]:
    """One seed of a study as it is stored, its files of full logits, and how its numbers are made."""
    folder = runs / name / f"seed-{seed}" / "test"
    if name == ZERO_SHOT:
        zero = zero_shot_results.bring_together(replace(load_zero_shot_recipe(), seeds=(seed,)), runs)
        names = [family.name for family in families_of(True)]
        return zero, [folder / f"{one}.npz" for one in names], zero_shot_rows.method_numbers
    study = results.bring_together(replace(load_recipe(name), seeds=(seed,)), runs)
    return study, [folder / f"{unit}.npz" for unit in study.facts["units"]], rows.method_numbers


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", required=True)
    parser.add_argument("--runs", type=Path, required=True, help="run folder of the studies")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("results/stored_logits.json"))
    options = parser.parse_args(arguments)
    study, files, numbers = opened(options.study, options.runs, options.seed)
    full = replace(study, sets=full_sets(study, files, options.seed))
    found: Mapping[str, Any] = {
        "seed": options.seed,
        "device": study.facts["device"],
        "versions": study.facts["versions"],
        "methods": len(study.methods),
        "sets": len(full.sets),
        "largest": compare(study, full, options.seed, numbers),
    }
    earlier = json.loads(options.output.read_text()) if options.output.exists() else {}
    options.output.write_text(json.dumps({**earlier, options.study: found}, indent=1) + "\n")
    for metric, one in found["largest"].items():
        print(options.study, metric, one, flush=True)


if __name__ == "__main__":
    main()
