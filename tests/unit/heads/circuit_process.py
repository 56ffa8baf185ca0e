"""A circuit extraction in a process of its own: to be killed, or to be one of several ranks.

Usage: python circuit_process.py OUTPUT [JOURNAL] [METHOD] [SECONDS]

Writes the ranking to OUTPUT. With SECONDS, every greedy step takes that much longer.
"""

import os
import sys
import time
from pathlib import Path

import torch
from circuit_models import random_problem

from hydra_ensembles.circuit.extract import Journal, Step

BUDGET = 5


class SlowJournal(Journal):
    """A journal that lingers after each step, so that there is time to be killed."""

    seconds = 0.0

    def add(self, step: Step) -> None:
        super().add(step)
        time.sleep(self.seconds)


def main(output: str, journal: str = "", method: str = "exact", seconds: str = "0") -> None:
    torch.set_num_threads(1)
    if float(seconds):
        from hydra_ensembles.circuit import extract

        SlowJournal.seconds = float(seconds)
        extract.Journal = SlowJournal  # type: ignore[misc]
    ranking = random_problem().extract(budget=BUDGET, method=method, journal=journal or None, screen_size=3)
    ranking.save(Path(f"{output}.{os.environ.get('RANK', '0')}"))


if __name__ == "__main__":
    main(*sys.argv[1:])
