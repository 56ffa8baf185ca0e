"""Actions with a known outcome: refused with a clear error, or answered like a reference."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from itertools import chain
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import hydra_ensembles as he
from hydra_ensembles.digest import digest as digest_of
from hydra_ensembles.errors import HydraError
from hydra_ensembles.settings import to_plain

from .small import KINDS

T = TypeVar("T")
Case = tuple[str, str, str]  # kind of model, action, value


@dataclasses.dataclass(frozen=True)
class Deed:
    """An action to try.

    Attributes:
        act: Performs it and returns the answer.
        reference: Returns the right answer, computed in another way; None if it must be refused.
        may_refuse: Whether a refusal is acceptable as well.
    """

    act: Callable[[], Any]
    reference: Callable[[], Any] | None = None
    may_refuse: bool = False


def outcome(deed: Deed) -> str:
    """The outcome of an action; a justified refusal is re-raised, an unjustified one is a defect."""
    try:
        answer = deed.act()
    except HydraError as error:
        if deed.reference is None or deed.may_refuse:
            raise
        raise AssertionError(f"refused, but it is right: {type(error).__name__}: {error}") from error
    if deed.reference is None:
        return "other"
    return "same" if alike(answer, deed.reference()) else "other"


Deeds = Callable[[str], Mapping[tuple[str, str], Callable[[], Deed]]]  # for a kind of model


def cases_of(deeds: Deeds) -> list[Case]:
    return [(kind, *deed) for kind in KINDS for deed in deeds(kind)]


def check_of(deeds: Deeds, case: Case) -> str:
    kind, *deed = case
    return outcome(deeds(kind)[deed[0], deed[1]]())


def must_refuse_of(deeds: Deeds, case: Case) -> bool:
    """Whether an action must be refused."""
    kind, *deed = case
    return deeds(kind)[deed[0], deed[1]]().reference is None


def alike(one: Any, other: Any) -> bool:
    """Whether two answers are equal, up to the rounding of their dtype."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        half = {one.dtype, other.dtype} & {torch.float16, torch.bfloat16}
        close = (2e-2, 1e-2) if half else (1e-4, 1e-5)
        return one.shape == other.shape and torch.allclose(one.double(), other.double(), *close, equal_nan=True)
    if isinstance(one, nn.Module) and isinstance(other, nn.Module):
        return alike(one.state_dict(), other.state_dict())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5) or one == other or (one != one and other != other)
    if dataclasses.is_dataclass(one) and type(one) is type(other) and not isinstance(one, type):
        return all(alike(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one))
    return bool(one == other)


def drawn(all_cases: list[T], count: int, seed: int) -> list[T]:
    """A sample of this many cases, drawn by the seed, in order; all if there are fewer."""
    chosen = Random(seed).sample(range(len(all_cases)), min(count, len(all_cases)))
    return [all_cases[index] for index in sorted(chosen)]


def digest(*parts: Any) -> str:
    """A digest: tensors by their bits, models by weights, configuration and metadata."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, nn.Module):
            found.update(digest_of(part).encode())
            for tower in (part.image, part.text) if isinstance(part, he.DualEncoder) else (part,):
                found.update(digest(to_plain(tower.config), to_plain(tower.metadata.plain)).encode())
                side, fitted = tower.metadata.text_side, tower.metadata.familiarity
                if side is not None:
                    found.update(digest(side.tower, side.templates, side.logit_scale).encode())
                if fitted is not None:
                    found.update(digest(to_plain(fitted.settings), *chain(*sorted(fitted.state.items()))).encode())
        elif isinstance(part, Tensor):
            found.update(digest_of(part).encode())
        else:
            found.update(json.dumps(part, sort_keys=True, default=repr).encode())
        found.update(b"\x1f")
    return found.hexdigest()
