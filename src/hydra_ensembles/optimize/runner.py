"""Running a frozen ensemble: by which plan, compiled or not, recorded or not, and what is fastest here."""

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, cast, get_args

import torch
from torch import Tensor

from ..errors import ConfigError
from ..model.base import Predictor
from ..model.ensemble import Ensemble
from ..prediction import Prediction
from .freeze import Plan, frozen, with_plan

PLANS: tuple[Plan, ...] = get_args(Plan)
MEASURED_SHAPES = 32  # beyond so many different input shapes, a new one takes the plan of the nearest

Run = Callable[..., Tensor]
Arguments = tuple[Tensor | None, ...]
Key = tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]


_NO_LIMITS = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}


@dataclass(frozen=True)
class RunOptions:
    """Settings of an `OptimizedEnsemble`.

    Attributes:
        plans: Ways to choose from; None for all that can be faster on the device.
        compile: Whether to compile the plan chosen for an input shape; the name of a backend of `torch.compile`
            in place of true chooses that backend.
        dynamic: Whether compiled code is to serve all batch sizes. It is slower than code made for one size, which
            takes some seconds to make for each.
        compiled_shapes: For so many input shapes code of their own is compiled; further ones run uncompiled.
        graphs: Whether to record CUDA graphs; None does so on a CUDA device.
        dtype: Floating type to compute in, such as `torch.bfloat16`; None keeps the ensemble's.
        repeats: How often each plan is run to choose between them.
    """

    plans: Sequence[Plan] | None = None
    compile: bool | str = False
    dynamic: bool = False
    compiled_shapes: int = 16
    graphs: bool | None = None
    dtype: torch.dtype | None = None
    repeats: int = 5

    def __post_init__(self) -> None:
        object.__setattr__(self, "plans", None if self.plans is None else tuple(self.plans))
        if self.plans is not None and (not self.plans or set(self.plans) - set(PLANS)):
            raise ConfigError(f"plans must be some of {list(PLANS)}, got {list(self.plans)}")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ConfigError(f"dtype must be a floating type such as torch.bfloat16, got {self.dtype}")
        if self.compiled_shapes < 1 or self.repeats < 1:
            got = f"got {self.compiled_shapes} and {self.repeats}"
            raise ConfigError(f"compiled_shapes and repeats must be at least 1, {got}")


def optimize(
    ensemble: Ensemble, example_inputs: Tensor | Mapping[str, Tensor] | None = None, **options: Any
) -> "OptimizedEnsemble":
    """Prepare an ensemble for fast inference.

    What all members have in common is stored and computed once, constants are folded into the weights, and the
    rest runs by the fastest plan for the shape of the input. See `OptimizedEnsemble`.

    Args:
        ensemble: The ensemble; it is not changed, and later changes to it do not reach the result.
        example_inputs: A batch to measure (and compile, and record) with now rather than at the first call.
        options: Settings by name, see `RunOptions`: `plans`, `compile`, `dynamic`, `compiled_shapes`, `graphs`,
            `dtype`, `repeats`.

    Raises:
        ConfigError: A setting is not accepted, or not on this device.
    """
    result = OptimizedEnsemble(ensemble, RunOptions(**options))
    if example_inputs is not None:
        result(example_inputs)
    return result


class OptimizedEnsemble(Predictor):
    """Runs like the ensemble it was made from, faster; inference only, with the weights it had then.

    For every shape of input the plans are measured once, at its first call, and the fastest is used from then on
    (compiled, if asked for). Any batch size gives the numbers of the ensemble, up to rounding. Not for several
    threads at a time.

    Attributes:
        ensemble: The ensemble it was made from.
        config: Its configuration, as all that follows as it was then.
        metadata: Labels, preprocessing, calibration and history, which `predict` and `evaluate` go by.
        description: Parameters, multiply-adds and heads kept of the ensemble.
        device: Where it runs.
        dtype: Floating type it computes in.
        options: How it runs.
        choices: The plan for each input shape seen, with the measured times.
    """

    device: torch.device
    dtype: torch.dtype

    def __init__(self, ensemble: Ensemble, options: RunOptions | None = None) -> None:
        self.options = RunOptions() if options is None else options
        self.ensemble, self.config, self.metadata = ensemble, ensemble.config, ensemble.metadata
        self.device, self.dtype = ensemble.device, self.options.dtype or ensemble.dtype
        self.description = ensemble.describe()
        self.choices: dict[Key, Choice] = {}
        on_cuda = self.device.type == "cuda"
        if self.options.graphs and not on_cuda:
            raise ConfigError(f"CUDA graphs need an ensemble on a CUDA device, this one is on {self.device}")
        self._graphed = on_cuda if self.options.graphs is None else self.options.graphs
        self._pool: Any = torch.cuda.graph_pool_handle() if self._graphed else None
        base = frozen(ensemble, self.dtype)
        plans = self.options.plans or _sensible_plans(base)
        self._modules: dict[Plan, Ensemble] = {plan: with_plan(base, plan) for plan in plans}
        self._plain: dict[Plan, Run] = {plan: self._with_graphs(module) for plan, module in self._modules.items()}
        self._compiled: dict[Plan, Run] = {}

    @torch.inference_mode()
    def __call__(
        self,
        inputs: Tensor | Mapping[str, Tensor],
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Member logits `[M, B, C]`."""
        arguments = self._arguments(inputs, attention_mask, token_type_ids)
        choice = self._choice(arguments)
        run = self._compiled[choice.plan] if choice.compiled else self._plain[choice.plan]
        return run(*arguments)

    def predict(self, inputs: Any, check_finite: bool = True) -> Prediction:
        """Label, confidence and uncertainty of a batch; takes what `Ensemble.predict` takes."""
        return self._prediction(self(self.prepare(inputs)), check_finite)

    @torch.inference_mode()
    def choice_for(
        self,
        inputs: Tensor | Mapping[str, Tensor],
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> "Choice":
        """How inputs of this shape are run; measured if need be."""
        return self._choice(self._arguments(inputs, attention_mask, token_type_ids))

    def module(self, plan: Plan) -> Ensemble:
        """The rewritten ensemble as it runs by a plan: uncompiled, without graphs."""
        if plan not in self._modules:
            raise ConfigError(f"there is no plan {plan!r} here; there are {list(self._modules)}")
        return self._modules[plan]

    @property
    def timings(self) -> "dict[Key, Mapping[Plan, float]]":
        """Seconds of each plan, by input shape, where they were measured."""
        return {key: choice.seconds for key, choice in self.choices.items() if choice.seconds}

    @property
    def memory_bytes(self) -> int:
        """Bytes of all weights it computes with, those of all plans together; what plans share counts once."""
        tensors = (tensor for module in self._modules.values() for tensor in [*module.parameters(), *module.buffers()])
        return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())

    def describe(self) -> str:
        """Settings, memory, and for every input shape seen so far the plan and the times it was chosen by."""
        shapes = [" and ".join(str(list(one[0])) for one in key if one is not None) for key in self.choices]
        seen = zip(shapes, self.choices.values(), strict=True)
        return "\n".join([repr(self), *(f"  {shape}: {choice}" for shape, choice in seen)])

    def __repr__(self) -> str:
        compiled = "dynamic" if self.options.compile and self.options.dynamic else bool(self.options.compile)
        return (
            f"OptimizedEnsemble(plans={list(self._modules)}, compile={compiled}, graphs={self._graphed}, "
            f"dtype={str(self.dtype).removeprefix('torch.')}, memory={self.memory_bytes / 1e6:.1f} MB, "
            f"shapes seen={len(self.choices)})"
        )

    def _arguments(
        self, inputs: Tensor | Mapping[str, Tensor], attention_mask: Tensor | None, token_type_ids: Tensor | None
    ) -> Arguments:
        main, mask, segments = self.ensemble.unpack(inputs, attention_mask, token_type_ids)
        return main.to(self.dtype) if main.is_floating_point() else main, mask, segments

    def _choice(self, arguments: Arguments) -> "Choice":
        """How arguments of these shapes are run: as before, or by measuring where there are several plans."""
        key = shape_key(arguments)
        if key in self.choices:
            return self.choices[key]
        if len(self._plain) == 1:
            choice = Choice(next(iter(self._plain)))
        elif len(self.choices) >= MEASURED_SHAPES:
            near = min(self.choices, key=lambda other: abs(batch_size(other) - batch_size(key)))
            choice = Choice(self.choices[near].plan, note="plan of the nearest batch size")
        else:
            choice = fastest(self._plain, arguments, self.options.repeats, self.device)
        if self.options.compile:
            choice = self._with_compilation(choice, arguments)
        for plan, run in self._plain.items():
            if isinstance(run, GraphCache) and (choice.compiled or plan != choice.plan):
                run.forget(key)
        self.choices[key] = choice
        return choice

    def _with_compilation(self, choice: "Choice", arguments: Arguments) -> "Choice":
        """Compile the chosen plan for these arguments, and say so; or say why it stays uncompiled."""
        compiled = sum(other.compiled for other in self.choices.values())
        if compiled >= self.options.compiled_shapes and not self.options.dynamic:
            return replace(choice, note=f"code is compiled for {compiled} other shapes, the most allowed")
        if choice.plan not in self._compiled:
            backend = self.options.compile if isinstance(self.options.compile, str) else "inductor"
            module, dynamic = self._modules[choice.plan], self.options.dynamic
            code = torch.compile(module, fullgraph=True, dynamic=dynamic, backend=backend)

            def run(*arguments: Tensor | None) -> Tensor:
                # the compiler's own limits count for all ensembles together; how often to compile is decided above
                with torch.compiler.config.patch(_NO_LIMITS):  # type: ignore[attr-defined]
                    return cast(Tensor, code(*arguments))

            self._compiled[choice.plan] = self._with_graphs(run)
        try:
            self._compiled[choice.plan](*arguments)
        except RuntimeError as error:  # those of the compiler are among them
            self._plain[choice.plan](*arguments)  # raises by itself where the inputs are to blame
            warnings.warn(f"torch.compile failed, the plan runs uncompiled: {first_line(error)}", stacklevel=5)
            return replace(choice, note=f"not compiled: {first_line(error)}")
        return replace(choice, compiled=True)

    def _with_graphs(self, function: Run) -> Run:
        return GraphCache(function, pool=self._pool) if self._graphed else function


def _sensible_plans(ensemble: Ensemble) -> tuple[Plan, ...]:
    """Plans that differ for this ensemble and can run where it is."""
    if ensemble.num_members == 1:
        return ("batched",)
    grouped = ensemble.device.type == "cuda" and ensemble.dtype == torch.bfloat16 and ensemble.head_dim % 8 == 0
    return PLANS if grouped and torch.cuda.get_device_capability(ensemble.device) >= (9, 0) else ("batched", "loop")


# --- choosing a plan -------------------------------------------------------------------------------------


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
    seconds: dict[Plan, list[float]] = {}
    errors: dict[Plan, RuntimeError] = {}
    for plan, run in runs.items():
        try:
            run(*arguments)
            synchronize(device)
            seconds[plan] = []
        except RuntimeError as error:  # among them: out of memory, unsupported type or alignment
            errors[plan] = error
    if not seconds:
        raise next(iter(errors.values()))
    for _ in range(repeats):
        for plan, taken in seconds.items():
            synchronize(device)
            start = time.perf_counter()
            runs[plan](*arguments)
            synchronize(device)
            taken.append(time.perf_counter() - start)
    medians = {plan: median(taken) for plan, taken in seconds.items()}
    failures = {plan: first_line(error) for plan, error in errors.items()}
    return Choice(min(medians, key=lambda plan: medians[plan]), medians, failures)


def first_line(error: Exception) -> str:
    """The beginning of an error's message."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:160]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- recorded graphs -------------------------------------------------------------------------------------


def shape_key(arguments: Arguments) -> Key:
    """What a recorded graph depends on: shapes and dtypes of the arguments."""
    return tuple(None if one is None else (tuple(one.shape), one.dtype) for one in arguments)


def batch_size(key: Key) -> int:
    """The batch size of the main input."""
    return 0 if key[0] is None else key[0][0][0]


class GraphCache:
    """Recorded graphs of one function, one per shape of its arguments, the least recently used dropped first.

    A graph reads from buffers of its own; arguments are copied in and the result is copied out, so callers may
    keep what they get. Graphs of one pool share the memory of their intermediate results, which is safe as long as
    they are replayed one at a time.

    Args:
        function: What to record; tensors (or None) in, one tensor out.
        pool: Handle from `torch.cuda.graph_pool_handle`; None for a pool of its own for each graph.
        limit: How many graphs to keep.
    """

    def __init__(self, function: Run, pool: Any = None, limit: int = 16) -> None:
        self._function, self._pool, self._limit = function, pool, limit
        self._graphs: OrderedDict[Key, tuple[torch.cuda.CUDAGraph, Arguments, Tensor]] = OrderedDict()

    def __call__(self, *arguments: Tensor | None) -> Tensor:
        """Replay the graph for these shapes, recording it first where there is none."""
        key = shape_key(arguments)
        if key not in self._graphs:
            self._graphs[key] = self._record(arguments)
            if len(self._graphs) > self._limit:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        graph, buffers, result = self._graphs[key]
        for buffer, argument in zip(buffers, arguments, strict=True):
            if buffer is not None and argument is not None:
                buffer.copy_(argument)
        graph.replay()
        return result.clone()

    def forget(self, key: Key) -> None:
        """Drop the graph of a shape and the memory it holds, if there is one."""
        self._graphs.pop(key, None)

    def _record(self, arguments: Arguments) -> tuple[torch.cuda.CUDAGraph, Arguments, Tensor]:
        buffers = tuple(None if one is None else one.clone() for one in arguments)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # let libraries pick kernels and allocate before anything is recorded
                self._function(*buffers)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self._function(*buffers)
        return graph, buffers, result
