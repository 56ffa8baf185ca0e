"""Second-order expansion of the loss around a model, in gates on its heads and in its attention weights.

A gate multiplies a head's part of the output projection: 1 is the unchanged model, 0 the model without the head.
Pruning a set of heads is a step from 1 to 0 in their gates, so the gradient and Hessian in the gates are all that a
second-order statement about pruning whole heads needs. In weights, the same step zeroes all weights of the heads.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hydra_ensembles as he
from hydra_ensembles.heads.masking import attention_of, working_copy

Batch = tuple[Any, Tensor]
Batches = Sequence[Batch]


@dataclass(frozen=True)
class Expansion:
    """The mean loss around the whole model: value, gradient `[L·H]` and Hessian `[L·H, L·H]` in the gates, float64."""

    value: float
    gradient: Tensor
    hessian: Tensor

    def second_order(self, steps: Tensor) -> Tensor:
        """Half the curvature along steps `[..., L·H]`."""
        return (steps @ self.hessian * steps).sum(-1) / 2


def gated_logits(model: he.Ensemble, gates: Tensor, inputs: Any) -> Tensor:
    """Logits `[B, C]` with gates `[L, H]` on the heads of an unpruned model with one member."""
    names = [f"encoder.layers.{layer}.attention.out" for layer in range(model.num_layers)]
    weights = {
        name: model.get_parameter(name).detach() * gates[layer, :, None, None]  # [H, d_k, d]
        for layer, name in enumerate(names)
    }
    return functional_call(model, weights, (inputs,))[0]  # [1, B, C] -> [B, C]


def measure(model: he.Ensemble, gates: Tensor, batches: Iterable[Batch]) -> dict[str, float]:
    """Mean loss, accuracy and mean confidence of a model with these gates."""
    sums = torch.zeros(3, dtype=torch.float64)
    samples = 0
    with torch.no_grad():
        for inputs, labels in batches:
            logits = gated_logits(model, gates, inputs).double()
            confidence, label = logits.softmax(-1).max(-1)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            sums += torch.stack([loss, (label == labels).sum(), confidence.sum()]).cpu()
            samples += len(labels)
    return dict(zip(("loss", "accuracy", "confidence"), (sums / samples).tolist(), strict=True))


def expand(model: he.Ensemble, batches: Iterable[Batch]) -> Expansion:
    """Value, gradient and Hessian of the mean loss at the whole model."""
    count = model.num_layers * model.num_heads
    value, samples = 0.0, 0
    gradient, hessian = torch.zeros(count, dtype=torch.float64), torch.zeros(count, count, dtype=torch.float64)
    for inputs, labels in batches:
        shape = (model.num_layers, model.num_heads)
        gates = torch.ones(shape, dtype=model.dtype, device=model.device, requires_grad=True)
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be differentiated twice
            loss = F.cross_entropy(gated_logits(model, gates, inputs), labels, reduction="sum")
            (slope,) = torch.autograd.grad(loss, gates, create_graph=True)
            flat = slope.flatten()
            rows = [torch.autograd.grad(flat[row], gates, retain_graph=True)[0].flatten() for row in range(count)]
        value += loss.item()
        gradient += flat.detach().double().cpu()
        hessian += torch.stack(rows).double().cpu()
        samples += len(labels)
    hessian = (hessian + hessian.T) / 2  # symmetric except for rounding
    return Expansion(value / samples, gradient / samples, hessian / samples)


def pruning_step(model: he.Ensemble, heads: Iterable[he.Head]) -> Tensor:
    """The step `[L·H]` in the gates that removes these heads."""
    step = torch.zeros(model.num_layers * model.num_heads, dtype=torch.float64)
    step[[head.layer * model.num_heads + head.head for head in heads]] = -1.0
    return step


def gates_after(model: he.Ensemble, step: Tensor, share: float = 1.0) -> Tensor:
    """Gates `[L, H]` after a share of a step."""
    gates = (1.0 + share * step).reshape(model.num_layers, model.num_heads)
    return gates.to(model.device, model.dtype)


# --- expansion in weights --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightTerms:
    """The mean loss in the attention weights: terms along steps, and the Hessian's diagonal summed per head."""

    first: dict[str, float]  # gradient · step
    second: dict[str, float]  # half the curvature along a step
    traces: Tensor  # [L, H], sums of the diagonal over the weights of a head
    weights: int  # of all heads


def weight_terms(model: he.Ensemble, batches: Iterable[Batch], steps: Mapping[str, Tensor], probes: int) -> WeightTerms:
    """Gradient and curvature along steps in the gates (a step to 0 removes all weights of a head), and the diagonal.

    The diagonal of the Hessian is the mean of v · Hv over `probes` random sign vectors (Hutchinson); losses that are
    compared use the same vectors.
    """
    copy = working_copy(model, None, None)
    weights = [
        weight
        for layer in range(copy.num_layers)
        for weight in (attention_of(copy, layer).qkv, attention_of(copy, layer).qkv_bias, attention_of(copy, layer).out)
        if weight is not None
    ]
    per_layer = len(weights) // copy.num_layers
    for weight in weights:
        weight.requires_grad_(True)  # [H, …] each
    directions = {}
    for name, step in steps.items():
        gates = step.reshape(copy.num_layers, copy.num_heads)
        directions[name] = [_moved(weight, gates[index // per_layer]) for index, weight in enumerate(weights)]
    draws = torch.Generator().manual_seed(0)
    signs = [[_signs(weight, draws) for weight in weights] for _ in range(probes)]
    first, second = dict.fromkeys(steps, 0.0), dict.fromkeys(steps, 0.0)
    traces = torch.zeros(copy.num_layers, copy.num_heads, dtype=torch.float64)
    samples = 0
    for inputs, labels in batches:
        with sdpa_kernel(SDPBackend.MATH):
            loss = F.cross_entropy(copy(inputs)[0], labels, reduction="sum")
            slopes = torch.autograd.grad(loss, weights, create_graph=True)
            for name, moves in directions.items():
                along = _inner(slopes, moves)
                bent = torch.autograd.grad(along, weights, retain_graph=True)
                first[name] += along.item()
                second[name] += _inner(bent, moves).item() / 2
            for probe in signs:
                bent = torch.autograd.grad(_inner(slopes, probe), weights, retain_graph=True)
                for index, (bend, sign) in enumerate(zip(bent, probe, strict=True)):
                    traces[index // per_layer] += (bend * sign).flatten(1).sum(1).double().cpu() / probes
        samples += len(labels)
    first, second = ({name: value / samples for name, value in sums.items()} for sums in (first, second))
    return WeightTerms(first, second, traces / samples, sum(weight.numel() for weight in weights))


def _moved(weight: Tensor, gates: Tensor) -> Tensor:
    """The step in a weight `[H, …]` that corresponds to a step in the gates `[H]` of its layer."""
    scale = gates.to(weight.device, weight.dtype).reshape(-1, *[1] * (weight.dim() - 1))
    return weight.detach() * scale


def _signs(weight: Tensor, draws: torch.Generator) -> Tensor:
    return (2 * torch.randint(0, 2, weight.shape, generator=draws) - 1).to(weight.device, weight.dtype)


def _inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(left, right, strict=True)]).sum()
