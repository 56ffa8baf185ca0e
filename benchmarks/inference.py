"""What inference costs: single models, Deep Ensembles, MC Dropout and Hydra Ensembles, all treated alike.

    python benchmarks/inference.py --output results/inference.json                       # the cells with targets first
    python benchmarks/inference.py --batches 1 4 32 128 512 --modes graphed compiled eager graphed-eager
    python benchmarks/inference.py --shape vit-s16 --dtype float32 --batches 8 --modes eager --device cpu --threads 2
    python benchmarks/inference.py --members 1 2 3 5 8 --modes graphed-eager --batches 4 128
    python benchmarks/inference.py --shape clip-b32 --modes graphed-eager --batches 4 128   # zero-shot classifiers
    for batch in 1 4 128; do python benchmarks/inference.py --prepare-only --batches $batch & done; wait

Every contender is timed in turn with the user's own model, in the same mode. Modes: `eager`; `compiled`
(`torch.compile` for that batch size); `graphed` (compiled, then recorded as a CUDA graph: the best the user's model
can get); `graphed-eager` (recorded, not compiled). Rows that the output file has already are skipped, unless `--again`.
"""

import argparse
import importlib.metadata
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

import torch
from contenders import NAMES, ONE_MEMBER, Workshop
from inference_modes import MODES, Modes, Run, release, synchronize
from inference_rows import HEADER, Key, Results, Row, line, table
from model_shapes import SHAPES, ClipShape, Inputs
from torch import Tensor
from zero_shot_contenders import ZERO_SHOT_NAMES, ZeroShotWorkshop

from hydra_ensembles.model.cost import measure_costs
from hydra_ensembles.optimize import Plan

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FIRST_CONTENDERS = ("single", "hydra-k0", "hydra-k8", "hydra-k10", "hydra-uneven", "ours")
FIRST_BATCHES = (1, 4, 128)
GROWTH_CONTENDERS = ("hydra-k0", "hydra-k8", "hydra-joint", "deep-in-turn", "deep-stacked")

Work = tuple[int, str, int]  # batch, contender, members


class OutOfTime(Exception):  # noqa: N818 (it is no error)
    """The time limit has passed."""


class Benchmark:
    """One shape in one dtype on one device."""

    def __init__(self, options: argparse.Namespace, results: Results, deadline: float) -> None:
        self.options, self.results, self.deadline = options, results, deadline
        self.hardware = hardware(options)
        self.workshop = workshop(options)
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
                contender = self.workshop.make(name, members, inputs, self.options.plan)
                mine = Modes(contender, inputs, self.workshop.answer(name, members, inputs))
        except (RuntimeError, NotImplementedError, ValueError, TypeError, ImportError) as error:
            self._fail(modes, batch, name, members, error)
            return
        for mode in modes:
            self._check_time()
            if self.options.prepare_only:
                start = time.perf_counter()
                mine.run("compiled")
                print(
                    f"{name:<18}{members:>2} batch {batch}: prepared in {time.perf_counter() - start:.1f} s", flush=True
                )
                break
            try:
                row = self._row(mode, batch, name, members, mine, reference)
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                self._fail([mode], batch, name, members, error)
                continue
            print(line(self.results.add(row)), flush=True)
        del mine
        release()

    def _row(self, mode: str, batch: int, name: str, members: int, mine: Modes, reference: Modes) -> Row:
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


def workshop(options: argparse.Namespace) -> Workshop:
    """What makes the contenders of the chosen shape."""
    shape, dtype = SHAPES[options.shape], DTYPES[options.dtype]
    if isinstance(shape, ClipShape):
        return ZeroShotWorkshop(shape, dtype, options.device, options.seed)
    return Workshop(shape, dtype, options.device, options.seed)


def ordered(options: argparse.Namespace) -> list[Work]:
    """All work, cells with targets first; the batches in the order given."""
    work = [
        (batch, name, members)
        for batch in options.batches
        for name in options.contenders
        for members in (options.members if name not in ONE_MEMBER else (1,))
    ]

    def rank(one: Work) -> tuple[bool, int, int]:
        batch, name, _ = one
        first = batch in FIRST_BATCHES and name in FIRST_CONTENDERS
        place = FIRST_CONTENDERS.index(name) if first else list(options.contenders).index(name)
        return (not first, list(options.batches).index(batch), place)

    return sorted(dict.fromkeys(work), key=rank)


def _with_mapping(run: Run) -> Callable[[Mapping[str, Tensor]], Tensor]:
    return lambda inputs: run(*inputs.values())


def hardware(options: argparse.Namespace) -> str:
    """What the times were taken on."""
    if torch.device(options.device).type == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU {platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def settings(options: argparse.Namespace) -> dict[str, str]:
    """What else the times may depend on."""
    versions = {"torch": str(torch.__version__)}
    for package in ("hydra-ensembles", "timm", "transformers", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = {"cuda": str(torch.version.cuda)} if torch.device(options.device).type == "cuda" else {}
    return {
        **versions,
        **cuda,
        "python": platform.python_version(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="vit-b16")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 128])
    parser.add_argument("--modes", choices=MODES, nargs="+", help="default: graphed on a GPU, eager elsewhere")
    parser.add_argument(
        "--contenders",
        choices=tuple(dict.fromkeys((*NAMES, *ZERO_SHOT_NAMES))),
        nargs="+",
        help="default: all of the shape",
    )
    parser.add_argument("--members", type=int, nargs="+", default=[3], help="several: cost against their number")
    parser.add_argument("--plan", choices=get_args(Plan), help="run ensembles of ours by this plan, not the fastest")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="on a CPU")
    parser.add_argument("--repeats", type=int, help="timed rounds; default: as many as fit in --seconds")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for the rounds of a row")
    parser.add_argument("--time-limit", type=float, help="stop after so many seconds, with what is there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="measure rows that the output has already")
    parser.add_argument(
        "--prepare-only",
        action="store_true",
        help="compile and measure nothing: several such processes at a time fill the compiler's cache for a later run",
    )
    parser.add_argument("--output", type=Path, help="JSON file that rows are merged into")
    options = parser.parse_args(arguments)
    on_gpu = torch.device(options.device).type == "cuda"
    options.modes = options.modes or (["graphed"] if on_gpu else ["eager"])
    if not on_gpu and any(mode.startswith("graphed") for mode in options.modes):
        parser.error(f"CUDA graphs need a GPU, the device is {options.device}")
    names = ZERO_SHOT_NAMES if isinstance(SHAPES[options.shape], ClipShape) else NAMES
    unknown = sorted(set(options.contenders or ()) - set(names))
    if unknown:
        parser.error(f"the shape {options.shape} has no contenders {unknown}; it has {list(names)}")
    growing = [name for name in names if name in ("single", *GROWTH_CONTENDERS)]
    options.contenders = options.contenders or (growing if len(options.members) > 1 else list(names))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    many = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}  # many models, each for its shapes
    deadline = time.monotonic() + (options.time_limit or float("inf"))
    results = Results(options.output)
    before = dict(results.rows)
    print(HEADER, flush=True)
    try:
        with torch._dynamo.config.patch(many):
            Benchmark(options, results, deadline).run()
    except OutOfTime:
        print("the time limit has passed; run the same command again for the rest", flush=True)
    print(table(row for key, row in results.rows.items() if before.get(key) != row), flush=True)


if __name__ == "__main__":
    main()
