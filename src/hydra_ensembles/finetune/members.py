"""Fine-tuning one ensemble, or many members in one call."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast, overload

import torch

from .._utils import derive_seed
from ..batches import Batches, borrowed, require_rereadable
from ..errors import ConfigError
from ..heads.fingerprint import model_fingerprint
from ..model.clip import require_ensemble
from ..model.config import require_whole
from ..model.ensemble import Ensemble
from ..model.members import are_several
from .data_identity import fingerprint
from .grid import best_rate, check_choosing
from .learner import Learner
from .loop import RunPlan, RunResult
from .recipe import Recipe
from .runtime import Runtime, find_runtime


@overload
def finetune(
    member: Ensemble,
    train: Batches,
    recipe: Recipe,
    validation: Batches | None = ...,
    *,
    output: str | Path | None = ...,
    progress: bool = ...,
    device: torch.device | str | None = ...,
    index: int = ...,
    checkpoint_every: int = ...,
) -> Ensemble: ...


@overload
def finetune(
    member: Iterable[Ensemble],
    train: Batches,
    recipe: Recipe,
    validation: Batches | None = ...,
    *,
    output: str | Path | None = ...,
    progress: bool = ...,
    device: torch.device | str | None = ...,
    index: int = ...,
    checkpoint_every: int = ...,
) -> list[Ensemble]: ...


@torch.inference_mode(False)
@torch.enable_grad()
def finetune(
    member: Ensemble | Iterable[Ensemble],
    train: Batches,
    recipe: Recipe,
    validation: Batches | None = None,
    *,
    output: str | Path | None = None,
    progress: bool = True,
    device: torch.device | str | None = None,
    index: int = 0,
    checkpoint_every: int = 500,
) -> Ensemble | list[Ensemble]:
    """Train copies of one ensemble or of several, each on its own; the inputs are untouched.

    The members of one ensemble train together, on the sum of their mean losses: what they share is moved by all
    of them. Ensembles in a sequence train one after another, and every one of them has random numbers of its own,
    derived from the recipe's seed and its number. So `finetune(members, …)[2]` is what
    `finetune(members[2], …, index=2)` gives, whatever ran before.

    With `validation`, the weights with the best validation accuracy are kept (equal: lower NLL, then earlier);
    without, the last ones. A grid of learning rates needs it, and the rate is chosen in the same way (equal: the
    smaller rate).

    With `output`, a run that was killed goes on where it was when called again with the same arguments, and ends
    (on a CPU) with the same bits. How the order of a shuffling loader is reproduced is told in `reading_order`;
    batches before the checkpoint are read again and dropped. A finished run is read back instead of repeated.
    Data are known again by their length, their first batch, and all labels where the source has them in memory
    (`labels` or `targets` of a data set, a `TensorDataset`, a list); other changes of the data go unnoticed, so give
    another `output` after them.

    Started in several processes (accelerate launch, torchrun), they share the batches and average gradients. It
    may be called inside `torch.no_grad()` and `torch.inference_mode()`.

    Args:
        member: An ensemble, or several in a list or another iterable.
        train: Batches with labels that can be read again and again: a DataLoader, or a list of batches.
        recipe: How to train.
        validation: Held-out batches with labels.
        output: Folder for checkpoints and the journal of evaluations, `member-<index>/rate-<rate>/`.
        progress: Whether to show a progress bar.
        device: Where to train; None stays on the ensemble's device. The result is where its input was.
        index: Number of the (first) member.
        checkpoint_every: Updates between checkpoints; the ends of epochs and evaluations are saved too.

    Returns:
        New ensembles in evaluation mode, one or a list as given. Their calibration is dropped.

    Raises:
        ConfigError: A recipe that does not fit the model or the data.
        DataError: Batches that cannot be used, or a loss that is not finite; the last checkpoint stays.
        CheckpointError: A checkpoint in `output` that belongs to another recipe, model or data.
    """
    members: list[Ensemble] = list(member) if are_several(member) else [cast(Ensemble, member)]
    _check(members, train, recipe, validation, index, checkpoint_every)
    runtime = find_runtime(device, members[0].device)
    data: dict[str, Any] = {}
    if output is not None:
        seed = derive_seed(recipe.seed, "fingerprint")
        data["train"] = fingerprint(train, "train", seed)
        data["validation"] = None if validation is None else fingerprint(validation, "validation", seed)
    trained = []
    with ExitStack() as loaders:
        for source in (train, () if validation is None else validation):
            loaders.enter_context(borrowed(source))
        shared = runtime.share(train)
        for number, one in enumerate(members, start=index):
            place = runtime if device is not None or runtime.processes > 1 else Runtime(one.device)
            folder = None if output is None else Path(output) / f"member-{number}"
            identity = {**data, "model": model_fingerprint(one)} if output is not None else {}
            plan = RunPlan(recipe, 0.0, number, shared, validation, checkpoint_every, identity, progress)
            learner = partial(Learner, one, recipe, place)
            trained.append(_result(one, *best_rate(learner, plan, place, folder), recipe))
    return trained[0] if isinstance(member, Ensemble) else trained


def _result(start: Ensemble, result: RunResult, rate: float, recipe: Recipe) -> Ensemble:
    """The trained weights in a new ensemble like the one at the start, in its dtype and on its device."""
    state = {
        name: result.weights[name].to(tensor.device, tensor.dtype) if name in result.weights else tensor
        for name, tensor in start.state_dict().items()
    }
    chosen = f", chosen of {len(recipe.grid)}" if recipe.grid else ""
    where = "" if recipe.last_blocks is None else f" of the last {recipe.last_blocks} blocks"
    line = (
        f"fine-tuned {', '.join(recipe.train_groups)}{where} for {result.steps} steps: {recipe.optimizer}, "
        f"learning rate {rate:g}{chosen}, seed {recipe.seed}"
    )
    metrics: Mapping[str, float] = {}
    if result.best is not None:
        line += f"; validation accuracy {result.best.accuracy:.4f} at step {result.best.step}"
        metrics = {"validation/accuracy": result.best.accuracy, "validation/nll": result.best.nll}
    history = (*start.metadata.history, line)
    metadata = replace(start.metadata, history=history, calibration=None, metrics=metrics)
    return Ensemble.from_state(start.config, state, metadata)


def _check(
    members: Sequence[Ensemble],
    train: Batches,
    recipe: Recipe,
    validation: Batches | None,
    index: int,
    checkpoint_every: int,
) -> None:
    if not members:
        raise ConfigError("finetune needs at least one ensemble, got an empty sequence")
    for member in members:
        require_ensemble(member, "finetune")
    require_rereadable(train, "train")
    if validation is not None:
        require_rereadable(validation, "validation")
    check_choosing(recipe, validation)
    require_whole("index", index, 0)
    require_whole("checkpoint_every", checkpoint_every, 1)
