"""An ensemble prepared for inference: the fastest of several equivalent ways to run it, chosen by measuring."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..encoder.head_products import Plan
from ..errors import ConfigError
from ..prediction import Prediction
from .graphs import Arguments, GraphCache, Key, shape_key
from .model import EnsembleLike
from .simplify import simplified, use_plan

PLANS: tuple[Plan, ...] = ("batched", "loop", "grouped")
MEASURED_SHAPES = 32  # beyond so many different input shapes, a new one takes the plan of the nearest


E = TypeVar("E", bound=EnsembleLike)


class OptimizedEnsemble(Generic[E]):
    """Runs like the ensemble it was made from, faster; inference only, with the weights it had then.

    For every shape of input the plans are measured once, at its first call, and the fastest is used from then
    on. Any batch size gives the same numbers as the ensemble, up to rounding.

    Attributes:
        ensemble: The ensemble it was made from.
        timings: Seconds of each plan, by input shape.
    """

    def __init__(
        self,
        ensemble: E,
        plans: Sequence[Plan] | None = None,
        compile: bool = False,
        graphs: bool | None = None,
        repeats: int = 5,
    ) -> None:
        if graphs and ensemble.device.type != "cuda":
            raise ConfigError(f"CUDA graphs need an ensemble on a CUDA device, this one is on {ensemble.device}")
        if plans is not None and (not plans or set(plans) - set(PLANS)):
            raise ConfigError(f"plans must be some of {list(PLANS)}, got {list(plans)}")
        self.ensemble = ensemble
        self.timings: dict[Key, dict[Plan, float]] = {}
        self._repeats = max(1, repeats)
        base = simplified(ensemble)
        self._runs: dict[Plan, Callable[..., Tensor]] = {}
        for plan in plans if plans is not None else _sensible_plans(base):
            copied = _shell(base) if _same_weights(base, plan) else copy.deepcopy(base)
            run: Callable[..., Tensor] = use_plan(copied, plan)
            if compile:
                run = torch.compile(run, fullgraph=True, dynamic=False)
            if graphs or (graphs is None and ensemble.device.type == "cuda"):
                run = GraphCache(run)
            self._runs[plan] = run

    @torch.inference_mode()
    def __call__(
        self,
        inputs: Tensor | Mapping[str, Tensor],
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Member logits `[M, B, C]`."""
        arguments = self.ensemble.unpack(inputs, attention_mask, token_type_ids)
        return self._runs[self.plan_for(arguments)](*arguments)

    def predict(self, inputs: Any) -> Prediction:
        """Label, confidence and uncertainty of a batch; takes what `Ensemble.predict` takes."""
        return self.ensemble.prediction_of(self(self.ensemble.prepare(inputs)))

    def plan_for(self, arguments: Arguments) -> Plan:
        """The plan used for inputs of this shape, measured if need be."""
        if len(self._runs) == 1:
            return next(iter(self._runs))
        key = shape_key(arguments)
        if key not in self.timings:
            if len(self.timings) >= MEASURED_SHAPES:
                key = min(self.timings, key=lambda known: abs(_size(known) - _size(key)))
            else:
                self.timings[key] = self._measure(arguments)
        return min(self.timings[key], key=lambda plan: self.timings[key][plan])

    def _measure(self, arguments: Arguments) -> dict[Plan, float]:
        """Median seconds of each plan, taken in turns so that a busy machine slows all of them."""
        for run in self._runs.values():
            run(*arguments)
        seconds: dict[Plan, list[float]] = {plan: [] for plan in self._runs}
        for _ in range(self._repeats):
            for plan, run in self._runs.items():
                _synchronize(self.ensemble.device)
                start = time.perf_counter()
                run(*arguments)
                _synchronize(self.ensemble.device)
                seconds[plan].append(time.perf_counter() - start)
        return {plan: median(values) for plan, values in seconds.items()}


def optimize(
    ensemble: E,
    example_inputs: Tensor | Mapping[str, Tensor] | None = None,
    *,
    plans: Sequence[Plan] | None = None,
    compile: bool = False,
    graphs: bool | None = None,
) -> OptimizedEnsemble[E]:
    """Prepare an ensemble for fast inference.

    What all members have in common is stored and computed once, the rest runs by the fastest plan for the shape
    of the input. See `OptimizedEnsemble`.

    Args:
        ensemble: The ensemble; it is not changed, and later changes to it do not reach the result.
        example_inputs: A batch to measure (and compile, and record) with now rather than at the first call.
        plans: Ways to choose from; None for all that can be faster on this device.
        compile: Whether to run each plan through `torch.compile`.
        graphs: Whether to record CUDA graphs; None does so on a CUDA device.
    """
    result = OptimizedEnsemble(ensemble, plans, compile, graphs)
    if example_inputs is not None:
        result(example_inputs)
    return result


def _sensible_plans(ensemble: EnsembleLike) -> tuple[Plan, ...]:
    """Plans that differ for this ensemble and can run where it is."""
    if ensemble.config.members == 1:
        return ("batched",)
    config = ensemble.config.encoder
    grouped = ensemble.device.type == "cuda" and ensemble.dtype == torch.bfloat16 and config.head_dim % 8 == 0
    return PLANS if grouped and torch.cuda.get_device_capability(ensemble.device) >= (9, 0) else ("batched", "loop")


def _same_weights(ensemble: EnsembleLike, plan: Plan) -> bool:
    """Whether a plan runs on the weights as they are, so that no copy of them is needed."""
    blocks = ensemble.encoder.layers
    return plan != "batched" or all(block.attention.even or block.attention.distinct is not None for block in blocks)  # type: ignore[union-attr]


def _shell(ensemble: E) -> E:
    """A copy of the modules around the same parameters."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in [*ensemble.parameters(), *ensemble.buffers()]}
    return copy.deepcopy(ensemble, memo)


def _size(key: Key) -> int:
    shape = key[0]
    return 0 if shape is None else shape[0][0]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
