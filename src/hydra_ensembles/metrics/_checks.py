"""Checks every metric makes on its input, so that a bad set is named instead of measured."""

from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import ConfigError, DataError

Convention = Literal["torch-uncertainty", "openood"]

# How far a row of probabilities may be from one: the rounding of the dtype, added up over the classes.
_ROW_SUM_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 1e-3, torch.float64: 1e-3}


def where(name: str | None) -> str:
    """Start of an error message: the name of the set, where it is known."""
    return "" if name is None else f"set {name!r}: "


def check_convention(convention: str) -> None:
    """Refuse a convention that is not one of `Convention`."""
    if convention not in get_args(Convention):
        accepted = ", ".join(repr(choice) for choice in get_args(Convention))
        raise ConfigError(f"convention={convention!r} is not known; choose one of {accepted}")


def at_least_float32(values: Tensor) -> Tensor:
    """Half precision becomes float32 (counts and sums saturate in it); float32 and float64 stay."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def check_finite(values: Tensor, what: str, name: str | None) -> None:
    """Refuse NaN and infinity, saying how many there are and where the first one is."""
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return
    bad = (~finite).nonzero()
    first = tuple(int(index) for index in bad[0])
    raise DataError(
        f"{where(name)}{len(bad)} of {values.numel()} {what} are NaN or infinite, the first at index {first} "
        f"(value {values[first].item()}); every value must be finite: look for overflow in what produced them"
    )


def check_same_length(lengths: dict[str, int], name: str | None) -> int:
    """Refuse arrays of different length, and empty ones; returns the common length."""
    if len(set(lengths.values())) > 1:
        listing = ", ".join(f"{length} {what}" for what, length in lengths.items())
        raise DataError(f"{where(name)}got {listing}; every sample needs one of each, in the same order")
    length = next(iter(lengths.values()))
    if length == 0:
        raise DataError(f"{where(name)}got no samples; at least one is needed: check how the set was loaded")
    return length


def check_scores(scores: Tensor, what: str, name: str | None) -> Tensor:
    """One score a sample, `[B]`, at least one, no NaN. Infinite scores have a rank and are accepted."""
    if scores.ndim != 1:
        raise DataError(
            f"{where(name)}{what} must be a vector [B], one score a sample, but have shape {list(scores.shape)}"
        )
    if scores.is_complex():
        raise DataError(f"{where(name)}{what} must be real numbers, but have dtype {scores.dtype}")
    if scores.numel() == 0:
        raise DataError(
            f"{where(name)}there are no {what}; detection needs at least one ID and one OOD sample: "
            "check how the sets were loaded"
        )
    missing = torch.isnan(scores)
    if bool(missing.any()):
        first = int(missing.nonzero()[0])
        raise DataError(
            f"{where(name)}{int(missing.sum())} of {scores.numel()} {what} are NaN, the first at index {first}; "
            "a NaN cannot be ranked: look for overflow in what produced the scores"
        )
    return scores.detach()


def check_probs(probs: Tensor, labels: Tensor, name: str | None) -> tuple[Tensor, Tensor]:
    """Probabilities `[B, C]` and class indices `[B]`, ready to be measured.

    Returns:
        The probabilities in at least float32 and clamped to [0, 1], and the labels as int64, on one device.
        The clamp matters: torchmetrics takes a row that rounding put above one for logits, and applies a
        softmax to the whole set.
    """
    if probs.ndim != 2:
        raise DataError(f"{where(name)}probabilities must have shape [B, C], but have {list(probs.shape)}")
    if labels.ndim != 1:
        raise DataError(
            f"{where(name)}labels must have shape [B], one class index a sample, but have {list(labels.shape)}"
        )
    check_same_length({"rows of probabilities": len(probs), "labels": len(labels)}, name)
    probs = check_probability_rows(probs.detach(), name)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(
            f"{where(name)}labels must be integer class indices, but have dtype {labels.dtype}; "
            "convert them with .long()"
        )
    lowest, highest, classes = int(labels.min()), int(labels.max()), probs.shape[1]
    if lowest < 0 or highest >= classes:
        raise DataError(
            f"{where(name)}labels run from {lowest} to {highest}, but the probabilities have {classes} classes "
            f"(indices 0 to {classes - 1}); check that the model and the set have the same classes"
        )
    return probs, labels.to(device=probs.device, dtype=torch.int64)


def check_member_probs(member_probs: Tensor, name: str | None) -> Tensor:
    """Member probabilities `[M, B, C]`, at least one sample, in at least float32."""
    if member_probs.ndim != 3:
        raise DataError(
            f"{where(name)}member probabilities must have shape [M, B, C] (members first), "
            f"but have {list(member_probs.shape)}"
        )
    if member_probs.shape[0] == 0 or member_probs.shape[1] == 0:
        raise DataError(
            f"{where(name)}member probabilities have shape {list(member_probs.shape)}; "
            "at least one member and one sample are needed"
        )
    return check_probability_rows(member_probs.detach(), name)


def check_probability_rows(probs: Tensor, name: str | None) -> Tensor:
    """Rows over the last axis are probabilities over two classes or more; returned clamped to [0, 1]."""
    if probs.shape[-1] < 2:
        raise DataError(
            f"{where(name)}probabilities have {probs.shape[-1]} class(es); at least two are needed: "
            "give a binary problem as two columns, 1 - p and p"
        )
    if not probs.is_floating_point():
        raise DataError(f"{where(name)}probabilities must be floating point, but have dtype {probs.dtype}")
    check_finite(probs, "probabilities", name)
    tolerance = _ROW_SUM_TOLERANCE.get(probs.dtype, 1e-3)
    probs = at_least_float32(probs)
    off = (probs.sum(-1) - 1).abs().max().item()
    if probs.min().item() < -tolerance or off > tolerance:
        raise DataError(
            f"{where(name)}rows must be probabilities that sum to one, but the smallest entry is "
            f"{probs.min().item():.4g} and a row sum is off by {off:.4g}; apply a softmax first if these are logits"
        )
    return probs.clamp(0, 1)
