"""The learning rate of every update, as a fraction of the peak."""

import math
from typing import Literal

from ..errors import ConfigError

Schedule = Literal["cosine", "linear", "constant"]


def warmup_updates(warmup: int | float, total: int) -> int:
    """Number of warm-up updates: a whole number as it is, a fraction as its share of `total`, rounded up."""
    if isinstance(warmup, int):
        return warmup
    return math.ceil(round(warmup * total, 9))  # 0.07 · 100 is 7, not 8


def rate_factor(update: int, *, total: int, warmup: int, schedule: Schedule, floor: float = 0.0) -> float:
    """Share of the peak learning rate that update number `update` (from 0) uses.

    Warm-up is linear: the k-th of W warm-up updates uses k / W, so none is wasted on a rate of zero. Then the
    rate falls from the peak to `floor`, which it reaches when the budget of `total` updates is spent.
    """
    if warmup >= total:
        raise ConfigError(
            f"the warm-up takes {warmup} updates and the whole training {total}; "
            "shorten the warm-up or train for longer"
        )
    if update < warmup:
        return (update + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = min((update - warmup) / (total - warmup), 1.0)
    remaining = (1.0 + math.cos(math.pi * progress)) / 2.0 if schedule == "cosine" else 1.0 - progress
    return floor + (1.0 - floor) * remaining
