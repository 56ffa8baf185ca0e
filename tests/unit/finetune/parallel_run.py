"""One of several processes that train together: python parallel_run.py FOLDER, with torchrun's variables set."""

import os
import sys
from pathlib import Path

from finetune_cases import batches, own_batches, shuffled, tiny
from safetensors.torch import save_file

from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.recipe import Recipe

RECIPE = Recipe(
    optimizer="sgd",
    learning_rate=0.05,
    steps=4,
    schedule="constant",
    gradient_accumulation=2,
    evaluate_every=2,
    clip_norm=1.0,
)


def run(folder: Path, name: str, train, recipe: Recipe = RECIPE) -> None:
    trained = finetune(tiny(), train, recipe, batches(40, 7), output=folder / name, progress=False)
    rank = os.environ.get("RANK", "0")
    metrics = [f"{name} {value!r}" for name, value in trained.metadata.metrics.items()]
    save_file(trained.state_dict(), folder / f"{name}-{rank}.safetensors")
    (folder / f"{name}-{rank}.txt").write_text("\n".join(metrics))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    run(target, "list", batches(64, 4))  # 16 batches, 8 for each of two processes
    run(target, "loader", shuffled(64, 4))
    run(target, "own", own_batches(64, 4))
