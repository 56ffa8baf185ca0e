"""A build that ends at once, as if killed, before a given file gets its name: killed_build.py FOLDER NAME COUNT."""

import sys
from pathlib import Path

from build_cases import batches, image_model, recipe, shuffled

import hydra_ensembles as he
from processes import end_at_write

TUNING = recipe(steps=3, evaluate_every=2)
CONFIG = he.HydraConfig(prune=2, members=2, method="naive", recipe=TUNING, shared_layers=1, seed=2)
"""The seed draws halves on which the two circuits differ."""


def model(seed: int = 4) -> he.Ensemble:
    """Of two layers, which are soon saved, read and trained."""
    return image_model(seed, layers=2)


def run(folder: Path | None) -> he.Ensemble:
    """The build that all tests of resuming interrupt; its loaders shuffle."""
    ood = batches(8, 8, seed=3, shift=1.5)
    return he.build(
        model(), CONFIG, train=shuffled(12), id=shuffled(16, 8, seed=2), ood=ood, output=folder, progress=False
    )


if __name__ == "__main__":
    end_at_write(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    run(Path(sys.argv[1]))
