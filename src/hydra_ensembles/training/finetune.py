"""Fine-tuning of ensembles: of their own weights, or of parameters that some weights are computed from."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from .._utils import derive_seed, evaluation_mode, with_float64
from ..batches import (
    Batches,
    Inputs,
    changed,
    class_names_in,
    labelled,
    read_batch,
    renumbered,
    require_labels,
)
from ..metrics.probabilities import class_logits, log_mean_probs
from ..model.dual_encoder import require_ensemble
from ..model.ensemble import Ensemble
from ..model.metadata import Metadata
from .loop import Job, Learner, RunResult, TrainOptions, train_best, trains
from .recipe import Recipe, trainable_state

LabelledBatch = tuple[Inputs, Tensor]
_DEVIATION = 0.02  # standard deviation of new classifier weights
CLASSIFIERS = ("readout.classifier.", "readout.distillation_classifier.")


class Parametrised(nn.Module):
    """Trains low-rank updates, scales or masks instead of the weights themselves.

    The inner ensemble runs with the computed weights; its own parameters train if they require gradients.
    """

    INNER: ClassVar[str] = "ensemble."  # prefix of the ensemble's parameter names here

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        self.ensemble = ensemble
        self.rates: dict[str, float] = {}  # multiples of the recipe's learning rate, by parameter name, if not 1
        self.spared: frozenset[str] = frozenset()  # names of parameters without weight decay
        self.num_members, self.num_classes = ensemble.num_members, ensemble.num_classes

    @abstractmethod
    def computed(self) -> dict[str, Tensor]:
        """The computed weights, with names and shapes as in the ensemble."""

    def forward(self, inputs: Inputs) -> Tensor:
        """Member logits `[M, B, C]` with the current computed weights, which are computed in full precision."""
        with torch.autocast(self.ensemble.device.type, enabled=False):
            weights = self.computed()
        return functional_call(self.ensemble, weights, (inputs,))

    def prepare(self, inputs: Any) -> Inputs:
        """As `Ensemble.prepare`."""
        return self.ensemble.prepare(inputs)

    @torch.no_grad()
    def whole(self) -> dict[str, Tensor]:
        """All weights of the ensemble, including the computed ones."""
        return {**self.ensemble.state_dict(), **self.computed()}


class EnsembleLearner(Learner[LabelledBatch]):
    """A copy of an ensemble in training: in float32 (or float64), with parameters frozen as the recipe says.

    `arrange` may wrap the copy in a `Parametrised` that computes some of its weights, and freeze more parameters.
    """

    def __init__(
        self,
        start: Ensemble,
        recipe: Recipe,
        device: torch.device,
        index: int,
        arrange: Callable[[Ensemble], Parametrised] | None = None,
    ) -> None:
        copy = Ensemble.from_state(recipe.with_dropout(start.config), trainable_state(start, device))
        generator = torch.Generator().manual_seed(derive_seed(recipe.seed, "classifier", index))
        rates: dict[str, float] = {}
        for name, parameter in copy.named_parameters():
            parameter.requires_grad_(recipe.trains(name, start.num_layers))
            if name.startswith(CLASSIFIERS):
                rates[name] = recipe.classifier_rate
                if recipe.reinit_classifier is not None:
                    nn.init.zeros_(parameter)
                if recipe.reinit_classifier == "random" and name.endswith("weight"):
                    parameter.data.copy_(_DEVIATION * torch.randn(parameter.shape, generator=generator))  # [M, C, d]
        self.model: Ensemble | Parametrised = copy
        spared = frozenset[str]()
        if arrange is not None:
            self.model = arranged = arrange(copy)
            rates = {Parametrised.INNER + name: rate for name, rate in rates.items()} | arranged.rates
            spared = arranged.spared
        super().__init__(self.model, recipe, device, rates, spared)
        self.model.train()

    def read(self, raw: Any, index: int) -> LabelledBatch:
        """Inputs and labels, on the loader's device."""
        inputs, labels = read_batch(raw, "train", index)
        return inputs, require_labels(labels, self.model.num_classes, "train", index)

    def prepared(self, inputs: Inputs) -> Inputs:
        """Inputs as the model expects them."""
        return self.model.prepare(inputs)

    def training_batch(self, inputs: Inputs, labels: Tensor) -> tuple[Inputs, Tensor]:
        """Training inputs of the model, and the target classes of its members, `[M, B]`."""
        return self.prepared(inputs), labels.repeat(self.model.num_members, 1)

    def loss(self, batch: LabelledBatch) -> Tensor:
        """The sum over members of their mean cross-entropy.

        So a parameter of one member gets the same gradient as if the member trained alone.
        """
        prepared, targets = self.training_batch(*batch)
        prepared = changed(prepared, lambda x: x.clone() if x.is_inference() else x)  # autograd rejects them
        with self.autocast():
            logits = class_logits(self.model(prepared))  # [M, B, C]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        # [M·B, C], and [M·B] or [M·B, C]
        flat, classes = logits.flatten(0, 1), targets.to(self.device).flatten(0, 1)
        return F.cross_entropy(flat, classes, label_smoothing=self.recipe.label_smoothing) * len(logits)

    def size(self, batch: LabelledBatch) -> int:
        """Number of labels."""
        return len(batch[1])

    @torch.no_grad()
    def measure(self, validation: Batches) -> tuple[float, float]:
        """Accuracy and NLL of the mean member probabilities."""
        device = with_float64(self.device)
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # correct, NLL, samples
        with evaluation_mode(self.model):
            for _, inputs, labels in labelled(validation, self.model.num_classes, "validation"):
                target = labels.to(device)
                with self.autocast():
                    logits = class_logits(self.model(self.prepared(inputs)))  # [M, B, C]
                log_probs = log_mean_probs(logits.to(device).double())  # [B, C]
                correct = (log_probs.argmax(1) == target).sum()
                nll = -log_probs.gather(1, target[:, None]).sum()
                sums += torch.stack([correct.double(), nll, torch.ones_like(nll) * len(target)])
        correct_sum, nll_sum, samples = sums.tolist()
        return correct_sum / samples, nll_sum / samples


@trains
def finetune(
    member: Ensemble,
    train: Batches,
    recipe: Recipe,
    validation: Batches | None = None,
    *,
    index: int = 0,
    **run: Unpack[TrainOptions],
) -> Ensemble:
    """Train a copy of an ensemble; the input is not changed.

    Its members train together, on the sum of their mean losses, and all of them train what they share. To train
    separate ensembles as members, train them one by one, each with its `index`: random numbers are derived from the
    recipe's seed and the index, so the order of the calls does not matter.

    `train` are batches with labels that can be read repeatedly; images are cropped and mirrored at random only if it
    does so (`data.TrainTransform`). With held-out batches as `validation`, the weights with the best accuracy on them
    are kept (if equal: lower NLL, then earlier), and a learning rate of a grid is chosen in the same way; without, the
    last ones.

    With the folder `output`, whose `member-<index>/` is rewritten `checkpoint_every` updates, a killed run resumes when
    called again with the same arguments, and (on a CPU) gives the same bits; a finished one is read back. Data are
    recognised by their length and first batch. The result is on the device of its input, in evaluation mode, and has
    no calibration.

    Examples:
        >>> recipe = he.Recipe(learning_rate=1e-4, steps=2)
        >>> tuned = he.finetune(he.prune(base, [(5, 0)]), batches, recipe, progress=False)
        >>> tuned.metadata.history[-1].startswith("fine-tuned")
        True
    """
    require_ensemble(member, "finetune", classifies=True)
    job = Job(recipe, train, validation, index=index, **run)
    result = train_classifier(partial(EnsembleLearner, member, recipe, index=index), member, job)
    line = f"fine-tuned {result.described(recipe)}"
    return Ensemble.from_state(member.config, result.state_like(member), trained_metadata(member, train, result, line))


def train_classifier(
    make_learner: Callable[[torch.device], Learner[LabelledBatch]], start: Ensemble, job: Job
) -> RunResult:
    """Check that recipe, model and data fit together, then run `train_best` on a classifier."""
    job.recipe.check(start, job.train, job.validation)
    sets = {"train": job.train, "validation": job.validation}
    return train_best(make_learner, start, replace(job, **renumbered(sets, start.metadata.labels, start.num_classes)))


def trained_metadata(start: Ensemble, train: Batches, result: RunResult, line: str) -> Metadata:
    """Metadata after training: a history line and the best validation; no calibration.

    A model without class names takes those of the data, as other data may number the classes differently.
    """
    best = result.end.best
    metrics = {} if best is None else {"validation/accuracy": best.accuracy, "validation/nll": best.nll}
    labels = start.metadata.labels or class_names_in(train, start.num_classes)
    return start.metadata.after(line, metrics=metrics, labels=labels)


def train_parametrised(
    arrange: Callable[[Ensemble], Parametrised], start: Ensemble, job: Job, line: str, parts: str | None = None
) -> Ensemble:
    """Train a `Parametrised` copy of `start`, then return an ensemble with the final computed weights.

    `line` is the start of the history entry; `parts` says what was trained, if not the groups of the recipe.
    """
    make = partial(EnsembleLearner, start, job.recipe, index=job.index, arrange=arrange)
    result = train_classifier(make, start, job)
    model = arrange(Ensemble.from_state(start.config, trainable_state(start, start.device)))
    unexpected = model.load_state_dict(result.weights, strict=False).unexpected_keys
    assert not unexpected, unexpected  # `arrange` always creates the same parameters
    state = {name: tensor.to(start.dtype) for name, tensor in model.whole().items()}
    metadata = trained_metadata(start, job.train, result, f"{line}: {result.described(job.recipe, parts)}")
    return Ensemble.from_state(start.config, state, metadata)
