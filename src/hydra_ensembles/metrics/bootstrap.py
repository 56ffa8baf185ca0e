"""The one bootstrap: confidence intervals of a metric, and of the difference of two methods on the same samples.

Samples are drawn with replacement and the interval contains the middle share of the replicates (percentile method). A
resample is a row of weights, how often each sample was drawn, so that all resamples are computed at once. A difference
uses the same weights for both methods: noise common to both cancels.

With few samples percentile intervals are too narrow, most of all for AURC when almost all answers are right. If all
samples have the same value, as when all answers are right, the interval has no width and shows no uncertainty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._utils import derive_seed

_DRAWS_AT_ONCE = 4_000_000  # held in memory: a thousand resamples of ten thousand samples are split into such pieces
_CALIBRATED = 200  # simulations of a perfectly calibrated model, to see how large its error is by chance


@dataclass(frozen=True)
class Interval:
    """A number with its bootstrap confidence interval at `level`, from `resamples` replicates."""

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
    count = len(ours[0])

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
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.cat(replicates).double().quantile(ends).tolist()
    everything = torch.ones(1, count, dtype=torch.float64)
    value = measured(everything).item()
    if mirrored:
        generator = torch.Generator().manual_seed(0)
        right = (torch.rand(count, generator=generator) < ours[0] for _ in range(_CALIBRATED))
        by_chance = torch.cat([statistic(everything, ours[0], correct) for correct in right])
        lowest = 0.0 if value <= by_chance.quantile((1 + level) / 2) else min(max(2 * value - high, 0.0), value)
        low, high = lowest, max(2 * value - low, value)
    return Interval(value, low, high, level, resamples)
