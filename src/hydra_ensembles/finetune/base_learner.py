"""What every training has: an optimizer over some parameters, a gradient scaler, and their state to save."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ..batches import Batches
from .checkpoints import optimizer_tensors, restore_optimizer
from .parameters import RATE_FACTOR
from .recipe import Recipe
from .runtime import Runtime

BatchT = TypeVar("BatchT")
_AUTOCAST: Mapping[str, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class NotFiniteError(ArithmeticError):
    """A loss or a gradient that is not finite; `batch` is its place among the batches of the update."""

    def __init__(self, what: str, batch: int) -> None:
        super().__init__(what)
        self.what, self.batch = what, batch


class BaseLearner(ABC, Generic[BatchT]):
    """A model in training. Subclasses say what a batch is, what its loss is, and how the model is measured."""

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        runtime: Runtime,
    ) -> None:
        self.recipe, self.runtime = recipe, runtime
        self.trained, self.optimizer = dict(trained), optimizer
        self.scaler = GradScaler(runtime.device.type, enabled=recipe.precision == "fp16")
        self.autocast = _AUTOCAST[recipe.precision]

    @abstractmethod
    def begin(self) -> None:
        """Get ready to train, after the weights are in place."""

    @abstractmethod
    def read(self, raw: Any, index: int) -> BatchT:
        """A batch of the training data, checked; `index` is its number, for messages."""

    @abstractmethod
    def update(self, group: list[BatchT], rate: float, seed: int) -> float:
        """One step of the optimizer on one or more batches at once; gives the mean loss over their samples.

        Args:
            group: Batches that count as one.
            rate: Learning rate.
            seed: Of the dropout of this update; every process draws its own.
        """

    @abstractmethod
    def measure(self, validation: Batches) -> tuple[float, float]:
        """Accuracy and negative log-likelihood on validation data."""

    def set_rate(self, rate: float) -> None:
        """Give every group of parameters its learning rate."""
        for options in self.optimizer.param_groups:
            options["lr"] = rate * options.get(RATE_FACTOR, 1.0)

    def step(self) -> None:
        """Clip and apply the gradients, then forget them."""
        self.scaler.unscale_(self.optimizer)
        gradients = [parameter.grad for parameter in self.trained.values() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if not self.scaler.is_enabled() and not math.isfinite(norm.item()):  # the scaler skips such steps itself
            raise NotFiniteError(f"the gradient has norm {norm.item()}", 0)
        if self.recipe.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self.trained.values(), self.recipe.clip_norm, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Tensor]:
        """A copy of the trained parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything to save: weights, what the optimizer keeps, and the scaler."""
        tensors: dict[str, Tensor] = {f"weights/{name}": parameter for name, parameter in self.trained.items()}
        kept = optimizer_tensors(self.optimizer, self.trained)
        tensors |= {f"optimizer/{name}": value for name, value in kept.items()}
        if self.scaler.is_enabled():
            state = self.scaler.state_dict()
            tensors["scaler/scale"] = torch.tensor(state["scale"], dtype=torch.float64)
            tensors["scaler/growth_tracker"] = torch.tensor(state["_growth_tracker"])
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(tensors[f"weights/{name}"])
        kept = {name.removeprefix("optimizer/"): value for name, value in tensors.items()}
        restore_optimizer(self.optimizer, self.trained, kept)
        if self.scaler.is_enabled():
            scale = {
                "scale": tensors["scaler/scale"].item(),
                "_growth_tracker": tensors["scaler/growth_tracker"].item(),
            }
            self.scaler.load_state_dict({**self.scaler.state_dict(), **scale})
