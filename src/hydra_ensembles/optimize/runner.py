"""Run a frozen ensemble with the fastest plan, optionally compiled and recorded as CUDA graphs."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import median
from typing import Any, get_args

import torch
from torch import Tensor

from .._utils import unlimited_recompiles, without_autocast
from ..arguments import Whole, checked
from ..batches import Inputs
from ..errors import ConfigError
from ..model.cost import Description, interleaved_times
from ..model.ensemble import Ensemble
from ..model.input_checks import Given, check_device, require_values
from ..prediction import Prediction
from .freeze import frozen, with_plan
from .frozen_layers import Plan

PLANS: tuple[Plan, ...] = get_args(Plan)
MEASURED_SHAPES = 32  # beyond this number of input shapes, a new one uses the plan of the nearest
USUAL_SHAPES = 16  # input shapes for which compiled code and graphs are kept
REPEATS = 5  # timed runs of each plan

_PROCESS_STATE = ("choices", "_lock", "_stream", "_pool", "_plain", "_compiled")

Run = Callable[..., tuple[Tensor, ...]]  # member logits, and feature scores if fitted
RunArguments = tuple[Tensor | None, ...]  # the first is never None
Key = tuple[tuple[tuple[int, ...], torch.dtype | None], ...]  # per argument; () and None if it is None
Recording = tuple[torch.cuda.CUDAGraph, RunArguments, tuple[Tensor, ...]]  # a graph, where it reads, where it writes


class OptimizedEnsemble:
    """A faster copy of an ensemble, for inference only, with the weights at the time it was made.

    What all members have in common is stored and computed once; constants are folded into the weights. For every
    input shape the plans are measured once, at its first call, and the fastest is used from then on (compiled, if
    asked for). Any batch size gives the numbers of the ensemble, up to rounding. Threads may share it; measuring,
    compiling and recording are done for one of them at a time.

    `config`, `metadata`, `kind`, `num_members`, `num_classes` and `device` are those of the ensemble.

    Attributes:
        dtype: Floating type it computes in.
        choices: The plan for each input shape seen, with the measured times.
    """

    @checked
    @without_autocast()
    def __init__(
        self,
        ensemble: Ensemble,
        example_inputs: Given | None = None,
        *,
        plans: Iterable[Plan] | None = None,
        compile: bool = False,
        dynamic: bool = False,
        compiled_shapes: Whole = USUAL_SHAPES,
        graphs: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Prepare an ensemble for fast inference.

        Args:
            ensemble: The ensemble; it is not changed, and later changes to it do not reach the result.
            example_inputs: A batch to measure (and compile, and record) with now rather than at the first call.
            plans: Plans to choose from; None for all that can be faster on the device.
            compile: Whether to compile the plan chosen for an input shape.
            dynamic: Whether compiled code should serve all batch sizes, which makes it somewhat slower.
            compiled_shapes: Maximum number of input shapes to compile code for; further ones run uncompiled.
            graphs: Whether to record CUDA graphs; None does so on a CUDA device. They are kept for 16 shapes, or for
                `compiled_shapes` if that is more.
            dtype: Floating type to compute in, such as `torch.bfloat16`; None keeps the ensemble's. A caller's autocast
                changes nothing: what is compiled or recorded serves all calls.

        Raises:
            ConfigError: A setting is not accepted, or not on this device.
        """
        chosen = None if plans is None else tuple(plans)
        if chosen is not None and (not chosen or set(chosen) - set(PLANS)):
            raise ConfigError(f"plans must be some of {list(PLANS)}, got {list(chosen)}")
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"dtype must be a floating type such as torch.bfloat16, got {dtype}")
        require_values(next(ensemble.parameters(), None))
        ensemble.whole_state()  # frozen layers cannot hold computed weights
        self.device = ensemble.device
        self.dtype = dtype or ensemble.dtype
        on_cuda = self.device.type == "cuda"
        if graphs and not on_cuda:
            raise ConfigError(f"CUDA graphs need an ensemble on a CUDA device, but this one is on {self.device}")
        self.config = ensemble.config
        self._description = ensemble.describe()
        self.metadata = ensemble.metadata
        self.kind, self.num_members, self.num_classes = ensemble.kind, ensemble.num_members, ensemble.num_classes
        self._compile, self._dynamic, self._compiled_shapes = compile, dynamic, compiled_shapes
        self._graphed = on_cuda if graphs is None else graphs
        base = frozen(ensemble, self.dtype)
        self._modules: dict[Plan, Ensemble] = {plan: with_plan(base, plan) for plan in chosen or _sensible_plans(base)}
        self._model = next(iter(self._modules.values()))  # reads inputs and makes predictions
        self._home = next(self._model.parameters())
        self._reset_state()
        if example_inputs is not None:
            self(example_inputs)

    def _reset_state(self) -> None:
        """Set up the state of this process: nothing is measured, compiled or recorded yet."""
        self.choices: dict[Key, Choice] = {}
        self._lock = threading.Lock()
        self._stream: Any = None  # on which graphs were last replayed
        self._pool: Any = torch.cuda.graph_pool_handle() if self._graphed else None
        self._plain: dict[Plan, Run] = {
            plan: self._with_graphs(self._run(module)) for plan, module in self._modules.items()
        }
        self._compiled: dict[Plan, Run] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Weights and settings; a copy, or a pickle in another process, measures, compiles and records again."""
        return {name: value for name, value in vars(self).items() if name not in _PROCESS_STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_state()

    @torch.inference_mode()
    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        """Member logits `[M, B, C]`; takes what `Ensemble.forward` takes."""
        return self.answers(*inputs, **named)[0]

    @torch.inference_mode()
    @without_autocast()
    def answers(self, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Member logits `[M, B, C]`, and how unfamiliar the inputs are by every fitted score, `[S, M, B]`."""
        arguments = self._arguments(*inputs, **named)
        with self._lock:
            self._wait_for_stream()
            choice = self._choice(arguments)
            run = self._compiled[choice.plan] if choice.compiled else self._plain[choice.plan]
            exclusive = choice.compiled or self._graphed  # compiler settings and graph buffers allow one at a time
            answers = run(*arguments) if exclusive else None
        answers = run(*arguments) if answers is None else answers
        return answers[0], answers[1] if len(answers) > 1 else None

    def predict(self, *inputs: Any, check_finite: bool = True, **named: Any) -> Prediction:
        """Label, confidence and uncertainty of a batch; arguments as for `Ensemble.predict`."""
        return self._model.prediction(*self.answers(self.prepare(*inputs, **named)), check_finite=check_finite)

    def prepare(self, *inputs: Any, **named: Any) -> Inputs:
        """Like `Ensemble.prepare`."""
        return self._model.prepare(*inputs, **named)

    @torch.inference_mode()
    @without_autocast()
    def choice_for(self, inputs: Given) -> "Choice":
        """The choice for inputs of this shape, measured if needed."""
        arguments = self._arguments(inputs)
        with self._lock:
            self._wait_for_stream()
            return self._choice(arguments)

    def module(self, plan: Plan) -> Ensemble:
        """The rewritten ensemble that runs a plan, uncompiled and without graphs."""
        if plan not in self._modules:
            raise ConfigError(f"there is no plan {plan!r} here; there are {list(self._modules)}")
        return self._modules[plan]

    @property
    def timings(self) -> "dict[Key, Mapping[Plan, float]]":
        """Measured seconds of each plan, by input shape."""
        return {key: choice.seconds for key, choice in self.choices.items() if choice.seconds}

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights of all plans; weights that plans share count once."""
        tensors = (tensor for module in self._modules.values() for tensor in [*module.parameters(), *module.buffers()])
        return sum({storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, tensors)}.values())

    def describe(self) -> Description:
        """Parameters, multiply-adds and heads kept of the ensemble that was optimized; print it."""
        return self._description

    def describe_plans(self) -> str:
        """Settings, memory, and for every input shape so far the chosen plan and its timings."""
        lines = [repr(self)]
        for key, choice in self.choices.items():
            lines.append(f"  {' and '.join(str(list(shape)) for shape, _ in key if shape)}: {choice}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        settings = f"plans={list(self._modules)}, compile={self._compile}, graphs={self._graphed}, dtype={self.dtype}"
        return f"OptimizedEnsemble({settings}, memory={self.memory_bytes / 1e6:.1f} MB, shapes={len(self.choices)})"

    def _arguments(self, *inputs: Any, **named: Any) -> RunArguments:
        main, mask, segments = self._model.unpack(*inputs, **named)
        main = main.to(self.dtype) if main.is_floating_point() else main
        check_device((main, mask, segments), self._home)
        return main, mask, segments

    def _choice(self, arguments: RunArguments) -> "Choice":
        """The choice for arguments of these shapes: cached, or measured if there are several plans."""
        key = shape_key(arguments)
        if key in self.choices:
            return self.choices[key]
        if len(self._plain) == 1:
            choice = Choice(next(iter(self._plain)))
        elif len(self.choices) >= MEASURED_SHAPES:
            nearest = min(self.choices, key=lambda other: abs(other[0][0][0] - key[0][0][0]))  # by batch size
            choice = Choice(self.choices[nearest].plan, note="plan of the nearest batch size")
        else:
            choice = fastest(self._plain, arguments, self.device)
        if self._compile:
            choice = self._with_compilation(choice, arguments)
        for plan, run in self._plain.items():
            if isinstance(run, GraphCache) and (choice.compiled or plan != choice.plan):
                run.forget(key)
        self.choices[key] = choice
        return choice

    def _with_compilation(self, choice: "Choice", arguments: RunArguments) -> "Choice":
        """The choice with code compiled for these arguments, or with a note why not."""
        compiled = sum(other.compiled for other in self.choices.values())
        if compiled >= self._compiled_shapes and not self._dynamic:
            return replace(choice, note=f"code is already compiled for {compiled} other shapes, the maximum")
        if choice.plan not in self._compiled:
            run = self._run(self._modules[choice.plan], compiled=True)
            self._compiled[choice.plan] = self._with_graphs(run)
        self._compiled[choice.plan](*arguments)
        return replace(choice, compiled=True)

    def _wait_for_stream(self) -> None:
        """Make a stream wait for the previous one: their graphs read from the same buffers."""
        if self._graphed:
            stream = torch.cuda.current_stream(self.device)
            if self._stream not in (None, stream):
                stream.wait_stream(self._stream)
            self._stream = stream

    def _run(self, module: Ensemble, compiled: bool = False) -> Run:
        """The function that runs a rewritten ensemble; feature scores are not compiled, but recorded with the rest."""
        familiarity = self.metadata.familiarity
        code: Any = module if familiarity is None else module.features_and_logits
        if compiled:
            code = torch.compile(code, fullgraph=True, dynamic=self._dynamic)

        def run(*arguments: Tensor | None) -> tuple[Tensor, ...]:
            with unlimited_recompiles() if compiled else nullcontext():
                outputs = code(*arguments)
            return (outputs,) if familiarity is None else (outputs[1], familiarity.scores(*outputs))

        return run

    def _with_graphs(self, function: Run) -> Run:
        if not self._graphed:
            return function
        return GraphCache(function, self.device, self._pool, max(self._compiled_shapes, USUAL_SHAPES))


def _sensible_plans(ensemble: Ensemble) -> tuple[Plan, ...]:
    """Plans that differ for this ensemble and can run on its device."""
    if ensemble.num_members == 1:
        return ("batched",)
    aligned = ensemble.dtype == torch.bfloat16 and ensemble.config.encoder.head_dim % 8 == 0
    grouped = aligned and ensemble.device.type == "cuda" and torch.cuda.get_device_capability(ensemble.device) >= (9, 0)
    return PLANS if grouped else ("batched", "loop")


# --- choosing a plan -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The plan for one input shape.

    Attributes:
        plan: The plan.
        seconds: Time of each plan, uncompiled; empty if there was nothing to choose or measure.
        compiled: Whether compiled code is used.
        note: Plans that failed on such inputs, or why there is no compiled code.
    """

    plan: Plan
    seconds: Mapping[Plan, float] = field(default_factory=dict)
    compiled: bool = False
    note: str = ""

    def __str__(self) -> str:
        timings = ", ".join(f"{plan} {1e3 * seconds:.3g} ms" for plan, seconds in self.seconds.items())
        details = "; ".join(text for text in (timings, self.note) if text)
        return f"{self.plan}{', compiled' if self.compiled else ''}{f' ({details})' if details else ''}"


def fastest(runs: Mapping[Plan, Run], arguments: RunArguments, device: torch.device) -> Choice:
    """Time each plan and choose the fastest; those that cannot run these inputs are skipped, unless none can."""
    able: dict[Plan, Callable[[], tuple[Tensor, ...]]] = {}
    errors: dict[Plan, RuntimeError] = {}
    for plan, run in runs.items():
        try:
            interleaved_times({plan: partial(run, *arguments)}, 1, device)
            able[plan] = partial(run, *arguments)
        except RuntimeError as error:  # such as out of memory, unsupported dtype or alignment
            errors[plan] = error
    if not able:
        raise next(iter(errors.values()))
    seconds = {plan: median(times) for plan, times in interleaved_times(able, REPEATS, device).items()}
    note = "; ".join(f"{plan} failed: {str(error).splitlines()[0]}" for plan, error in errors.items())
    return Choice(min(seconds, key=lambda plan: seconds[plan]), seconds, note=note)


# --- recorded graphs -------------------------------------------------------------------------------------


def shape_key(arguments: RunArguments) -> Key:
    """What a recorded graph depends on: shapes and dtypes of the arguments."""
    return tuple(((), None) if tensor is None else (tuple(tensor.shape), tensor.dtype) for tensor in arguments)


class GraphCache:
    """CUDA graphs of one function, one per argument shapes; the least recently used is dropped first.

    A graph reads from its own buffers; arguments are copied in and results are copied out, so callers may keep them.
    Graphs of one pool share the memory of their intermediate results, which is safe as long as they are replayed one at
    a time. Streams and recordings belong to the current device, whatever device the tensors are on: with another
    current device nothing would be recorded, silently. So everything here runs with `device` current.
    """

    def __init__(self, function: Run, device: torch.device, pool: Any, limit: int) -> None:
        self._function, self._device, self._pool, self._limit = function, device, pool, limit
        self._graphs: OrderedDict[Key, Recording] = OrderedDict()

    def __call__(self, *arguments: Tensor | None) -> tuple[Tensor, ...]:
        """Replay the graph for these shapes, recording it first if there is none."""
        key = shape_key(arguments)
        with torch.cuda.device(self._device):
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
            return tuple(tensor.clone() for tensor in result)

    def forget(self, key: Key) -> None:
        """Drop the graph of a shape, if there is one, and free its memory."""
        self._graphs.pop(key, None)

    def _record(self, arguments: RunArguments) -> Recording:
        buffers = tuple(None if tensor is None else tensor.clone() for tensor in arguments)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # let libraries choose kernels and allocate before recording
                self._function(*buffers)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        side = _recording_stream(self._device)
        with torch.cuda.graph(graph, self._pool, side, capture_error_mode="thread_local"):  # other threads may continue
            result = self._function(*buffers)
        return graph, buffers, result


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for recording graphs on a device; torch's default is that of the device that recorded first."""
    return torch.cuda.Stream(device)
