"""Circuit extractions in a process of their own: to be killed, or to be one of several ranks.

Usage: python circuit_process.py FOLDER METHOD[,METHOD…] [STEPS]

Writes `FOLDER/METHOD.RANK` and the journal `FOLDER/METHOD.journal`. With STEPS, the process ends there, at once.
"""

import os
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]  # the helpers of the tests

from circuit_models import random_problem  # noqa: E402
from hydra_ensembles.circuit.extract import Journal, Step  # noqa: E402

BUDGET = 5
KILLED = 9


def main(folder: str, methods: str, steps: str = "") -> None:
    torch.set_num_threads(1)
    add = Journal.add

    def add_and_die(journal: Journal, step: Step, path: Path | None) -> None:
        add(journal, step, path)
        if steps and len(journal.steps) == int(steps):
            os._exit(KILLED)

    Journal.add = add_and_die  # type: ignore[method-assign]
    place = Path(folder)
    for method in methods.split(","):
        journal = place / f"{method}.journal"
        ranking = random_problem().extract(budget=BUDGET, method=method, journal=journal, screen_size=3)
        ranking.save(place / f"{method}.{os.environ.get('RANK', '0')}")


if __name__ == "__main__":
    main(*sys.argv[1:])
