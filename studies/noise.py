"""Proposition 1 of the paper on real models (B.1): does pruning hurt more on noisy data, and do its conditions hold?

A gate multiplies a head's output: 1 is the unchanged model, 0 the model without the head, so pruning heads is a step
from 1 to 0 in their gates. Gradient and Hessian of the loss in the gates, on clean test images and on the same images
with noise (one of the fifteen corruptions each, in turn), give the conditions of the proposition and the second-order
change of the loss gap for any set of heads. It is compared with the change measured by pruning: for sets that rankings
choose, for random ones, and for random ones that meet the conditions, at a tenth of the step and at the whole step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hydra_ensembles as he
from hydra_ensembles.batches import move
from hydra_ensembles.heads.masking import attention_of
from hydra_ensembles.model.layers import gating

from .classifiers import ClassifierLab, ClassifierTask
from .corruptions import CORRUPTIONS, corrupted
from .engine import products
from .samples import SampleBatches

DRAWS = 10_000  # random sets of heads
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
    with gating({attention_of(model, layer): gates[layer] for layer in range(model.num_layers)}):
        return model(inputs)[0]  # [1, B, C] -> [B, C]


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


# --- samples ---------------------------------------------------------------------------------------------------------


def samples(task: ClassifierTask, severity: int) -> Batches:
    """Test images, every fifteenth with the same corruption, grouped by it; severity 0 leaves them unchanged."""
    chosen = task.settings["analyses"]["noise"]
    images = task.pictures(chosen["images"])
    parts = [images.select(np.arange(start, len(images), len(CORRUPTIONS))) for start in range(len(CORRUPTIONS))]
    pairs = [(part, name) for part, name in zip(parts, CORRUPTIONS, strict=True) if len(part)]
    parameters = task.plain["corruptions"]
    changed = [corrupted(part, name, severity, parameters=parameters) if severity else part for part, name in pairs]
    batches = SampleBatches(task.changed(changed), chosen["batch"])
    return [(move(inputs, task.device, torch.float32), labels.to(task.device)) for inputs, labels in batches]


# --- the experiment -------------------------------------------------------------------------------------------------


def noise(lab: ClassifierLab) -> dict[str, dict[str, Any]]:
    """Run the experiment: the conditions, every set of heads, and losses by severity."""
    task, base, count = lab.task, lab.base, lab.prune
    chosen = task.settings["analyses"]["noise"]
    ranked = {"Taylor": lab.taylor(), "CircAcc": lab.circuit("acc"), "CircAvg": lab.circuit("avg")}
    steps = {name: pruning_step(base, ranking.first(count)) for name, ranking in ranked.items()}
    batches = {"clean": samples(task, 0), "noisy": samples(task, chosen["severity"])}
    return experiment(base, batches, steps, count, chosen["random"], lab.number)


def experiment(
    model: he.Ensemble,
    batches: Mapping[str, Batches],
    ranked: Mapping[str, Tensor],
    prune: int,
    random: int,
    seed: int,
) -> dict[str, dict[str, Any]]:
    """All results for a model without `prune` heads, on `clean` and `noisy` samples; `ranked` are steps by ranking."""
    with products("highest"):
        expansions = {name: expand(model, some) for name, some in batches.items()}
        steps = random_steps(model, prune, seed)
        facts, meeting = conditions(expansions["clean"], expansions["noisy"], steps)
        tried = dict(ranked) | {f"random {row}": steps[row] for row in range(random)}
        tried |= {f"meeting {row}": steps[row] for row in meeting.nonzero()[:random, 0].tolist()}
        rows = {f"set {name}": pruned(model, step, batches, expansions) for name, step in tried.items()}
        for name, step in {"whole": torch.zeros_like(steps[0]), **ranked}.items():
            for kind, some in batches.items():
                rows[f"{name}, {kind}"] = measure(model, gates_after(model, step), some)
    losses = {f"{name}_loss": one.value for name, one in expansions.items()}
    return {"conditions": {"heads": model.num_layers * model.num_heads, "prune": prune, **losses, **facts}, **rows}


def random_steps(model: he.Ensemble, prune: int, seed: int) -> Tensor:
    """Steps `[DRAWS, L·H]` that remove random heads."""
    generator = torch.Generator().manual_seed(seed)
    heads = model.num_layers * model.num_heads
    drawn = torch.stack([torch.randperm(heads, generator=generator)[:prune] for _ in range(DRAWS)])
    return torch.zeros(DRAWS, heads, dtype=torch.float64).scatter(1, drawn, -1.0)


def conditions(clean: Expansion, noisy: Expansion, steps: Tensor) -> tuple[dict[str, Any], Tensor]:
    """The proposition's assumptions, over all directions and over random steps; and which steps `[DRAWS]` meet them."""
    aligned = steps @ noisy.gradient >= 0
    curved = noisy.second_order(steps) > clean.second_order(steps)
    shares = {"aligned": aligned, "curved": curved, "both": aligned & curved}
    facts = {
        "positive_eigenvalues": int((torch.linalg.eigvalsh(noisy.hessian - clean.hessian) > 0).sum()),
        "positive_on_the_diagonal": int(((noisy.hessian - clean.hessian).diagonal() > 0).sum()),
        "mean_of_diagonal_difference": (noisy.hessian - clean.hessian).diagonal().mean().item(),
        "clean_gradient_norm": clean.gradient.norm().item(),
        "noisy_gradient_norm": noisy.gradient.norm().item(),
        "random_sets": len(steps),
        **{f"share_{name}": holds.double().mean().item() for name, holds in shares.items()},
    }
    return facts, aligned & curved


def pruned(
    model: he.Ensemble, step: Tensor, batches: Mapping[str, Batches], expansions: Mapping[str, Expansion]
) -> dict[str, Any]:
    """One set of heads: terms of the expansion, and both losses after a tenth of the step and the whole step."""
    terms: dict[str, Any] = {f"{name}_first_order": (loss.gradient @ step).item() for name, loss in expansions.items()}
    terms |= {f"{name}_second_order": loss.second_order(step).item() for name, loss in expansions.items()}
    first, second = (terms[f"noisy_{order}"] - terms[f"clean_{order}"] for order in ("first_order", "second_order"))
    gap = expansions["noisy"].value - expansions["clean"].value
    for name, share in {"tenth": 0.1, "whole": 1.0}.items():
        gates = gates_after(model, step, share)
        losses = {f"{kind}_loss": measure(model, gates, some)["loss"] for kind, some in batches.items()}
        change = losses["noisy_loss"] - losses["clean_loss"] - gap
        expected = share * first + share**2 * second
        found = {**losses, "gap_change": change, "gap_change_second_order": expected}
        terms |= {f"{name}.{key}": value for key, value in found.items()}
    return terms
