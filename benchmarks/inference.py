"""What inference costs: single models, Deep Ensembles, MC Dropout and Hydra Ensembles, all treated alike.

    python benchmarks/inference.py --output results/inference.json                       # the cells with targets first
    python benchmarks/inference.py --batches 1 4 32 128 512 --modes graphed compiled eager graphed-eager
    python benchmarks/inference.py --shape vit-s16 --dtype float32 --batches 8 --modes eager --device cpu --threads 2
    python benchmarks/inference.py --members 1 2 3 5 8 --modes graphed-eager --batches 4 128

Every contender is timed in turn with the user's own model, in the same mode. Modes: `eager`; `compiled`
(`torch.compile` for that batch size); `graphed` (compiled, then recorded as a CUDA graph: the best the user's model
can get); `graphed-eager` (recorded, not compiled). Rows that the output file has already are skipped, unless `--again`.
"""

import argparse
import gc
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from contenders import NAMES, ONE_MEMBER, Contender, Workshop
from inference_rows import HEADER, Key, Results, Row, line, table
from model_shapes import SHAPES, Inputs
from torch import Tensor

import hydra_ensembles
from hydra_ensembles.metrics.cost import measure_costs
from hydra_ensembles.optimize.graphs import GraphCache

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MODES = ("graphed", "compiled", "graphed-eager", "eager")
FIRST_CONTENDERS = ("single", "hydra-k0", "hydra-k8", "hydra-k10", "hydra-uneven", "ours")
FIRST_BATCHES = (1, 4, 128)
GROWTH_CONTENDERS = ("hydra-k0", "hydra-k8", "deep-in-turn", "deep-stacked")

Run = Callable[..., Tensor]
Work = tuple[int, str, int]  # batch, contender, members


class OutOfTime(Exception):  # noqa: N818 (it is no error)
    """The time limit has passed."""


class Benchmark:
    """One shape in one dtype on one device."""

    def __init__(self, options: argparse.Namespace, results: Results, deadline: float) -> None:
        self.options, self.results, self.deadline = options, results, deadline
        self.hardware = hardware(options)
        self.workshop = Workshop(SHAPES[options.shape], DTYPES[options.dtype], options.device, options.seed)
        self.single: dict[int, Modes] = {}  # by batch

    def run(self) -> None:
        """Measure what is asked for and not there yet, the most important first."""
        for batch, name, members in ordered(self.options):
            modes = [mode for mode in self.options.modes if self._is_missing(mode, batch, name, members)]
            if modes:
                self._measure(modes, batch, name, members)

    def _measure(self, modes: list[str], batch: int, name: str, members: int) -> None:
        inputs = self._inputs(batch)
        self._check_time()
        if batch not in self.single:
            self.single[batch] = Modes(self.workshop.make("single", 1, inputs), inputs)
        reference = self.single[batch]
        try:
            mine = reference
            if name != "single":
                mine = Modes(self.workshop.make(name, members, inputs, self.options.plan), inputs)
                mine.check_against(self.workshop.answer(name, members, inputs))
        except (RuntimeError, NotImplementedError, ValueError, TypeError, ImportError) as error:
            self._fail(modes, batch, name, members, error)
            return
        for mode in modes:
            self._check_time()
            try:
                row = self._row(mode, batch, name, members, mine, reference)
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                self._fail([mode], batch, name, members, error)
                continue
            print(line(self.results.add(row)), flush=True)
        del mine
        release()

    def _row(self, mode: str, batch: int, name: str, members: int, mine: "Modes", reference: "Modes") -> Row:
        start = time.perf_counter()
        runs: dict[str, Run] = {"single": reference.run(mode)}
        if mine is not reference:
            runs[name] = mine.run(mode)
        error = mine.error(mode)
        preparation = time.perf_counter() - start
        repeats = self._repeats(list(runs.values()), mine.inputs)
        callables = {key: _with_mapping(run) for key, run in runs.items()}
        costs = measure_costs(callables, mine.inputs, repeats=repeats, warmup=2)
        contender = mine.contender
        return Row(
            hardware=self.hardware,
            shape=self.options.shape,
            dtype=self.options.dtype,
            mode=mode,
            batch=batch,
            contender=self._label(name),
            members=members,
            plan=contender.plan,
            latency_ms=costs[-1].latency_ms,
            latency_low_ms=costs[-1].latency_low_ms,
            latency_high_ms=costs[-1].latency_high_ms,
            single_ms=costs[0].latency_ms,
            multiply_adds=contender.multiply_adds,
            limit=contender.multiply_adds / self.workshop.single_multiply_adds,
            parameters=contender.parameters,
            weight_bytes=contender.weight_bytes,
            peak_memory_bytes=mine.peak_memory(mode),
            repeats=repeats,
            seed=self.options.seed,
            error=error,
            preparation_s=preparation,
            settings=settings(self.options),
        )

    def _repeats(self, runs: list[Run], inputs: Inputs) -> int:
        if self.options.repeats:
            return int(self.options.repeats)
        start = time.perf_counter()
        with torch.no_grad():
            for run in runs:
                run(*inputs.values())
        synchronize(self.options.device)
        return max(7, min(100, int(self.options.seconds / (time.perf_counter() - start))))

    def _inputs(self, batch: int) -> Inputs:
        generator = torch.Generator().manual_seed(self.options.seed)
        made = self.workshop.shape.inputs(batch, generator)
        dtype = DTYPES[self.options.dtype]
        moved = {name: one.to(self.options.device) for name, one in made.items()}
        return {name: one.to(dtype) if one.is_floating_point() else one for name, one in moved.items()}

    def _label(self, name: str) -> str:
        of_ours = name in ("ours", "pruned", "deep-stacked") or name.startswith("hydra")
        return f"{name}@{self.options.plan}" if self.options.plan and of_ours else name

    def _key(self, mode: str, batch: int, name: str, members: int) -> Key:
        return (self.hardware, self.options.shape, self.options.dtype, mode, batch, self._label(name), members)

    def _is_missing(self, mode: str, batch: int, name: str, members: int) -> bool:
        return self.options.again or self._key(mode, batch, name, members) not in self.results.rows

    def _fail(self, modes: list[str], batch: int, name: str, members: int, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        for mode in modes:
            self.results.fail(self._key(mode, batch, name, members), reason)
            print(f"{name:<18}{members:>2} {mode:<13}{batch:>5} failed: {reason}", flush=True)
        release()

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime


class Modes:
    """One contender on one batch, in every mode; what modes have in common is made once."""

    def __init__(self, contender: Contender, inputs: Inputs) -> None:
        self.contender, self.inputs = contender, inputs
        self._made: dict[str, Run] = {}
        with torch.no_grad():
            self._plain = contender.run(*inputs.values())

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
        """How far a mode's answer is from the plain one; a contender that draws numbers has none."""
        if self.contender.random:
            return None
        with torch.no_grad():
            difference = relative_difference(self.run(mode)(*self.inputs.values()), self._plain)
        if not difference < 0.05:
            raise RuntimeError(f"the answers in mode {mode} are off by {difference:.2g}")
        return difference

    def check_against(self, expected: Tensor | None) -> None:
        """Refuse a contender that does not compute what it should."""
        if expected is not None and not relative_difference(self._plain, expected) < 0.05:
            raise RuntimeError(f"the answers are off by {relative_difference(self._plain, expected):.2g}")

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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run(*arguments)
    held = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
