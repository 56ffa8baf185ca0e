"""What learns: the model, its optimizer and its gradient scaler, moved by one update at a time."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from ..batches import Inputs, move
from ..ensemble import Ensemble
from ..randomness import derive_seed, torch_seeded
from .checkpoints import optimizer_tensors, restore_optimizer
from .parameters import make_optimizer, trained_parameters, training_copy
from .recipe import Recipe
from .runtime import Runtime

Batch = tuple[Inputs, Tensor]
_AUTOCAST: Mapping[str, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class NotFiniteError(ArithmeticError):
    """A loss or a gradient that is not finite; `batch` is its place among the batches of the update."""

    def __init__(self, what: str, batch: int) -> None:
        super().__init__(what)
        self.what, self.batch = what, batch


def ensemble_loss(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sum over members of their mean cross-entropy, for logits `[M, B, C]` and labels `[B]`.

    A sum, so that a parameter of one member gets the gradient it would get if the member trained alone.
    """
    members = logits.shape[0]
    flat = logits.flatten(0, 1)  # [M·B, C]
    return F.cross_entropy(flat, labels.repeat(members), label_smoothing=label_smoothing) * members


class Learner:
    """A copy of an ensemble in training."""

    def __init__(self, start: Ensemble, recipe: Recipe, runtime: Runtime) -> None:
        self.recipe, self.runtime = recipe, runtime
        self.model = training_copy(start, recipe, runtime.device)
        self.trained = trained_parameters(self.model)
        self.optimizer = make_optimizer(self.model, recipe)
        self.scaler = GradScaler(runtime.device.type, enabled=recipe.precision == "fp16")
        self.autocast = _AUTOCAST[recipe.precision]
        self.parallel: nn.Module = self.model

    def begin(self) -> None:
        """Get ready to train, after the weights are in place."""
        self.parallel = self.runtime.wrap(self.model)
        self.parallel.train()

    def update(self, group: list[Batch], rate: float, seed: int) -> float:
        """One step of the optimizer on one or more batches at once; gives the mean loss over their samples.

        Args:
            group: Batches whose gradients are added up, each weighted by its share of the samples.
            rate: Learning rate.
            seed: Of the dropout of this update; every process draws its own.
        """
        for options in self.optimizer.param_groups:
            options["lr"] = rate
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
        self._step()
        return math.fsum(losses)

    def _backward(self, inputs: Inputs, labels: Tensor, weight: float, index: int) -> float:
        device = self.runtime.device
        with torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None):
            logits = self.parallel(move(inputs, device, self.model.dtype))  # [M, B, C]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        loss = ensemble_loss(logits, labels.to(device), self.recipe.label_smoothing)
        value = loss.item()
        if not math.isfinite(value):
            raise NotFiniteError(f"the loss is {value}", index)
        self.scaler.scale(loss * weight).backward()
        return value * weight

    def _step(self) -> None:
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
