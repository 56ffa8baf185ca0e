"""Tuning the text side of a dual encoder while its image tower is locked (LiT)."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .._utils import derive_seed
from ..batches import Batches, borrowed, require_rereadable
from ..errors import ConfigError
from ..finetune.data_identity import fingerprint
from ..finetune.grid import best_rate, check_choosing
from ..finetune.loop import RunPlan, RunResult
from ..finetune.recipe import Recipe
from ..finetune.runtime import find_runtime
from ..heads.fingerprint import model_fingerprint
from ..model.clip import DualEncoder
from .learner import TextLearner
from .pair_batches import pair_content
from .parameters import Moving


@torch.inference_mode(False)
@torch.enable_grad()
def tune_text(
    dual: DualEncoder,
    train: Batches,
    recipe: Recipe,
    *,
    validation: Batches | None = None,
    train_image_projection: bool = False,
    projection_rate: float = 1.0,
    output: str | Path | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    checkpoint_every: int = 500,
) -> DualEncoder:
    """Train a copy of a dual encoder with one member so that its texts meet its images; the input is untouched.

    The image tower is locked: it gets no gradient and ends with the bits it had. The loss is CLIP's, over all pairs of
    an update; pairs of one class are positives of each other. `Recipe.gradient_accumulation` batches, from every
    process that accelerate or torchrun started, count as one large batch: every image is compared with every text of
    all of them. The logit scale (a logarithm, as CLIP has it) is trained and kept between 0 and log(100); the first
    update moves one from outside to the nearer end.

    `Recipe.train_groups` and `last_blocks` speak of the text tower; the text projection belongs to the group
    `readout`. With `validation`, the weights are kept with which the text nearest to an image is most often of its
    class; a grid of learning rates is decided in the same way.

    With `output`, a run that was killed goes on where it was when called again with the same arguments, and ends
    (on a CPU) with the same bits; see `finetune`.

    Args:
        dual: One member, perhaps pruned in either tower. Tune members one by one and fuse them afterwards.
        train: Batches `(images, texts, labels)` that can be read again and again. Images as `encode_image` takes them,
            or features `[B, d]` computed once by `text_tuning.image_features`; texts as `encode_text` takes them,
            or, where the text tower does not learn, features by `text_tuning.text_features`; labels `[B]` or None, or
            left out: then each pair stands alone.
        recipe: How to train.
        validation: Held-out batches of the same kind.
        train_image_projection: Whether the image projection learns, too; for one that is new.
        projection_rate: Learning rate of image projection and logit scale, over that of the recipe.
        output: Folder for checkpoints and the journal of evaluations.
        device: Where to train; None stays on the encoder's device. The result is where its input was.
        progress: Whether to show a progress bar.
        checkpoint_every: Updates between checkpoints; the ends of epochs and evaluations are saved too.

    Raises:
        ConfigError: More than one member, or a recipe that does not fit.
        DataError: Batches that cannot be used, or a loss that is not finite; the last checkpoint stays.
        CheckpointError: A checkpoint in `output` that belongs to another recipe, model or data.
    """
    _check(dual, recipe, train_image_projection, projection_rate, checkpoint_every)
    check_choosing(recipe, validation)
    require_rereadable(train, "train")
    if validation is not None:
        require_rereadable(validation, "validation")
    moving = Moving(train_image_projection, projection_rate)
    identity: dict[str, Any] = {}
    if output is not None:
        seed = derive_seed(recipe.seed, "fingerprint")
        identity = {
            "task": "text tuning",
            "train": fingerprint(train, "train", seed, pair_content),
            "validation": None if validation is None else fingerprint(validation, "validation", seed, pair_content),
            "model": model_fingerprint(dual),
            "image_projection": moving.image_projection,
            "projection_rate": moving.projection_rate,
        }
    with ExitStack() as loaders:
        for source in (train, () if validation is None else validation):
            loaders.enter_context(borrowed(source))
        runtime = find_runtime(device, dual.device)
        shared = runtime.share(train)
        plan = RunPlan(recipe, 0.0, 0, shared, validation, checkpoint_every, identity, progress)
        learner = partial(TextLearner, dual, recipe, moving, runtime)
        result, rate = best_rate(learner, plan, runtime, None if output is None else Path(output))
    return _result(dual, result, rate, recipe, moving)


def _result(start: DualEncoder, result: RunResult, rate: float, recipe: Recipe, moving: Moving) -> DualEncoder:
    """The trained weights in a new dual encoder like the one at the start, in its dtype and on its device."""
    state = {
        name: result.weights[name].to(tensor.device, tensor.dtype) if name in result.weights else tensor
        for name, tensor in start.state_dict().items()
    }
    where = "" if recipe.last_blocks is None else f" of the last {recipe.last_blocks} blocks"
    also = " and the image projection" if moving.image_projection else ""
    line = (
        f"tuned the text side ({', '.join(recipe.train_groups)}{where}){also} to the locked image tower for "
        f"{result.steps} steps: {recipe.optimizer}, learning rate {rate:g}, seed {recipe.seed}"
    )
    if result.best is not None:
        line += f"; validation accuracy {result.best.accuracy:.4f} at step {result.best.step}"
    text = replace(start.text.metadata, history=(*start.text.metadata.history, line))
    return DualEncoder.from_state(start.config, state, start.image.metadata, text)


def _check(
    dual: DualEncoder, recipe: Recipe, train_image_projection: bool, projection_rate: float, checkpoint_every: int
) -> None:
    if not isinstance(dual, DualEncoder):
        raise ConfigError(
            f"tune_text takes a DualEncoder, got a {type(dual).__name__}; finetune is for ensembles with a classifier"
        )
    if dual.num_members > 1:
        raise ConfigError(
            f"this dual encoder has {dual.num_members} members; tune them one by one, "
            "[tune_text(dual.member(index), ...) for each index], and fuse the results"
        )
    if train_image_projection and dual.projections.image is None:
        raise ConfigError("train_image_projection is true, but this dual encoder has no image projection to train")
    if recipe.reinit_classifier is not None or recipe.classifier_rate != 1.0:
        raise ConfigError(
            f"Recipe.reinit_classifier is {recipe.reinit_classifier!r} and classifier_rate {recipe.classifier_rate}, "
            "but a dual encoder has no classifier; leave them None and 1, and see projection_rate"
        )
    if not projection_rate > 0 or checkpoint_every < 1:
        raise ConfigError(
            f"projection_rate must be positive and checkpoint_every at least 1, got {projection_rate} and "
            f"{checkpoint_every}"
        )
