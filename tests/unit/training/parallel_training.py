"""One of several processes that train together: parallel_training.py FOLDER, as torchrun starts it."""

import dataclasses
import os
import sys
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from training_cases import batches, pairs, shuffled, tiny, tiny_dual

from hydra_ensembles.baselines.lora import LoRA, lora_ensemble
from hydra_ensembles.errors import DataError
from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.recipe import Recipe
from hydra_ensembles.training.text import tune_text

TEXT = Recipe(
    optimizer="sgd", learning_rate=0.05, epochs=2, schedule="constant", gradient_accumulation=2, clip_norm=1.0
)
RECIPE = dataclasses.replace(TEXT, epochs=None, steps=3, evaluate_every=2)
LOW_RANK = LoRA(members=2, rank=2, training="together")


def uneven(labelled: bool = True):
    """Batches of 6, 6, 7 and 5 pairs: what two processes read differs in size, and perhaps in having labels."""
    images, texts, labels = pairs(24, 24, dtype=torch.float64)[0]
    cuts = enumerate(pairwise((0, 6, 12, 19, 24)))
    return [(images[a:b], texts[a:b], labels[a:b] if labelled or not number % 2 else None) for number, (a, b) in cuts]


def tune(labelled: bool = True):
    dual = tiny_dual(dtype=torch.float64)
    return tune_text(dual, uneven(labelled), TEXT, train_image_projection=True, device="cpu", progress=False)


def train_all(folder: Path) -> None:
    rank = os.environ["RANK"]
    for name, source in (("list", batches(32, 4)), ("loader", shuffled(32, 4))):
        trained = finetune(tiny(), source, RECIPE, batches(20, 7), output=folder / name, device="cpu", progress=False)
        save_file(trained.state_dict(), folder / f"{name}-{rank}.safetensors")
        (folder / f"{name}-{rank}.txt").write_text(repr(dict(trained.metadata.metrics)))
    apart = lora_ensemble(tiny(), batches(32, 4), RECIPE, LOW_RANK, device="cpu", progress=False)
    save_file(apart.state_dict(), folder / f"lora-{rank}.safetensors")
    save_file(tune().state_dict(), folder / f"text-{rank}.safetensors")
    try:
        tune(labelled=False)
    except DataError as error:
        (folder / f"refused-{rank}.txt").write_text(str(error))


if __name__ == "__main__":
    train_all(Path(sys.argv[1]))
