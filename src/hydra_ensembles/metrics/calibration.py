"""Accuracy and calibration of class probabilities `[B, C]` against labels `[B]`.

Half precision is raised to float32 before anything is counted, and sums over samples are taken in float64.
Each function takes the `name` of the set, which its error messages repeat.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._utils import require
from ..errors import ConfigError, DataError
from .inputs import at_least_float32, check_finite, check_probs, check_same_length, check_scores, where

BINS = 15


@dataclass(frozen=True, eq=False)
class ReliabilityBins:
    """Equal-width bins of confidence for a reliability diagram, in float64 on the CPU.

    Attributes:
        edges: `[bins + 1]` from 0 to 1.
        count: `[bins]` samples in each bin.
        confidence: `[bins]` mean confidence, NaN in an empty bin.
        accuracy: `[bins]` share of correct predictions, NaN in an empty bin.
    """

    edges: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor


def accuracy(probs: Tensor, labels: Tensor, *, name: str | None = None) -> float:
    """Share of samples whose most probable class is the label.

    Counted here and divided once, so that 9 of 10 is 0.9; torchmetrics would divide in float32.
    """
    _, correct = top_label(probs, labels, name=name)
    return int(correct.sum()) / len(correct)


def brier(probs: Tensor, labels: Tensor, *, name: str | None = None) -> float:
    """Brier score: squared error summed over the classes, mean over the samples (0 best, 2 worst)."""
    return _mean(brier_per_sample(probs, labels, name=name))


def brier_per_sample(probs: Tensor, labels: Tensor, *, name: str | None = None) -> Tensor:
    """Squared error of each sample, summed over the classes: `[B]`.

    Ours, because torchmetrics has none and scikit-learn's covers more than two classes in new versions only.
    """
    probs, labels = check_probs(probs, labels, name)
    error = probs.clone()
    error[torch.arange(len(labels), device=probs.device), labels] -= 1
    return error.square().sum(dim=-1)


def nll(probs: Tensor, labels: Tensor, *, name: str | None = None) -> float:
    """Negative log-likelihood of the label, mean over the samples.

    Infinite as soon as one label has probability zero, as in torch-uncertainty; scikit-learn would clip.
    `nll_of_log_probs` stays finite where the probability underflows and its logarithm does not.
    """
    return _mean(nll_per_sample(probs, labels, name=name))


def nll_per_sample(probs: Tensor, labels: Tensor, *, name: str | None = None) -> Tensor:
    """Negative log-likelihood of each sample's label: `[B]`."""
    probs, labels = check_probs(probs, labels, name)
    return -probs.gather(1, labels.unsqueeze(1)).squeeze(1).log()


def nll_of_log_probs(log_probs: Tensor, labels: Tensor, *, name: str | None = None) -> float:
    """Negative log-likelihood from log-probabilities `[B, C]`, mean over the samples."""
    _, labels = check_probs(log_probs.detach().exp(), labels, name)
    return _mean(-log_probs.gather(1, labels.unsqueeze(1)).squeeze(1))


def ece(probs: Tensor, labels: Tensor, *, bins: int = BINS, name: str | None = None) -> float:
    """Expected calibration error: equal-width bins of top-1 confidence, L1, as torchmetrics defines it.

    torchmetrics puts a confidence of exactly 1 in a bin of its own.
    """
    _check_bins(bins)
    probs, labels = check_probs(probs, labels, name)
    functional = require("torchmetrics.functional.classification", extra="metrics")
    return float(
        functional.multiclass_calibration_error(
            probs, labels, num_classes=probs.shape[1], n_bins=bins, norm="l1", validate_args=False
        )
    )


def adaptive_ece(probs: Tensor, labels: Tensor, *, bins: int = BINS, name: str | None = None) -> float:
    """Calibration error over bins of equal count, L1 weighted by count.

    Ours: torchmetrics has none, and torch-uncertainty's is NaN with fewer samples than bins, where here the
    empty bins are dropped. Equal confidences keep the order of the data.
    """
    return adaptive_ece_of_confidence(*top_label(probs, labels, name=name), bins=bins, name=name)


def top_label(probs: Tensor, labels: Tensor, *, name: str | None = None) -> tuple[Tensor, Tensor]:
    """Confidence of the most probable class and whether it is the label: `[B]` and `[B]` of bool.

    All that calibration error needs to know of a sample, and little enough to resample a thousand times.
    """
    probs, labels = check_probs(probs, labels, name)
    confidence, predicted = probs.max(dim=1)
    return confidence, predicted == labels


def ece_of_confidence(confidence: Tensor, correct: Tensor, *, bins: int = BINS, name: str | None = None) -> float:
    """`ece` from what `top_label` returns, without torchmetrics, which takes whole probability rows only."""
    groups, confidence, correct = _equal_width_groups(confidence, correct, bins, name)
    return _weighted_gap(groups, confidence, correct, bins + 1)


def adaptive_ece_of_confidence(
    confidence: Tensor, correct: Tensor, *, bins: int = BINS, name: str | None = None
) -> float:
    """`adaptive_ece` from what `top_label` returns."""
    confidence, correct = _check_confidence(confidence, correct, bins, name)
    order = confidence.sort(stable=True).indices
    size, larger = divmod(len(order), bins)  # the first `larger` bins hold one sample more
    sizes = torch.tensor([size + 1] * larger + [size] * (bins - larger))
    groups = torch.repeat_interleave(torch.arange(bins), sizes)
    return _weighted_gap(groups, confidence[order], correct[order], bins)


def reliability_bins(probs: Tensor, labels: Tensor, *, bins: int = BINS, name: str | None = None) -> ReliabilityBins:
    """The bins of `ece`, for a reliability diagram; a confidence of exactly 1 is shown in the last bin."""
    groups, confidence, correct = _equal_width_groups(*top_label(probs, labels, name=name), bins, name)
    groups = groups.clamp(max=bins - 1)
    count = torch.bincount(groups, minlength=bins)
    return ReliabilityBins(
        edges=torch.linspace(0, 1, bins + 1, dtype=torch.float64),
        count=count,
        confidence=torch.bincount(groups, weights=confidence.double(), minlength=bins) / count,
        accuracy=torch.bincount(groups, weights=correct.double(), minlength=bins) / count,
    )


def _equal_width_groups(
    confidence: Tensor, correct: Tensor, bins: int, name: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The bin of each sample, `bins` being that of a confidence of exactly one.

    Bins are found in float32, where torchmetrics finds them, so that a confidence on an edge lands alike.
    """
    confidence, correct = _check_confidence(confidence, correct, bins, name)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float32)
    return torch.bucketize(confidence.float(), edges, right=True) - 1, confidence, correct


def _check_confidence(confidence: Tensor, correct: Tensor, bins: int, name: str | None) -> tuple[Tensor, Tensor]:
    _check_bins(bins)
    check_same_length({"confidences": len(confidence), "correct flags": len(correct)}, name)
    confidence = check_scores(confidence, "confidences", name).cpu()
    check_finite(confidence, "confidences", name)
    if not confidence.is_floating_point() or confidence.min() < 0 or confidence.max() > 1:
        raise DataError(
            f"{where(name)}confidences must be floating point numbers in [0, 1], but have dtype {confidence.dtype} "
            f"and run from {confidence.min().item():.4g} to {confidence.max().item():.4g}"
        )
    return at_least_float32(confidence), correct.detach().cpu()


def _weighted_gap(groups: Tensor, confidence: Tensor, correct: Tensor, bins: int) -> float:
    """Sum over bins of |correct - confidence|, over the number of samples: an empty bin adds nothing."""
    gap = torch.bincount(groups, weights=correct.double() - confidence.double(), minlength=bins)
    return gap.abs().sum().item() / len(groups)


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise ConfigError(f"bins={bins} cannot hold samples; use at least 1 ({BINS} is the custom)")


def _mean(values: Tensor) -> float:
    return values.detach().cpu().double().mean().item()
