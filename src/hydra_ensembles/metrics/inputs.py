"""What metrics take, checked once, and the counts they share."""

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
