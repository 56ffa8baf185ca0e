"""Conformal prediction: thresholds and p-values whose guarantee holds for any number of samples.

All of it is split conformal: the score of a new sample is compared with those of held-out samples that were not used to
fit the score. The guarantee averages over both: if held-out and new samples are exchangeable, a new one is within the
threshold with at least the requested probability. It does not cover inputs from another distribution.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..settings import PositiveShare, require
from .probabilities import check_scores

KEPT = 1000  # maximum scores in a reference; with more samples a p-value is rounded up by at most 1 / KEPT


def rank_for(share: float, samples: int) -> int:
    """Rank, from 1, of the threshold among sorted scores; `samples + 1` if every input must be accepted."""
    return max(math.ceil(round(share * (samples + 1), 9)), 1)  # 0.95 * 20 is 19 scores, not 20


def samples_for(share: float) -> int:
    """Minimum number of samples for a finite threshold, one that can reject an input."""
    return math.ceil(round(share / (1.0 - share), 9)) if share < 1.0 else 0


def conformal_threshold(scores: Tensor, share: float) -> float:
    """Threshold that a new score does not exceed with probability `share` or more, from held-out scores `[n]`.

    It is the ⌈share · (n + 1)⌉-th smallest score, and infinite if there are too few scores for that guarantee.
    """
    ordered = check_scores(scores, "scores").sort().values
    rank = rank_for(require("share", share, PositiveShare), len(ordered))
    return math.inf if rank > len(ordered) else ordered[rank - 1].item()


@dataclass(frozen=True)
class Reference:
    """Sorted held-out scores, to compare new scores with; of many, only some at evenly spaced ranks are kept."""

    values: tuple[float, ...] = field(repr=False)
    samples: int  # number of held-out samples

    @classmethod
    def of(cls, scores: Tensor, most: int | None = KEPT) -> "Reference":
        """Build a reference from scores `[n]`, keeping at most `most` of them."""
        ordered = check_scores(scores, "scores").sort().values
        samples = len(ordered)
        kept = min(samples, most or samples)
        ranks = torch.tensor([_rank(i, kept, samples) for i in range(1, kept + 1)], device=ordered.device)
        return cls(tuple(ordered[ranks - 1].tolist()), samples)

    def p_values(self, scores: Tensor) -> Tensor:
        """The p-value of each score `[B]`, rounded up if not all held-out scores are kept."""
        kept = len(self.values)
        values = torch.tensor(self.values, dtype=scores.dtype, device=scores.device)
        below = torch.tensor([_rank(i, kept, self.samples) for i in range(kept + 1)], device=scores.device)
        positions = torch.searchsorted(values, scores.contiguous())  # how many kept scores are below
        return (1 + self.samples - below[positions]).to(scores.dtype) / (self.samples + 1)


def _rank(position: int, kept: int, samples: int) -> int:
    """Rank among all samples of the kept score at `position`, both from 1; position 0 means before the first."""
    return -(-position * samples // kept)


@dataclass(frozen=True)
class Bins:
    """How scores of held-out rows are spread over bins: what `Monitor` ranks new rows with, in constant memory.

    The edges come from rows that fitted something, the counts from the others: so a new row like the others falls into
    a bin as if drawn with them, whatever the edges are. Bin k has the scores from edge k - 1 up to, not including,
    edge k.
    """

    edges: tuple[float, ...] = field(repr=False)  # rising
    counts: tuple[int, ...] = field(repr=False)  # one more than edges

    @classmethod
    def of(cls, fitting: Tensor, others: Tensor, most: int = 100) -> "Bins":
        """Build at most `most` bins, equally full of the scores `[n]` of fitting rows, and count the others' `[m]`."""
        ordered = check_scores(fitting, "scores of the fitting rows").double().sort().values
        places = torch.arange(1, most, device=ordered.device) * len(ordered) // most
        edges = ordered[places.unique()].unique().cpu()
        scores = check_scores(others, "scores of the other rows").double().cpu()
        counts = torch.searchsorted(edges, scores, right=True).bincount(minlength=len(edges) + 1)
        return cls(tuple(edges.tolist()), tuple(counts.tolist()))
