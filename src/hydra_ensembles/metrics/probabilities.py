"""Accuracy and calibration of class probabilities `[B, C]`, and diversity of member probabilities `[M, B, C]`.

Labels are integers `[B]`. Half precision is cast to float32 before anything is counted, and sums over samples are
computed in float64. Functions that `hydra_ensembles.metrics` does not export do not check their inputs. The tests
compare these numbers with torchmetrics and torch-uncertainty.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import Labels, at_least_float32, check_confidence, check_member_probs, check_probs, mean

BINS = 15


@dataclass(frozen=True, eq=False)
class ReliabilityBins:
    """Equal-width bins of confidence for a reliability diagram, in float64 on the CPU; means of no samples are NaN."""

    edges: Tensor  # [bins + 1], from 0 to 1
    count: Tensor  # [bins]
    confidence: Tensor  # [bins], mean
    accuracy: Tensor  # [bins]


class EntropyParts(NamedTuple):
    """Entropy of the mean prediction in nats, and its two parts; each `[B]`."""

    total: Tensor  # of the mean probabilities; the sum of the two others
    aleatoric: Tensor  # mean entropy of the members
    epistemic: Tensor  # mutual information of label and member: entropy due to their disagreement


# --- accuracy and calibration -------------------------------------------------------------------------------


def accuracy(probs: Tensor, labels: Labels) -> float:
    """Share of samples whose most probable class is the label; a single division, so that 9 of 10 is exactly 0.9."""
    return mean(top_label(probs, labels)[1])


def brier(probs: Tensor, labels: Labels) -> float:
    """Brier score: squared error summed over the classes, mean over the samples (0 best, 2 worst)."""
    return mean(brier_per_sample(probs, labels))


def nll(probs: Tensor, labels: Labels) -> float:
    """Negative log-likelihood of the label, mean over the samples.

    Infinite if a label has probability zero, as in torch-uncertainty; scikit-learn would clip.
    """
    return mean(nll_per_sample(probs, labels))


def ece(probs: Tensor, labels: Labels, *, bins: int = BINS) -> float:
    """Expected calibration error: equal-width bins of top-1 confidence, L1, as torchmetrics defines it.

    As there, a confidence of exactly 1 has its own bin.
    """
    return ece_of_confidence(*top_label(probs, labels), bins=bins)


def adaptive_ece(probs: Tensor, labels: Labels, *, bins: int = BINS) -> float:
    """Calibration error over bins of equal count, L1 weighted by count.

    With fewer samples than bins, torch-uncertainty gives NaN; here empty bins are dropped. If a bin ends among equal
    confidences, each of them counts with their share of right answers, so the number does not depend on the order of
    the data.
    """
    return adaptive_ece_of_confidence(*top_label(probs, labels), bins=bins)


def top_label(probs: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """Confidence of the most probable class and whether it is the label: `[B]` and `[B]` of bool."""
    probs, targets = check_probs(probs, labels)
    confidence, predicted = probs.max(dim=1)
    return confidence, predicted == targets


def brier_per_sample(probs: Tensor, labels: Labels) -> Tensor:
    """Squared error of each sample, summed over the classes: `[B]`."""
    return squared_errors(*check_probs(probs, labels))


def squared_errors(probs: Tensor, labels: Tensor) -> Tensor:
    """`brier_per_sample` without checks."""
    error = at_least_float32(probs.clone())
    error[torch.arange(len(labels), device=probs.device), labels] -= 1
    return error.square().sum(dim=-1)


def nll_per_sample(probs: Tensor, labels: Labels) -> Tensor:
    """Negative log-likelihood of each sample's label: `[B]`."""
    return -at_labels(*check_probs(probs, labels)).log()


def at_labels(values: Tensor, labels: Tensor) -> Tensor:
    """The value of each sample's label: `[B, C] -> [B]`."""
    return values.gather(1, labels.unsqueeze(1)).squeeze(1)


def ece_of_confidence(confidence: Tensor, correct: Tensor, *, bins: int = BINS) -> float:
    """`ece` from what `top_label` returns."""
    return weighted_ece(_each_once(confidence), *check_confidence(confidence, correct), bins).item()


def adaptive_ece_of_confidence(confidence: Tensor, correct: Tensor, *, bins: int = BINS) -> float:
    """`adaptive_ece` from what `top_label` returns."""
    return weighted_adaptive_ece(_each_once(confidence), *check_confidence(confidence, correct), bins).item()


def reliability_bins(confidence: Tensor, correct: Tensor, *, bins: int = BINS) -> ReliabilityBins:
    """The bins of `ece` from what `top_label` returns; a confidence of exactly 1 is shown in the last bin."""
    confidence, correct = check_confidence(confidence, correct)
    groups = _equal_width_groups(confidence, bins).clamp(max=bins - 1)
    count = torch.bincount(groups, minlength=bins)
    return ReliabilityBins(
        edges=torch.linspace(0, 1, bins + 1, dtype=torch.float64, device="cpu"),
        count=count,
        confidence=torch.bincount(groups, weights=confidence.double(), minlength=bins) / count,
        accuracy=torch.bincount(groups, weights=correct.double(), minlength=bins) / count,
    )


def _equal_width_groups(confidence: Tensor, bins: int) -> Tensor:
    """The bin of each sample; a confidence of exactly one has its own, number `bins`.

    Computed in float32, as in torchmetrics, so that a confidence on an edge lands in the same bin.
    """
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float32, device="cpu")
    return torch.bucketize(confidence.float().clamp(0, 1), edges, right=True) - 1


# --- the same of weighted samples, for `bootstrap.paired` ---------------------------------------------------


def weighted_mean(weights: Tensor, values: Tensor) -> Tensor:
    """Mean of values `[B]` under each row of weights `[R, B]`: `[R]`."""
    return (weights @ values.to(weights)) / weights.sum(dim=1)


def weighted_ece(weights: Tensor, confidence: Tensor, correct: Tensor, bins: int = BINS) -> Tensor:
    """`ece_of_confidence` under each row of weights `[R, B]`: `[R]`."""
    gaps = weights * (correct.double() - confidence.double())  # [R, B]
    sums = weights.new_zeros(len(weights), bins + 1).index_add(1, _equal_width_groups(confidence, bins), gaps)
    return sums.abs().sum(dim=1) / weights.sum(dim=1)


def weighted_adaptive_ece(weights: Tensor, confidence: Tensor, correct: Tensor, bins: int = BINS) -> Tensor:
    """`adaptive_ece_of_confidence` under each row of whole weights `[R, B]` of one sum: `[R]`."""
    rising, order = confidence.double().sort()
    _, run = rising.unique_consecutive(return_inverse=True)  # [B], runs of equal confidences
    weights = weights[:, order]
    in_run, right = (
        weights.new_zeros(len(weights), int(run[-1]) + 1).index_add(1, run, part)
        for part in (weights, weights * correct.double()[order])
    )  # [R, runs] each
    gaps = (right / in_run.clamp(min=1))[:, run] - rising  # [R, B]: samples of a run count with its share of right ones
    zero = weights.new_zeros(len(weights), 1)
    counts = torch.cat([zero, weights.cumsum(dim=1)], dim=1)  # [R, B + 1], samples below each place
    sums = torch.cat([zero, (weights * gaps).cumsum(dim=1)], dim=1)
    size, larger = divmod(int(counts[0, -1]), bins)  # the first `larger` bins hold one sample more
    ends = weights.new_tensor([size * bin + min(bin, larger) for bin in range(bins + 1)]).expand(len(weights), -1)
    place = torch.searchsorted(counts[:, 1:].contiguous(), ends.contiguous()).clamp(max=len(order) - 1)  # [R, bins + 1]
    upto = sums.gather(1, place) + (ends - counts.gather(1, place)) * gaps.gather(1, place)  # a bin may end in a sample
    return upto.diff(dim=1).abs().sum(dim=1) / counts[:, -1]


def _each_once(values: Tensor) -> Tensor:
    return torch.ones(1, len(values), dtype=torch.float64, device="cpu")


# --- means over members, and their diversity ----------------------------------------------------------------


def log_mean_probs(member_logits: Tensor) -> Tensor:
    """Logarithm of the mean over members of the softmax of `[M, …, C]`: `[…, C]`, finite even if that underflows."""
    return log_mean_exp(member_logits.log_softmax(dim=-1))


def log_mean_exp(values: Tensor) -> Tensor:
    """Logarithm of the mean of `exp(values)` over the first axis of `values` `[M, …]`."""
    return values.logsumexp(dim=0) - math.log(len(values))


def mutual_information(member_probs: Tensor) -> float:
    """Mutual information of label and member in nats, mean over samples; zero for one member."""
    return mean(entropy_parts(member_probs).epistemic)


def disagreement(member_probs: Tensor) -> float:
    """Share of member pairs that predict different classes, mean over samples; zero for one member."""
    return mean(disagreement_per_sample(member_probs))


def entropy_parts(member_probs: Tensor) -> EntropyParts:
    """Entropy of the mean probabilities, split into aleatoric and epistemic: `[M, B, C] -> [B]` each."""
    return split_entropy(check_member_probs(member_probs))


def split_entropy(member_probs: Tensor) -> EntropyParts:
    """`entropy_parts` without checks, which would synchronise with a GPU.

    Entropy is concave, so the total is below the mean of the members only by rounding; taking the larger of
    the two keeps every part non-negative and their sum exact.
    """
    member_probs = at_least_float32(member_probs)
    aleatoric = torch.special.entr(member_probs).sum(dim=-1).mean(dim=0)  # [M, B, C] -> [B]
    total = torch.special.entr(member_probs.mean(dim=0)).sum(dim=-1)  # [B, C] -> [B]
    total = torch.maximum(total, aleatoric)
    return EntropyParts(total, aleatoric, total - aleatoric)


def disagreement_per_sample(member_probs: Tensor) -> Tensor:
    """One minus the share of member pairs that agree on the class: `[M, B, C] -> [B]`."""
    return differing_pairs(check_member_probs(member_probs))


def differing_pairs(member_probs: Tensor) -> Tensor:
    """`disagreement_per_sample` without checks, as in `split_entropy`."""
    votes = member_probs.argmax(dim=-1)  # [M, B]
    members = len(votes)
    differing = torch.zeros_like(votes[0])
    for member in range(1, members):  # pairs (earlier, member), without an [M, M, B] table
        differing += (votes[:member] != votes[member]).sum(dim=0)
    pairs = max(members * (members - 1) // 2, 1)
    return differing.to(at_least_float32(member_probs).dtype) / pairs
