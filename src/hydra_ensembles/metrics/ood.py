"""Out-of-distribution detection: AUROC, AUPR, FPR95 and the ROC curve.

OOD is the positive class and a score is higher the more uncertain the model is. The libraries of the field
disagree on AUPR and FPR95, so the convention has a name:

* `"torch-uncertainty"` (version 0.12.1, the default): AUPR is the step-wise average precision; FPR95 is taken
  at the threshold whose recall is nearest 95 %, even where that is below 95 %.
* `"openood"`: AUPR is the area of trapezoids under the precision-recall curve; FPR95 is taken at the first
  threshold that flags at least 95 % of the OOD samples. Every distinct score is a threshold; OpenOOD itself lets
  scikit-learn drop points between two others on a line first, which can only matter for scores with ties.

All of them are read off two integer counts, how many ID and how many OOD samples each distinct score flags, for one
set of scores or for a thousand resamples of it at once. Scores only enter by their order: nothing squashes them
(torchmetrics passes scores outside [0, 1] through a sigmoid, batch by batch, which ties or reorders them), half
precision loses nothing, and infinite scores are allowed. torchmetrics, scikit-learn and torch-uncertainty are the
referees, in the tests.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .inputs import Convention, at_least_float32, check_convention, check_scores

OodMetric = Literal["auroc", "aupr", "fpr95"]


@dataclass(frozen=True, eq=False)
class RocCurve:
    """Points of a ROC curve, from the strictest threshold to the loosest, in float64 on the CPU.

    Attributes:
        fpr: Share of ID samples flagged.
        tpr: Share of OOD samples flagged.
        thresholds: Samples with a score at or above it are flagged; the first is infinite and flags none.
    """

    fpr: Tensor
    tpr: Tensor
    thresholds: Tensor


def discordance(id_scores: Tensor, ood_scores: Tensor, *, name: str | None = None) -> int:
    """Twice the number of (ID, OOD) pairs in the wrong order, plus the number of tied pairs.

    An integer, so that two candidates compare exactly: AUROC = 1 - discordance / (2 · ID · OOD). Scores `[n]` and
    `[m]` may have any real dtype. Runs on the device of the ID scores, and takes O(n log n).
    """
    fp, tp, _ = flagged(*_checked(id_scores, ood_scores, name))
    return 2 * len(id_scores) * len(ood_scores) - int(_concordant_twice(fp, tp))


def auroc(
    id_scores: Tensor, ood_scores: Tensor, convention: Convention = "torch-uncertainty", *, name: str | None = None
) -> float:
    """Probability that an OOD sample scores higher than an ID sample, ties counting one half.

    The same exact number as `discordance`; both conventions agree on it.
    """
    return _measured("auroc", id_scores, ood_scores, convention, name)


def aupr(
    id_scores: Tensor, ood_scores: Tensor, convention: Convention = "torch-uncertainty", *, name: str | None = None
) -> float:
    """Area under the precision-recall curve with OOD as the positive class."""
    return _measured("aupr", id_scores, ood_scores, convention, name)


def fpr95(
    id_scores: Tensor, ood_scores: Tensor, convention: Convention = "torch-uncertainty", *, name: str | None = None
) -> float:
    """Share of ID samples flagged at the threshold that flags 95 % of the OOD samples."""
    return _measured("fpr95", id_scores, ood_scores, convention, name)


def roc_curve(id_scores: Tensor, ood_scores: Tensor, *, name: str | None = None) -> RocCurve:
    """The ROC curve for a figure; points between two others on a straight line are left out."""
    return roc_of_counts(*flagged(*_checked(id_scores, ood_scores, name)))


def _measured(
    metric: OodMetric, id_scores: Tensor, ood_scores: Tensor, convention: Convention, name: str | None
) -> float:
    check_convention(convention)
    fp, tp, _ = flagged(*_checked(id_scores, ood_scores, name))
    return of_counts(metric, fp.cpu(), tp.cpu(), convention).item()  # in float64, which not every device has


def _checked(id_scores: Tensor, ood_scores: Tensor, name: str | None) -> tuple[Tensor, Tensor]:
    return check_scores(id_scores, "ID scores", name), check_scores(ood_scores, "OOD scores", name)


def flagged(id_scores: Tensor, ood_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many ID and OOD samples each threshold flags, `[1, K]` each, and the thresholds `[K]`, strictest first."""
    id_ranks, ood_ranks, distinct = joint_ranks(id_scores, ood_scores)
    fp, tp = (cumulative_counts(ranks.unsqueeze(0), len(distinct)) for ranks in (id_ranks, ood_ranks))
    return fp, tp, distinct.flip(0)


def joint_ranks(id_scores: Tensor, ood_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Dense ranks of both sets among all their scores: equal scores share a rank, infinity has one too.

    Returns:
        Ranks of the ID scores, ranks of the OOD scores, and the distinct scores in ascending order.
    """
    dtypes = (id_scores.dtype, ood_scores.dtype)
    if all(dtype.is_floating_point for dtype in dtypes):
        id_scores, ood_scores = at_least_float32(id_scores), at_least_float32(ood_scores)
        dtype = torch.promote_types(id_scores.dtype, ood_scores.dtype)
    else:
        dtype = torch.float64 if any(dtype.is_floating_point for dtype in dtypes) else torch.int64
    both = torch.cat([id_scores.to(dtype), ood_scores.to(id_scores.device, dtype)])
    distinct, ranks = torch.unique(both, return_inverse=True)
    return ranks[: len(id_scores)], ranks[len(id_scores) :], distinct


def cumulative_counts(ranks: Tensor, distinct: int) -> Tensor:
    """How many samples are flagged at each threshold, from the highest score down: `[R, n] -> [R, K]`."""
    rows = torch.arange(len(ranks), device=ranks.device).unsqueeze(1)
    flat = ((distinct - 1 - ranks) + rows * distinct).flatten()  # rank K-1, the highest score, comes first
    counts = torch.bincount(flat, minlength=len(ranks) * distinct)
    return counts.view(len(ranks), distinct).cumsum(dim=1)


def of_counts(metric: OodMetric, fp: Tensor, tp: Tensor, convention: Convention) -> Tensor:
    """The metric of each row of cumulative false and true positives: `[R, K] -> [R]`, in float64."""
    if metric == "auroc":
        return _concordant_twice(fp, tp).double() / (2 * fp[:, -1] * tp[:, -1]).double()
    return _aupr(fp, tp, convention) if metric == "aupr" else _fpr95(fp, tp, convention)


def roc_of_counts(fp: Tensor, tp: Tensor, thresholds: Tensor) -> RocCurve:
    """`roc_curve` from what `flagged` returns."""
    fp, tp, thresholds = fp[0].cpu(), tp[0].cpu(), thresholds.cpu().double()
    if len(fp) > 2:
        bends = (fp.diff(n=2) != 0) | (tp.diff(n=2) != 0)
        kept = torch.cat([torch.ones(1), bends, torch.ones(1)]).bool()
        fp, tp, thresholds = fp[kept], tp[kept], thresholds[kept]
    none = torch.zeros(1).double()
    return RocCurve(
        fpr=torch.cat([none, fp.double() / fp[-1]]),
        tpr=torch.cat([none, tp.double() / tp[-1]]),
        thresholds=torch.cat([none + torch.inf, thresholds]),
    )


def _concordant_twice(fp: Tensor, tp: Tensor) -> Tensor:
    """Twice the pairs in the right order, plus the tied ones: `[R, K] -> [R]`."""
    tp_here = tp.diff(dim=1, prepend=torch.zeros_like(tp[:, :1]))
    fp_before = torch.cat([torch.zeros_like(fp[:, :1]), fp[:, :-1]], dim=1)
    return (tp_here * (2 * fp[:, -1:] - fp - fp_before)).sum(dim=1)


def _aupr(fp: Tensor, tp: Tensor, convention: Convention) -> Tensor:
    """By steps, or by trapezoids."""
    flagged = tp + fp
    precision = torch.where(flagged > 0, tp.double() / flagged.clamp(min=1).double(), 1.0)
    recall = tp.double() / tp[:, -1:].double()
    step = recall.diff(dim=1, prepend=torch.zeros_like(recall[:, :1]))
    if convention == "torch-uncertainty":
        return (step * precision).sum(dim=1)
    previous = torch.cat([torch.ones_like(precision[:, :1]), precision[:, :-1]], dim=1)
    return (step * (precision + previous) / 2).sum(dim=1)


def _fpr95(fp: Tensor, tp: Tensor, convention: Convention) -> Tensor:
    """At the threshold that the convention takes.

    torch-uncertainty takes the threshold whose recall is nearest 0.95, reckoned in float32. Between two
    equally near it takes the lower threshold, so the point after a run of ID samples, except at full recall,
    where it takes the first threshold that reaches it. All of that is kept, to give its numbers.
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
