"""Tails of stored logits: what members say of the classes that are not stored one by one, in a few numbers.

Logits of many classes are spread much like a normal distribution. A tail is made again as its lower part: the places
of the kept classes are left out at the top, and its width and height follow from two stored numbers: the entropy
within the tail, and the logit of its classes if they were so many alike as have this entropy, its level. So
probability and entropy of the tail are those of the member, and with a temperature they stay close to it.

Which class has which place is not stored, for no table asks for it: the label and all answers are kept. What matters
is whether members who answer together agree on it, since their mean and the mutual information depend on that. Places
are given in the order of the classes, mixed with an order of each member's own: as much as makes the tails add to the
mutual information what they did. How much is the third number, one for all members.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

MIXTURES = 16
FINENESS = 8  # entropies are stored as multiples of 1 / FINENESS
BISECTIONS = 60
WIDEST = 200.0
HIGHEST = -1 / 16  # no class of a tail comes up to its member's answer, which is at zero
_PRIMES = tuple(number for number in range(2, 100) if all(number % other for other in range(2, number)))


def tail_logits(level: Tensor, entropy: Tensor, mixture: Tensor, classes: int, kept: int) -> Tensor:
    """Logits `[R, B, C - k]` of the classes that are not kept, for rows that answer together.

    Args:
        level: `[R, B]`, log-sum-exp less entropy.
        entropy: `[R, B]`, as a number of steps of 1 / `FINENESS`; the highest, `even_tail`, is that of equal logits.
        mixture: `[B]`, how much the rows differ in the order of classes, 0 to `MIXTURES` - 1.
        classes: Number C of classes.
        kept: How many of them, k, are not in the tail.
    """
    shapes, orders = _shapes(classes, kept).to(level.dtype), _orders(len(level), classes - kept)
    found = [
        height[:, None] + shapes[steps].gather(1, orders[mixture, row])
        for row, (height, steps) in enumerate(zip(level, entropy, strict=True))
    ]
    return torch.stack(found).clamp_max(HIGHEST)


def describe_tail(rest: Tensor) -> tuple[Tensor, Tensor]:
    """`level` and `entropy` of tails, from logits `[R, B, C]` where kept classes are -inf."""
    count = int((rest[0, 0] > -torch.inf).sum())
    steps = torch.special.entr(rest.softmax(-1)).sum(-1).mul(FINENESS).round().clamp_max(even_tail(count))
    return rest.logsumexp(-1) - steps.div(FINENESS).clamp_max(math.log(count)), steps.long()


def even_tail(count: int) -> int:
    """The `entropy` of equal logits of so many classes."""
    return math.ceil(FINENESS * math.log(count))


def find_mixture(probs: Tensor, kept: Tensor, level: Tensor, entropy: Tensor, classes: int) -> Tensor:
    """The `mixture` `[B]` by which the tails of members add as much to their mutual information as they did.

    Args:
        probs: The members' probabilities of classes that are not kept, zero for the others, `[R, B, C]`.
        kept: Stored logits of kept classes, `[R, B, k]`.
        level: As stored, `[R, B]`.
        entropy: As stored, `[R, B]`.
        classes: Number of classes.
    """
    best = torch.zeros(probs.shape[1], dtype=torch.long)
    if len(probs) == 1:
        return best
    wanted = _information(probs)
    gap = torch.full_like(wanted, torch.inf)
    for mixture in range(MIXTURES):
        tails = tail_logits(level, entropy, torch.full_like(best, mixture), classes, kept.shape[-1])
        total = torch.cat([kept, tails], dim=-1).logsumexp(-1, keepdim=True)
        found = (_information((tails - total).exp()) - wanted).abs()
        best = torch.where(found < gap, mixture, best)
        gap = torch.minimum(found, gap)
    return best


def _information(probs: Tensor) -> Tensor:
    """What some classes add to the mutual information, `[B]`, from members' probabilities `[R, B, ...]`."""
    return torch.special.entr(probs.mean(0)).sum(-1) - torch.special.entr(probs).sum(-1).mean(0)


@lru_cache(maxsize=16)
def _shapes(classes: int, kept: int) -> Tensor:
    """Logits by place, over their level, for every entropy: `[1 + even_tail, C - k]`."""
    count = classes - kept
    places = torch.arange(kept, classes, dtype=torch.double)
    normal = torch.special.ndtri((classes - places - 0.5) / classes)  # descending
    entropy = torch.arange(1 + even_tail(count), dtype=torch.double).div(FINENESS).clamp_max(math.log(count))
    low, high = torch.zeros_like(entropy), torch.full_like(entropy, WIDEST)
    for _ in range(BISECTIONS):
        width = (low + high) / 2
        found = torch.special.entr((width[:, None] * normal).softmax(-1)).sum(-1)
        low, high = torch.where(found > entropy, width, low), torch.where(found > entropy, high, width)
    shapes = (high[:, None] * normal).log_softmax(-1) + entropy[:, None]
    shapes[-1] = 0.0  # all classes alike
    return shapes


@lru_cache(maxsize=16)
def _orders(rows: int, count: int) -> Tensor:
    """The place of every class in the tail of every row, for every mixture: `[MIXTURES, rows, count]`."""
    normal = torch.special.ndtri((torch.arange(count, dtype=torch.double) + 0.5) / count)
    number = torch.arange(1, count + 1, dtype=torch.double)
    own = torch.stack([_rank(number.mul(math.sqrt(_PRIMES[row % len(_PRIMES)])).frac()) for row in range(rows)])
    apart = (torch.arange(MIXTURES, dtype=torch.double) / (MIXTURES - 1)) ** 2  # one less the correlation
    mixed = (1 - apart).sqrt()[:, None, None] * normal + apart.sqrt()[:, None, None] * normal[own]
    return _rank(mixed)


def _rank(values: Tensor) -> Tensor:
    """The place of every value among those of the last axis in ascending order."""
    return values.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)
