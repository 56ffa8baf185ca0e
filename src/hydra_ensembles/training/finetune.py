"""Fine-tuning of members."""

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from .._utils import derive_seed, evaluation_mode, torch_seeded
from ..batches import Batches, Inputs, borrowed, changed, iterate, move, read_batch, require_labels
from ..errors import ConfigError, DataError
from ..heads.ranking import model_fingerprint
from ..model.clip import require_ensemble
from ..model.config import require_whole
from ..model.ensemble import Ensemble
from ..model.members import are_several
from .loop import Job, Learner, RunResult, Runtime, check_job, require_finite_loss, train_best, training_runtime
from .recipe import Recipe, trainable_state
from .reproducible import data_identity

Batch = tuple[Inputs, Tensor]
_CLASSIFIERS = ("readout.classifier.", "readout.distillation_classifier.")


def ensemble_loss(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sum over members of their mean cross-entropy, for logits `[M, B, C]` and labels `[B]`.

    A sum, so that a parameter of one member gets the gradient it would get if the member trained alone.
    """
    members = logits.shape[0]
    flat = logits.flatten(0, 1)  # [M·B, C]
    return F.cross_entropy(flat, labels.repeat(members), label_smoothing=label_smoothing) * members


class EnsembleLearner(Learner[Batch]):
    """A copy of an ensemble in training: in float32 (or float64), frozen where the recipe says."""

    def __init__(self, start: Ensemble, recipe: Recipe, runtime: Runtime) -> None:
        self.model = Ensemble.from_state(recipe.with_dropout(start.config), trainable_state(start, runtime.device))
        if recipe.reinit_classifier == "zeros":
            for classifier in (self.model.readout.classifier, self.model.readout.distillation_classifier):
                for parameter in () if classifier is None else classifier.parameters():
                    nn.init.zeros_(parameter)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(recipe.trains(name, start.num_layers))
        classifier_names = (name for name, _ in self.model.named_parameters() if name.startswith(_CLASSIFIERS))
        super().__init__(self.model, recipe, runtime, dict.fromkeys(classifier_names, recipe.classifier_rate))
        self.parallel = runtime.wrap(self.model).train()

    def read(self, raw: Any, index: int) -> Batch:
        """Inputs and labels, still where the loader put them."""
        inputs, labels = read_batch(raw, "train", index)
        return inputs, require_labels(labels, self.model.num_classes, "train", index)

    def backward(self, group: list[Batch], seed: int) -> float:
        """Add up the gradients of the batches, each weighted by its share of the samples."""
        device, samples = self.runtime.device, sum(len(labels) for _, labels in group)
        losses = []
        for index, (inputs, labels) in enumerate(group):
            wrapped, last = self.parallel, index + 1 == len(group)
            kept = nullcontext() if last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync()
            with kept, torch_seeded(derive_seed(seed, index, self.runtime.ranks.rank), device):  # exchanged at the last
                with self.autocast():
                    logits = self.parallel(changed(move(inputs, device, self.model.dtype), _for_gradients))  # [M, B, C]
                logits = logits if logits.dtype == torch.float64 else logits.float()
                loss = ensemble_loss(logits, labels.to(device), self.recipe.label_smoothing)
                weight = len(labels) / samples
                losses.append(require_finite_loss(loss, index) * weight)
                self.scaler.scale(loss * weight).backward()
        return math.fsum(losses)

    @torch.no_grad()
    def measure(self, validation: Batches) -> tuple[float, float]:
        """Accuracy and NLL of the mean member probabilities; ranks share the batches."""
        device, ranks = self.runtime.device, self.runtime.ranks
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # correct, NLL, samples
        with evaluation_mode(self.model):
            for index, (inputs, labels) in enumerate(iterate(validation, "validation")):
                if index % ranks.size != ranks.rank:
                    continue
                target = require_labels(labels, self.model.num_classes, "validation", index).to(device)
                with self.autocast():
                    logits = self.model(move(inputs, device, self.model.dtype))  # [M, B, C]
                log_probs = logits.double().log_softmax(-1).logsumexp(0) - math.log(logits.shape[0])  # [B, C]
                correct = (log_probs.argmax(1) == target).sum()
                nll = -log_probs.gather(1, target[:, None]).sum()
                sums += torch.stack([correct.double(), nll, torch.ones_like(nll) * len(target)])
        correct_sum, nll_sum, samples = ranks.total(sums).tolist()
        if not samples or not math.isfinite(nll_sum):
            raise DataError(
                f"validation has {samples:.0f} samples and a negative log-likelihood of {nll_sum}; "
                "it needs at least one sample and finite logits"
            )
        return correct_sum / samples, nll_sum / samples


def _for_gradients(tensor: Tensor) -> Tensor:
    """A tensor that gradients can be taken through: a copy of one that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


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
    (on a CPU) with the same bits: batches before the checkpoint are read again, in the same order, and dropped. A
    finished run is read back instead of repeated.
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
    if not members:
        raise ConfigError("finetune needs at least one ensemble, got an empty sequence")
    check_job(train, validation, recipe, checkpoint_every)
    require_whole("index", index, 0)
    for one in members:
        require_ensemble(one, "finetune")
        if not one.num_classes:
            raise ConfigError("fine-tuning needs a classifier, but this ensemble has none (num_classes is 0)")
        recipe.check(one, train, validation)
    data = {} if output is None else data_identity(train, validation, recipe.seed)
    trained = []
    with borrowed(train, validation), training_runtime(device, members[0].device) as runtime:
        for number, one in enumerate(members, start=index):
            alone = device is None and runtime.ranks.size == 1
            place = Runtime(one.device) if alone else runtime
            folder = None if output is None else Path(output) / f"member-{number}"
            identity = {} if output is None else {**data, "model": model_fingerprint(one)}
            job = Job(recipe, place.share(train), validation, number, folder, identity, checkpoint_every, progress)
            trained.append(_result(one, train_best(partial(EnsembleLearner, one, recipe, place), job, place), recipe))
    return trained[0] if isinstance(member, Ensemble) else trained


def _result(start: Ensemble, result: RunResult, recipe: Recipe) -> Ensemble:
    """The trained weights in a new ensemble like the one at the start."""
    best = result.best
    metadata = replace(
        start.metadata,
        history=(*start.metadata.history, f"fine-tuned {result.described(recipe)}"),
        calibration=None,
        metrics={} if best is None else {"validation/accuracy": best.accuracy, "validation/nll": best.nll},
    )
    return Ensemble.from_state(start.config, result.state_like(start), metadata)
