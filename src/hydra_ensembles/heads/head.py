"""The address of an attention head, and how users may write one."""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import NamedTuple

from ..errors import HeadError


class Head(NamedTuple):
    """One attention head: layer and original index, counted from 0, and the tower it belongs to."""

    layer: int
    head: int
    tower: str = "main"

    def __str__(self) -> str:
        """`3.7`, or `text:3.7` outside the main tower."""
        prefix = "" if self.tower == "main" else f"{self.tower}:"
        return f"{prefix}{self.layer}.{self.head}"


HeadLike = Head | tuple[int, int] | tuple[int, int, str] | Sequence[int]


def as_head(value: HeadLike) -> Head:
    """Read a head from a `Head`, a tuple `(layer, head)` or `(layer, head, tower)`."""
    parts = tuple(value) if isinstance(value, list | tuple) else ()
    integers = len(parts) in (2, 3) and all(isinstance(p, Integral) and not isinstance(p, bool) for p in parts[:2])
    if not integers or not all(isinstance(tower, str) for tower in parts[2:]):
        raise HeadError(f"a head is Head(layer, head) or a tuple (layer, head), got {value!r}")
    return Head(int(parts[0]), int(parts[1]), *parts[2:])  # plain integers also where numpy's were given


def as_heads(values: Iterable[HeadLike]) -> tuple[Head, ...]:
    """Read several heads, keeping their order; the same head twice is an error."""
    if not isinstance(values, Iterable):
        raise HeadError(f"heads are a list of Head(layer, head), as ranking.first(count) gives it, got {values!r}")
    heads = tuple(as_head(value) for value in values)
    seen: set[Head] = set()
    for head in heads:
        if head in seen:
            raise HeadError(f"head {head} is listed twice")
        seen.add(head)
    return heads


def require_budget(budget: object, candidates: int) -> None:
    """Refuse to remove a number of heads that is no whole number, or more than there are."""
    if isinstance(budget, bool) or not isinstance(budget, Integral) or not 1 <= int(budget) <= candidates:
        raise HeadError(
            f"budget is {budget!r}; with these layers and removed heads there are {candidates} heads to choose from, "
            "so it must be a whole number between 1 and that"
        )
