"""What inference costs: single models, Deep Ensembles, MC Dropout and Hydra Ensembles, all treated alike.

    python benchmarks/inference.py --output results/inference.json                       # the cells with targets first
    python benchmarks/inference.py --batches 1 4 32 128 512 --modes graphed compiled eager graphed-eager
    python benchmarks/inference.py --shape vit-s16 --dtype float32 --batches 8 --modes eager --device cpu --threads 2
    python benchmarks/inference.py --members 1 2 3 5 8 --modes graphed-eager --batches 4 128
    python benchmarks/inference.py --shape clip-b32 --modes graphed-eager --batches 4 128   # zero-shot classifiers
    python benchmarks/inference.py --against FOLDER --contenders hydra-k0 hydra-k8 hydra-k10   # and another checkout

Every contender is timed in turn with the user's own model, in the same mode. Modes: `eager`; `compiled`
(`torch.compile` for that batch size); `graphed` (compiled, then recorded as a CUDA graph: the best the user's model
can get); `graphed-eager` (recorded, not compiled). Rows that the output file has already are skipped, unless `--again`.
With `--against`, a process for each checkout makes the same contenders, and the two take turns on the clock.
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
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from common import ROOT, Worker, hardware, serve, store, synchronize, versions
from inference_models import NAMES, ONE_MEMBER, SHAPES, ZERO_SHOT, Call, Contender, Inputs, Workshop, ZeroShotWorkshop
from torch import Tensor

MODES = ("graphed", "compiled", "graphed-eager", "eager")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FIRST_CONTENDERS = ("single", "hydra-k0", "hydra-k8", "hydra-k10", "hydra-uneven", "ours")
FIRST_BATCHES = (1, 4, 128)
GROWTH_CONTENDERS = ("single", "hydra-k0", "hydra-k8", "hydra-joint", "deep-in-turn", "deep-stacked")
TEST_SET = 50_000  # images of ImageNet's validation set, as in the paper's whole-test times
TOLERANCE = 0.1  # relative; answers in bfloat16 differ by about a hundredth, wrong ones by about one
BLOCKS = 8  # turns that each of two checkouts gets

Key = tuple[str, str, str, str, int, str, int]
EXPECTED_ERRORS = (RuntimeError, NotImplementedError, ValueError, TypeError, ImportError)


# --- running and timing ----------------------------------------------------------------------------------------------


class Modes:
    """One contender on one batch, in every mode; what modes have in common is made once."""

    def __init__(self, contender: Contender, inputs: Inputs) -> None:
        self.contender, self.inputs = contender, list(inputs.values())
        self._made: dict[str, Call] = {"eager": contender.run}

    def run(self, mode: str) -> Call:
        """The function to call in a mode."""
        if mode not in self._made:
            if mode == "compiled":
                made: Call = torch.compile(self.contender.run, dynamic=False)
            else:
                made = recorded(self.run("compiled" if mode == "graphed" else "eager"), self.inputs)
            with torch.no_grad():
                made(*self.inputs)
            self._made[mode] = made
        return self._made[mode]

    def error(self, mode: str) -> float | None:
        """How far a mode's answer is from what is expected; a contender that draws numbers has none."""
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
        """Bytes of the weights, and the most that a forward pass allocates; a graph keeps what its function needs."""
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
    buffers = [one.clone() for one in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):  # let libraries pick kernels and allocate before anything is recorded
            function(*buffers)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        result = function(*buffers)

    def replay(*inputs: Tensor) -> Tensor:
        for buffer, one in zip(buffers, inputs, strict=True):
            buffer.copy_(one)
        graph.replay()
        return result.clone()

    return replay


def allocated_on_cpu(run: Call, arguments: list[Tensor]) -> int:
    """The most bytes of tensors that a call holds at a time."""
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
    """Milliseconds of each function, a list each; in every round another one goes first."""
    clock = cuda_time if inputs[0].device.type == "cuda" else wall_time
    taken: list[list[float]] = [[] for _ in runs]
    with torch.no_grad():
        for turn in range(rounds):
            for step in range(len(runs)):
                index = (turn + step) % len(runs)
                taken[index].append(clock(runs[index], inputs))
    return taken


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
    """How many rounds fit into so many seconds, within reason; also warms up."""
    times(runs, inputs, 2)
    start = time.perf_counter()
    times(runs, inputs, 1)
    return max(7, min(100, int(seconds / (time.perf_counter() - start))))


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One contender at one batch size in one mode. Ratios compare latencies, and below 1 is faster.

    Attributes:
        latency_ms: Median of the rounds; `latency_low_ms` and `latency_high_ms` are the quartiles.
        single_ms: Median of the user's own model, measured in turn with this one, in the same mode.
        ratio_to_single: Of the two.
        ratio_to_ours, ratio_to_pruned, ratio_to_deep: To our single, pruned, and the Deep Ensemble run in turn, by
            way of the user's model, where those rows exist.
        multiply_adds: Of one input, those really done; `limit` is their ratio to the user's model.
        ratio_to_limit: How far the time is from what arithmetic alone would give.
        inputs_per_second: Throughput.
        test_set_s: Time of 50,000 inputs.
        peak_memory_bytes: Weights, and the most that a forward pass needs beside them.
        error: Relative difference to the answers of the model before it was rewritten, compiled or recorded.
    """

    hardware: str
    shape: str
    dtype: str
    mode: str
    batch: int
    contender: str
    members: int
    plan: str
    latency_ms: float
    latency_low_ms: float
    latency_high_ms: float
    single_ms: float
    multiply_adds: int
    limit: float
    parameters: int
    weight_bytes: int
    peak_memory_bytes: int | None
    repeats: int
    seed: int
    error: float | None
    preparation_s: float
    settings: dict[str, str] = field(default_factory=dict)
    ratio_to_single: float = 1.0
    ratio_to_ours: float | None = None
    ratio_to_pruned: float | None = None
    ratio_to_deep: float | None = None
    ratio_to_limit: float = 1.0
    inputs_per_second: float = 0.0
    test_set_s: float = 0.0

    @property
    def key(self) -> Key:
        """What tells rows apart; a new one replaces an old one with the same."""
        return (self.hardware, self.shape, self.dtype, self.mode, self.batch, self.contender, self.members)


def completed(rows: Iterable[Row]) -> list[Row]:
    """The rows with everything that follows from what was measured, in a stable order."""
    rows = sorted(rows, key=lambda row: row.key)
    relative = {row.key: row.latency_ms / row.single_ms for row in rows}

    def to(row: Row, contender: str, members: int) -> float | None:
        other = relative.get((*row.key[:5], contender, members))
        return None if other is None else relative[row.key] / other

    return [
        replace(
            row,
            ratio_to_single=relative[row.key],
            ratio_to_ours=to(row, "ours", 1),
            ratio_to_pruned=to(row, "pruned", 1),
            ratio_to_deep=to(row, "deep-in-turn", row.members) if row.members > 1 else None,
            ratio_to_limit=relative[row.key] / row.limit,
            inputs_per_second=1e3 * row.batch / row.latency_ms,
            test_set_s=math.ceil(TEST_SET / row.batch) * row.latency_ms / 1e3,
        )
        for row in rows
    ]


class Results:
    """The rows of a file that several runs fill together; each is written at once, so a stopped run loses nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: dict[Key, Row] = {}
        self.failures: dict[str, str] = {}
        if path is not None and path.exists():
            report = json.loads(path.read_text())
            known = {one.name for one in fields(Row)}
            rows = [Row(**{name: value for name, value in row.items() if name in known}) for row in report["rows"]]
            self.rows = {row.key: row for row in rows}
            self.failures = dict(report.get("failures", {}))

    def add(self, row: Row) -> Row:
        """Put a row in, replacing an older one, and write the file; the row with its ratios."""
        self.rows = {one.key: one for one in completed({**self.rows, row.key: row}.values())}
        self.failures.pop("/".join(map(str, row.key)), None)
        self._save()
        return self.rows[row.key]

    def fail(self, key: Key, reason: str) -> None:
        """Remember that something could not be measured, and why."""
        self.failures["/".join(map(str, key))] = reason
        self._save()

    def _save(self) -> None:
        if self.path is not None:
            rows, failures = [asdict(row) for row in self.rows.values()], dict(sorted(self.failures.items()))
            store(self.path, {"benchmark": "inference", "rows": rows, "failures": failures})


HEADER = (
    f"{'contender':<18}{'M':>2} {'mode':<13}{'batch':>5} {'plan':<8}{'ms':>9}{'x single':>9}{'x ours':>8}"
    f"{'x deep':>8}{'limit':>7}{'inputs/s':>10}{'params M':>9}{'peak MB':>9}{'error':>9}"
)


def line(row: Row) -> str:
    """A row of the table that the benchmark prints."""
    ours, deep = ("-" if one is None else f"{one:.2f}" for one in (row.ratio_to_ours, row.ratio_to_deep))
    memory = "-" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 1e6:.0f}"
    error = "-" if row.error is None else f"{row.error:.0e}"
    return (
        f"{row.contender:<18}{row.members:>2} {row.mode:<13}{row.batch:>5} {row.plan:<8}{row.latency_ms:>9.3f}"
        f"{row.ratio_to_single:>9.2f}{ours:>8}{deep:>8}{row.limit:>7.2f}{row.inputs_per_second:>10.0f}"
        f"{row.parameters / 1e6:>9.1f}{memory:>9}{error:>9}"
    )


# --- the benchmark ---------------------------------------------------------------------------------------------------


class Benchmark:
    """One shape in one dtype on one device."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self.options, self.results = options, results
        shape = SHAPES[options.shape]
        kind = ZeroShotWorkshop if shape.classes else Workshop
        self.workshop = kind(shape, DTYPES[options.dtype], options.device, options.seed)
        self.single: dict[int, Modes] = {}  # by batch

    def run(self) -> None:
        """Measure what is asked for and not there yet, the most important first."""
        for batch, name, members in ordered(self.options):
            for mode in self.options.modes:
                key = self._key(mode, batch, name, members)
                if key in self.results.rows and not self.options.again:
                    continue
                try:
                    self._measure(key, name)
                except EXPECTED_ERRORS as error:
                    reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
                    self.results.fail(key, reason)
                    print(f"{name:<18}{members:>2} {mode:<13}{batch:>5} failed: {reason}", flush=True)
            self._last = None
            release()

    _last: tuple[tuple[int, str, int], Modes] | None = None

    def modes(self, batch: int, name: str, members: int) -> tuple[Modes, Modes]:
        """The user's own model and a contender, ready for a batch; the last contender is kept."""
        inputs = self._inputs(batch)
        if batch not in self.single:
            self.single[batch] = Modes(self.workshop.make("single", 1, inputs), inputs)
        if name == "single":
            return self.single[batch], self.single[batch]
        if self._last is None or self._last[0] != (batch, name, members):
            contender = self.workshop.make(name, members, inputs, self.options.plan)
            self._last = ((batch, name, members), Modes(contender, inputs))
        return self.single[batch], self._last[1]

    def _measure(self, key: Key, name: str) -> None:
        mode, batch, members = key[3], key[4], key[6]
        start = time.perf_counter()
        reference, mine = self.modes(batch, name, members)
        runs = [reference.run(mode)] + ([mine.run(mode)] if mine is not reference else [])
        error, preparation = mine.error(mode), time.perf_counter() - start
        repeats = self.options.repeats or rounds_for(runs, mine.inputs, self.options.seconds)
        taken = times(runs, mine.inputs, repeats)  # of the user's model, and of the contender
        low, median, high = statistics.quantiles(taken[-1], method="inclusive") if repeats > 1 else taken[-1] * 3
        contender, done = mine.contender, mine.contender.multiply_adds()
        row = Row(
            *key,
            plan=contender.plan,
            latency_ms=median,
            latency_low_ms=low,
            latency_high_ms=high,
            single_ms=statistics.median(taken[0]),
            multiply_adds=done,
            limit=done / self.workshop.single_multiply_adds(),
            parameters=contender.parameters,
            weight_bytes=contender.weight_bytes,
            peak_memory_bytes=mine.peak_memory(mode),
            repeats=repeats,
            seed=self.options.seed,
            error=error,
            preparation_s=preparation,
            settings=settings(self.options.device),
        )
        print(line(self.results.add(row)), flush=True)

    def _inputs(self, batch: int) -> Inputs:
        made = self.workshop.shape.inputs(batch, torch.Generator().manual_seed(self.options.seed))
        moved = {name: one.to(self.options.device) for name, one in made.items()}
        return {name: one.to(self.workshop.dtype) if one.is_floating_point() else one for name, one in moved.items()}

    def _key(self, mode: str, batch: int, name: str, members: int) -> Key:
        of_ours = name in ("ours", "pruned", "deep-stacked") or name.startswith("hydra")
        label = f"{name}@{self.options.plan}" if self.options.plan and of_ours else name
        return (hardware(self.options.device), self.options.shape, self.options.dtype, mode, batch, label, members)


def ordered(options: argparse.Namespace) -> list[tuple[int, str, int]]:
    """All work as batch, contender and members: cells with targets first, the batches in the order given."""
    work = [
        (batch, name, members)
        for batch in options.batches
        for name in options.contenders
        for members in (options.members if name not in ONE_MEMBER else (1,))
    ]

    def rank(one: tuple[int, str, int]) -> tuple[bool, int, int]:
        batch, name, _ = one
        first = batch in FIRST_BATCHES and name in FIRST_CONTENDERS
        place = FIRST_CONTENDERS.index(name) if first else list(options.contenders).index(name)
        return (not first, list(options.batches).index(batch), place)

    return sorted(dict.fromkeys(work), key=rank)


def settings(device: str) -> dict[str, str]:
    """What else the times may depend on."""
    cuda = {"cuda": str(torch.version.cuda)} if torch.device(device).type == "cuda" else {}
    precision = {"float32_matmul_precision": torch.get_float32_matmul_precision()}
    return {**versions("timm", "transformers", "triton"), **cuda, "python": platform.python_version(), **precision}


def release() -> None:
    """Give back the memory of models that are done with."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- another checkout ------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Be one of two checkouts: make a contender, then time it together with the user's model, as asked."""
    benchmark = Benchmark(options, Results(None))
    current: dict[str, Any] = {}

    def make(mode: str, batch: int, name: str, members: int) -> dict[str, Any]:
        current.clear()
        benchmark._last = None
        release()
        reference, mine = benchmark.modes(batch, name, members)
        current.update(runs=[reference.run(mode), mine.run(mode)], inputs=mine.inputs)
        error = mine.error(mode)
        rounds = rounds_for(current["runs"], mine.inputs, options.seconds / BLOCKS)
        synchronize(options.device)
        return {"plan": mine.contender.plan, "error": error, "rounds": options.repeats or rounds}

    serve({"make": make, "time": lambda rounds: times(current["runs"], current["inputs"], rounds)})


def compare(options: argparse.Namespace, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Time the same contenders with this checkout and with another, which take turns; a line for each cell."""
    workers = [Worker(__file__, folder, arguments) for folder in (ROOT, options.against)]
    print(f"{'contender':<14}{'mode':<14}{'batch':>5}{'new ms':>10}{'old ms':>10}{'new/old':>9}{'x single':>10}"
          f"{'old x':>8}{'singles':>9}  plans", flush=True)  # fmt: skip
    rows = []
    for batch, name, members in ordered(options):
        for mode in options.modes:
            made = [worker.ask("make", mode=mode, batch=batch, name=name, members=members) for worker in workers]
            taken: list[list[list[float]]] = [[[], []], [[], []]]  # of each checkout: the user's model, the contender
            for block in range(BLOCKS):
                for index in (0, 1) if block % 2 == 0 else (1, 0):
                    found = workers[index].ask("time", rounds=min(one["rounds"] for one in made))
                    for mine, more in zip(taken[index], found, strict=True):
                        mine += more
            (new_single, new), (old_single, old) = ([statistics.median(one) for one in pair] for pair in taken)
            row = {"contender": name, "members": members, "mode": mode, "batch": batch, "new_ms": new, "old_ms": old}
            row |= {"ratio": new / old, "new_to_single": new / new_single, "old_to_single": old / old_single}
            row |= {"singles": new_single / old_single, "plans": [one["plan"] for one in made]}
            rows.append(row | {"errors": [one["error"] for one in made]})
            print(f"{name:<14}{mode:<14}{batch:>5}{new:>10.3f}{old:>10.3f}{new / old:>9.3f}{new / new_single:>10.2f}"
                  f"{old / old_single:>8.2f}{new_single / old_single:>9.3f}  {row['plans']}", flush=True)  # fmt: skip
    for worker in workers:
        worker.close()
    return rows


# --- command ---------------------------------------------------------------------------------------------------------


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable[..., Any] = parser.add_argument
    add("--shape", choices=list(SHAPES), default="vit-b16")
    add("--dtype", choices=list(DTYPES), default="bfloat16")
    add("--batches", type=int, nargs="+", default=[1, 4, 128])
    add("--modes", choices=MODES, nargs="+", help="default: graphed on a GPU, eager elsewhere")
    add("--contenders", choices=tuple(dict.fromkeys((*NAMES, *ZERO_SHOT))), nargs="+", help="default: all of the shape")
    add("--members", type=int, nargs="+", default=[3], help="several: cost against their number")
    add("--plan", choices=("batched", "loop", "grouped"), help="run ensembles of ours so, not by the fastest")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, help="on a CPU")
    add("--repeats", type=int, help="timed rounds; default: as many as fit in --seconds")
    add("--seconds", type=float, default=1.0, help="time for the rounds of a row")
    add("--seed", type=int, default=0)
    add("--again", action="store_true", help="measure rows that the output has already")
    add("--output", type=Path, help="JSON file that rows are merged into")
    add("--against", type=Path, help="folder of another checkout, to be timed side by side with this one")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    on_gpu = torch.device(options.device).type == "cuda"
    options.modes = options.modes or (["graphed"] if on_gpu else ["eager"])
    if not on_gpu and any(mode.startswith("graphed") for mode in options.modes):
        parser.error(f"CUDA graphs need a GPU, the device is {options.device}")
    names = ZERO_SHOT if SHAPES[options.shape].classes else NAMES
    unknown = sorted(set(options.contenders or ()) - set(names))
    if unknown:
        parser.error(f"the shape {options.shape} has no contenders {unknown}; it has {list(names)}")
    growing = [name for name in names if name in GROWTH_CONTENDERS]
    options.contenders = options.contenders or (growing if len(options.members) > 1 else list(names))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = read_options(given)
    if options.threads:
        torch.set_num_threads(options.threads)
    many = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}  # many models, each for its shapes
    with torch._dynamo.config.patch(many):
        if options.worker:
            work(options)
        elif options.against:
            rows = compare(options, given)
            if options.output:
                about = {"hardware": hardware(options.device), "shape": options.shape, "dtype": options.dtype}
                store(options.output, {"benchmark": "inference, two checkouts", **about, "rows": rows})
        else:
            print(HEADER, flush=True)
            Benchmark(options, Results(options.output)).run()


if __name__ == "__main__":
    main()
