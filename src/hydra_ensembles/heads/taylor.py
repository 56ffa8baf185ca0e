"""First-order Taylor scores: how much the loss would feel the loss of a head's weights.

The score of a head is the mean of |W · dL/dW| over its rows of the query, key and value projections, L being
the mean cross-entropy over all calibration samples (appendix D.1.1 of the paper).
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from .._utils import require_device
from ..batches import Batches, Inputs, move
from ..errors import ConfigError, DataError, HeadError
from ..model.clip import DualEncoder, require_ensemble
from ..model.ensemble import Ensemble
from .calibration_batches import NAME, CalibrationBatches
from .fingerprint import model_fingerprint
from .head import Head, HeadLike, as_heads, require_budget
from .mask import attention_of, checked_layers, existing_heads, head_rows, masked
from .ranking import HeadRanking

Scope = Literal["layer", "global"]


def taylor(
    ensemble: Ensemble,
    batches: Batches,
    *,
    budget: int,
    scope: Scope = "layer",
    layers: Iterable[int] | None = None,
    removed: Iterable[HeadLike] = (),
    seed: int = 0,
    calibration_batches: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> HeadRanking:
    """Rank heads by their first-order Taylor score, least important first.

    `scope="layer"` takes the same number of heads from every layer: layers first to last, the lowest scores
    of a layer go, and the gradients are computed anew before the next layer. The ranking holds as a whole, so
    its `first` accepts `budget` only. `scope="global"` compares the heads of all layers after a single
    gradient pass and ranks every one of them; `first` then takes any number.

    Dropout is off. The ensemble is left alone: weights, gradients, flags and training mode.

    Args:
        ensemble: An ensemble with one member and a classifier.
        batches: Calibration data, `(inputs, labels)` or mappings with `labels`. What is drawn is kept in
            memory, except by a global ranking on all batches.
        budget: Heads to remove, in addition to those in `removed`.
        scope: Whether heads are compared within their layer or across layers.
        layers: Layers whose heads may be removed; None for all of them.
        removed: Heads that are already off; they are no candidates.
        seed: Draws the calibration batches: this is how the members of a Taylor ensemble come to differ.
        calibration_batches: How many batches to draw. None uses all of them, and then another seed gives the
            same ranking.
        dtype: Precision of the passes; None for the ensemble's own. Gradients add up in float32 at least.
        device: Where to compute; None for where the ensemble is.
        progress: Show a progress bar.

    Returns:
        The ranking; `scores` are the importances the heads had when they were chosen.

    Raises:
        HydraError: More than one member, no classifier, a budget the layers do not have or cannot share
            evenly, layers or heads that do not exist, no data, wrong labels, a loss that is not finite.
    """
    _require_single_classifier(ensemble)
    if scope not in get_args(Scope):
        raise ConfigError(f"scope must be one of {list(get_args(Scope))}, got {scope!r}")
    chosen_layers, off = checked_layers(ensemble.config, layers), as_heads(removed)
    for head in off:
        head_rows(ensemble.config, head)  # raises for a head that does not exist
    candidates = [head for head in existing_heads(ensemble.config, chosen_layers) if head not in set(off)]
    steps = _steps(candidates, chosen_layers, budget, scope)
    place = require_device(device)
    order: list[tuple[float, Head]] = []
    with torch.inference_mode(False), ExitStack() as switched_off:
        data = CalibrationBatches(batches, calibration_batches, seed, ensemble.num_classes, keep=len(steps) > 1)
        model = _working_copy(ensemble, dtype, place)
        switched_off.enter_context(masked(model, off))
        for heads, count in tqdm(steps, desc=f"taylor/{scope}", unit="pass", disable=not progress):
            lowest = sorted(zip(head_importance(model, data, heads), heads, strict=True))[:count]  # ties: first head
            order += lowest
            if len(steps) > 1:
                switched_off.enter_context(masked(model, [head for _, head in lowest]))
    return HeadRanking(
        heads=tuple(head for _, head in order),
        scores=tuple(score for score, _ in order),
        method=f"taylor/{scope}",
        score="taylor",
        provenance={
            "model": model_fingerprint(ensemble),
            "data": data.fingerprint(),
            "samples": data.samples,
            "batches": sorted(set(data.indices)),
            "calibration_batches": calibration_batches,
            "seed": seed,
            "budget": budget,
            "layers": chosen_layers,
            "removed": off,
            "dtype": str(model.dtype),
        },
        only=budget if scope == "layer" else None,
    )


def head_importance(
    model: Ensemble, batches: Iterable[tuple[int, Inputs, Tensor]], heads: Sequence[Head]
) -> list[float]:
    """Taylor scores of the given heads, after one pass over the batches.

    Args:
        model: One member, in the mode and with the heads switched off that are to be scored. Which of its
            parameters require gradients is changed.
        batches: Position (for error messages), inputs and labels of each batch.
        heads: The heads to score.
    """
    layers = sorted({head.layer for head in heads})
    weights = [attention_of(model, layer).qkv for layer in layers]
    gradients = gradients_of_mean_loss(model, batches, weights)
    scores = {
        layer: layer_scores(weight, gradient, f"layer {layer}")
        for layer, weight, gradient in zip(layers, weights, gradients, strict=True)
    }
    return [float(scores[head.layer][head_rows(model.config, head)[0]]) for head in heads]


def layer_scores(weight: Tensor, gradient: Tensor, where: str) -> Tensor:
    """Scores `[K]` of the heads of a layer: the mean of |W · dL/dW| over their rows of query, key and value.

    Args:
        weight: Input projections `[K, 3, d_k, d]`.
        gradient: Of the mean loss, of the same shape.
        where: What an error calls the layer.
    """
    sensitivity = (weight.detach().cpu().double() * gradient.cpu().double()).abs()
    scores = sensitivity.mean((2, 3)).mean(1)  # [K, 3] for query, key, value -> [K]
    if not scores.isfinite().all():
        raise DataError(
            f"the gradients of {where} are not finite in {weight.dtype}; use dtype=torch.float32 or torch.bfloat16, "
            "or check the weights"
        )
    return scores


def gradients_of_mean_loss(
    model: Ensemble, batches: Iterable[tuple[int, Inputs, Tensor]], weights: Sequence[Tensor]
) -> list[Tensor]:
    """Gradient of the mean cross-entropy over all samples, for some parameters of a model with one member.

    Which parameters require gradients is changed: these and no others, so that nothing below the first of them is
    recorded for the backward pass.
    """
    model.requires_grad_(False)
    for weight in weights:
        weight.requires_grad_(True)
    precise = torch.promote_types(model.dtype, torch.float32)
    totals = [torch.zeros_like(weight, dtype=precise, requires_grad=False) for weight in weights]
    samples = 0
    for index, inputs, labels in batches:
        with torch.enable_grad():
            logits = model(move(inputs, model.device, model.dtype))[0]  # [1, B, C] -> [B, C]
            loss = F.cross_entropy(logits.to(precise), labels.to(model.device), reduction="sum")
            if not loss.isfinite():
                raise DataError(
                    f"batch {index} of {NAME} gives a loss of {float(loss.detach())} in {model.dtype}; "
                    "check its inputs for NaN or infinite values, and the weights of the model"
                )
            parts = torch.autograd.grad(loss, weights)
        for total, part in zip(totals, parts, strict=True):
            total += part
        samples += len(labels)
    return [total / samples for total in totals]


def _require_single_classifier(ensemble: Ensemble | DualEncoder) -> None:
    if isinstance(ensemble, DualEncoder):
        raise ConfigError(
            "taylor ranks the heads of one transformer, got a dual encoder: the scores of its two towers lie on "
            "different scales and do not compare. Rank the image tower, as taylor(zero_shot(dual, class_names), …); "
            "for both towers together use extract_circuit"
        )
    require_ensemble(ensemble, "taylor")
    if ensemble.num_members != 1:
        raise ConfigError(
            f"taylor ranks the heads of one model, got an ensemble of {ensemble.num_members} members; "
            "take one of them with ensemble.member(i)"
        )
    if not ensemble.num_classes:
        raise ConfigError("taylor needs a loss, but this ensemble has no classifier (num_classes is 0)")


def _steps(
    candidates: Sequence[Head], layers: Sequence[int], budget: int, scope: Scope
) -> list[tuple[list[Head], int]]:
    """One entry for each gradient pass: the heads it scores, and how many of them it ranks."""
    require_budget(budget, len(candidates))
    if scope == "global":
        return [(list(candidates), len(candidates))]
    if budget % len(layers):
        raise HeadError(
            f'budget {budget} cannot be spread evenly over {len(layers)} layers (scope="layer"); use a multiple '
            f'of {len(layers)}, or scope="global"'
        )
    each = budget // len(layers)
    steps = [([head for head in candidates if head.layer == layer], each) for layer in layers]
    for layer, (heads, _) in zip(layers, steps, strict=True):
        if len(heads) < each:
            raise HeadError(
                f"budget {budget} takes {each} heads from each of {len(layers)} layers, but layer {layer} has "
                f"only {len(heads)} left; lower the budget, leave the layer out of `layers`, or use "
                'scope="global"'
            )
    return steps


def _working_copy(ensemble: Ensemble, dtype: torch.dtype | None, device: torch.device | None) -> Ensemble:
    """An ensemble of the same weights whose flags and output projections may be changed freely.

    Where dtype and device stay, all other tensors are the original's own memory.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype must be a floating-point type such as torch.float32, got {dtype}")
    state = {name: tensor.detach().to(device, dtype) for name, tensor in ensemble.state_dict().items()}
    state |= {name: tensor.clone() for name, tensor in state.items() if name.endswith("attention.out")}
    with torch.device("meta"):
        copy = Ensemble(ensemble.config)
    copy.load_state_dict(state, assign=True)
    return copy.eval()
