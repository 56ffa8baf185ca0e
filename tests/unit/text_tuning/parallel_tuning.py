"""One of several processes that tune together: python parallel_tuning.py FOLDER [some], with torchrun's variables set.

With `some`, only the first process has labels.
"""

import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tuning_cases import Batch, pairs, tiny_dual

from hydra_ensembles.training.recipe import Recipe
from hydra_ensembles.training.text import tune_text

RECIPE = Recipe(
    optimizer="sgd", learning_rate=0.05, epochs=2, schedule="constant", gradient_accumulation=2, clip_norm=1.0
)


def uneven() -> list[Batch]:
    """Batches of 6, 6, 7 and 5 pairs: what the two processes read differs in size."""
    whole = pairs(24, 24, dtype=torch.float64)[0]
    cuts = (0, 6, 12, 19, 24)
    return [(whole[0][a:b], whole[1][a:b], whole[2][a:b]) for a, b in pairwise(cuts)]


def partly_labelled() -> list[Any]:
    """The same; every other batch, those of the second process, without labels."""
    return [batch[:2] if index % 2 else batch for index, batch in enumerate(uneven())]


if __name__ == "__main__":
    batches = partly_labelled() if "some" in sys.argv else uneven()
    tuned = tune_text(
        tiny_dual(dtype=torch.float64), batches, RECIPE, train_image_projection=True, device="cpu", progress=False
    )
    save_file(tuned.state_dict(), Path(sys.argv[1]) / f"tuned-{os.environ['RANK']}.safetensors")
