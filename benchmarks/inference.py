"""The cost of inference: single models, Deep Ensembles, other baselines and Hydra Ensembles, all measured alike.

    python benchmarks/inference.py --output results/inference.json
    python benchmarks/inference.py --batches 1 4 32 128 512 --modes graphed compiled eager graphed-eager
    python benchmarks/inference.py --shape vit-s16 --dtype float32 --batches 8 --modes eager --device cpu --threads 2
    python benchmarks/inference.py --members 1 2 3 5 8 --modes graphed-eager --batches 4 128
    python benchmarks/inference.py --shape clip-b32 --modes graphed-eager --batches 4 128   # zero-shot classifiers
    python benchmarks/inference.py --methods --modes graphed-eager --batches 4 128 --seconds 0.5 \\
        --output results/inference_methods.json   # every baseline, for docs/tables_methods.md
    python benchmarks/inference.py --against FOLDER --contenders hydra-k0 hydra-k8 hydra-k10   # and another checkout
    python benchmarks/inference.py --methods --counts --device cpu --output results/inference_counts.json
    python benchmarks/inference.py --conversion --device cpu --threads 1 --output results/conversion.json

Every contender is timed in turn with the user's own model, in the same mode. Modes: `eager`; `compiled`
(`torch.compile` for that batch size); `graphed` (compiled, then recorded as a CUDA graph: the best the user's model
can get); `graphed-eager` (recorded, not compiled). Rows that are already in the output file are skipped, unless
`--again`. With `--against`, processes of both checkouts measure the same contenders in turn. `--conversion` times
`convert` instead, with and without its comparison of outputs. `--counts` times nothing: parameters and arithmetic
follow from shapes.
"""

import argparse
import gc
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import by_turns, synchronize
from inference_models import (
    MEMBERS,
    METHODS,
    NAMES,
    SHAPES,
    ZERO_SHOT,
    Call,
    Contender,
    Inputs,
    Workshop,
    ZeroShotWorkshop,
    names_of,
)
from torch import Tensor

import hydra_ensembles as he
from studies.results import hardware, store, versions

MODES = ("graphed", "compiled", "graphed-eager", "eager")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
GROWTH_CONTENDERS = ("single", "hydra-k0", "hydra-k8", "hydra-joint", "deep-in-turn", "deep-stacked")
TEST_SET = 50_000  # images of ImageNet's validation set, as in the paper's whole-test times
TOLERANCE = 0.1  # relative; outputs in bfloat16 differ by about a hundredth, wrong ones by about one

Row = dict[str, Any]
KEY = ("hardware", "shape", "dtype", "mode", "batch", "contender", "members")  # identifies a row
EXPECTED_ERRORS = (RuntimeError, NotImplementedError, ValueError, TypeError, ImportError)


# --- running and timing ----------------------------------------------------------------------------------------------


class Modes:
    """One contender on one batch, in every mode; work that modes share is done once."""

    def __init__(self, contender: Contender, inputs: Inputs) -> None:
        self.contender = contender
        self.inputs = list(inputs.values())
        self._calls: dict[str, Call] = {"eager": contender.run}

    def run(self, mode: str) -> Call:
        """The function to call in a mode."""
        if mode not in self._calls:
            if mode == "compiled":
                call: Call = torch.compile(self.contender.run, dynamic=False)
            else:
                call = recorded(self.run("compiled" if mode == "graphed" else "eager"), self.inputs)
            with torch.no_grad():
                call(*self.inputs)
            self._calls[mode] = call
        return self._calls[mode]

    def error(self, mode: str) -> float | None:
        """Relative error of a mode's output; raises if it is too large. None for random contenders."""
        if self.contender.random:
            return None
        with torch.no_grad():
            expected = self.contender.expected
            expected = (self.contender.run(*self.inputs) if expected is None else expected).float()
            difference = float((self.run(mode)(*self.inputs).float() - expected).norm() / expected.norm())
        if not difference < TOLERANCE:
            raise RuntimeError(f"the answers in mode {mode} are off by {difference:.2g}")
        return difference

    def peak_memory(self, mode: str) -> int:
        """Bytes of the weights, plus the peak allocation of a forward pass; a graph needs as much as its function."""
        run = self.run({"graphed": "compiled", "graphed-eager": "eager"}.get(mode, mode))
        with torch.no_grad():
            if self.inputs[0].device.type != "cuda":
                return self.contender.weight_bytes + allocated_on_cpu(run, self.inputs)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run(*self.inputs)
            torch.cuda.synchronize()
            return self.contender.weight_bytes + torch.cuda.max_memory_allocated() - before


def recorded(function: Call, inputs: Sequence[Tensor]) -> Call:
    """A function as a CUDA graph: inputs are copied into its buffers, the result is copied out."""
    buffers = [tensor.clone() for tensor in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):  # let libraries pick kernels and allocate before recording
            function(*buffers)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = function(*buffers)

    def replay(*inputs: Tensor) -> Tensor:
        for buffer, tensor in zip(buffers, inputs, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        return output.clone()

    return replay


def allocated_on_cpu(run: Call, arguments: list[Tensor]) -> int:
    """The peak bytes of tensors that a call holds."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        run(*arguments)
    held = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def times(runs: Sequence[Call], inputs: Sequence[Tensor], rounds: int) -> list[list[float]]:
    """Milliseconds of each function in every round; the functions take turns in going first."""
    clock = cuda_time if inputs[0].device.type == "cuda" else wall_time
    spent: list[list[float]] = [[] for _ in runs]
    with torch.no_grad():
        for turn in range(rounds):
            for step in range(len(runs)):
                index = (turn + step) % len(runs)
                spent[index].append(clock(runs[index], inputs))
    return spent


def wall_time(run: Call, inputs: Sequence[Tensor]) -> float:
    start = time.perf_counter()
    run(*inputs)
    return (time.perf_counter() - start) * 1e3


def cuda_time(run: Call, inputs: Sequence[Tensor]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run(*inputs)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def rounds_for(runs: Sequence[Call], inputs: Sequence[Tensor], seconds: float) -> int:
    """Warm up, and return the number of rounds, 7 to 100, that fit into so many seconds."""
    times(runs, inputs, 2)
    start = time.perf_counter()
    times(runs, inputs, 1)
    return max(7, min(100, int(seconds / (time.perf_counter() - start))))


# --- the benchmark ---------------------------------------------------------------------------------------------------


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def completed(rows: Iterable[Row]) -> list[Row]:
    """The rows, sorted, with all derived numbers. A ratio compares times: below 1 is faster.

    Rows are compared through the user's model, with which each was measured in turn.
    """
    rows = sorted(rows, key=key_of)
    relative = {key_of(row): row["latency_ms"] / row["single_ms"] for row in rows}

    def to(row: Row, contender: str, members: int) -> float | None:
        reference = relative.get((*key_of(row)[:5], contender, members))
        return None if reference is None else relative[key_of(row)] / reference

    return [
        row
        | {
            "ratio_to_single": relative[key_of(row)],
            "ratio_to_ours": to(row, "ours", 1),
            "ratio_to_pruned": to(row, "pruned", 1),
            "ratio_to_deep": to(row, "deep-in-turn", row["members"]) if row["members"] > 1 else None,
            "ratio_to_limit": relative[key_of(row)] / row["limit"],  # 1: as fast as arithmetic alone
            "inputs_per_second": 1e3 * row["batch"] / row["latency_ms"],
            "test_set_s": math.ceil(TEST_SET / row["batch"]) * row["latency_ms"] / 1e3,
        }
        for row in rows
    ]


class Benchmark:
    """One shape in one dtype on one device, and a file of rows that several runs may fill.

    A row is written as soon as it is measured, so a stopped run loses nothing.
    """

    def __init__(self, options: argparse.Namespace, path: Path | None = None) -> None:
        self.options, self.path = options, path
        shape = SHAPES[options.shape]
        kind = ZeroShotWorkshop if shape.classes else Workshop
        self.workshop = kind(shape, DTYPES[options.dtype], options.device, options.seed)
        self.single: dict[int, Modes] = {}  # by batch
        stored = json.loads(path.read_text()) if path is not None and path.exists() else {"rows": []}
        self.rows: dict[tuple[Any, ...], Row] = {key_of(row): row for row in stored["rows"]}
        self.failures: dict[str, str] = stored.get("failures", {})

    def run(self) -> None:
        """Measure the requested rows that are not in the file yet."""
        print(f"{'contender':<20}{'M':>2} {'mode':<13}{'batch':>5} {'plan':<8}{'ms':>9}{'x single':>9}{'limit':>7}")
        for cell in cells(self.options):
            pair = None
            for mode in self.options.modes:
                about = (hardware(self.options.device), self.options.shape, self.options.dtype, mode, *cell)
                if about in self.rows and not self.options.again:
                    continue
                heading = f"{cell[1]:<20}{cell[2]:>2} {mode:<13}{cell[0]:>5}"
                try:
                    start = time.perf_counter()
                    pair = pair or self.pair(*cell)
                    row = dict(zip(KEY, about, strict=True)) | self._measured(mode, *pair, start)
                    self.rows = {key_of(full): full for full in completed({**self.rows, about: row}.values())}
                    self.failures.pop("/".join(map(str, about)), None)
                    ratio = self.rows[about]["ratio_to_single"]
                    print(f"{heading} {row['plan']:<8}{row['latency_ms']:>9.3f}{ratio:>9.2f}{row['limit']:>7.2f}")
                except EXPECTED_ERRORS as error:
                    reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
                    self.failures["/".join(map(str, about))] = reason
                    print(f"{heading} failed: {reason}")
                sys.stdout.flush()
                if self.path is not None:
                    rows = list(self.rows.values())
                    failures = dict(sorted(self.failures.items()))
                    store(self.path, {"benchmark": "inference", "rows": rows, "failures": failures})
            del pair
            release()

    def pair(self, batch: int, name: str, members: int) -> tuple[Modes, Modes]:
        """The user's own model, cached for the next contender, and a contender, both ready for a batch."""
        drawn = self.workshop.shape.inputs(batch, torch.Generator().manual_seed(self.options.seed))
        moved = {key: tensor.to(self.options.device) for key, tensor in drawn.items()}
        dtype = self.workshop.dtype
        inputs = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in moved.items()}
        if batch not in self.single:
            self.single[batch] = Modes(self.workshop.make("single", 1, inputs), inputs)
        single = self.single[batch]
        return single, single if name == "single" else Modes(self.workshop.make(name, members, inputs), inputs)

    def _measured(self, mode: str, reference: Modes, mine: Modes, start: float) -> Row:
        runs = [reference.run(mode)] + ([mine.run(mode)] if mine is not reference else [])
        error = mine.error(mode)
        preparation = time.perf_counter() - start
        repeats = self.options.repeats or rounds_for(runs, mine.inputs, self.options.seconds)
        spent = times(runs, mine.inputs, repeats)  # of the user's model, and of the contender
        low, median, high = statistics.quantiles(spent[-1], method="inclusive") if repeats > 1 else spent[-1] * 3
        contender = mine.contender
        madds = mine.contender.multiply_adds()
        return {
            "plan": contender.plan,
            "latency_ms": median,
            "latency_low_ms": low,  # the quartiles
            "latency_high_ms": high,
            "single_ms": statistics.median(spent[0]),  # the user's own model, in turn with this one
            "multiply_adds": madds,  # per input, those actually computed
            "limit": madds / self.workshop.single_multiply_adds(),
            "parameters": contender.parameters,
            "weight_bytes": contender.weight_bytes,
            "peak_memory_bytes": mine.peak_memory(mode),  # weights, and what a forward pass allocates
            "repeats": repeats,
            "seed": self.options.seed,
            "error": error,  # relative to the model before it was optimized, compiled or recorded
            "preparation_s": preparation,
            "settings": settings(self.options.device),
        }


def cells(options: argparse.Namespace) -> list[tuple[int, str, int]]:
    """All cells to measure: batch, contender and number of members."""
    return [
        (batch, name, members)
        for batch in options.batches
        for name in options.contenders
        for members in ((MEMBERS[name],) if name in MEMBERS else options.members)
    ]


def settings(device: str) -> dict[str, str]:
    """Versions and settings that the times may depend on."""
    cuda = {"cuda": str(torch.version.cuda)} if torch.device(device).type == "cuda" else {}
    precision = {"float32_matmul_precision": torch.get_float32_matmul_precision()}
    return {**versions("timm", "transformers", "triton"), **cuda, "python": platform.python_version(), **precision}


def release() -> None:
    """Free the memory of deleted models."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- comparison with another checkout --------------------------------------------------------------------------------


def compare(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Time the same contenders with this checkout and another one, in turn; print a line for each cell."""
    stored = by_turns(__file__, options.against, arguments, options.turns, "rows")
    sides = [[{key_of(row): row for row in rows} for rows in turns] for turns in stored]
    header = ("new ms", "x single", "old ms", "x single", "new/old")
    print(f"{'contender':<14}{'mode':<14}{'batch':>5}", *(f"{title:>9}" for title in header), " plans")
    rows: list[Row] = []
    for cell in (cell for cell in sides[0][0] if cell in sides[1][0]):
        measured = [[turn[cell] for turn in turns if cell in turn] for turns in sides]
        numbers: dict[str, float] = {}
        for side, own in zip(("new", "old"), measured, strict=True):
            numbers[f"{side}_ms"] = statistics.median(row["latency_ms"] for row in own)
            numbers[f"{side}_to_single"] = statistics.median(row["ratio_to_single"] for row in own)
        numbers["ratio"] = numbers["new_ms"] / numbers["old_ms"]
        row = dict(zip(KEY, cell, strict=True)) | numbers
        rows.append(row | {f"{key}s": [own[0][key] for own in measured] for key in ("plan", "error")})
        shown = [f"{number:>9.3f}" for number in numbers.values()]
        print(f"{row['contender']:<14}{row['mode']:<14}{row['batch']:>5}", *shown, "", rows[-1]["plans"])
    if options.output:
        store(options.output, {"benchmark": "inference, two checkouts", "rows": rows})


def conversion(options: argparse.Namespace) -> None:
    """Time `convert` in float32 with and without its comparison of outputs, in turn; in CPU seconds."""
    model = SHAPES[options.shape].build().to(options.device).eval()
    spent: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(1 + (options.repeats or 5)):  # the first warms up
        for probe, seconds in spent.items():
            start = time.process_time()
            he.convert(model, probe=probe)
            synchronize(options.device)
            seconds += [time.process_time() - start] if turn else []
    medians = {probe: statistics.median(seconds) for probe, seconds in spent.items()}
    about = {"hardware": hardware(options.device), "shape": options.shape, "repeats": len(spent[True])}
    numbers = {"convert_seconds": medians[True], "comparison_seconds": medians[True] - medians[False]}
    print(", ".join(f"{name} {value}" for name, value in {**about, **numbers}.items()))
    if options.output:
        store(options.output, {"benchmark": "conversion", **about, **numbers, "versions": versions("timm")})


def counts(options: argparse.Namespace) -> None:
    """Count what contenders store and compute, from their shapes."""
    workshop = Workshop(SHAPES[options.shape], DTYPES[options.dtype], options.device, options.seed)
    single = workshop.single_multiply_adds()
    rows = list[Row]()
    for name in options.contenders:
        members = MEMBERS.get(name, options.members[0])
        parameters, madds = workshop.counts(name, members)
        rows.append({"contender": name, "members": members, "parameters": parameters, "limit": madds / single})
        print(f"{name:<22}{members:>3}{parameters / 1e6:>9.1f} M{madds / single:>7.2f}", flush=True)
    if options.output:
        store(options.output, {"benchmark": "inference, counted", "shape": options.shape, "rows": rows})


# --- command ---------------------------------------------------------------------------------------------------------


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable[..., Any] = parser.add_argument
    add("--shape", choices=list(SHAPES), default="vit-b16")
    add("--dtype", choices=list(DTYPES), default="bfloat16")
    add("--batches", type=int, nargs="+", default=[1, 4, 128])
    add("--modes", choices=MODES, nargs="+", help="default: graphed on a GPU, eager elsewhere")
    add("--contenders", choices=tuple(dict.fromkeys((*NAMES, *ZERO_SHOT))), nargs="+", help="default: all of the shape")
    add("--methods", action="store_true", help="contenders: every baseline beside a single model and Hydra Ensembles")
    add("--members", type=int, nargs="+", default=[3], help="several: cost against their number")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, help="on a CPU")
    add("--repeats", type=int, help="timed rounds; default: as many as fit in --seconds")
    add("--seconds", type=float, default=1.0, help="time for the rounds of a row")
    add("--seed", type=int, default=0)
    add("--again", action="store_true", help="measure rows that the output has already")
    add("--output", type=Path, help="JSON file that rows are merged into")
    add("--against", type=Path, help="folder of another checkout, to be timed side by side with this one")
    add("--conversion", action="store_true", help="time `convert` instead")
    add("--counts", action="store_true", help="count parameters and multiply-adds instead")
    add("--turns", type=int, default=3, help="of each of two checkouts")
    options = parser.parse_args(arguments)
    on_gpu = torch.device(options.device).type == "cuda"
    options.modes = options.modes or (["graphed"] if on_gpu else ["eager"])
    if not on_gpu and any(mode.startswith("graphed") for mode in options.modes):
        parser.error(f"CUDA graphs need a GPU, the device is {options.device}")
    names = names_of(SHAPES[options.shape])
    unknown = sorted(set(options.contenders or ()) - set(names))
    if unknown:
        parser.error(f"the shape {options.shape} has no contenders {unknown}; it has {list(names)}")
    if options.methods:
        options.contenders = [name for name in METHODS if name in names]
    growing = [name for name in names if name in GROWTH_CONTENDERS]
    options.contenders = options.contenders or (growing if len(options.members) > 1 else list(names))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    options = read_options(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    limits = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}  # many models, each with its shapes
    with torch._dynamo.config.patch(limits):
        if options.conversion:
            conversion(options)
        elif options.counts:
            counts(options)
        elif options.against:
            compare(options, argv)
        else:
            Benchmark(options, options.output).run()


if __name__ == "__main__":
    main()
