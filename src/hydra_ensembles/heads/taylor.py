"""Taylor scores of heads, and the batches they are computed on."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from .._utils import require_device
from ..batches import Batches, Inputs, begin_epoch, borrowed, move, read_batch, require_labels
from ..errors import ConfigError, DataError, HeadError
from ..model.clip import DualEncoder, require_ensemble
from ..model.config import require_whole
from ..model.ensemble import Ensemble
from .masking import attention_of, checked_layers, existing_heads, head_rows, masked
from .ranking import DataFingerprint, Head, HeadLike, HeadRanking, as_heads, model_fingerprint, require_budget

NAME = "the calibration data"


class CalibrationBatches:
    """Labelled batches out of a source, checked, counted and fingerprinted as they are read.

    Every batch of the source gets a random key from `seed`, and those with the smallest keys are taken, in
    the order of the source; so a list, a loader and a generator of the same batches give the same draw. While
    the source is read, PyTorch's global random numbers and those of the source also start from `seed`, and are
    put back afterwards (see `reading_order`): a shuffling loader gives other samples for another seed and the
    same ones for the same seed.

    Args:
        source: Batches with labels.
        count: How many to draw; None takes all of them, whatever the seed.
        seed: Decides which.
        classes: Number of classes the labels must fit.
        keep: Hold the batches in memory, so that they can be iterated over more than once.

    Attributes:
        indices: Positions in the source of the batches read.
        samples: Number of samples read.
    """

    def __init__(self, source: Batches, count: int | None, seed: int, classes: int, keep: bool) -> None:
        count = None if count is None else require_whole("calibration_batches", count, 1)
        seed = require_whole("seed", seed, 0)
        self.indices: list[int] = []
        self._source, self._count, self._seed, self._classes = source, count, seed, classes
        self._fingerprint = DataFingerprint()
        self._kept = list(self._read()) if keep else None

    def __iter__(self) -> Iterator[tuple[int, Inputs, Tensor]]:
        """Position in the source, inputs and labels of each batch."""
        return self._read() if self._kept is None else iter(self._kept)

    @property
    def samples(self) -> int:
        """Number of samples read so far."""
        return self._fingerprint.samples

    def fingerprint(self) -> str:
        """Fingerprint of the samples read so far."""
        return self._fingerprint.hexdigest()

    def _read(self) -> Iterator[tuple[int, Inputs, Tensor]]:
        with borrowed(self._source):
            begin_epoch(self._source, 0, self._seed)
            for index, batch in self._draw():
                inputs, labels = read_batch(batch, NAME, index)
                labels = require_labels(labels, self._classes, NAME, index)
                self.indices.append(index)
                self._fingerprint.update(inputs, labels)
                yield index, inputs, labels
        if not self.samples:
            raise DataError(f"{NAME} has no samples; check the loader, or that it was not consumed before")

    def _draw(self) -> Iterator[tuple[int, Any]]:
        """Position and content of the chosen batches, in the order of the source."""
        if self._count is None:
            yield from enumerate(_seeded(self._source, self._seed))
            return
        source = self._source
        sampler = _batch_sampler(source)
        if isinstance(source, Sequence):
            yield from ((index, source[index]) for index in self._choose(len(source)))
        elif sampler is not None:
            samples = list(_seeded(sampler, self._seed))  # which samples make up each batch
            chosen = self._choose(len(samples))
            loader = _loader_of(cast(DataLoader[Any], source), [samples[index] for index in chosen])
            yield from zip(chosen, _seeded(loader, self._seed), strict=True)
        else:
            yield from self._choose_while_reading(_seeded(source, self._seed))

    def _choose(self, total: int) -> list[int]:
        """Positions of the batches with the smallest keys, ascending."""
        self._require_enough(total)
        order = np.argsort(self._keys().random(total), kind="stable")[: self._count]
        return [int(index) for index in np.sort(order)]

    def _choose_while_reading(self, batches: Iterator[Any]) -> list[tuple[int, Any]]:
        """The same choice where the number of batches is not known; holds no more batches than are drawn."""
        keys, total = self._keys(), 0
        smallest: list[tuple[float, int, Any]] = []  # a heap of (-key, -position, batch)
        for index, batch in enumerate(batches):
            total += 1
            heapq.heappush(smallest, (-keys.random(), -index, batch))
            if len(smallest) > (self._count or 0):
                heapq.heappop(smallest)
        self._require_enough(total)
        return sorted(((-index, batch) for _, index, batch in smallest), key=lambda drawn: drawn[0])

    def _keys(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self._seed))

    def _require_enough(self, total: int) -> None:
        if total and self._count is not None and total < self._count:
            raise DataError(
                f"calibration_batches is {self._count}, but {NAME} has {total} batches; "
                "ask for fewer, or make the batches smaller"
            )


def _batch_sampler(source: Batches) -> Batches | None:
    """What tells a plain loader which samples make up each batch; None where batches can only be read in turn."""
    if type(source) is not DataLoader or isinstance(source.dataset, IterableDataset):
        return None
    return source.batch_sampler


def _loader_of(loader: DataLoader[Any], batches: list[Any]) -> DataLoader[Any]:
    """A loader for some batches of another one, so that the samples of the others need not be read."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=min(loader.num_workers, len(batches)),
        collate_fn=loader.collate_fn,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _seeded(source: Batches, seed: int) -> Iterator[Any]:
    """Iterate over a source as if PyTorch's global CPU generator had been seeded before and used by it alone."""
    own = torch.Generator().manual_seed(seed).get_state()
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(own)
        iterator = iter(source)
        own = torch.get_rng_state()
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(own)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            own = torch.get_rng_state()
        yield batch


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
