"""A build that ends at once, as if killed, before a given file gets its name: killed_build.py FOLDER NAME COUNT."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from build_cases import batches, image_model, recipe, shuffled

import hydra_ensembles as he

CONFIG = he.HydraConfig(
    prune=2,
    members=2,
    method="naive",
    recipe=recipe(steps=3, evaluate_every=2),
    shared_layers=1,
    seed=2,  # draws halves on which the two circuits differ
)


def run(folder: Path | None) -> he.Ensemble:
    """The build that all tests of resuming interrupt; its loaders shuffle."""
    ood = batches(8, seed=3, shift=1.5)
    return he.build(
        image_model(), CONFIG, train=shuffled(12), id=shuffled(16, seed=2), ood=ood, output=folder, progress=False
    )


def watch_replacements(act: Callable[[Path], None]) -> Callable[..., None]:
    """A stand-in for `os.replace`, the last act of every write of the library, that calls `act` first."""
    original = os.replace

    def replace(source: Any, target: Any, **options: Any) -> None:
        act(Path(target))
        original(source, target, **options)

    return replace


def main(folder: Path, name: str, count: int) -> None:
    """End the process at the given write of files whose path in the folder starts with `name`."""
    left = count

    def act(target: Path) -> None:
        nonlocal left
        left -= str(target.relative_to(folder)).startswith(name)
        if left == 0:
            os._exit(9)

    os.replace = watch_replacements(act)  # type: ignore[assignment]
    run(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
