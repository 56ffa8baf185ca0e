"""Optimal Brain Apoptosis: prune single weights by the curvature of the loss."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._utils import derive_seed, require_device
from ..batches import Batches, Inputs, epoch_of, in_model_order, labelled, require_rereadable, restored
from ..errors import DataError
from ..metrics.probabilities import class_logits
from ..model.dual_encoder import require_single
from ..model.ensemble import Ensemble
from ..model.layers import dropping
from ..model.member_states import place_of
from ..settings import Checked, Rate, Whole
from ..training.finetune import Parametrised, train_parametrised
from ..training.loop import Job, TrainOptions, trains
from ..training.recipe import Recipe, trainable_state

_SMALL = 1e-6  # added to the divisor of importances


@dataclass(frozen=True)
class OBA(Checked):
    """How weights are removed; the schedule and the rule are those of the public code.

    Attributes:
        keep: Share of all parameters to keep: the paper uses 0.891 (like removing 4 of 12 heads) and 0.94.
        steps: Pruning steps, each of which keeps the same share of the remaining parameters.
        batches: Maximum number of batches for the importances of a step.
    """

    keep: Rate = 0.891
    steps: Whole = 49
    batches: Whole = 200


@trains
def oba(
    model: Ensemble,
    train: Batches,
    recipe: Recipe | None = None,
    settings: OBA = OBA(),  # noqa: B008 (frozen)
    validation: Batches | None = None,
    **run: Unpack[TrainOptions],
) -> Ensemble:
    """Set single weights to zero: those whose removal costs least by the second-order term of the loss.

    The importance of a weight is `|θ (Hθ)|`, with H the Hessian of the cross-entropy, in evaluation mode, summed with
    its sign over batches. All maps of stem, attention and MLP are pruned, with their biases. A recipe trains the
    remaining weights: zeros stay zeros (a `finetune` afterwards would change them). The result takes as much time and
    memory as the whole model.

    Without a recipe the remaining weights are not trained. A resumed run prunes again.
    """
    require_single(model, "oba")
    require_rereadable(train, "train")
    train = in_model_order(train, "train", model)
    if recipe is not None:
        recipe.check(model, train, validation)
    seed = derive_seed(0 if recipe is None else recipe.seed, "oba")
    masks = pruned_masks(model, train, settings, seed, run.get("device"))
    zeros = sum(int((~mask).sum()) for mask in masks.values())
    share = 1 - zeros / sum(parameter.numel() for parameter in model.parameters())
    line = f"OBA: {share:.1%} of the parameters left after {settings.steps} steps"
    state = {
        name: tensor * masks[name].to(tensor.device) if name in masks else tensor
        for name, tensor in model.state_dict().items()
    }
    start = Ensemble.from_state(model.config, state, model.metadata.after(line))
    if recipe is None:
        return start
    job = Job(recipe, train, validation, settings=settings, **run)
    return train_parametrised(lambda copy: Masked(copy, masks), start, job, "trained what OBA left")


class Masked(Parametrised):
    """An ensemble whose weights stay zero where the mask is False."""

    def __init__(self, ensemble: Ensemble, masks: Mapping[str, Tensor]) -> None:
        super().__init__(ensemble)
        self.masks = {name: mask.to(ensemble.device) for name, mask in masks.items()}

    def computed(self) -> dict[str, Tensor]:
        """The removable weights, multiplied by their masks."""
        return {name: self.ensemble.get_parameter(name) * mask for name, mask in self.masks.items()}


def removable_weights(model: Ensemble) -> dict[str, Tensor]:
    """Weights and biases of linear maps and the patch kernel, by name; without norms, tokens and the classifier."""
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        inside = place_of(name)[0] in ("attention", "mlp") and not name.endswith(".scale")
        inside = inside or name.startswith(("stem.patch", "stem.project.", "readout.hidden.", "readout.map."))
        if inside and parameter.numel() and "norm" not in name and not name.endswith("query_token"):
            weights[name] = parameter
    return weights


def curvature(
    model: Ensemble, batches: Iterable[tuple[int, Inputs, Tensor]], names: Iterable[str]
) -> dict[str, Tensor]:
    """`θ ∘ Hθ` of the named parameters, summed over batches; H is the Hessian of the mean cross-entropy in them."""
    weights = {name: model.get_parameter(name) for name in names}
    parameters = list(weights.values())
    values = [parameter.detach() for parameter in parameters]
    sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    with dropping(False), sdpa_kernel(SDPBackend.MATH):  # faster kernels have no second derivative
        for index, inputs, labels in batches:
            logits = class_logits(model(inputs)[0])  # [B, C]
            loss = F.cross_entropy(logits, labels.to(logits.device))
            if not loss.isfinite():
                raise DataError(f"batch {index} of train gives a loss of {loss.item()}; look for bad values in it")
            first = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
            second = torch.autograd.grad(first, parameters, grad_outputs=values, materialize_grads=True)  # Hθ
            for total, product, value in zip(sums.values(), second, values, strict=True):
                total += product * value
    return sums


def importances(curved: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Importance of each weight, comparable across tensors: curvature relative to its tensor's maximum, plus |θ|."""
    shares = {name: values.abs() / (values.abs().max() + _SMALL) for name, values in curved.items()}
    return {name: share + weights[name].abs() for name, share in shares.items()}


def kept(scores: Mapping[str, Tensor], masks: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Masks that keep the `count` most important of the remaining weights."""
    flat = torch.cat([score.masked_fill(~masks[name], -1.0).flatten() for name, score in scores.items()])
    chosen = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    chosen[flat.topk(count, sorted=False).indices] = True
    parts = chosen.split([score.numel() for score in scores.values()])
    return {name: part.view_as(score) for (name, score), part in zip(scores.items(), parts, strict=True)}


def pruned_masks(
    model: Ensemble, train: Batches, settings: OBA, seed: int, device: torch.device | str | None
) -> dict[str, Tensor]:
    """Prune step by step; returns the mask of every removable tensor."""
    place = require_device(device or model.device)
    with restored(train):
        copy = Ensemble.from_state(model.config, trainable_state(model, place))
        weights = removable_weights(copy)
        masks = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in weights.items()}
        total = sum(parameter.numel() for parameter in copy.parameters())
        fixed = total - sum(weight.numel() for weight in weights.values())
        for step in range(settings.steps):
            with epoch_of(train, step, seed, place):
                batches = islice(labelled(train, copy.num_classes, "train"), settings.batches)
                curved = curvature(copy, batches, weights)
            scores = importances(curved, {name: weight.detach() for name, weight in weights.items()})
            count = round(settings.keep ** ((step + 1) / settings.steps) * total) - fixed
            masks = kept(scores, masks, count)
            with torch.no_grad():
                for name, weight in weights.items():
                    weight *= masks[name]
        return {name: mask.cpu() for name, mask in masks.items()}
