"""Deep Ensembles by fine-tuning: one model trained several times, with what does not train stored once."""

from dataclasses import replace
from pathlib import Path

import torch

from ..arguments import checked, require_whole
from ..batches import Batches
from ..model.ensemble import Ensemble
from ..training.finetune import finetune
from ..training.recipe import Recipe
from .start import joined, require_single, trained_apart


@checked
@torch.inference_mode(False)
@torch.enable_grad()
def deep_ensemble(
    model: Ensemble,
    train: Batches,
    recipe: Recipe,
    members: int = 3,
    validation: Batches | None = None,
    *,
    snapshots: bool = False,
    output: str | Path | None = None,
    progress: bool = True,
    device: torch.device | str | None = None,
    checkpoint_every: int = 500,
) -> Ensemble:
    """Several fine-tunings of one model, each with an order of the data, dropout and classifier of its own.

    What the recipe does not train is the same in all of them and stored once: with `train_groups=("readout",)` this is
    an ensemble of classifiers at the price of one model, with `last_blocks` one above a common trunk. Models that were
    pretrained apart are put together by `Ensemble.stack`.

    Args:
        model: A classifier with one member; it is not changed.
        train: Batches with labels that can be read again and again.
        recipe: How to train; `reinit_classifier="random"` gives every member a classifier of its own to start from.
        members: How often.
        validation: Held-out batches with labels, as for `finetune`.
        snapshots: Each fine-tuning goes on from where the one before ended, its learning rate high again: a Snapshot
            Ensemble, for which each run may be short. A classifier starts anew in the first alone.
        output: Folder for checkpoints; a run that was killed goes on from there.
        progress: Whether to show a progress bar.
        device: Where to train; None stays on the model's device.
        checkpoint_every: Updates between checkpoints.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles import baselines
        >>> from hydra_ensembles.demo import load_backbone
        >>> batches = [(torch.randn(7, 3, 64, 64), torch.arange(7))]  # or a DataLoader
        >>> recipe = he.Recipe(learning_rate=1e-4, steps=1)
        >>> deep = baselines.deep_ensemble(load_backbone(), batches, recipe, members=2, progress=False)
        >>> deep.num_members
        2
    """
    require_single(model, "deep_ensemble")
    require_whole("members", members, 1)
    found: list[Ensemble] = []
    for index in range(members):
        goes_on = snapshots and index > 0
        found.append(
            finetune(
                found[-1] if goes_on else model,
                train,
                replace(recipe, reinit_classifier=None) if goes_on else recipe,
                validation,
                output=output,
                progress=progress,
                device=device,
                index=index,
                checkpoint_every=checkpoint_every,
            )
        )
    return joined(found, *trained_apart(model, recipe))
