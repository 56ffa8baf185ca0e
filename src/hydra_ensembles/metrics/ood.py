"""Out-of-distribution detection: AUROC, AUPR, FPR95 and the ROC curve.

OOD is the positive class and a score is higher the more uncertain the model is. The libraries of the field
disagree on AUPR and FPR95, so the convention has a name:

* `"torch-uncertainty"` (version 0.12.1, the default): AUPR is the step-wise average precision; FPR95 is taken
  at the threshold whose recall is nearest 95 %, even where that is below 95 %.
* `"openood"`: AUPR is the area of trapezoids under the precision-recall curve; FPR95 is taken at the first
  threshold that flags at least 95 % of the OOD samples.

Scores reach scikit-learn as their ranks, over all samples at once. So no library can squash them (torchmetrics
passes scores outside [0, 1] through a sigmoid, batch by batch, which ties or reorders them), half precision
loses nothing, and infinite scores are allowed.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .._utils import require
from .inputs import (
    Convention,
    check_convention,
    check_scores,
    common_dtype,
    cumulative_counts,
    fpr95_from_counts,
    joint_ranks,
)


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

    An integer, so that two candidates compare exactly: AUROC = 1 - discordance / (2 · ID · OOD). Needs torch
    alone, runs on the device of the ID scores, and takes O(n log n).

    Args:
        id_scores: `[n]`, any real dtype.
        ood_scores: `[m]`, any real dtype.
        name: Name of the OOD set, for error messages.
    """
    id_scores, ood_scores = _checked(id_scores, ood_scores, name)
    id_scores, ood_scores = common_dtype(id_scores, ood_scores)
    ordered = id_scores.sort().values
    below = torch.searchsorted(ordered, ood_scores)  # ID scores below each OOD score
    not_above = torch.searchsorted(ordered, ood_scores, right=True)
    # a pair counts 2 when the ID score is above, 1 when it is equal: 2 (n - not_above) + (not_above - below)
    return int((2 * len(ordered) - not_above - below).sum())


def auroc(
    id_scores: Tensor,
    ood_scores: Tensor,
    convention: Convention = "torch-uncertainty",
    *,
    name: str | None = None,
) -> float:
    """Probability that an OOD sample scores higher than an ID sample, ties counting one half.

    Read off `discordance`, not off a library: the same exact number chooses heads and reports results. Both
    conventions agree on it.
    """
    check_convention(convention)
    pairs = 2 * len(id_scores) * len(ood_scores)
    return (pairs - discordance(id_scores, ood_scores, name=name)) / pairs


def aupr(
    id_scores: Tensor,
    ood_scores: Tensor,
    convention: Convention = "torch-uncertainty",
    *,
    name: str | None = None,
) -> float:
    """Area under the precision-recall curve with OOD as the positive class."""
    check_convention(convention)
    is_ood, ranks, _ = _ranked(id_scores, ood_scores, name)
    metrics = require("sklearn.metrics", extra="metrics")
    if convention == "torch-uncertainty":
        return float(metrics.average_precision_score(is_ood, ranks))
    precision, recall, _ = metrics.precision_recall_curve(is_ood, ranks)
    return float(metrics.auc(recall, precision))


def fpr95(
    id_scores: Tensor,
    ood_scores: Tensor,
    convention: Convention = "torch-uncertainty",
    *,
    name: str | None = None,
) -> float:
    """Share of ID samples flagged at the threshold that flags 95 % of the OOD samples.

    scikit-learn has no threshold "nearest 95 %", so torch-uncertainty's is our own. For `"openood"` every
    distinct score is a threshold; OpenOOD itself lets scikit-learn drop points between two others on a line
    first, which can only matter for scores with ties.
    """
    check_convention(convention)
    if convention == "torch-uncertainty":
        id_ranks, ood_ranks, distinct = joint_ranks(*_checked(id_scores, ood_scores, name))
        fp = cumulative_counts(id_ranks.unsqueeze(0), len(distinct))
        tp = cumulative_counts(ood_ranks.unsqueeze(0), len(distinct))
        return fpr95_from_counts(fp.cpu(), tp.cpu(), convention).item()
    is_ood, ranks, _ = _ranked(id_scores, ood_scores, name)
    metrics = require("sklearn.metrics", extra="metrics")
    fpr, tpr, _ = metrics.roc_curve(is_ood, ranks, drop_intermediate=False)
    return float(fpr[np.argmax(tpr >= 0.95)])


def roc_curve(id_scores: Tensor, ood_scores: Tensor, *, name: str | None = None) -> RocCurve:
    """The ROC curve for a figure; points between two others on a straight line are left out."""
    is_ood, ranks, distinct = _ranked(id_scores, ood_scores, name)
    metrics = require("sklearn.metrics", extra="metrics")
    fpr, tpr, threshold_ranks = metrics.roc_curve(is_ood, ranks)
    thresholds = np.concatenate([[np.inf], distinct[threshold_ranks[1:].astype(np.int64)]])
    return RocCurve(torch.from_numpy(fpr), torch.from_numpy(tpr), torch.from_numpy(thresholds))


def _checked(id_scores: Tensor, ood_scores: Tensor, name: str | None) -> tuple[Tensor, Tensor]:
    return check_scores(id_scores, "ID scores", name), check_scores(ood_scores, "OOD scores", name)


def _ranked(id_scores: Tensor, ood_scores: Tensor, name: str | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whether each sample is OOD, its rank, and the distinct scores, as scikit-learn wants them."""
    id_ranks, ood_ranks, distinct = joint_ranks(*_checked(id_scores, ood_scores, name))
    is_ood = np.repeat([0, 1], [len(id_ranks), len(ood_ranks)])
    return is_ood, torch.cat([id_ranks, ood_ranks]).cpu().numpy(), distinct.cpu().double().numpy()
