"""Fine-tuning of members."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._utils import derive_seed, torch_seeded
from ..batches import Batches, Inputs, borrowed, changed, move, read_batch, require_labels, require_rereadable
from ..errors import ConfigError
from ..heads.ranking import model_fingerprint
from ..model.clip import require_ensemble
from ..model.config import require_whole
from ..model.ensemble import Ensemble
from ..model.members import are_several
from ..schema import to_plain
from .loop import (
    BaseLearner,
    BatchT,
    NotFiniteError,
    Run,
    RunPlan,
    RunResult,
    Runtime,
    Store,
    find_runtime,
    fingerprint,
    measure,
)
from .recipe import Recipe, make_optimizer, trained_parameters, training_copy

Batch = tuple[Inputs, Tensor]


def ensemble_loss(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sum over members of their mean cross-entropy, for logits `[M, B, C]` and labels `[B]`.

    A sum, so that a parameter of one member gets the gradient it would get if the member trained alone.
    """
    members = logits.shape[0]
    flat = logits.flatten(0, 1)  # [M·B, C]
    return F.cross_entropy(flat, labels.repeat(members), label_smoothing=label_smoothing) * members


class Learner(BaseLearner[Batch]):
    """A copy of an ensemble in training."""

    def __init__(self, start: Ensemble, recipe: Recipe, runtime: Runtime) -> None:
        self.model = training_copy(start, recipe, runtime.device)
        super().__init__(trained_parameters(self.model), make_optimizer(self.model, recipe), recipe, runtime)
        self.parallel: nn.Module = self.model

    def begin(self) -> None:
        """Get ready to train, after the weights are in place."""
        self.parallel = self.runtime.wrap(self.model)
        self.parallel.train()

    def read(self, raw: Any, index: int) -> Batch:
        """Inputs and labels, still where the loader put them."""
        inputs, labels = read_batch(raw, "train", index)
        return inputs, require_labels(labels, self.model.num_classes, "train", index)

    def update(self, group: list[Batch], rate: float, seed: int) -> float:
        """One step on batches whose gradients are added up, each weighted by its share of the samples."""
        self.set_rate(rate)
        samples = sum(len(labels) for _, labels in group)
        losses = []
        for index, (inputs, labels) in enumerate(group):
            weight = len(labels) / samples
            with torch_seeded(derive_seed(seed, index, self.runtime.rank), self.runtime.device):
                if index + 1 < len(group):
                    with self.runtime.without_exchange(self.parallel):
                        losses.append(self._backward(inputs, labels, weight, index))
                else:
                    losses.append(self._backward(inputs, labels, weight, index))
        self.step()
        return math.fsum(losses)

    def measure(self, validation: Batches) -> tuple[float, float]:
        """Accuracy and NLL of the mean member probabilities."""
        return measure(self.model, validation, self.model.num_classes, self.runtime, self.autocast)

    def _backward(self, inputs: Inputs, labels: Tensor, weight: float, index: int) -> float:
        device = self.runtime.device
        with torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None):
            moved = changed(move(inputs, device, self.model.dtype), _for_gradients)
            logits = self.parallel(moved)  # [M, B, C]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        loss = ensemble_loss(logits, labels.to(device), self.recipe.label_smoothing)
        value = loss.item()
        if not math.isfinite(value):
            raise NotFiniteError(f"the loss is {value}", index)
        self.scaler.scale(loss * weight).backward()
        return value * weight


def _for_gradients(tensor: Tensor) -> Tensor:
    """A tensor that gradients can be taken through: a copy of one that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def best_rate(
    make_learner: Callable[[], BaseLearner[BatchT]], plan: RunPlan, runtime: Runtime, folder: Path | None
) -> tuple[RunResult, float]:
    """Train once per learning rate of the recipe; the best result and its rate."""
    recipe = plan.recipe
    best: tuple[RunResult, float] | None = None
    for rate in sorted(recipe.rates):
        store = Store(None if folder is None else folder / f"rate-{rate!r}")
        identity = {
            **plan.fingerprint,
            "recipe": to_plain(recipe),
            "rate": rate,
            "member": plan.index,
            "processes": runtime.processes,
        }
        result = Run(make_learner, replace(plan, rate=rate, fingerprint=identity), runtime, store).finish()
        if best is None or (result.best is not None and result.best.better_than(best[0].best)):
            best = result, rate
    if best is None:
        raise ConfigError("the recipe has no learning rate")
    return best


def check_choosing(recipe: Recipe, validation: Batches | None) -> None:
    """Refuse a recipe that chooses or stops by validation where there is none."""
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"recipe must be a Recipe, such as Recipe.preset('sst2'), got {type(recipe).__name__}")
    if validation is None and len(recipe.grid) > 1:
        raise ConfigError(
            f"the recipe tries {len(recipe.grid)} learning rates {recipe.grid}, which needs validation data to choose "
            "by; give validation=, or one rate: dataclasses.replace(recipe, grid=(), learning_rate=...)"
        )
    if validation is None and recipe.patience is not None:
        raise ConfigError(
            f"the recipe stops early (patience={recipe.patience}), which needs validation data; give validation=, or "
            "set patience=None"
        )


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
