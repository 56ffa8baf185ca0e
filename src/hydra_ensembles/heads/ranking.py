"""The order in which heads are removed, with the evidence for it."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._utils import write_atomically
from ..errors import HeadError
from ..model.config import require_whole
from ..schema import from_plain, to_plain
from .head import Head, as_heads


@dataclass(frozen=True)
class HeadRanking:
    """Heads in removal order, least useful first.

    Attributes:
        heads: The heads, in the order in which they were removed.
        scores: A number for each removal. For a circuit, the score of the model after it; for Taylor, the
            importance the head had.
        method: How the order was found, such as `"circuit/exact"` or `"taylor/layer"`.
        score: What was scored: `"acc"`, `"ood"`, `"avg"`, or `"taylor"`.
        provenance: Data sizes, seed, model fingerprint, counters, whatever tells two runs apart.
        only: When set, the ranking is valid as a whole of exactly this many heads and `first` takes no other
            number (per-layer Taylor: a shorter list would not prune the layers evenly).
    """

    heads: tuple[Head, ...]
    scores: tuple[float, ...]
    method: str
    score: str
    provenance: Mapping[str, Any] = field(default_factory=dict)
    only: int | None = None

    def __post_init__(self) -> None:
        """Check that heads are distinct and each has its score; make the provenance what JSON would give back."""
        object.__setattr__(self, "heads", as_heads(self.heads))
        object.__setattr__(self, "scores", tuple(float(score) for score in self.scores))
        object.__setattr__(self, "provenance", to_plain(self.provenance))
        if len(self.scores) != len(self.heads):
            raise HeadError(f"a ranking needs one score per head, got {len(self.scores)} for {len(self.heads)}")
        for head, score in zip(self.heads, self.scores, strict=True):
            if head.layer < 0 or head.head < 0:
                raise HeadError(f"a ranking counts layers and heads from 0, got {head}")
            if not math.isfinite(score):
                raise HeadError(f"the score of head {head} is {score}; a ranking needs finite scores")
        if self.only is not None and self.only != len(self.heads):
            raise HeadError(f"`only` is {self.only}, but the ranking has {len(self.heads)} heads; they must be equal")

    def __len__(self) -> int:
        """Number of ranked heads."""
        return len(self.heads)

    def first(self, count: int) -> tuple[Head, ...]:
        """The `count` heads to prune, in removal order."""
        require_whole("count", count, 0)
        if self.only is not None and count != self.only:
            raise HeadError(
                f"this ranking ({self.method}) was made for exactly {self.only} heads, {count} were asked for; "
                f"rank again with budget={count}"
            )
        if not 0 <= count <= len(self.heads):
            raise HeadError(
                f"{count} heads were asked for, the ranking has {len(self.heads)}; rank again with a larger budget"
            )
        return self.heads[:count]

    def save(self, path: str | Path) -> None:
        """Write the ranking as JSON."""
        write_atomically(Path(path), json.dumps(to_plain(self), indent=1, allow_nan=False).encode())

    @classmethod
    def load(cls, path: str | Path) -> "HeadRanking":
        """Read a ranking that `save` wrote."""
        try:
            saved = from_plain(_SavedRanking, json.loads(Path(path).read_text(encoding="utf-8")), "ranking")
            return cls(
                heads=tuple(Head(*head) for head in saved.heads),
                scores=saved.scores,
                method=saved.method,
                score=saved.score,
                provenance=saved.provenance,
                only=saved.only,
            )
        except (OSError, ValueError, RecursionError) as error:
            raise HeadError(f"{path} is not a saved head ranking: {error}") from error


@dataclass(frozen=True)
class _SavedRanking:
    """The fields of a ranking as a file holds them, for checking one by one."""

    heads: tuple[tuple[int, int, str], ...]
    scores: tuple[float, ...]
    method: str
    score: str
    provenance: Mapping[str, Any]
    only: int | None


def overlap(first: HeadRanking, second: HeadRanking, count: int) -> float:
    """Share of heads that two rankings have in common among the first `count` of each."""
    if count < 1:
        raise HeadError(f"overlap needs at least one head, got count={count}")
    return len(set(first.first(count)) & set(second.first(count))) / count


def jensen_shannon(first: HeadRanking, second: HeadRanking, count: int) -> float:
    """Jensen–Shannon divergence (natural logarithm) between two choices of `count` heads over the layers.

    Each choice is a distribution over (tower, layer): the share of its heads that lie there. It is 0 when
    both take as many heads from every layer, and at most log 2.
    """
    p, q = _heads_per_layer(first, count), _heads_per_layer(second, count)
    divergence = 0.0
    for place in sorted(p.keys() | q.keys()):
        a, b = p[place], q[place]
        divergence += sum(heads * math.log(2 * heads / (a + b)) for heads in (a, b) if heads > 0)
    return min(max(divergence / (2 * count), 0.0), math.log(2))


def _heads_per_layer(ranking: HeadRanking, count: int) -> Counter[tuple[str, int]]:
    if count < 1:
        raise HeadError(f"a divergence needs at least one head, got count={count}")
    return Counter((head.tower, head.layer) for head in ranking.first(count))
