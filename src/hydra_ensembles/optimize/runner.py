"""Run a frozen ensemble with the fastest plan, optionally compiled and recorded as CUDA graphs."""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median
from typing import Any, get_args

import torch
from torch import Tensor

from .._utils import unlimited_recompiles, without_autocast
from ..batches import Inputs
from ..errors import ConfigError
from ..model.cost import Description, interleaved_times
from ..model.ensemble import Answering, Ensemble
from ..model.inputs import Given, Prepared
from .freeze import Plan, frozen, has_copies, with_plan

PLANS: tuple[Plan, ...] = get_args(Plan)
USUAL_SHAPES = 16  # input shapes for which plans are measured, code compiled and graphs kept
REPEATS = 5  # timed runs of each plan

Run = Callable[..., tuple[Tensor, ...]]  # member logits, and feature scores if fitted
RunArguments = tuple[Tensor | None, ...]  # the first is never None
Key = tuple[tuple[tuple[int, ...], torch.dtype | None], ...]  # per argument; () and None if it is None
Part = tuple[str, tuple[int, ...]]  # a method of `Ensemble` that runs a part of it, and its first arguments
WHOLE: Part = ("", ())  # from inputs to member logits, and to feature scores if fitted
Recording = tuple[torch.cuda.CUDAGraph, RunArguments, tuple[Tensor, ...]]  # a graph, where it reads, where it writes


@dataclass(frozen=True)
class Choice:
    """How inputs of one shape are run.

    Attributes:
        plan: The plan.
        seconds: Time of each plan, uncompiled; empty if there was nothing to choose or to measure.
        compiled: Whether compiled code is used.
    """

    plan: Plan
    seconds: Mapping[Plan, float] = field(default_factory=dict)
    compiled: bool = False


class OptimizedEnsemble(Answering):
    """A faster copy of an ensemble, for inference only, with the weights at the time it was made.

    What all members have in common is stored and computed once; constants are folded into the weights. Where something
    is per member, the plans are measured once for every input shape, at its first call, and the fastest is used from
    then on (compiled, if asked for). Any batch size gives the numbers of the ensemble, up to rounding. Threads may
    share it; measuring, compiling and recording are done for one of them at a time.

    `config`, `metadata`, `kind`, `num_members`, `num_classes` and `device` are those of the ensemble.

    Attributes:
        dtype: Floating type it computes in.
        choices: The plan for each input shape seen, with the measured times.
    """

    @without_autocast()
    def __init__(
        self,
        ensemble: Ensemble,
        example_inputs: Given | None = None,
        *,
        plans: Iterable[Plan] | None = None,
        compile: bool = False,
        shapes: int = USUAL_SHAPES,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Prepare an ensemble for fast inference.

        Args:
            ensemble: The ensemble; it is not changed, and later changes to it do not reach the result.
            example_inputs: A batch to measure (and compile, and record) with now rather than at the first call.
            plans: Plans to choose from; None for all that differ for this ensemble.
            compile: Whether to compile the plan chosen for an input shape.
            shapes: Number of input shapes that are measured and compiled; further ones run uncompiled, with the plan
                of the nearest batch size. Of CUDA graphs (on a CUDA device), those of so many shapes are kept.
            dtype: Floating type to compute in, such as `torch.bfloat16`; None keeps the ensemble's. A caller's autocast
                changes nothing: what is compiled or recorded serves all calls.
        """
        chosen = None if plans is None else tuple(plans)
        if chosen is not None and (not chosen or set(chosen) - set(PLANS)):
            raise ConfigError(f"plans must be some of {list(PLANS)}, got {list(chosen)}")
        self.device, self.dtype = ensemble.device, dtype or ensemble.dtype
        self.config, self.metadata, self._description = ensemble.config, ensemble.metadata, ensemble.describe()
        self.kind, self.num_members, self.num_classes = ensemble.kind, ensemble.num_members, ensemble.num_classes
        self.outputs = ensemble.outputs
        self._compile, self._shapes, self._graphed = compile, shapes, self.device.type == "cuda"
        base = frozen(ensemble, self.dtype)
        usual = PLANS if has_copies(base) else PLANS[:1]
        self._modules: dict[Plan, Ensemble] = {plan: with_plan(base, plan) for plan in chosen or usual}
        self._model = next(iter(self._modules.values()))  # reads inputs and makes predictions
        self.choices: dict[Key, Choice] = {}
        self._of_parts: dict[Part, dict[Key, Choice]] = {}
        self._lock = threading.Lock()
        self._stream: Any = None  # on which graphs were last replayed
        self._pool: Any = torch.cuda.graph_pool_handle() if self._graphed else None
        self._runs: dict[tuple[Plan, bool, Part], Run] = {}  # by plan, whether it is compiled, and part
        if example_inputs is not None:
            self(example_inputs)

    @torch.inference_mode()
    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        """Member logits `[M, B, C]`; takes what `Ensemble.forward` takes."""
        logits = self.answers(*inputs, **named)[0]
        return logits[..., 1:] if self.outputs == "odds" else logits

    @torch.inference_mode()
    @without_autocast()
    def answers(self, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Member logits `[M, B, C]`, and how unfamiliar the inputs are by every fitted score, `[S, M, B]`."""
        logits, *scores = self._outputs(WHOLE, self._model.unpack(*inputs, **named))
        return logits, scores[0] if scores else None

    @torch.inference_mode()
    @without_autocast()
    def features_and_logits(self, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Like `Ensemble.features_and_logits`."""
        features, logits = self._outputs(("_features_and_logits", ()), self._model.unpack(*inputs, **named))
        return features, logits

    @torch.inference_mode()
    @without_autocast()
    def split(self, layers: int, prepared: Prepared) -> tuple[Tensor, Tensor, Tensor]:
        """Like `Ensemble.split`."""
        tokens, features, logits = self._outputs(("_split", (layers,)), prepared.arguments)
        return tokens, features, logits

    @torch.inference_mode()
    @without_autocast()
    def continued(self, layers: int, tokens: Tensor, prepared: Prepared) -> Tensor:
        """Like `Ensemble.continued`."""
        return self._outputs(("_continued", (layers,)), (tokens, *prepared.arguments[:2]))[0]

    def _outputs(self, part: Part, arguments: RunArguments) -> tuple[Tensor, ...]:
        """What a part of the model returns, by the plan chosen for these shapes."""
        with self._lock:
            choice = self._choice(arguments, part)
            run = self._run(choice.plan, choice.compiled, part)
            exclusive = choice.compiled or self._graphed  # compiler settings and graph buffers allow one at a time
            outputs = run(*arguments) if exclusive else None
        return run(*arguments) if outputs is None else outputs

    def prepare(self, *inputs: Any, **named: Any) -> Inputs:
        """Like `Ensemble.prepare`."""
        return self._model.prepare(*inputs, **named)

    @torch.inference_mode()
    @without_autocast()
    def choice_for(self, inputs: Given) -> Choice:
        """The choice for inputs of this shape, measured if needed."""
        arguments = self._model.unpack(inputs)
        with self._lock:
            return self._choice(arguments, WHOLE)

    def module(self, plan: Plan) -> Ensemble:
        """The rewritten ensemble that runs a plan, uncompiled and without graphs."""
        return self._modules[plan]

    def describe(self) -> Description:
        """Parameters, multiply-adds and heads kept of the ensemble that was optimized; print it."""
        return self._description

    def _choice(self, arguments: RunArguments, part: Part) -> Choice:
        """The choice for arguments of these shapes: made before, or measured now if there are several plans."""
        self._wait_for_stream()
        choices = self.choices if part == WHOLE else self._of_parts.setdefault(part, {})
        key = shape_key(arguments)
        if key in choices:
            return choices[key]
        seconds: Mapping[Plan, float] = {}
        if len(self._modules) == 1:
            plan = next(iter(self._modules))
        elif len(choices) < self._shapes:
            seconds = seconds_of({plan: self._run(plan, False, part) for plan in self._modules}, arguments, self.device)
            plan = min(seconds, key=lambda plan: seconds[plan])
        else:
            nearest = min(choices, key=lambda other: abs(math.prod(other[0][0]) - math.prod(key[0][0])))
            plan = choices[nearest].plan
        compiled = self._compile and sum(other.compiled for other in choices.values()) < self._shapes
        if compiled:
            self._run(plan, True, part)(*arguments)
        for (other, is_compiled, _), run in self._runs.items():
            if isinstance(run, GraphCache) and (other, is_compiled) != (plan, compiled):
                run.forget(key)  # of plans that are slower; the pool keeps a graph, as it must
        choices[key] = Choice(plan, seconds, compiled)
        return choices[key]

    def _wait_for_stream(self) -> None:
        """Make a stream wait for the previous one: their graphs read from the same buffers."""
        if self._graphed:
            stream = torch.cuda.current_stream(self.device)
            if self._stream not in (None, stream):
                stream.wait_stream(self._stream)
            self._stream = stream

    def _run(self, plan: Plan, compiled: bool, part: Part) -> Run:
        """The function that runs a part by a plan; feature scores are not compiled, but recorded with the rest."""
        if (plan, compiled, part) in self._runs:
            return self._runs[plan, compiled, part]
        name, first = part
        familiarity, module = self.metadata.familiarity if part == WHOLE else None, self._modules[plan]
        usual = "_forward" if familiarity is None else "_features_and_logits"
        code: Any = partial(getattr(module, name or usual), *first)
        if compiled:
            code = torch.compile(code, fullgraph=True, dynamic=False)

        def run(*arguments: Tensor | None) -> tuple[Tensor, ...]:
            with unlimited_recompiles() if compiled else nullcontext():
                found = code(*arguments)
            outputs: tuple[Tensor, ...] = (found,) if isinstance(found, Tensor) else found
            return outputs if familiarity is None else (found[1], familiarity.scores(*found))

        made: Run = GraphCache(run, self.device, self._pool, self._shapes) if self._graphed else run
        return self._runs.setdefault((plan, compiled, part), made)


def seconds_of(
    runs: Mapping[Plan, Callable[..., object]], arguments: Sequence[Any], device: torch.device
) -> dict[Plan, float]:
    """The median seconds of each plan; one for which there is no memory is left out, unless there is for none."""
    able: dict[Plan, Callable[[], object]] = {}
    for plan, run in runs.items():
        try:
            interleaved_times({plan: partial(run, *arguments)}, 1, device)
            able[plan] = partial(run, *arguments)
        except torch.OutOfMemoryError:
            if not able and plan == [*runs][-1]:
                raise
    return {plan: median(times) for plan, times in interleaved_times(able, REPEATS, device).items()}


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
