"""A training run that kills itself with SIGKILL before reading a given batch: python killed_run.py FOLDER COUNT."""

import os
import signal
import sys
from pathlib import Path

from finetune_cases import shuffled, tiny

from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.recipe import Recipe

RECIPE = Recipe(
    optimizer="adamw",
    grid=(0.01, 0.001),
    epochs=2,
    warmup=2,
    dropout=0.2,
    evaluate_every=3,
    gradient_accumulation=2,
    weight_decay=0.01,
    clip_norm=1.0,
)


class Deadly:
    """A shuffling loader that kills the process at the given batch, counted over everything read."""

    def __init__(self, fatal: int) -> None:
        self.loader, self.fatal, self.read = shuffled(count=40), fatal, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            if self.read == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            self.read += 1
            yield batch


def run(folder: Path | None, fatal: int = -1, recipe: Recipe = RECIPE):
    members = [tiny(seed=0), tiny(seed=1)]
    return finetune(
        members, Deadly(fatal), recipe, shuffled(count=16, seed=9), output=folder, progress=False, checkpoint_every=2
    )


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
