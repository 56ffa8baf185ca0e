"""Run many cases, and count how they end.

A check is a function of one case. It returns "same" (accepted, with the right answer) or "other" (accepted, with a
wrong one); a `HydraError` is a refusal, any other exception a defect, and so are ten seconds or a gigabyte.
"""

import hashlib
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import hydra_ensembles as he
from hydra_ensembles.errors import HydraError

Case = TypeVar("Case")

SECONDS, KILOBYTES = 10.0, 1 << 20  # per case
OUTCOMES = ("refused", "same", "other", "raw", "slow")
EXAMPLES = 5  # failures that are told


@dataclass(frozen=True)
class Row:
    """Outcomes of the cases of one kind; each is counted once."""

    what: str
    cases: int
    refused: int = 0  # with a HydraError
    same: int = 0  # accepted, with the right answer
    other: int = 0  # accepted, with a wrong answer
    raw: int = 0  # any other exception
    slow: int = 0  # over 10 s or 1 GB
    examples: tuple[str, ...] = ()

    @property
    def failures(self) -> int:
        """Number of cases with a forbidden outcome."""
        return self.other + self.raw + self.slow


def count(what: str, check: Callable[[Case], str], cases: Iterable[Case]) -> Row:
    """Run `check` on every case and count the outcomes."""
    found = [(case, *outcome_of(check, case)) for case in cases]
    counts = {name: sum(outcome == name for _, outcome, _ in found) for name in OUTCOMES}
    told = [f"{outcome}: {case}: {said}"[:400] for case, outcome, said in found if outcome not in ("refused", "same")]
    return Row(what, len(found), **counts, examples=tuple(told[:EXAMPLES]))


def outcome_of(check: Callable[[Case], str], case: Case) -> tuple[str, str]:
    """Run one case: its outcome and the message."""
    begun, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = ""
    with warnings.catch_warnings(action="ignore"):
        try:
            outcome = check(case)
        except HydraError as error:
            outcome, said = "refused", str(error)
        except Exception as error:
            outcome, said = "raw", f"{type(error).__name__}: {error}"
    seconds, more = time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    return ("slow", f"{outcome} after {seconds:.0f} s") if seconds > SECONDS or more > KILOBYTES else (outcome, said)


def drawn(cases: list[Case], count: int, seed: int) -> list[Case]:
    """So many of the cases, in a random order; all of them first, before any repeats."""
    random = Random(seed)
    rounds = [random.sample(cases, len(cases)) for _ in range(1 + count // len(cases))]
    return [case for some in rounds for case in some][:count]


def alike(found: Any, wanted: Any, tolerance: float = 2e-4) -> bool:
    """Whether two answers agree: numbers up to rounding, all else exactly."""
    if isinstance(found, Tensor) and isinstance(wanted, Tensor):
        one, two = found.detach().float(), wanted.detach().float()
        return one.shape == two.shape and torch.allclose(one, two, rtol=tolerance, atol=tolerance, equal_nan=True)
    return bool(found == wanted)


def digest(*values: Any) -> str:
    """Everything that these values hold, to the last bit."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, nn.Module):
            value = [value.state_dict(), repr(value.metadata)] if isinstance(value, he.Ensemble) else value.state_dict()
        if isinstance(value, Mapping):
            value = sorted(value.items(), key=lambda pair: str(pair[0]))
        if isinstance(value, Tensor):
            value = value.detach().cpu().contiguous().view(torch.uint8).numpy() if value.dim() else value.tolist()
        if isinstance(value, list | tuple):
            found.update(f"{len(value)}[".encode())
            for one in value:
                add(one)
        else:
            found.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())

    add(values)
    return found.hexdigest()
