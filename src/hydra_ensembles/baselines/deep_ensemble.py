"""Deep Ensembles by fine-tuning: one model trained several times, frozen parts stored once."""

from dataclasses import replace
from typing import Unpack

from ..batches import Batches
from ..model.ensemble import Ensemble
from ..model.kinds import require_single
from ..training.finetune import finetune
from ..training.loop import TrainOptions, trains
from ..training.recipe import Recipe
from .building_blocks import joined, shared_parts, to_float32, warn_equal


@trains
def deep_ensemble(
    model: Ensemble,
    train: Batches,
    recipe: Recipe,
    members: int = 3,
    validation: Batches | None = None,
    *,
    snapshots: bool = False,
    **run: Unpack[TrainOptions],
) -> Ensemble:
    """Fine-tune one model several times, each with its own order of the data, dropout and classifier.

    Parts that the recipe does not train are the same in all members and stored once: `train_groups=("readout",)` gives
    an ensemble of classifiers at the price of one model, `last_blocks` members above a common trunk. To combine
    separately pretrained models, use `Ensemble.stack`.

    `reinit_classifier="random"` gives every member its own classifier to start from. With `snapshots`, each fine-tuning
    starts from the result of the previous one, with a high learning rate again: a Snapshot Ensemble, for which each run
    may be short. Only the first starts with a new classifier.
    """
    require_single(model, "deep_ensemble")
    trained: list[Ensemble] = []
    start, member_recipe = to_float32(model) if snapshots else model, recipe
    for index in range(members):
        trained.append(finetune(start, train, member_recipe, validation, index=index, **run))
        if snapshots:
            start, member_recipe = trained[-1], replace(recipe, reinit_classifier=None)
    return warn_equal(joined(trained, *shared_parts(model, recipe)).to(model.dtype))
