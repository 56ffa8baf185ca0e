"""Which plan runs inputs of a shape, and why."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from ..model.layers import Plan
from .graphs import Arguments, Key

Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Choice:
    """The plan for one shape of input.

    Attributes:
        plan: The plan.
        seconds: What each plan took, uncompiled; empty where there was nothing to choose or measure.
        failures: Plans that cannot run on such inputs, with the reason.
        compiled: Whether compiled code is used.
        note: What else there is to say, such as why there is no compiled code.
    """

    plan: Plan
    seconds: Mapping[Plan, float] = field(default_factory=dict)
    failures: Mapping[Plan, str] = field(default_factory=dict)
    compiled: bool = False
    note: str = ""

    def __str__(self) -> str:
        """The plan, compiled or not, the times of all plans and the failures."""
        timings = ", ".join(f"{plan} {1e3 * seconds:.3g} ms" for plan, seconds in self.seconds.items())
        failures = "; ".join(f"{plan} failed: {reason}" for plan, reason in self.failures.items())
        details = "; ".join(text for text in (timings, failures, self.note) if text)
        return f"{self.plan}{', compiled' if self.compiled else ''}{f' ({details})' if details else ''}"


def fastest(runs: Mapping[Plan, Run], arguments: Arguments, repeats: int, device: torch.device) -> Choice:
    """Run each plan and choose the fastest; one that cannot run such inputs drops out.

    The plans take turns, so that a machine that is busy for a while slows all of them.

    Raises:
        RuntimeError: No plan can run these inputs; the error of the first.
    """
    able: dict[Plan, Run] = {}
    errors: dict[Plan, RuntimeError] = {}
    for plan, run in runs.items():
        try:
            run(*arguments)
            synchronize(device)
            able[plan] = run
        except RuntimeError as error:  # among them: out of memory, unsupported type or alignment
            errors[plan] = error
    if not able:
        raise next(iter(errors.values()))
    seconds: dict[Plan, list[float]] = {plan: [] for plan in able}
    for _ in range(repeats):
        for plan, run in able.items():
            synchronize(device)
            start = time.perf_counter()
            run(*arguments)
            synchronize(device)
            seconds[plan].append(time.perf_counter() - start)
    medians = {plan: median(values) for plan, values in seconds.items()}
    failures = {plan: first_line(error) for plan, error in errors.items()}
    return Choice(min(medians, key=lambda plan: medians[plan]), medians, failures)


def first_line(error: Exception) -> str:
    """The beginning of an error's message."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:160]


def nearest(known: Mapping[Key, Choice], key: Key) -> Choice:
    """The choice for the known shape whose batch size is nearest."""
    return known[min(known, key=lambda other: abs(batch_of(other) - batch_of(key)))]


def batch_of(key: Key) -> int:
    """Batch size of a shape."""
    return 0 if key[0] is None else key[0][0][0]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
