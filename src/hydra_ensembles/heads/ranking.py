"""Rankings: the order in which heads are removed, with its provenance; and the members chosen by them."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..digest import digest
from ..errors import HeadError, SameMembersError
from ..files import expanded, read_object, write_json
from ..model.dual_encoder import DualEncoder
from ..model.ensemble import Ensemble
from ..settings import Count, from_plain, require, to_plain
from ..store import Form
from .masking import Head, as_heads, heads_in, pooling_of


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
        """Read heads and scores, and convert the provenance to plain JSON values."""
        object.__setattr__(self, "heads", as_heads(self.heads))
        object.__setattr__(self, "scores", tuple(float(score) for score in self.scores))
        object.__setattr__(self, "provenance", to_plain(self.provenance))

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


# --- members

Members = tuple[tuple[Head, ...], ...]
Score = Literal["acc", "ood", "avg"]  # what a circuit maximises: accuracy, OOD detection, or their mean

CIRCUIT_ORDER: tuple[Score, ...] = ("avg", "acc", "ood")  # order in which circuits are assigned to members
TAYLOR_DRAWS = 4  # rankings computed per member before giving up on finding distinct members


def circuit_members(
    rankings: Mapping[str, HeadRanking], prune: int, members: int, pool: int | None = None, seed: int = 0
) -> Members:
    """Members from the circuits for `"avg"`, `"acc"` and `"ood"`, in this order, then draws from the `"avg"` ranking.

    If a circuit repeats an earlier member, its last head is replaced by a later one of its ranking, if there is one.
    Members after the third lose heads drawn with the seed from the first `pool` of the `"avg"` ranking (None: all).
    """
    needed = CIRCUIT_ORDER[:members]
    chosen: list[tuple[Head, ...]] = []
    for score in needed:
        heads = rankings[score].heads
        options = [rankings[score].first(prune), *((*heads[: prune - 1], last) for last in heads[prune:])]
        earlier = [set(member) for member in chosen]
        new = [option for option in options if set(option) not in earlier]
        if not new:
            same = needed[earlier.index(set(options[0]))]
            advice = "use another `prune`, other data, or members sampled from one circuit"
            raise SameMembersError(f"the circuits for {same!r} and {score!r} remove the same {prune} heads; {advice}")
        chosen.append(new[0])
    if members > len(chosen):
        heads = rankings["avg"].first(len(rankings["avg"]) if pool is None else pool)
        chosen += _draw_distinct(heads, prune, members - len(chosen), seed, "pool", chosen)
    return tuple(chosen)


def distinct_taylor(rank: Callable[[int], HeadRanking], prune: int, members: int) -> list[tuple[int, HeadRanking]]:
    """One (draw, Taylor ranking) pair per member; no two rankings remove the same `prune` heads.

    `rank` computes the ranking of draw 0, 1, 2, …, each with its own seed. A draw that repeats an earlier member is
    skipped. Raises `SameMembersError` if `TAYLOR_DRAWS` draws per member do not give enough distinct ones.
    """
    distinct: dict[frozenset[Head], tuple[int, HeadRanking]] = {}
    for draw in range(members * TAYLOR_DRAWS):
        ranking = rank(draw)
        distinct.setdefault(frozenset(ranking.first(prune)), (draw, ranking))
        if len(distinct) == members:
            return list(distinct.values())
    problem = f"{members * TAYLOR_DRAWS} Taylor rankings chose {len(distinct)} different sets of {prune} heads"
    advice = "rank with fewer `calibration_batches` or with smaller batches, or change `prune`"
    raise SameMembersError(f"{problem} for {members} members; {advice}")


def sampled_members(ranking: HeadRanking, prune: int, pool: int, members: int, seed: int = 0) -> Members:
    """Members that each lose `prune` heads, in removal order, drawn at random from the first `pool` of one ranking."""
    return tuple(_draw_distinct(ranking.first(pool), prune, members, seed, "pool"))


def random_members(
    model: Ensemble | DualEncoder, prune: int, members: int, seed: int = 0, layers: Iterable[int] | None = None
) -> Members:
    """Members that lose `prune` heads drawn from all heads of the layers: the control every ranking has to beat."""
    heads = heads_in(model, layers)
    return tuple(_draw_distinct(heads, prune, members, seed, "layers", never_all=pooling_of(model, heads)))


def _draw_distinct(
    heads: Sequence[Head],
    prune: int,
    count: int,
    seed: int,
    setting: str,
    taken: Sequence[tuple[Head, ...]] = (),
    never_all: Sequence[Head] = (),
) -> list[tuple[Head, ...]]:
    """Draw `count` distinct subsets of `prune` heads, none of them in `taken`; repeated draws are rejected.

    Each subset keeps the order of `heads`, and none contains all of `never_all`. `setting` names the argument that
    determines how many heads there are, for error messages.
    """
    subsets = {frozenset(subset) for subset in taken}
    possible = math.comb(len(heads), prune) - sum(subset <= set(heads) for subset in subsets)
    if 0 < len(never_all) <= prune:
        possible -= math.comb(len(heads) - len(never_all), prune - len(never_all))
    if possible < count:
        problem = f"prune {prune} of {len(heads)} heads leaves {possible} choices for {count} more members"
        raise SameMembersError(f"{problem}; enlarge `{setting}`, change `prune`, or ask for fewer members")
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn: list[tuple[Head, ...]] = []
    while len(drawn) < count:
        order = np.argsort(generator.random(len(heads)), kind="stable")[:prune]
        subset = tuple(heads[index] for index in np.sort(order))
        if frozenset(subset) not in subsets and not (never_all and set(never_all) <= set(subset)):
            subsets.add(frozenset(subset))
            drawn.append(subset)
    return drawn
