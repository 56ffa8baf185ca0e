"""Member logits small enough to keep in a repository, from which every table is made.

Logits are taken relative to the largest one of their member and sample and rounded. Where there are many classes,
only some are stored one by one. Every group of rows that answer together has its own: every answer of one of them,
the label, and those that they give most weight to. The others, a member's tail, are stored as a few numbers from which
its probability, its entropy and its part in the mutual information can be had again; see `logit_tails`. Rows of
different groups must not be averaged.

All tables are made from what is stored, so making them again gives the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_ensembles.errors import ConfigError

from .logit_tails import describe_tail, find_mixture, tail_logits

GROWTH = 1 / 8
"""Stored logits of many classes lie at -step (n + GROWTH n²), n = 0, 1, ...: the less a class matters, the coarser."""
LOWEST = -32.0  # of a kept class or a tail: a probability of 1e-14
LOWEST_OF_ALL = -60000.0  # where all classes are stored


@dataclass(frozen=True)
class Storing:
    """How the logits of a set are stored.

    Attributes:
        step: Next to the largest logit, others are rounded to multiples of this; everywhere, if all are stored.
        keep: Classes of a sample that each group of rows stores one by one (more, where its members give more
            different answers); None for all classes.
    """

    step: float
    keep: int | None = None

    def __post_init__(self) -> None:
        """Check both."""
        if not self.step > 0 or (self.keep is not None and self.keep < 1):
            raise ConfigError(f"a step is positive and at least one class is kept, got {self}")


@dataclass(frozen=True, eq=False)
class CompactGroup:
    """Logits of rows that answer together, some classes one by one.

    Attributes:
        values: `[R, B, k + 1]` in float16, largest zero: of the kept classes, and the level of the tail.
        kept: `[B, k]`, the kept classes, the most likely one first.
        entropy: `[R, B]`, that of each tail, in steps.
        mixture: `[B]`, how much the tails differ.
    """

    values: npt.NDArray[np.float16]
    kept: npt.NDArray[np.unsignedinteger[Any]]
    entropy: npt.NDArray[np.uint8]
    mixture: npt.NDArray[np.uint8]

    def logits(self, classes: int) -> Tensor:
        """Member logits `[R, B, C]` in float32."""
        values = torch.from_numpy(self.values.astype(np.float32))
        kept, entropy, mixture = (
            torch.from_numpy(array.astype(np.int64)) for array in (self.kept, self.entropy, self.mixture)
        )
        tails = tail_logits(values[..., -1], entropy, mixture, classes, kept.shape[-1])
        index = kept.expand(len(values), -1, -1)  # [R, B, k]
        others = torch.ones(*values.shape[:2], classes, dtype=torch.bool).scatter_(2, index, False)
        full = values.new_empty(others.shape).masked_scatter_(others, tails)
        return full.scatter_(2, index, values[..., :-1])


@dataclass(frozen=True, eq=False)
class CompactSet:
    """Logits of all members on one set: `values`, or `groups` where there are many classes.

    Attributes:
        values: `[S, B, C]`, as `compact` stores them in float16, largest zero; None where not all classes are stored.
        groups: All rows, those that answer together in one; empty where all classes are stored.
        labels: `[B]`, or None where they do not matter.
        classes: Number of classes.
    """

    values: npt.NDArray[np.floating[Any]] | None
    groups: tuple[CompactGroup, ...]
    labels: npt.NDArray[np.int64] | None
    classes: int

    def logits(self, rows: Sequence[int] | None = None) -> Tensor:
        """Member logits `[R, B, C]` in float32, of some rows in the order given, or of all."""
        if self.values is not None:
            values = self.values if rows is None else self.values[list(rows)]
            return torch.from_numpy(values.astype(np.float32))
        if rows is None:
            return torch.cat([group.logits(self.classes) for group in self.groups])
        found: dict[int, Tensor] = {}
        start = 0
        for group in self.groups:
            inside = [row for row in rows if start <= row < start + len(group.values)]
            full = group.logits(self.classes) if inside else torch.empty(0)
            found |= {row: full[row - start] for row in inside}
            start += len(group.values)
        return torch.stack([found[row] for row in rows])


def compact(logits: Tensor, labels: Tensor | None, groups: Sequence[int], storing: Storing) -> CompactSet:
    """Store member logits `[S, B, C]` of one set.

    Args:
        logits: Of all members.
        labels: `[B]`; they are stored, and their classes kept. None where they do not matter.
        groups: How many rows each group has: members that answer together.
        storing: How.

    Raises:
        ConfigError: The groups are not those of the rows.
    """
    rows, _, classes = logits.shape
    if sum(groups) != rows or min(groups) < 1:
        raise ConfigError(f"groups {list(groups)} must add up to the {rows} rows of the logits, none of them empty")
    relative = logits.double() - logits.double().amax(-1, keepdim=True)
    numbers = None if labels is None else labels.numpy()
    parts = relative.split(list(groups))
    if storing.keep is not None:
        needed = [_needed(part, labels) for part in parts]
        keep = [max(storing.keep, int(one.sum(-1).amax())) for one in needed]
        if max(keep) + 1 < classes:
            found = (_compact_group(*one, storing.step) for one in zip(parts, needed, keep, strict=True))
            return CompactSet(None, tuple(found), numbers, classes)
    rounded = (relative / storing.step).round() * storing.step
    rounded = rounded.where(relative == 0, rounded.clamp_max(-storing.step))  # no tie with a member's answer
    return CompactSet(rounded.clamp_min(LOWEST_OF_ALL).to(torch.float16).numpy(), (), numbers, classes)


def _compact_group(relative: Tensor, needed: Tensor, keep: int, step: float) -> CompactGroup:
    """Of rows `[R, B, C]`, `keep` classes, among them those `[B, C]` that are needed."""
    classes = relative.shape[-1]
    weight = relative.softmax(-1).amax(0)  # [B, C], the most that any member gives to a class
    first = (weight + needed).topk(keep, dim=-1).indices  # those needed come first
    kept = first.gather(1, weight.gather(1, first).argsort(dim=-1, descending=True, stable=True))
    index = kept.expand(len(relative), -1, -1)  # [R, B, k]
    level, entropy = describe_tail(relative.scatter(2, index, -torch.inf))
    stored = _rounded(torch.cat([relative.gather(2, index), level[..., None]], dim=-1), step).to(torch.float16)
    in_tail = relative.softmax(-1).scatter(2, index, 0.0).float()
    values = stored.float()
    mixture = find_mixture(in_tail, values[..., :-1], values[..., -1], entropy, classes)
    whole = np.min_scalar_type(classes)
    return CompactGroup(
        values=stored.numpy(),
        kept=kept.numpy().astype(whole),
        entropy=entropy.numpy().astype(np.uint8),
        mixture=mixture.numpy().astype(np.uint8),
    )


def _needed(relative: Tensor, labels: Tensor | None) -> Tensor:
    """Classes `[B, C]` that must be kept of a group's `[R, B, C]`: every answer, and the label."""
    needed = torch.zeros(relative.shape[1:], dtype=torch.bool).scatter_(1, relative.argmax(-1).T, True)
    if labels is not None:
        needed[torch.arange(len(labels)), labels] = True
    return needed


def _rounded(relative: Tensor, step: float) -> Tensor:
    """The nearest places where logits are stored; none but a member's answer is at zero."""
    number = ((1 - 4 * GROWTH * relative.clamp_min(LOWEST) / step).sqrt() - 1) / (2 * GROWTH)
    number = number.round().where(relative == 0, number.round().clamp_min(1))
    return -step * (number + GROWTH * number**2)
