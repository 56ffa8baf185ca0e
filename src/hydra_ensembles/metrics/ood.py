"""How good an uncertainty score is: out-of-distribution detection and selective prediction.

A score is higher the more uncertain the model is, and OOD is the positive class. Libraries disagree on AUPR and FPR95,
so the convention has a name:

* `"torch-uncertainty"` (version 0.12.1, the default): AUPR is the step-wise average precision; FPR95 is taken
  at the threshold whose recall is nearest 95 %, even if that is below 95 %.
* `"openood"`: AUPR is the trapezoidal area under the precision-recall curve; FPR95 is taken at the first
  threshold that flags at least 95 % of the OOD samples. Every distinct score is a threshold; OpenOOD itself lets
  scikit-learn first drop collinear points, which can only matter for scores with ties.

All of them are computed from two integer counts, how many ID and how many OOD samples each distinct score flags, for
one set of scores or for a thousand resamples at once. Only the order of scores matters: they are not squashed, half
precision loses nothing, and infinite scores are allowed. The tests compare with torchmetrics, scikit-learn and
torch-uncertainty.

In selective prediction the order of tied scores is undefined, so each tied sample counts with their mean error: the
expectation over all orders. No number depends on the order of the data, which is often sorted by class; a constant
score has the model's error as its AURC. torch-uncertainty uses whatever order its sort gives ties; without ties the
numbers are the same.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import DataError
from ..settings import PositiveShare, require
from .probabilities import Convention, check_scores

OodMetric = Literal["auroc", "aupr", "fpr95"]


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """A risk-coverage curve in float64 on the CPU: the k most certain samples, for k from 1 to B."""

    coverage: Tensor  # [B], share of samples answered
    risk: Tensor  # [B], mean error among them, in expectation over the order of tied scores

    @property
    def area(self) -> float:
        """Trapezoidal area under the curve, divided by the width it spans; for one sample, its risk."""
        return self._area(self.risk)

    @property
    def generalized_area(self) -> float:
        """Area under risk times coverage, the share of all samples that are answered wrongly; errors count once."""
        return self._area(self.risk * self.coverage)

    def _area(self, heights: Tensor) -> float:
        if len(heights) == 1:
            return heights.item()
        return torch.trapezoid(heights, self.coverage).item() / (1 - 1 / len(heights))

    def at(self, coverage: float) -> float:
        """Mean error when at least this share of the samples is answered, the most certain ones."""
        coverage = require("coverage", coverage, PositiveShare)
        answered = math.ceil(round(len(self.risk) * coverage, 9))  # 100 * 0.07 is 7 samples, not 8
        return self.risk[max(answered, 1) - 1].item()


# --- selective prediction -----------------------------------------------------------------------------------


def risk_coverage(scores: Tensor, errors: Tensor) -> RiskCoverage:
    """Risk at every coverage, from scores `[B]` and whether (bool) or how much (float) each answer is wrong."""
    if len(check_scores(scores, "scores")) != len(check_scores(errors, "errors")):
        raise DataError(f"got {len(scores)} scores, {len(errors)} errors; every sample needs one of each")
    if not errors.is_floating_point() and bool((errors > 1).any()):
        raise DataError(f"errors are {errors.dtype} above 1, like labels; give predicted != labels, or float losses")
    _, run_of, sizes = scores.detach().cpu().unique(return_inverse=True, return_counts=True)  # runs of equal scores
    wrong = sizes.new_zeros(len(sizes), dtype=torch.float64).index_add(0, run_of, errors.detach().cpu().double())
    answered = torch.arange(1, len(scores) + 1, dtype=torch.float64, device="cpu")
    run = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)  # [B], of the k-th most certain sample
    missing = sizes.cumsum(dim=0)[run] - answered  # samples of its run that are not answered yet
    risk = (wrong.cumsum(dim=0)[run] - wrong[run] * missing / sizes[run]) / answered
    return RiskCoverage(coverage=answered / len(run), risk=risk)


def aurc(scores: Tensor, errors: Tensor) -> float:
    """Area under the risk-coverage curve, as `RiskCoverage.area` defines it; ties count by their mean error."""
    return risk_coverage(scores, errors).area


def augrc(scores: Tensor, errors: Tensor) -> float:
    """Area under the generalized risk-coverage curve, as `RiskCoverage.generalized_area` defines it."""
    return risk_coverage(scores, errors).generalized_area


def weighted_aurc(weights: Tensor, scores: Tensor, errors: Tensor) -> Tensor:
    """`aurc` under each row of whole weights `[R, B]`: `[R]`.

    Among the n-th to m-th most certain samples, which have one score, the risk at k is (a + b·k) / k: its sum needs
    only the harmonic numbers at n and m.
    """
    _, run = scores.unique(return_inverse=True)  # [B], the run of equal scores of each sample
    zeros = weights.new_zeros(len(weights), int(run.max()) + 1)
    size, wrong = zeros.index_add(1, run, weights), zeros.index_add(1, run, weights * errors.double())  # [R, runs]
    answered, missed = size.cumsum(dim=1), wrong.cumsum(dim=1)
    share = wrong / size.clamp(min=1)  # in the run
    total = answered[:, -1]
    harmonic = weights.new_zeros(int(total.max()) + 1)
    harmonic[1:] = (1 / torch.arange(1, len(harmonic), dtype=harmonic.dtype)).cumsum(dim=0)
    terms = harmonic[answered.long()] - harmonic[(answered - size).long()]
    risks = (((missed - wrong) - share * (answered - size)) * terms + share * size).sum(dim=1)  # at k from 1 to B
    first = share.gather(1, (size > 0).int().argmax(dim=1, keepdim=True)).squeeze(1)
    last = missed[:, -1] / total
    return torch.where(total > 1, (risks - (first + last) / 2) / (total - 1).clamp(min=1), last)


# --- detection ----------------------------------------------------------------------------------------------


def auroc(id_scores: Tensor, ood_scores: Tensor, convention: Convention = "torch-uncertainty") -> float:
    """Probability that an OOD sample scores higher than an ID sample, ties counting one half; exact.

    Both conventions agree on it. Scores `[n]` and `[m]` may have any real dtype.
    """
    return _measured("auroc", id_scores, ood_scores, convention)


def aupr(id_scores: Tensor, ood_scores: Tensor, convention: Convention = "torch-uncertainty") -> float:
    """Area under the precision-recall curve with OOD as the positive class."""
    return _measured("aupr", id_scores, ood_scores, convention)


def fpr95(id_scores: Tensor, ood_scores: Tensor, convention: Convention = "torch-uncertainty") -> float:
    """Share of ID samples flagged at the threshold that flags 95 % of the OOD samples."""
    return _measured("fpr95", id_scores, ood_scores, convention)


def _measured(metric: OodMetric, id_scores: Tensor, ood_scores: Tensor, convention: Convention) -> float:
    fp, tp = flagged(id_scores, ood_scores)
    return of_counts(metric, fp.cpu(), tp.cpu(), convention).item()  # on the CPU: not every device has float64


def flagged(
    id_scores: Tensor, ood_scores: Tensor, weights: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """How many ID and OOD samples each distinct score flags, `[R, K]` each, strictest first.

    Each row of weights, of ID samples `[R, n]` and OOD samples `[R, m]`, says how often a sample counts (None: once).
    """
    dtype = torch.promote_types(id_scores.dtype, ood_scores.dtype)
    if id_scores.is_floating_point() != ood_scores.is_floating_point():
        dtype = torch.float64  # exact for integers up to 2**53
    inside, outside = check_scores(id_scores, "ID scores"), check_scores(ood_scores, "OOD scores")
    scores = torch.cat([inside.to(dtype), outside.to(inside.device, dtype)])
    distinct, ranks = torch.unique(scores, return_inverse=True)
    sides = (len(distinct) - 1 - ranks).split([len(inside), len(outside)])
    counted = weights or tuple(torch.ones_like(side)[None] for side in sides)
    fp, tp = (
        counts.new_zeros(len(counts), len(distinct)).index_add(1, side, counts).cumsum(dim=1)
        for side, counts in zip(sides, counted, strict=True)
    )
    return fp, tp


def of_counts(metric: OodMetric, fp: Tensor, tp: Tensor, convention: Convention) -> Tensor:
    """The metric of each row of cumulative false and true positives: `[R, K] -> [R]`, in float64."""
    if metric != "auroc":
        return _aupr(fp, tp, convention) if metric == "aupr" else _fpr95(fp, tp, convention)
    # the share of pairs in the right order, counted in integers: twice these pairs, plus the tied ones
    tp_here = tp.diff(dim=1, prepend=torch.zeros_like(tp[:, :1]))
    fp_before = torch.cat([torch.zeros_like(fp[:, :1]), fp[:, :-1]], dim=1)
    concordant_twice = (tp_here * (2 * fp[:, -1:] - fp - fp_before)).sum(dim=1)
    return concordant_twice.double() / (2 * fp[:, -1] * tp[:, -1]).double()


def _aupr(fp: Tensor, tp: Tensor, convention: Convention) -> Tensor:
    """Step-wise or trapezoidal area, depending on the convention."""
    flagged = tp + fp
    precision = torch.where(flagged > 0, tp.double() / flagged.clamp(min=1).double(), 1.0)
    recall = tp.double() / tp[:, -1:].double()
    step = recall.diff(dim=1, prepend=torch.zeros_like(recall[:, :1]))
    if convention == "torch-uncertainty":
        return (step * precision).sum(dim=1)
    previous = torch.cat([torch.ones_like(precision[:, :1]), precision[:, :-1]], dim=1)
    return (step * (precision + previous) / 2).sum(dim=1)


def _fpr95(fp: Tensor, tp: Tensor, convention: Convention) -> Tensor:
    """FPR at the threshold that the convention uses.

    torch-uncertainty uses the threshold whose recall is nearest 0.95, computed in float32. Of two equally
    near ones it uses the lower threshold, hence the point after a run of ID samples, except at full recall,
    where it uses the first threshold that reaches it. This code does the same, to give the same numbers.
    """
    positives = tp[:, -1:]
    if convention == "openood":
        index = (20 * tp < 19 * positives).sum(dim=1, keepdim=True)  # first with recall >= 95 %
    else:
        full = tp == positives
        distance = (tp.float() / positives.float() - 0.95).abs()
        distance = distance.masked_fill(full & (full.cumsum(dim=1) > 1), torch.inf)
        index = tp.shape[1] - 1 - distance.flip(1).argmin(dim=1, keepdim=True)
    return (fp.gather(1, index).double() / fp[:, -1:].double()).squeeze(1)


def detection(metric: OodMetric, convention: Convention = "torch-uncertainty") -> Callable[..., Tensor]:
    """A statistic of weights `[R, B]`, scores `[B]` and the set of each sample: 0 for ID, OOD sets from 1.

    Gives the unweighted mean over the OOD sets, `[R]`; for `bootstrap.paired`, the sets are also the strata.
    """

    def measured(weights: Tensor, scores: Tensor, sets: Tensor) -> Tensor:
        inside, values = sets == 0, []
        for number in range(1, int(sets.max()) + 1):
            outside = sets == number
            fp, tp = flagged(scores[inside], scores[outside], (weights[:, inside], weights[:, outside]))
            values.append(of_counts(metric, fp, tp, convention))
        return torch.stack(values).mean(dim=0)

    return measured
