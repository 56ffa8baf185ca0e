"""Addresses of heads, and rankings: the order in which heads are removed, with its provenance."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

from ..digest import digest
from ..errors import HeadError
from ..files import expanded, read_object, write_json
from ..settings import Count, from_plain, require, to_plain
from ..store import Form


class Head(NamedTuple):
    """One attention head: layer and original index, counted from 0, and the tower it belongs to.

    Examples:
        >>> he.Head(layer=11, head=3)
        Head(layer=11, head=3, tower='main')
        >>> he.Head(11, 3) == (11, 3, "main")
        True
    """

    layer: int
    head: int
    tower: str = "main"

    def __str__(self) -> str:
        """`3.7`, or `text:3.7` outside the main tower."""
        prefix = "" if self.tower == "main" else f"{self.tower}:"
        return f"{prefix}{self.layer}.{self.head}"


HeadLike = Head | tuple[int, int] | tuple[int, int, str] | Sequence[int]


def as_heads(values: Iterable[HeadLike]) -> tuple[Head, ...]:
    """Read heads from `Head`s or tuples, keeping their order; the same head twice is an error."""
    heads = tuple(_as_head(value) for value in values)
    if len(set(heads)) < len(heads):
        raise HeadError(f"a head is listed twice: {' '.join(map(str, heads))}")
    return heads


def _as_head(value: HeadLike) -> Head:
    parts = tuple(value) if isinstance(value, list | tuple) else ()
    if len(parts) not in (2, 3) or not all(isinstance(part, Integral) for part in parts[:2]):
        raise HeadError(f"a head is Head(layer, head) or a tuple (layer, head), got {value!r}")
    return Head(int(parts[0]), int(parts[1]), *parts[2:])  # NumPy integers become Python ones


def require_budget(budget: int, candidates: int) -> None:
    """Raise unless the budget is between 1 and the number of candidates."""
    if not 1 <= budget <= candidates:
        raise HeadError(f"budget is {budget}; it must be from 1 to {candidates}, the number of heads to choose from")


@dataclass(frozen=True)
class HeadRanking:
    """Heads in removal order, least useful first.

    Attributes:
        scores: For a circuit, the score of the model after each removal; for Taylor, the importance of the head.
        method: How the order was found, such as `"circuit/exact"` or `"taylor/layer"`.
        score: What was scored: `"acc"`, `"ood"`, `"avg"`, or `"taylor"`.
        provenance: Data sizes, seed, model fingerprint, counters and all else that distinguishes two runs.
        only: If set, `first` accepts only this number (per-layer Taylor: fewer would not prune the layers evenly).

    Examples:
        >>> ranking = he.taylor(base, batches, budget=6, scope="global")
        >>> ranking.method, len(ranking.first(6))
        ('taylor/global', 6)
        >>> ranking.save("ranking.json")
        >>> he.HeadRanking.load("ranking.json") == ranking
        True
    """

    heads: tuple[Head, ...]
    scores: tuple[float, ...]
    method: str
    score: str
    provenance: Mapping[str, Any] = field(default_factory=dict)
    only: int | None = None

    def __post_init__(self) -> None:
        """Check that heads are distinct and each has a finite score; convert the provenance to plain JSON values."""
        object.__setattr__(self, "heads", as_heads(self.heads))
        object.__setattr__(self, "scores", tuple(float(score) for score in self.scores))
        object.__setattr__(self, "provenance", to_plain(self.provenance))
        if len(self.scores) != len(self.heads):
            raise HeadError(f"a ranking needs one score per head, got {len(self.scores)} for {len(self.heads)}")
        for head, score in zip(self.heads, self.scores, strict=True):
            if not math.isfinite(score):
                raise HeadError(f"head {head} has the score {score}; scores are finite")

    def __len__(self) -> int:
        """Number of ranked heads."""
        return len(self.heads)

    def first(self, count: int) -> tuple[Head, ...]:
        """The `count` heads to prune, in removal order."""
        count = require("count", count, Count)
        if self.only is not None and count != self.only:
            raise HeadError(f"this {self.method} ranking is for exactly {self.only} heads; rank with budget={count}")
        if count > len(self):
            raise HeadError(f"{count} heads were requested, but the ranking has {len(self)}; rank with a larger budget")
        return self.heads[:count]

    def save(self, path: str | Path) -> None:
        """Write the ranking as JSON, with the digest of its content."""
        plain = to_plain(self)
        write_json(expanded(path), {**plain, "digest": digest(plain)})

    @classmethod
    def load(cls, path: str | Path) -> "HeadRanking":
        """Read a ranking that `save` wrote."""
        plain = read_object(expanded(path))
        if plain.pop("digest", None) != digest(plain):
            raise HeadError(f"{path} is not a head ranking as it was saved; make it again")
        return from_plain(cls, plain, "ranking")


RANKING: Form[HeadRanking] = Form(".json", HeadRanking.load, lambda path, ranking: ranking.save(path))


def overlap(first: HeadRanking, second: HeadRanking, count: int) -> float:
    """Share of heads that two rankings have in common among the first `count` (at least one) of each."""
    heads, other_heads = (set(ranking.first(count)) for ranking in (first, second))
    return len(heads & other_heads) / count


def stability(rankings: Sequence[HeadRanking], count: int) -> float:
    """Mean overlap of all pairs of rankings among the first `count` heads of each; chance gives count / candidates."""
    pairs = list(combinations(rankings, 2))
    if not pairs:
        raise HeadError(f"stability compares rankings with each other; give at least two, got {len(rankings)}")
    return sum(overlap(first, second, count) for first, second in pairs) / len(pairs)


def jensen_shannon(first: HeadRanking, second: HeadRanking, count: int) -> float:
    """Jensen–Shannon divergence (natural logarithm) between two choices of `count` heads over the layers.

    Each choice is a distribution over (tower, layer): the share of its heads that lie there. The divergence is 0 if
    both take the same number of heads from every layer, and at most log 2.
    """
    chosen = [ranking.first(count) for ranking in (first, second)]
    p, q = (Counter((head.tower, head.layer) for head in heads) for heads in chosen)
    divergence = 0.0
    for layer in sorted(p.keys() | q.keys()):
        a, b = p[layer], q[layer]
        divergence += sum(heads * math.log(2 * heads / (a + b)) for heads in (a, b) if heads > 0)
    return min(max(divergence / (2 * count), 0.0), math.log(2))
