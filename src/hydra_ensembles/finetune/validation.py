"""Measuring a model on validation data during training, and deciding when to stop."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from ..batches import Batches, iterate, move, require_labels
from ..errors import DataError
from .runtime import Runtime


@dataclass(frozen=True)
class Evaluation:
    """Accuracy and negative log-likelihood of the mean member probabilities, and when they were measured."""

    step: int
    epoch: int
    accuracy: float
    nll: float

    def better_than(self, other: "Evaluation | None") -> bool:
        """Higher accuracy; where equal, lower NLL. Equal in both, the earlier one stays."""
        return other is None or (self.accuracy, -self.nll) > (other.accuracy, -other.nll)


@dataclass(frozen=True)
class Patience:
    """How many evaluations in a row brought no improvement over `reference`, the last accuracy that did."""

    reference: float = -math.inf
    waited: int = 0

    def after(self, accuracy: float, min_delta: float) -> "Patience":
        """The state after one more evaluation."""
        if accuracy - min_delta > self.reference:
            return Patience(accuracy, 0)
        return Patience(self.reference, self.waited + 1)


def measure(
    model: nn.Module, validation: Batches, classes: int, runtime: Runtime, autocast: torch.dtype | None
) -> tuple[float, float]:
    """Accuracy and NLL of the mean probabilities over all validation batches; processes share the work."""
    device = runtime.device
    dtype = next(model.parameters()).dtype
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # correct, NLL, samples
    training = model.training
    model.eval()
    with torch.no_grad():
        for index, (inputs, labels) in enumerate(iterate(validation, "validation")):
            if index % runtime.processes != runtime.rank:
                continue
            target = require_labels(labels, classes, "validation", index).to(device)
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                logits = model(move(inputs, device, dtype))  # [M, B, C]
            log_probs = logits.double().log_softmax(-1).logsumexp(0) - math.log(logits.shape[0])  # [B, C]
            correct = (log_probs.argmax(1) == target).sum()
            nll = -log_probs.gather(1, target[:, None]).sum()
            sums += torch.stack([correct.double(), nll, torch.tensor(float(len(target)), device=device).double()])
    model.train(training)
    correct_sum, nll_sum, samples = runtime.total(sums).tolist()
    if not samples or not math.isfinite(nll_sum):
        raise DataError(
            f"validation has {samples:.0f} samples and a negative log-likelihood of {nll_sum}; "
            "it needs at least one sample and finite logits"
        )
    return correct_sum / samples, nll_sum / samples
