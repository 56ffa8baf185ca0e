"""A classifier that learns, moved by one update at a time."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._utils import derive_seed, torch_seeded
from ..batches import Batches, Inputs, changed, move, read_batch, require_labels
from ..model.ensemble import Ensemble
from .base_learner import BaseLearner, NotFiniteError
from .parameters import make_optimizer, trained_parameters, training_copy
from .recipe import Recipe
from .runtime import Runtime
from .validation import measure

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
