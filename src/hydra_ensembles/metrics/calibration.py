"""Accuracy and calibration of class probabilities `[B, C]` against labels `[B]`.

Half precision is raised to float32 before anything is counted, and sums over samples are taken in float64.
Each function takes the `name` of the set, which its error messages repeat. torchmetrics and torch-uncertainty are
the referees of these numbers (in the tests); a calibration error is found here from confidence and correctness
alone, which is little enough to resample a thousand times.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError, DataError
from .inputs import at_least_float32, check_probs, check_same_length, check_scores, mean, where

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
    """Share of samples whose most probable class is the label, divided once, so that 9 of 10 is 0.9."""
    return mean(top_label(probs, labels, name=name)[1])


def brier(probs: Tensor, labels: Tensor, *, name: str | None = None) -> float:
    """Brier score: squared error summed over the classes, mean over the samples (0 best, 2 worst)."""
    return mean(brier_per_sample(probs, labels, name=name))


def brier_per_sample(probs: Tensor, labels: Tensor, *, name: str | None = None) -> Tensor:
    """Squared error of each sample, summed over the classes: `[B]`."""
    return squared_errors(*check_probs(probs, labels, name))


def nll(probs: Tensor, labels: Tensor, *, name: str | None = None) -> float:
    """Negative log-likelihood of the label, mean over the samples.

    Infinite as soon as one label has probability zero, as in torch-uncertainty; scikit-learn would clip.
    `nll_of_log_probs` stays finite where the probability underflows and its logarithm does not.
    """
    return mean(nll_per_sample(probs, labels, name=name))


def nll_per_sample(probs: Tensor, labels: Tensor, *, name: str | None = None) -> Tensor:
    """Negative log-likelihood of each sample's label: `[B]`."""
    probs, labels = check_probs(probs, labels, name)
    return -at_labels(probs, labels).log()


def nll_of_log_probs(log_probs: Tensor, labels: Tensor, *, name: str | None = None) -> float:
    """Negative log-likelihood from log-probabilities `[B, C]`, mean over the samples."""
    _, labels = check_probs(log_probs.exp(), labels, name)
    return -mean(at_labels(log_probs, labels))


def ece(probs: Tensor, labels: Tensor, *, bins: int = BINS, name: str | None = None) -> float:
    """Expected calibration error: equal-width bins of top-1 confidence, L1, as torchmetrics defines it.

    Like there, a confidence of exactly 1 has a bin of its own.
    """
    return equal_width_error(*top_label(probs, labels, name=name), _checked(bins))


def adaptive_ece(probs: Tensor, labels: Tensor, *, bins: int = BINS, name: str | None = None) -> float:
    """Calibration error over bins of equal count, L1 weighted by count.

    torch-uncertainty's is NaN with fewer samples than bins, where here the empty bins are dropped. Equal confidences
    keep the order of the data.
    """
    return equal_count_error(*top_label(probs, labels, name=name), _checked(bins))


def top_label(probs: Tensor, labels: Tensor, *, name: str | None = None) -> tuple[Tensor, Tensor]:
    """Confidence of the most probable class and whether it is the label: `[B]` and `[B]` of bool."""
    probs, labels = check_probs(probs, labels, name)
    confidence, predicted = probs.max(dim=1)
    return confidence, predicted == labels


def ece_of_confidence(confidence: Tensor, correct: Tensor, *, bins: int = BINS, name: str | None = None) -> float:
    """`ece` from what `top_label` returns."""
    return equal_width_error(*_checked_confidence(confidence, correct, name), _checked(bins))


def adaptive_ece_of_confidence(
    confidence: Tensor, correct: Tensor, *, bins: int = BINS, name: str | None = None
) -> float:
    """`adaptive_ece` from what `top_label` returns."""
    return equal_count_error(*_checked_confidence(confidence, correct, name), _checked(bins))


def reliability_bins(probs: Tensor, labels: Tensor, *, bins: int = BINS, name: str | None = None) -> ReliabilityBins:
    """The bins of `ece`, for a reliability diagram; a confidence of exactly 1 is shown in the last bin."""
    return equal_width_bins(*top_label(probs, labels, name=name), _checked(bins))


def squared_errors(probs: Tensor, labels: Tensor) -> Tensor:
    """`brier_per_sample` of values known to be good."""
    error = probs.clone()
    error[torch.arange(len(labels), device=probs.device), labels] -= 1
    return error.square().sum(dim=-1)


def at_labels(values: Tensor, labels: Tensor) -> Tensor:
    """The value of each sample's label: `[B, C] -> [B]`."""
    return values.gather(1, labels.unsqueeze(1)).squeeze(1)


def equal_width_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> float:
    """`ece_of_confidence` of values known to be good."""
    return _weighted_gap(_equal_width_groups(confidence, bins), confidence, correct, bins + 1)


def equal_count_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> float:
    """`adaptive_ece_of_confidence` of values known to be good."""
    order = confidence.sort(stable=True).indices
    size, larger = divmod(len(order), bins)  # the first `larger` bins hold one sample more
    sizes = torch.tensor([size + 1] * larger + [size] * (bins - larger))
    groups = torch.repeat_interleave(torch.arange(bins), sizes)
    return _weighted_gap(groups, confidence[order], correct[order], bins)


def equal_width_bins(confidence: Tensor, correct: Tensor, bins: int = BINS) -> ReliabilityBins:
    """`reliability_bins` of values known to be good."""
    groups = _equal_width_groups(confidence, bins).clamp(max=bins - 1)
    count = torch.bincount(groups, minlength=bins)
    return ReliabilityBins(
        edges=torch.linspace(0, 1, bins + 1, dtype=torch.float64),
        count=count,
        confidence=torch.bincount(groups, weights=confidence.cpu().double(), minlength=bins) / count,
        accuracy=torch.bincount(groups, weights=correct.cpu().double(), minlength=bins) / count,
    )


def _equal_width_groups(confidence: Tensor, bins: int) -> Tensor:
    """The bin of each sample, `bins` being that of a confidence of exactly one.

    Bins are found in float32, where torchmetrics finds them, so that a confidence on an edge lands alike.
    """
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float32)
    return torch.bucketize(confidence.cpu().float(), edges, right=True) - 1


def _weighted_gap(groups: Tensor, confidence: Tensor, correct: Tensor, bins: int) -> float:
    """Sum over bins of |correct - confidence|, over the number of samples: an empty bin adds nothing."""
    gap = torch.bincount(groups, weights=correct.cpu().double() - confidence.cpu().double(), minlength=bins)
    return gap.abs().sum().item() / len(groups)


def _checked_confidence(confidence: Tensor, correct: Tensor, name: str | None) -> tuple[Tensor, Tensor]:
    check_same_length({"confidences": len(confidence), "correct flags": len(correct)}, name)
    confidence = check_scores(confidence, "confidences", name)
    if not confidence.is_floating_point() or confidence.min() < 0 or confidence.max() > 1:
        raise DataError(
            f"{where(name)}confidences must be floating point numbers in [0, 1], but have dtype {confidence.dtype} "
            f"and run from {confidence.min().item():.4g} to {confidence.max().item():.4g}"
        )
    return at_least_float32(confidence), correct.detach()


def _checked(bins: int) -> int:
    if bins < 1:
        raise ConfigError(f"bins={bins} cannot hold samples; use at least 1 ({BINS} is the custom)")
    return bins
