"""What the figures of a report are drawn from: bins, histograms and thinned curves."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..metrics.calibration import equal_width_bins
from ..metrics.ood import flagged, roc_of_counts
from ..metrics.selective import risk_curve
from ..prediction import Prediction

POINTS = 160
"""Most points a stored curve has."""

HISTOGRAM_BINS = (12, 40)
"""Fewest and most bins of a score histogram; in between, twice the cube root of the smallest set (Rice's rule)."""


@dataclass(frozen=True)
class Curve:
    """Points of a line, in drawing order."""

    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class Reliability:
    """Equal-width bins of confidence.

    Attributes:
        count: Samples in each bin.
        confidence: Mean confidence; None in an empty bin.
        accuracy: Share of correct predictions; None in an empty bin.
    """

    count: tuple[int, ...]
    confidence: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]


@dataclass(frozen=True)
class Figures:
    """What the figures of a report are drawn from.

    Attributes:
        reliability: Of the in-distribution set.
        risk_coverage: Error among the most certain share of the in-distribution set.
        score_edges: Common bin edges of the score histograms; scores beyond the ends count in the end bins.
        id_scores: Histogram of the score on the in-distribution set.
        ood_scores: The same for each OOD set.
        roc: ROC curve of each OOD set.
        agreement_id: Share of in-distribution samples on which two members predict the same class, `[M][M]`.
        agreement_ood: The same, unweighted mean over the OOD sets; None without any.
    """

    reliability: Reliability
    risk_coverage: Curve
    score_edges: tuple[float, ...]
    id_scores: tuple[int, ...]
    ood_scores: Mapping[str, tuple[int, ...]]
    roc: Mapping[str, Curve]
    agreement_id: tuple[tuple[float, ...], ...]
    agreement_ood: tuple[tuple[float, ...], ...] | None


def make_figures(
    prediction: Prediction,
    labels: Tensor,
    id_scores: Tensor,
    answers: Mapping[str, Prediction],
    ood_scores: Mapping[str, Tensor],
) -> Figures:
    """Every curve of the report; `answers` and `ood_scores` are those of the OOD sets."""
    correct = prediction.label == labels
    bins = equal_width_bins(prediction.confidence, correct)
    stated, right = (
        tuple(_round(value) if full else None for value, full in zip(values.tolist(), bins.count.tolist(), strict=True))
        for values in (bins.confidence, bins.accuracy)
    )
    risk = risk_curve(id_scores, ~correct)
    rocs = {name: roc_of_counts(*flagged(id_scores, scores)) for name, scores in ood_scores.items()}
    edges = _edges([id_scores, *ood_scores.values()])
    foreign = [_agreement(answer) for answer in answers.values()]
    return Figures(
        reliability=Reliability(tuple(bins.count.tolist()), stated, right),
        risk_coverage=_thin(risk.coverage, risk.risk),
        score_edges=_rounded(edges),
        id_scores=_histogram(id_scores, edges),
        ood_scores={name: _histogram(scores, edges) for name, scores in ood_scores.items()},
        roc={name: _thin(curve.fpr, curve.tpr) for name, curve in rocs.items()},
        agreement_id=tuple(map(_rounded, _agreement(prediction))),
        agreement_ood=tuple(map(_rounded, torch.stack(foreign).mean(dim=0))) if foreign else None,
    )


def _agreement(prediction: Prediction) -> Tensor:
    votes = prediction.member_probs.argmax(dim=-1)  # [M, B]
    return torch.stack([(votes == vote).double().mean(dim=1) for vote in votes])  # [M, M]


def _edges(scores: list[Tensor]) -> Tensor:
    """Common edges that span all but a thousandth of the samples of each set at either end."""
    ends = [np.quantile(scores_of_set.double().numpy(), (0.001, 0.999)) for scores_of_set in scores]
    low, high = min(float(end[0]) for end in ends), max(float(end[1]) for end in ends)
    if not low < high:
        low, high = low - 0.5, high + 0.5
    fewest, most = HISTOGRAM_BINS
    bins = round(2 * min(len(scores_of_set) for scores_of_set in scores) ** (1 / 3))
    return torch.linspace(low, high, max(fewest, min(bins, most)) + 1, dtype=torch.float64)


def _histogram(scores: Tensor, edges: Tensor) -> tuple[int, ...]:
    bins = torch.bucketize(scores.double(), edges, right=True) - 1
    return tuple(torch.bincount(bins.clamp(0, len(edges) - 2), minlength=len(edges) - 1).tolist())


def _thin(x: Tensor, y: Tensor) -> Curve:
    """At most `POINTS` of the points, evenly spaced along the curve, the first and last always among them."""
    if len(x) > POINTS:
        length = torch.cat([torch.zeros(1).double(), (x.diff().abs() + y.diff().abs()).cumsum(dim=0)])
        wanted = torch.linspace(0, float(length[-1]), POINTS, dtype=torch.float64)
        chosen = torch.searchsorted(length, wanted).clamp(max=len(x) - 1)
        chosen[-1] = len(x) - 1
        chosen = torch.unique(chosen)
        x, y = x[chosen], y[chosen]
    return Curve(_rounded(x), _rounded(y))


def _rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(_round(value) for value in values.tolist())


def _round(value: float) -> float:
    return float(f"{value:.5g}")
