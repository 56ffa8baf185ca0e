"""Bootstrap confidence intervals for a metric, and for the difference of two methods on the same samples.

Samples are drawn with replacement and the interval contains the middle share of the replicates (percentile
method). A difference uses the same draws for both methods, so sampling noise common to both cancels. For OOD
metrics ID and OOD samples are drawn separately, and an unweighted mean over several OOD sets shares the ID
draws. The draws depend only on the seed and the numbers of samples, not on the device.

With few samples percentile intervals are too narrow, most of all for AURC when almost all answers are right. If all
samples have the same value, as when all answers are right, the interval has no width and shows no uncertainty.

Noise makes an ECE larger, and replicates are noisier than the samples: for a well calibrated model, percentile
intervals never contain the true ECE. `bootstrap_calibration` therefore mirrors the percentiles at the value, and
extends the interval to 0 if chance explains the value; it is still too narrow if the true error is not 0.
`benchmarks/coverage.py` measures how often intervals contain the true value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .._utils import derive_seed
from ..arguments import InnerShare, Seed, Whole, checked
from ..errors import DataError
from .inputs import Convention, check_same_length, check_scores
from .ood import OodMetric, cumulative_counts, joint_ranks, of_counts

# Draws held in memory at once; a thousand resamples of ten thousand samples are split into pieces of this size.
_DRAWS_AT_ONCE = 4_000_000
_CALIBRATED = 200  # simulations of a perfectly calibrated model, to see how large its error is by chance


@dataclass(frozen=True)
class Interval:
    """A number with its bootstrap confidence interval at `level`, from `resamples` replicates.

    Examples:
        >>> import hydra_ensembles as he
        >>> 0.5 in he.metrics.Interval(value=0.52, low=0.48, high=0.56, level=0.95, resamples=1000)
        True
    """

    value: float
    low: float
    high: float
    level: float
    resamples: int

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


Statistic = Callable[..., Tensor]
"""A number of weighted samples, for many weightings at once: `(weights [R, B], *columns [B, ...]) -> [R]`.

`weights` are counts in float64: how often each sample was drawn. `probabilities.weighted_mean`, `weighted_ece`,
`weighted_adaptive_ece`, and `ood.weighted_aurc` and `detection` are such statistics.
"""


def paired(
    statistic: Statistic,
    columns: Sequence[Tensor],
    minus: Sequence[Tensor] | None = None,
    *,
    strata: Tensor | None = None,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    mirrored: bool = False,
) -> Interval:
    """Interval of a statistic of samples, or of the difference of two methods on the same samples.

    Args:
        statistic: Maps weights `[R, B]` and the columns to `[R]`, see `Statistic`.
        columns: What it needs of each sample, `[B, ...]` each.
        minus: The same columns of another method, in which row i is the same sample: gives
            `statistic(columns) - statistic(minus)`, with the same draws for both.
        strata: Group of each sample `[B]`, from 0; each group keeps its size, such as ID (0) and OOD sets (1, ...).
            The draws of a group depend on the seed, its number and its size alone.
        resamples: Number of resamples.
        level: Share of the replicates inside the interval.
        seed: Seed of the draws.
        mirrored: For calibration errors, whose columns are confidence and correctness. Noise makes them larger, and
            replicates are noisier than the samples: the interval is mirrored at the value, and reaches down to 0 if a
            perfectly calibrated model has such an error by chance.
    """
    ours, theirs = ([column.detach().cpu() for column in given] for given in (columns, minus or ()))
    count = check_same_length({f"rows in column {i}": len(column) for i, column in enumerate([*ours, *theirs])})

    def measured(weights: Tensor) -> Tensor:
        return statistic(weights, *ours) - (statistic(weights, *theirs) if theirs else 0.0)

    groups = torch.zeros(count, dtype=torch.long) if strata is None else strata.detach().cpu()
    members = [(groups == number).nonzero().flatten() for number in range(int(groups.max()) + 1)]  # rows of each group
    generators = [torch.Generator().manual_seed(derive_seed(seed, number)) for number in range(len(members))]
    replicates = []
    for start in range(0, resamples, at_once := max(1, _DRAWS_AT_ONCE // count)):
        weights = torch.zeros(min(at_once, resamples - start), count, dtype=torch.float64)  # [R, B]
        for rows, generator in zip(members, generators, strict=True):
            drawn = torch.randint(max(len(rows), 1), (len(weights), len(rows)), generator=generator)  # [R, rows]
            weights.scatter_add_(1, rows[drawn], torch.ones((), dtype=torch.float64).expand(drawn.shape))
        replicates.append(measured(weights))
    everything = torch.ones(1, count, dtype=torch.float64)
    interval = _interval(measured(everything).item(), torch.cat(replicates).numpy(), level)
    if not mirrored:
        return interval
    value, mirror = interval.value, 2 * interval.value - interval.high
    confidence, generator = ours[0], torch.Generator().manual_seed(0)
    right = (torch.rand(len(confidence), generator=generator) < confidence for _ in range(_CALIBRATED))
    by_chance = torch.cat([statistic(everything, confidence, correct) for correct in right])
    low = 0.0 if value <= by_chance.quantile((1 + level) / 2) else min(max(mirror, 0.0), value)
    return replace(interval, low=low, high=max(2 * value - interval.low, value))


@checked
def bootstrap_metric(
    metric: Callable[..., float],
    samples: Sequence[Tensor],
    *,
    minus: Sequence[Tensor] | None = None,
    resamples: Whole = 1000,
    level: InnerShare = 0.95,
    seed: Seed = 0,
) -> Interval:
    """Interval of `metric(*samples)`, a function of arrays with one row per sample.

    Pass only what the metric needs: it is called once per resample. `top_label` gives confidence and
    correctness for `ece_of_confidence`, and the mean of `brier_per_sample` is the Brier score.

    Args:
        metric: Called with the drawn rows of each array.
        samples: Arrays `[B, ...]`, all of one length.
        minus: Arrays of another method, in which row i is the same sample: gives a paired interval of the difference
            `metric(*samples) - metric(*minus)`.
        resamples: Number of resamples.
        level: Share of the replicates inside the interval.
        seed: Seed for the draws.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> right = torch.tensor([1.0, 1.0, 1.0, 0.0])
        >>> found = he.metrics.bootstrap_metric(torch.mean, [right], resamples=100)
        >>> found.value, found.low < 0.75 < found.high
        (0.75, True)
    """
    if not samples:
        raise DataError("got no arrays to draw samples from; give at least one")
    arrays = [*samples, *(minus or ())]
    count = check_same_length({f"rows in array {i}": len(array) for i, array in enumerate(arrays)})

    def measured(drawn: Sequence[Tensor]) -> float:
        ours, theirs = drawn[: len(samples)], drawn[len(samples) :]
        return float(metric(*ours)) - (float(metric(*theirs)) if theirs else 0.0)

    generator = np.random.default_rng(seed)
    replicates = []
    for _ in range(resamples):
        rows = torch.from_numpy(generator.integers(count, size=count))
        replicates.append(measured([array[rows.to(array.device)] for array in arrays]))
    return _interval(measured(arrays), np.array(replicates), level)


def bootstrap_mean(
    values: Tensor, *, unseen: float | None = None, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Interval of the mean of values `[B]`: as from `bootstrap_metric` with the same draws, but vectorised.

    `unseen` is a rare value far from the others, which the samples may lack or contain too rarely. The interval is
    extended to that of the samples plus one of this value, which a resample contains up to three or four times.
    """
    if unseen is not None:
        plain = bootstrap_mean(values, resamples=resamples, level=level, seed=seed)
        extended = torch.cat([values, values.new_tensor([unseen])])
        more = bootstrap_mean(extended, resamples=resamples, level=level, seed=seed)
        return replace(plain, low=min(plain.low, more.low), high=max(plain.high, more.high))
    values = values.detach().cpu()
    generator = np.random.default_rng(seed)
    at_once = max(1, _DRAWS_AT_ONCE // len(values))
    sizes = [min(at_once, resamples - start) for start in range(0, resamples, at_once)]
    replicates = torch.cat([_drawn(values, rows, generator).mean(1) for rows in sizes])  # [R, B] -> [R]
    return _interval(float(values.mean()), replicates.numpy(), level)


def bootstrap_calibration(
    metric: Callable[[Tensor, Tensor], float], confidence: Tensor, correct: Tensor, resamples: int, level: float = 0.95
) -> Interval:
    """Interval of a calibration error, from confidences `[B]` and whether each answer is `correct`, `[B]` of bool.

    Basic bootstrap: the percentiles mirrored at the value, clipped at 0 and extended to contain the value. The interval
    also starts at 0 if a perfectly calibrated model with these confidences has an error as large by chance.
    """
    found = bootstrap_metric(metric, [confidence, correct], resamples=resamples, level=level)
    value, mirrored = found.value, 2 * found.value - found.high
    generator, sure = np.random.default_rng(0), confidence.detach().cpu()
    by_chance = [metric(sure, torch.from_numpy(generator.random(len(sure))) < sure) for _ in range(_CALIBRATED)]
    low = 0.0 if value <= np.quantile(by_chance, (1 + level) / 2) else min(max(mirrored, 0.0), value)
    return replace(found, low=low, high=max(2 * value - found.low, value))


@checked
def bootstrap_ood(
    metric: OodMetric,
    id_scores: Tensor,
    ood_scores: Tensor | Sequence[Tensor],
    *,
    minus: tuple[Tensor, Tensor | Sequence[Tensor]] | None = None,
    convention: Convention = "torch-uncertainty",
    resamples: Whole = 1000,
    level: InnerShare = 0.95,
    seed: Seed = 0,
) -> Interval:
    """Interval of an OOD metric of scores `[n]` and `[m]`, or of its unweighted mean over several OOD sets.

    Scores and `convention` are as in `hydra_ensembles.metrics.ood`, the other settings as in `bootstrap_metric`;
    `minus` is `(id_scores, ood_scores)` of another method on the same samples, for a paired difference.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> id_scores, ood_scores = torch.tensor([0.1, 0.2, 0.5]), torch.tensor([0.4, 0.8])
        >>> found = he.metrics.bootstrap_ood("auroc", id_scores, ood_scores, resamples=100)
        >>> round(found.value, 3), found.value in found
        (0.833, True)
    """
    value, replicates = ood_replicates(metric, id_scores, ood_scores, convention, resamples, seed)
    if minus is not None:
        ours = [len(scores) for scores in (id_scores, *_as_list(ood_scores))]
        theirs = [len(scores) for scores in (minus[0], *_as_list(minus[1]))]
        if ours != theirs:
            raise DataError(f"the methods have {ours} and {theirs} scores; paired differences need the same samples")
        other_value, other_replicates = ood_replicates(metric, *minus, convention, resamples, seed)
        value, replicates = value - other_value, replicates - other_replicates
    return _interval(value, replicates, level)


@checked
def ood_replicates(
    metric: OodMetric,
    id_scores: Tensor,
    ood_scores: Tensor | Sequence[Tensor],
    convention: Convention = "torch-uncertainty",
    resamples: Whole = 1000,
    seed: Seed = 0,
) -> tuple[float, np.ndarray]:
    """The metric, and its value on every resample `[R]`, averaged over the OOD sets.

    The draws depend only on the seed and the numbers of samples, so replicates of methods on the same samples
    are paired, and differences of many methods can be combined.
    """
    ood_sets = _as_list(ood_scores)
    if not ood_sets:
        raise DataError("got no OOD set; at least one is needed")
    id_scores = check_scores(id_scores, "ID scores")

    def measured(id_ranks: Tensor, ood_ranks: Tensor, distinct: int) -> Tensor:
        """The metric of each row: `[R, n]` and `[R, m]` to `[R]`."""
        fp, tp = cumulative_counts(id_ranks, distinct), cumulative_counts(ood_ranks, distinct)  # [R, K] each
        return of_counts(metric, fp, tp, convention)

    values, replicates = [], []
    # The ID stream comes first and each OOD set has its own: adding sets does not change the other draws.
    id_stream, *ood_streams = np.random.SeedSequence(seed).spawn(1 + len(ood_sets))
    for scores, stream in zip(ood_sets, ood_streams, strict=True):
        id_ranks, ood_ranks, thresholds = joint_ranks(id_scores, check_scores(scores, "OOD scores"))
        id_ranks, ood_ranks, distinct = id_ranks.cpu(), ood_ranks.cpu(), len(thresholds)
        values.append(measured(id_ranks.unsqueeze(0), ood_ranks.unsqueeze(0), distinct))
        at_once = max(1, _DRAWS_AT_ONCE // (len(id_ranks) + len(ood_ranks)))
        id_rng, ood_rng = np.random.default_rng(id_stream), np.random.default_rng(stream)
        sizes = [min(at_once, resamples - start) for start in range(0, resamples, at_once)]
        draws = ((_drawn(id_ranks, rows, id_rng), _drawn(ood_ranks, rows, ood_rng)) for rows in sizes)
        replicates.append(torch.cat([measured(*drawn, distinct) for drawn in draws]))
    return torch.cat(values).mean().item(), torch.stack(replicates).mean(dim=0).numpy()


def _drawn(ranks: Tensor, rows: int, generator: np.random.Generator) -> Tensor:
    """Draw `rows` resamples of the ranks: `[n] -> [R, n]`."""
    return ranks[torch.from_numpy(generator.integers(len(ranks), size=(rows, len(ranks))))]


def _as_list(scores: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [scores] if isinstance(scores, Tensor) else list(scores)


def _interval(value: float, replicates: np.ndarray, level: float) -> Interval:
    low, high = np.quantile(replicates, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high), level, len(replicates))
