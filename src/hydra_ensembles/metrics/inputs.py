"""Checks of the inputs of metrics, made once by public functions; the arithmetic below them trusts its caller."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..batches import read_labels, within_classes
from ..errors import DataError

Labels = Tensor | Sequence[int]
Convention = Literal["torch-uncertainty", "openood"]

# How far the sum of a row of probabilities may be from one: rounding errors of the dtype, summed over the classes.
_ROW_SUM_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}


def where(name: str | None) -> str:
    """Start of an error message: the name of the data, if known."""
    return "" if name is None else f"{name}: "


def at_least_float32(values: Tensor) -> Tensor:
    """Cast half precision, in which counts and sums saturate, to float32; keep float32 and float64."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def mean(values: Tensor) -> float:
    """Mean of per-sample values, computed in float64."""
    return values.detach().cpu().double().mean().item()


def check_finite(values: Tensor, quantity: str, name: str | None = None) -> None:
    """Raise for NaN and infinity; the error says how many there are and where the first one is."""
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        bad = (~finite).nonzero()
        count = f"{where(name)}{len(bad)} of {values.numel()} {quantity} are NaN or infinite"
        raise DataError(
            f"{count}, the first at index {tuple(bad[0].tolist())}; look for NaN and overflow in the inputs"
        )


def check_same_length(lengths: dict[str, int], name: str | None = None) -> int:
    """Raise for arrays of different lengths and for empty ones; returns the common length."""
    length, *others = lengths.values()
    if any(other != length for other in others):
        listing = ", ".join(f"{length} {quantity}" for quantity, length in lengths.items())
        raise DataError(f"{where(name)}got {listing}; every sample needs one of each, in the same order")
    if length == 0:
        raise DataError(f"{where(name)}got no samples; at least one is needed: check how the set was loaded")
    return length


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


def check_labels(labels: Any, samples: int, classes: int, name: str | None = None) -> Tensor:
    """Class indices `[B]` as int64, from a tensor, an array or a list; requires one for each sample."""
    source = "the data" if name is None else name
    check_same_length({"samples": samples}, name)
    return within_classes(read_labels(labels, samples, source).detach(), classes, source)


def check_probs(probs: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """Probabilities `[B, C]` in at least float32, clamped to [0, 1], and class indices `[B]`, on one device."""
    if probs.ndim != 2:
        raise DataError(f"probabilities must have shape [B, C], but have {list(probs.shape)}")
    targets = check_labels(labels, samples=probs.shape[0], classes=probs.shape[1])
    return check_rows(probs), targets.to(probs.device)


def check_confidence(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Confidences `[B]` in [0, 1], and whether each answer is right `[B]`, as booleans or 0 and 1; on the CPU."""
    check_same_length({"confidences": len(confidence), "truth values of the answers": len(correct)})
    confidence, right = check_scores(confidence, "confidences").cpu(), correct.detach().cpu()
    low, high = (float(bound) for bound in confidence.aminmax())
    if low < -1e-3 or high > 1 + 1e-3:  # beyond rounding
        raise DataError(f"confidences run from {low:.4g} to {high:.4g}; give probabilities, from 0 to 1")
    if right.shape != confidence.shape or not bool(((right == 0) | (right == 1)).all()):
        got = f"{right.dtype} {list(right.shape)}"
        raise DataError(f"give for each sample whether its answer is right (predicted == labels); got {got}")
    return confidence, right


def check_member_probs(member_probs: Tensor) -> Tensor:
    """Member probabilities `[M, B, C]`, at least one sample, in at least float32, clamped to [0, 1]."""
    if member_probs.ndim != 3 or 0 in member_probs.shape[:2]:
        raise DataError(f"member probabilities must be [M, B, C], none of them 0, but are {list(member_probs.shape)}")
    return check_rows(member_probs)


def check_rows(probs: Tensor) -> Tensor:
    """Probabilities `[…, C]` in at least float32, clamped to [0, 1]; raises for logits, accepts zero rows."""
    if probs.shape[-1] < 2 or not probs.is_floating_point():
        kind = f"{probs.dtype} over {probs.shape[-1]}"
        raise DataError(f"probabilities must be floating point over two classes or more (1 - p and p), but are {kind}")
    check_finite(probs, "probabilities")
    tolerance = _ROW_SUM_TOLERANCE.get(probs.dtype, 1e-3)
    probs = at_least_float32(probs.detach())
    if probs.numel() and (probs.min() < -tolerance or (probs.sum(-1) - 1).abs().max() > tolerance):
        raise DataError(
            f"rows must be probabilities and sum to one, got {probs.flatten(0, -2)[0].tolist()[:4]}, …; "
            "apply a softmax first if these are logits"
        )
    return probs.clamp(0, 1)
