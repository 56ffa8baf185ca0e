"""Ways to run a model that is to be measured: as it is, compiled, recorded as a CUDA graph."""

import gc
from collections.abc import Callable

import torch
from contenders import Contender
from model_shapes import Inputs
from torch import Tensor

from hydra_ensembles.optimize.runner import GraphCache

MODES = ("graphed", "compiled", "graphed-eager", "eager")
TOLERANCE = 0.1  # relative; answers in bfloat16 differ by about a hundredth, wrong ones by about one

Run = Callable[..., Tensor]


class Modes:
    """One contender on one batch, in every mode; what modes have in common is made once.

    Args:
        contender: The model.
        inputs: The batch.
        expected: What it should answer; None for what it answers in eager mode.
    """

    def __init__(self, contender: Contender, inputs: Inputs, expected: Tensor | None = None) -> None:
        self.contender, self.inputs = contender, inputs
        self._made: dict[str, Run] = {}
        with torch.no_grad():
            self._expected = contender.run(*inputs.values()) if expected is None else expected

    def run(self, mode: str) -> Run:
        """The function to call in a mode."""
        if mode == "eager":
            return self.contender.run
        if mode not in self._made:
            if mode == "compiled":
                self._made[mode] = torch.compile(self.contender.run, dynamic=False)
            else:
                self._made[mode] = GraphCache(self.run("compiled" if mode == "graphed" else "eager"))
            with torch.no_grad():
                self._made[mode](*self.inputs.values())
        return self._made[mode]

    def error(self, mode: str) -> float | None:
        """How far a mode's answer is from what is expected; a contender that draws numbers has none."""
        if self.contender.random:
            return None
        with torch.no_grad():
            difference = relative_difference(self.run(mode)(*self.inputs.values()), self._expected)
        if not difference < TOLERANCE:
            raise RuntimeError(f"the answers in mode {mode} are off by {difference:.2g}")
        return difference

    def peak_memory(self, mode: str) -> int | None:
        """Bytes of the weights, and the most that a forward pass allocates; a graph keeps what its function needs."""
        run = self.run({"graphed": "compiled", "graphed-eager": "eager"}.get(mode, mode))
        arguments = list(self.inputs.values())
        with torch.no_grad():
            if arguments[0].device.type == "cuda":
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                run(*arguments)
                torch.cuda.synchronize()
                return self.contender.weight_bytes + torch.cuda.max_memory_allocated() - before
            return self.contender.weight_bytes + allocated_on_cpu(run, arguments)


def allocated_on_cpu(run: Run, arguments: list[Tensor]) -> int:
    """The most bytes of tensors that a call holds at a time."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        run(*arguments)
    held = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def synchronize(device: str) -> None:
    """Wait for the device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def release() -> None:
    """Give back the memory of models that are done with."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
