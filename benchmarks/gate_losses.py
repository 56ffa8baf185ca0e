"""The loss of an ensemble as a function of gates on its heads: value, gradient and Hessian.

A gate multiplies a head's part of the output projection: 1 is the model as it is, 0 the model without the head. Pruning
a set of heads is the step from 1 to 0 in their gates, so this small gradient and Hessian are all that a second-order
statement about pruning whole heads needs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hydra_ensembles as he

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Expansion:
    """A mean loss around the whole model: value, gradient `[L·H]` and Hessian `[L·H, L·H]` in the gates, float64."""

    value: float
    gradient: Tensor
    hessian: Tensor


@dataclass(frozen=True)
class Quality:
    """Means over samples: cross-entropy, share of right answers, largest probability."""

    loss: float
    accuracy: float
    confidence: float


def gated_logits(model: he.Ensemble, gates: Tensor, inputs: Tensor) -> Tensor:
    """Logits `[B, C]` with gates `[L, H]` on the heads of a model with one member, none pruned."""
    weights = {
        f"encoder.layers.{layer}.attention.out": model.get_parameter(f"encoder.layers.{layer}.attention.out").detach()
        * gates[layer, :, None, None]  # [H, d_k, d]
        for layer in range(model.num_layers)
    }
    logits: Tensor = functional_call(model, weights, (inputs,))[0]  # [1, B, C] -> [B, C]
    return logits


def measure(model: he.Ensemble, gates: Tensor, batches: Iterable[Batch]) -> Quality:
    """What a model with these gates answers."""
    sums, samples = torch.zeros(3, dtype=torch.float64), 0
    with torch.no_grad():
        for inputs, labels in batches:
            logits = gated_logits(model, gates, inputs).double()
            confidence, label = logits.softmax(-1).max(-1)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            sums += torch.stack([loss, (label == labels).sum(), confidence.sum()])
            samples += len(labels)
    return Quality(*(sums / samples).tolist())


def expand(model: he.Ensemble, batches: Iterable[Batch]) -> Expansion:
    """Value, gradient and Hessian of the mean loss at the whole model."""
    count = model.num_layers * model.num_heads
    value, samples = 0.0, 0
    gradient = torch.zeros(count, dtype=torch.float64)
    hessian = torch.zeros(count, count, dtype=torch.float64)
    for inputs, labels in batches:
        gates = torch.ones(model.num_layers, model.num_heads, dtype=model.dtype, requires_grad=True)
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be differentiated twice
            loss = F.cross_entropy(gated_logits(model, gates, inputs), labels, reduction="sum")
            (slope,) = torch.autograd.grad(loss, gates, create_graph=True)
            flat = slope.flatten()
            rows = [torch.autograd.grad(flat[row], gates, retain_graph=True)[0].flatten() for row in range(count)]
        value += loss.item()
        gradient += flat.detach().double()
        hessian += torch.stack(rows).double()
        samples += len(labels)
    hessian = (hessian + hessian.T) / 2  # symmetric but for rounding
    return Expansion(value / samples, gradient / samples, hessian / samples)


def pruning_step(model: he.Ensemble, heads: Sequence[he.Head]) -> Tensor:
    """The step `[L·H]` in the gates that takes these heads out."""
    step = torch.zeros(model.num_layers, model.num_heads, dtype=torch.float64)
    for head in heads:
        step[head.layer, head.head] = -1.0
    return step.flatten()


def gates_after(model: he.Ensemble, step: Tensor, share: float = 1.0) -> Tensor:
    """Gates `[L, H]` after a share of a step."""
    return (1.0 + share * step).reshape(model.num_layers, model.num_heads).to(model.dtype)
