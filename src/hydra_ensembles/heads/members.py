"""Choosing the members of an ensemble: which heads each of them loses.

Every function returns one tuple of heads per member, ready for pruning, and refuses to return the same set of
heads twice: two such members would be one model, counted double.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..errors import ConfigError, HeadError, SameMembersError
from ..model.clip import DualEncoder
from ..model.ensemble import Ensemble
from .masking import existing_heads, towers_of
from .ranking import Head, HeadRanking

Members = tuple[tuple[Head, ...], ...]

CIRCUIT_ORDER = ("avg", "acc", "ood")


def circuit_members(
    rankings: Mapping[str, HeadRanking], prune: int, members: int, pool: int | None = None, seed: int = 0
) -> Members:
    """The circuits for both goals, for accuracy and for OOD detection, in this order; then draws from the first.

    Args:
        rankings: Circuits by score: `"avg"`, from two members on `"acc"`, from three on `"ood"`.
        prune: Heads each member loses.
        members: Number of members. Those after the third lose `prune` heads drawn from the pool.
        pool: The pool is the first `pool` heads of the `"avg"` ranking; None for the whole of it.
        seed: Draws the members after the third.
    """
    _require_counts(prune, members)
    needed = CIRCUIT_ORDER[:members]
    missing = [score for score in needed if score not in rankings]
    if missing:
        raise HeadError(
            f"{members} circuit members need rankings for {list(needed)}, got {sorted(rankings)}; "
            f"extract circuits for {missing} too"
        )
    _require_one_model([rankings[score] for score in needed])
    for score in needed:
        if rankings[score].score != score:
            raise HeadError(f"rankings[{score!r}] is a ranking for {rankings[score].score!r}; swap them")
    chosen = [rankings[score].first(prune) for score in needed]
    for second in range(1, len(chosen)):
        first = _same_as_earlier(chosen, second)
        if first is not None:
            raise SameMembersError(
                f"the circuits for {needed[first]!r} and {needed[second]!r} remove the same {prune} heads, so two "
                "members would be identical; use another `prune`, more or other data for the circuits, or "
                "members sampled from one circuit"
            )
    if members > len(chosen):
        average = rankings["avg"]
        heads = average.first(len(average) if pool is None else pool)
        chosen += _draw_distinct(heads, prune, members - len(chosen), seed, chosen, "pool")
    return tuple(chosen)


def taylor_members(rankings: Sequence[HeadRanking], prune: int) -> Members:
    """One member per Taylor ranking; the rankings were made with different seeds."""
    _require_counts(prune, len(rankings))
    _require_one_model(rankings)
    chosen = [ranking.first(prune) for ranking in rankings]
    for second in range(1, len(chosen)):
        first = _same_as_earlier(chosen, second)
        if first is not None:
            raise SameMembersError(
                f"rankings {first} and {second} remove the same {prune} heads, so two members would be identical: "
                f"{_why_equal(rankings[first], rankings[second])}"
            )
    return tuple(chosen)


def sampled_members(ranking: HeadRanking, prune: int, pool: int, members: int, seed: int = 0) -> Members:
    """Members that each lose `prune` heads drawn at random from the first `pool` of one ranking.

    Args:
        ranking: Usually the circuit for both goals, with a budget of at least `pool`.
        prune: Heads each member loses, listed in removal order.
        pool: Size of the pool; larger than `prune`, or every draw is the same.
        members: Number of members.
        seed: The pruning seed.
    """
    _require_counts(prune, members)
    return tuple(_draw_distinct(ranking.first(pool), prune, members, seed, (), "pool"))


def random_members(
    model: Ensemble | DualEncoder, prune: int, members: int, seed: int = 0, layers: Iterable[int] | None = None
) -> Members:
    """Members that lose `prune` heads drawn from all heads: the control every ranking has to beat.

    Args:
        model: The model to be pruned, one member; of a dual encoder, the heads of both towers are drawn from.
        prune: Heads each member loses, listed first layer first.
        members: Number of members.
        seed: Draws the heads.
        layers: Layers to draw from (of each tower); None for all of them.
    """
    _require_counts(prune, members)
    if model.num_members != 1:
        raise ConfigError(
            f"random_members draws from the heads of one model, got {model.num_members} members; take one of them "
            "with model.member(i)"
        )
    chosen = None if layers is None else tuple(layers)
    heads = [
        head for name, tower in towers_of(model).items() for head in existing_heads(tower.config, chosen, tower=name)
    ]
    return tuple(_draw_distinct(heads, prune, members, seed, (), "layers"))


def _draw_distinct(
    heads: Sequence[Head], prune: int, count: int, seed: int, taken: Sequence[tuple[Head, ...]], setting: str
) -> list[tuple[Head, ...]]:
    """Draw `count` different subsets of `prune` heads, none of them in `taken`; a repeated draw is made again.

    Each subset keeps the order of `heads`. `setting` is the argument that decides how many heads there are.
    """
    if seed < 0:
        raise ConfigError(f"seed must not be negative, got {seed}")
    if prune > len(heads):
        raise HeadError(f"prune is {prune}, but there are {len(heads)} heads to draw from; enlarge `{setting}`")
    seen = {frozenset(subset) for subset in taken}
    possible = math.comb(len(heads), prune) - sum(subset <= set(heads) for subset in seen)
    if possible < count:
        raise SameMembersError(
            f"prune={prune} out of {len(heads)} heads leaves {possible} different choices for {count} more members, "
            f"so some would be identical; enlarge `{setting}`, change `prune`, or ask for fewer members"
        )
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn: list[tuple[Head, ...]] = []
    while len(drawn) < count:
        order = np.argsort(generator.random(len(heads)), kind="stable")[:prune]
        subset = tuple(heads[index] for index in np.sort(order))
        if frozenset(subset) not in seen:
            seen.add(frozenset(subset))
            drawn.append(subset)
    return drawn


def _same_as_earlier(chosen: Sequence[tuple[Head, ...]], index: int) -> int | None:
    """The first member before `index` that loses the same set of heads, or None."""
    return next((other for other in range(index) if set(chosen[other]) == set(chosen[index])), None)


def _why_equal(first: HeadRanking, second: HeadRanking) -> str:
    """What made two Taylor rankings agree, as far as they remember it, and what to change."""
    mine, other = first.provenance, second.provenance
    if "calibration_batches" not in mine or "calibration_batches" not in other:
        return "rank with another seed and fewer calibration batches for each member, or change `prune`"
    if mine["calibration_batches"] is None or other["calibration_batches"] is None:
        return (
            "they used all calibration batches; set `calibration_batches` to fewer, so that seeds draw different ones"
        )
    if mine.get("seed") == other.get("seed"):
        return f"both were made with seed={mine.get('seed')}; rank with another seed for each member"
    if mine.get("data") == other.get("data"):
        return (
            f"seeds {mine.get('seed')} and {other.get('seed')} drew the same batches; draw fewer batches "
            "(`calibration_batches`), or take another seed"
        )
    return (
        f"seeds {mine.get('seed')} and {other.get('seed')} drew different batches, which agree on these heads; "
        "draw fewer batches (`calibration_batches`), make them smaller, or change `prune`"
    )


def _require_one_model(rankings: Sequence[HeadRanking]) -> None:
    """Refuse rankings of different models, where they remember which one it was."""
    models = {ranking.provenance["model"] for ranking in rankings if "model" in ranking.provenance}
    if len(models) > 1:
        raise HeadError(
            f"the rankings were made from {len(models)} different models (fingerprints "
            f"{sorted(str(model)[:12] for model in models)}); members of one ensemble need rankings of one model"
        )


def _require_counts(prune: int, members: int) -> None:
    if prune < 1:
        raise HeadError(f"each member must lose at least one head, got prune={prune}")
    if members < 1:
        raise HeadError(f"an ensemble needs at least one member, got {members}")
