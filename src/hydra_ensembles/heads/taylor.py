"""Taylor scores of heads, and the calibration batches they are computed on."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from .._utils import torch_seeded, without_autocast
from ..batches import Batches, Inputs, begin_epoch, in_model_order, length_of, read_batch, require_labels, restored
from ..digest import digest
from ..errors import DataError, HeadError
from ..metrics.probabilities import class_logits
from ..model.dual_encoder import require_single
from ..model.ensemble import Ensemble
from ..settings import Seed, Whole, require
from .masking import (
    Head,
    attention_of,
    checked_layers,
    head_rows,
    heads_in,
    masked,
    max_removable,
    pooling_of,
    working_copy,
)
from .ranking import HeadRanking, require_budget

Scope = Literal["layer", "global"]
LabelledBatches = Iterable[tuple[int, Inputs, Tensor]]  # position in the source, inputs and labels
NAME = "the calibration data"


@without_autocast()
def taylor(
    ensemble: Ensemble,
    batches: Batches,
    *,
    budget: int,
    scope: Scope = "layer",
    layers: Iterable[int] | None = None,
    seed: int = 0,
    calibration_batches: int | None = None,
    progress: bool = False,
) -> HeadRanking:
    """Rank heads by their first-order Taylor score, least important first.

    `scope="layer"` removes the same number of heads from every layer: from first layer to last, those with the lowest
    scores, with new gradients before each layer; `first` of such a ranking accepts only `budget`.
    `scope="global"` compares the heads of all layers after a single gradient pass and ranks all of them.

    Dropout is off. The ensemble is not changed: neither weights nor gradients, flags or training mode.

    Args:
        ensemble: An ensemble with one member and a classifier.
        batches: Calibration data, `(inputs, labels)` or mappings with `labels`. Drawn batches are kept in
            memory, except by a global ranking on all batches.
        budget: Heads to remove.
        scope: Whether heads are compared within their layer or across layers.
        layers: Layers whose heads may be removed; None for all of them, with the global scope including an attention
            that pools the tokens (layer `num_layers`).
        seed: Draws the calibration batches, by which the members of a Taylor ensemble differ.
        calibration_batches: How many batches to draw; None for all.
        progress: Show a progress bar.

    Examples:
        >>> ranking = he.taylor(base, batches, budget=12, scope="global")
        >>> he.prune(base, ranking.first(12)).describe().parameters < base.describe().parameters
        True
    """
    require_single(ensemble, "taylor")
    scope, seed = require("scope", scope, Scope), require("seed", seed, Seed)
    calibration_batches = require("calibration_batches", calibration_batches, Whole | None)
    blocks = range(ensemble.num_layers) if scope == "layer" else None  # "layer" leaves attention pooling out
    chosen_layers = checked_layers(ensemble.config, blocks if layers is None else layers)
    steps = _steps(ensemble, heads_in(ensemble, chosen_layers), chosen_layers, budget, scope)
    order: list[tuple[float, Head]] = []
    with torch.inference_mode(False), torch_seeded(seed, torch.device("cpu")), restored(batches), ExitStack() as stack:
        model = working_copy(ensemble)
        batches = in_model_order(batches, NAME, ensemble)
        read: list[tuple[int, int, str]] = []
        data = calibration(batches, calibration_batches, seed, ensemble.num_classes, read)
        samples = list(data) if len(steps) > 1 else data
        for step, (heads, count) in enumerate(steps, start=1):
            name, total = f"taylor {step}/{len(steps)}", calibration_batches or length_of(batches)
            scores = head_importance(model, tqdm(samples, name, total, unit="batch", disable=not progress), heads)
            lowest = sorted(zip(scores, heads, strict=True))[:count]  # ties go to the first head
            order += lowest
            if len(steps) > 1:
                stack.enter_context(masked(model, [head for _, head in lowest]))
    indices, sizes, digests = zip(*read, strict=True)
    if scope == "global":  # attention pooling keeps its most important head
        stays = pooling_of(ensemble, [head for _, head in order])[-1:]
        order = [(importance, head) for importance, head in order if head not in stays]
    return HeadRanking(
        heads=tuple(head for _, head in order),
        scores=tuple(score for score, _ in order),
        method=f"taylor/{scope}",
        score="taylor",
        provenance={
            "model": digest([ensemble.config, ensemble]),
            "data": digest(digests),
            "samples": sum(sizes),
            "batches": indices,
            "calibration_batches": calibration_batches,
            "seed": seed,
            "budget": budget,
            "layers": chosen_layers,
            "dtype": str(model.dtype),
        },
        only=budget if scope == "layer" else None,
    )


def head_importance(model: Ensemble, batches: LabelledBatches, heads: Sequence[Head]) -> list[float]:
    """The Taylor scores of `heads` after one pass over the batches. Changes `requires_grad` of the model.

    A head's score is the mean of |W · dL/dW| over its query, key and value weights, `[3, d_k, d]`.
    """
    weights = {head.layer: attention_of(model, head.layer).qkv for head in heads}
    gradients = gradients_of_mean_loss(model, batches, list(weights.values()))
    scores: dict[int, Tensor] = {}  # [K] of each layer
    for (layer, weight), gradient in zip(weights.items(), gradients, strict=True):
        sensitivity = (weight.detach().cpu().double() * gradient.cpu().double()).abs()
        scores[layer] = sensitivity.mean((2, 3)).mean(1)  # [K, 3] for query, key, value -> [K]
        if not scores[layer].isfinite().all():
            raise DataError(f"gradients are not finite in {weight.dtype}; try ensemble.float(), check weights, inputs")
    return [float(scores[head.layer][head_rows(model.config, head)[0]]) for head in heads]


def gradients_of_mean_loss(model: Ensemble, batches: LabelledBatches, weights: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the mean cross-entropy over all samples with respect to `weights`; one member.

    All other parameters have `requires_grad=False` afterwards: autograd records nothing below the first of `weights`.
    """
    model.requires_grad_(False)
    for weight in weights:
        weight.requires_grad_(True)
    precise = torch.promote_types(model.dtype, torch.float32)
    totals = [torch.zeros_like(weight, dtype=precise, requires_grad=False) for weight in weights]
    samples = 0
    for _, inputs, labels in batches:
        with torch.enable_grad():
            logits = class_logits(model(inputs)[0])  # [1, B, C] -> [B, C]
            loss = F.cross_entropy(logits.to(precise), labels.to(model.device), reduction="sum")
            gradients = torch.autograd.grad(loss, weights)
        for total, gradient in zip(totals, gradients, strict=True):
            total += gradient
        samples += len(labels)
    return [total / samples for total in totals]


def _steps(
    model: Ensemble, candidates: list[Head], layers: Sequence[int], budget: int, scope: Scope
) -> list[tuple[list[Head], int]]:
    """One entry per gradient pass: the heads it scores, and how many of them it ranks."""
    require_budget(budget, max_removable(model, candidates))
    if scope == "global":
        return [(candidates, len(candidates))]
    if budget % len(layers):
        uneven = f"budget {budget} does not spread evenly over {len(layers)} layers"
        raise HeadError(f'{uneven}; give a multiple, or scope="global"')
    per_layer = budget // len(layers)
    steps = []
    for layer in layers:
        heads = [head for head in candidates if head.layer == layer]
        if (most := max_removable(model, heads)) < per_layer:
            raise HeadError(f"budget {budget} takes {per_layer} heads per layer; layer {layer} can lose only {most}")
        steps.append((heads, per_layer))
    return steps


# --- calibration data --------------------------------------------------------------------------------------


_LOADING = (  # settings of a `DataLoader` besides what it reads in which order
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers"),
)


def calibration(
    source: Batches, count: int | None, seed: int, classes: int, read: list[tuple[int, int, str]]
) -> LabelledBatches:
    """`count` labelled batches of a source, drawn with the seed (None: all), each with its position.

    Position, size and digest of each are added to `read`. A source with its own generator is seeded too; seeding
    PyTorch's global generator is up to the caller.
    """
    begin_epoch(source, 0, seed)
    for index, batch in drawn(source, count, seed):
        inputs, labels = read_batch(batch, NAME, index)
        labels = require_labels(labels, classes, NAME, index)
        read.append((index, len(labels), digest([inputs, labels])))
        yield index, inputs, labels
    if not sum(samples for _, samples, _ in read):
        raise DataError(f"{NAME} has no samples; check the loader, or that it was not consumed before")


def drawn(source: Batches, count: int | None, seed: int) -> Iterator[tuple[int, Any]]:
    """Yield the position and content of `count` random batches of a source, in source order; None for all.

    Every batch gets a random key from the seed, and those with the smallest keys are taken; so a list, a loader and a
    generator of the same batches give the same draw. A map-style `DataLoader` reads only the samples of drawn batches.
    """
    if count is None:
        yield from enumerate(source)
        return
    keys = np.random.Generator(np.random.PCG64(seed))
    loader = source if type(source) is DataLoader and not isinstance(source.dataset, IterableDataset) else None
    sampler = None if loader is None else loader.batch_sampler  # which samples make up each batch
    contents: Iterable[Any] = source if sampler is None else list(sampler)
    keyed = ((keys.random(), index, content) for index, content in enumerate(contents))
    smallest = sorted(heapq.nsmallest(count, keyed, key=itemgetter(0, 1)), key=itemgetter(1))
    if 0 < len(smallest) < count:
        raise DataError(f"calibration_batches is {count}, but {NAME} has {len(smallest)} batches; ask for fewer")
    if loader is None or sampler is None:
        yield from ((index, batch) for _, index, batch in smallest)
        return
    torch.default_generator.manual_seed(seed)  # random transforms must not depend on the sampler's draws
    same = {name: getattr(loader, name) for name in _LOADING}
    fewer = DataLoader(loader.dataset, batch_sampler=[samples for _, _, samples in smallest], **same)
    yield from zip((index for _, index, _ in smallest), fewer, strict=True)
