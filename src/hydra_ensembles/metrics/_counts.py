"""Detection counts at every threshold, and the OOD metrics read off them, for many resamples at once.

scikit-learn defines the same metrics for one set of scores; a bootstrap needs them for a thousand resamples
of the same scores, so here the scores are sorted once and a resample only changes how often each one counts.
Everything is integer until the last division, hence exact and independent of device and dtype.
"""

import torch
from torch import Tensor

from ._checks import Convention, at_least_float32


def common_dtype(id_scores: Tensor, ood_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Both score vectors on one device and in one dtype that keeps their order (never half precision)."""
    dtypes = (id_scores.dtype, ood_scores.dtype)
    if all(dtype.is_floating_point for dtype in dtypes):
        id_scores, ood_scores = at_least_float32(id_scores), at_least_float32(ood_scores)
        dtype = torch.promote_types(id_scores.dtype, ood_scores.dtype)
    else:
        dtype = torch.float64 if any(dtype.is_floating_point for dtype in dtypes) else torch.int64
    return id_scores.to(dtype), ood_scores.to(device=id_scores.device, dtype=dtype)


def joint_ranks(id_scores: Tensor, ood_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Dense ranks of both sets among all their scores: equal scores share a rank, infinity has one too.

    Returns:
        Ranks of the ID scores, ranks of the OOD scores, and the distinct scores in ascending order.
    """
    id_scores, ood_scores = common_dtype(id_scores, ood_scores)
    distinct, ranks = torch.unique(torch.cat([id_scores, ood_scores]), return_inverse=True)
    return ranks[: len(id_scores)], ranks[len(id_scores) :], distinct


def cumulative_counts(ranks: Tensor, distinct: int) -> Tensor:
    """How many samples are flagged at each threshold, from the highest score down: `[R, n] -> [R, K]`."""
    rows = torch.arange(len(ranks), device=ranks.device).unsqueeze(1)
    flat = ((distinct - 1 - ranks) + rows * distinct).flatten()  # rank K-1, the highest score, comes first
    counts = torch.bincount(flat, minlength=len(ranks) * distinct)
    return counts.view(len(ranks), distinct).cumsum(dim=1)


def auroc_from_counts(fp: Tensor, tp: Tensor) -> Tensor:
    """AUROC of each row of cumulative false and true positives: `[R, K] -> [R]`."""
    negatives, positives = fp[:, -1:], tp[:, -1:]
    tp_here = tp.diff(dim=1, prepend=torch.zeros_like(positives))
    fp_before = torch.cat([torch.zeros_like(negatives), fp[:, :-1]], dim=1)
    concordant_twice = (tp_here * (2 * negatives - fp - fp_before)).sum(dim=1)
    return concordant_twice.double() / (2 * negatives * positives).squeeze(1).double()


def aupr_from_counts(fp: Tensor, tp: Tensor, convention: Convention) -> Tensor:
    """AUPR of each row of cumulative counts, by steps or by trapezoids: `[R, K] -> [R]`."""
    flagged = tp + fp
    precision = torch.where(flagged > 0, tp.double() / flagged.clamp(min=1).double(), 1.0)
    recall = tp.double() / tp[:, -1:].double()
    step = recall.diff(dim=1, prepend=torch.zeros_like(recall[:, :1]))
    if convention == "torch-uncertainty":
        return (step * precision).sum(dim=1)
    previous = torch.cat([torch.ones_like(precision[:, :1]), precision[:, :-1]], dim=1)
    return (step * (precision + previous) / 2).sum(dim=1)


def fpr95_from_counts(fp: Tensor, tp: Tensor, convention: Convention) -> Tensor:
    """FPR95 of each row of cumulative counts: `[R, K] -> [R]`.

    torch-uncertainty takes the threshold whose recall is nearest 0.95, reckoned in float32. Between two
    equally near it takes the lower threshold, so the point after a run of ID samples, except at full recall,
    where it takes the first threshold that reaches it. All of that is kept, to give its numbers.
    """
    positives = tp[:, -1:]
    if convention == "openood":
        index = (20 * tp < 19 * positives).sum(dim=1, keepdim=True)  # first with recall >= 95 %
    else:
        distance = (tp.float() / positives.float() - 0.95).abs()
        full = tp == positives
        after_full = full & (full.cumsum(dim=1) > 1)
        distance = distance.masked_fill(after_full, torch.inf)
        index = tp.shape[1] - 1 - distance.flip(1).argmin(dim=1, keepdim=True)
    return (fp.gather(1, index).double() / fp[:, -1:].double()).squeeze(1)
