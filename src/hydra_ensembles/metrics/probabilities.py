"""Accuracy and calibration of class probabilities `[B, C]`, and diversity of member probabilities `[M, B, C]`.

Labels are integers `[B]`. Half precision is cast to float32 before anything is counted, and sums over samples are
computed in float64. Functions of samples, of weights and of members do not check their inputs; those of probabilities
and labels do. The tests compare these numbers with torchmetrics and torch-uncertainty.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..batches import read_labels, within_classes
from ..errors import DataError

Labels = Tensor | Sequence[int]
Convention = Literal["torch-uncertainty", "openood"]

# How far the sum of a row of probabilities may be from one: rounding errors of the dtype, summed over the classes.
_ROW_SUM_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
BINS = 15


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
    return mean(squared_errors(*check_probs(probs, labels)))


def nll(probs: Tensor, labels: Labels) -> float:
    """Negative log-likelihood of the label, mean over the samples.

    Infinite if a label has probability zero, as in torch-uncertainty.
    """
    return mean(-at_labels(*check_probs(probs, labels)).log())


def ece(probs: Tensor, labels: Labels, *, bins: int = BINS) -> float:
    """Expected calibration error: equal-width bins of top-1 confidence, L1, as torchmetrics defines it.

    As there, a confidence of exactly 1 has its own bin.
    """
    return of_all(weighted_ece, *top_label(probs, labels), bins=bins)


def adaptive_ece(probs: Tensor, labels: Labels, *, bins: int = BINS) -> float:
    """Calibration error over bins of equal count, L1 weighted by count.

    With fewer samples than bins, torch-uncertainty gives NaN; here empty bins are dropped. If a bin ends among equal
    confidences, each of them counts with their share of right answers, so the number does not depend on the order of
    the data.
    """
    return of_all(weighted_adaptive_ece, *top_label(probs, labels), bins=bins)


def top_label(probs: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """Confidence of the most probable class and whether it is the label: `[B]` and `[B]` of bool."""
    probs, targets = check_probs(probs, labels)
    confidence, predicted = probs.max(dim=1)
    return confidence, predicted == targets


def squared_errors(probs: Tensor, labels: Tensor) -> Tensor:
    """Squared error of each sample, summed over the classes: `[B, C]` and `[B]` to `[B]`."""
    error = at_least_float32(probs.clone())
    error[torch.arange(len(labels), device=probs.device), labels] -= 1
    return error.square().sum(dim=-1)


def at_labels(values: Tensor, labels: Tensor) -> Tensor:
    """The value of each sample's label: `[B, C] -> [B]`."""
    return values.gather(1, labels.unsqueeze(1)).squeeze(1)


def of_all(statistic: Callable[..., Tensor], *columns: Tensor, **options: Any) -> float:
    """A statistic of weighted samples (see `bootstrap.Statistic`) where each sample counts once."""
    columns = tuple(column.detach().cpu() for column in columns)
    everything = torch.ones(1, len(columns[0]), dtype=torch.float64, device="cpu")
    return statistic(everything, *columns, **options).item()


def equal_width_groups(confidence: Tensor, bins: int) -> Tensor:
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
    """`ece`, from what `top_label` returns, under each row of weights `[R, B]`: `[R]`."""
    gaps = weights * (correct.double() - confidence.double())  # [R, B]
    sums = weights.new_zeros(len(weights), bins + 1).index_add(1, equal_width_groups(confidence, bins), gaps)
    return sums.abs().sum(dim=1) / weights.sum(dim=1)


def weighted_adaptive_ece(weights: Tensor, confidence: Tensor, correct: Tensor, bins: int = BINS) -> Tensor:
    """`adaptive_ece` under each row of whole weights `[R, B]` of one sum: `[R]`."""
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


# --- means over members, and their diversity ----------------------------------------------------------------


def class_logits(logits: Tensor) -> Tensor:
    """Logits `[…, C]` of classes: a single one is the log-odds of the second of two, and gets a zero before it."""
    return logits if logits.shape[-1] != 1 else torch.cat([torch.zeros_like(logits), logits], dim=-1)


def log_mean_probs(member_logits: Tensor) -> Tensor:
    """Logarithm of the mean over members of the softmax of `[M, …, C]`: `[…, C]`, finite even if that underflows."""
    return member_logits.log_softmax(dim=-1).logsumexp(dim=0) - math.log(len(member_logits))


def split_entropy(member_probs: Tensor) -> EntropyParts:
    """Entropy of the mean probabilities, split into aleatoric and epistemic: `[M, B, C] -> [B]` each.

    Entropy is concave, so the total is below the mean of the members only by rounding; taking the larger of
    the two keeps every part non-negative and their sum exact.
    """
    member_probs = at_least_float32(member_probs)
    aleatoric = torch.special.entr(member_probs).sum(dim=-1).mean(dim=0)  # [M, B, C] -> [B]
    total = torch.special.entr(member_probs.mean(dim=0)).sum(dim=-1)  # [B, C] -> [B]
    total = torch.maximum(total, aleatoric)
    return EntropyParts(total, aleatoric, total - aleatoric)


def differing_pairs(member_probs: Tensor) -> Tensor:
    """One minus the share of member pairs that agree on the class: `[M, B, C] -> [B]`."""
    votes = member_probs.argmax(dim=-1)  # [M, B]
    members = len(votes)
    differing = torch.zeros_like(votes[0])
    for member in range(1, members):  # pairs (earlier, member), without an [M, M, B] table
        differing += (votes[:member] != votes[member]).sum(dim=0)
    pairs = max(members * (members - 1) // 2, 1)
    return differing.to(at_least_float32(member_probs).dtype) / pairs


# --- checks of inputs, made once by public functions --------------------------------------------------------


def at_least_float32(values: Tensor) -> Tensor:
    """Cast half precision, in which counts and sums saturate, to float32; keep float32 and float64."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def mean(values: Tensor) -> float:
    """Mean of per-sample values, computed in float64."""
    return values.detach().cpu().double().mean().item()


def check_finite(values: Tensor, quantity: str) -> None:
    """Raise for NaN and infinity; the error says how many there are and where the first one is."""
    bad = (~torch.isfinite(values)).nonzero()
    if len(bad):
        count = f"{len(bad)} of {values.numel()} {quantity} are NaN or infinite"
        raise DataError(
            f"{count}, the first at index {tuple(bad[0].tolist())}; look for NaN and overflow in the inputs"
        )


def check_scores(scores: Tensor, quantity: str) -> Tensor:
    """Require scores `[B]`, at least one, no NaN. Infinite scores have a rank and are accepted."""
    if scores.ndim != 1 or scores.is_complex():
        raise DataError(f"{quantity} must be real numbers [B], but are {scores.dtype} {list(scores.shape)}")
    if scores.numel() == 0:
        raise DataError(f"got no {quantity}; at least one is needed: check how the set was loaded")
    if bool(scores.isnan().any()):
        first = int(scores.isnan().int().argmax())
        raise DataError(f"{int(scores.isnan().sum())} of {len(scores)} {quantity} are NaN, the first at index {first}")
    return scores.detach()


def check_probs(probs: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """Probabilities `[B, C]` in at least float32, clamped to [0, 1], and class indices `[B]`, on one device."""
    if probs.ndim != 2 or 0 in probs.shape or probs.shape[1] < 2 or not probs.is_floating_point():
        what = f"{probs.dtype} {list(probs.shape)}"
        raise DataError(f"probabilities must be floating point [B, C], of two classes or more, but are {what}")
    targets = within_classes(read_labels(labels, len(probs), "the data").detach(), probs.shape[1], "the data")
    check_finite(probs, "probabilities")
    tolerance = _ROW_SUM_TOLERANCE.get(probs.dtype, 1e-3)
    probs = at_least_float32(probs.detach())
    if probs.min() < -tolerance or (probs.sum(-1) - 1).abs().max() > tolerance:
        first = probs[0].tolist()[:4]
        raise DataError(f"rows must be probabilities and sum to one, got {first}, …; of logits take the softmax first")
    return probs.clamp(0, 1), targets.to(probs.device)
