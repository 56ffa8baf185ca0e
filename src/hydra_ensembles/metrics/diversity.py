"""How much the members of an ensemble differ, from their probabilities `[M, B, C]`.

Ours rather than a library's: torchmetrics and scikit-learn know no members. The numbers are those of
torch-uncertainty. The functions that end in `_per_sample` are the bare arithmetic, without a look at the
values, for a caller that made the probabilities itself; the others check them and average over samples.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import at_least_float32, check_member_probs, mean


class EntropyParts(NamedTuple):
    """Entropy of the mean prediction in nats, and where it comes from; each `[B]`.

    Attributes:
        total: Entropy of the mean probabilities; the sum of the two others.
        aleatoric: Mean entropy of the members: what each of them is unsure about.
        epistemic: Mutual information of label and member: what they are unsure about together only.
    """

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


def mutual_information(member_probs: Tensor, *, name: str | None = None) -> float:
    """Mutual information of label and member in nats, mean over samples; zero for one member."""
    return mean(entropy_parts(check_member_probs(member_probs, name)).epistemic)


def disagreement(member_probs: Tensor, *, name: str | None = None) -> float:
    """Share of member pairs that predict different classes, mean over samples; zero for one member."""
    return mean(disagreement_per_sample(check_member_probs(member_probs, name)))


def variation_ratio(member_probs: Tensor, *, name: str | None = None) -> float:
    """Share of members that predict another class than the ensemble, mean over samples."""
    return mean(variation_ratio_per_sample(check_member_probs(member_probs, name)))


def entropy_parts(member_probs: Tensor) -> EntropyParts:
    """Entropy of the mean probabilities, split into aleatoric and epistemic: `[M, B, C] -> [B]` each.

    Entropy is concave, so the total is never below the mean of the members, except by rounding; taking the
    larger of the two keeps every part non-negative and their sum exact.
    """
    member_probs = at_least_float32(member_probs)
    aleatoric = torch.special.entr(member_probs).sum(dim=-1).mean(dim=0)  # [M, B, C] -> [B]
    total = torch.special.entr(member_probs.mean(dim=0)).sum(dim=-1)  # [B, C] -> [B]
    total = torch.maximum(total, aleatoric)
    return EntropyParts(total, aleatoric, total - aleatoric)


def disagreement_per_sample(member_probs: Tensor) -> Tensor:
    """One minus the share of member pairs that agree on the class: `[M, B, C] -> [B]`."""
    votes = member_probs.argmax(dim=-1)  # [M, B]
    members = len(votes)
    differing = torch.zeros_like(votes[0])
    for member in range(1, members):  # pairs (earlier, member), without an [M, M, B] table
        differing += (votes[:member] != votes[member]).sum(dim=0)
    pairs = max(members * (members - 1) // 2, 1)
    return differing.to(at_least_float32(member_probs).dtype) / pairs


def variation_ratio_per_sample(member_probs: Tensor) -> Tensor:
    """Share of members whose class is not that of the mean probabilities: `[M, B, C] -> [B]`."""
    member_probs = at_least_float32(member_probs)
    differs = member_probs.argmax(dim=-1) != member_probs.mean(dim=0).argmax(dim=-1)  # [M, B]
    return differs.to(member_probs.dtype).mean(dim=0)
