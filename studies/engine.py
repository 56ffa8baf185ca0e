"""Running a study of any kind: jobs of its stages, which processes on one device may share, and what came of them.

A job begins when those that it waits for have ended and a process is free. First come those that take seconds and end
a row, so that a run out of time has whole rows; then those that most others wait for.
"""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hydra_ensembles as he
from hydra_ensembles.errors import ConfigError, SameMembersError
from hydra_ensembles.files import write_json
from hydra_ensembles.model.cost import measure_costs
from hydra_ensembles.schema import to_plain

from .samples import device_name
from .storing import newest_costs, read_if_there

COSTS = "costs.json"
Job = tuple[str, int, str]  # step, seed, and what of it
Plan = Mapping[Job, Sequence[Job]]  # jobs, each with those that it waits for, where they are in the plan
_OWN: dict[str, Any] = {}  # what a process works with: its task, read once, the folder of the run, and its last seed


@dataclass(frozen=True)
class Run:
    """What was asked for: a task, rows and seeds of it, and where everything goes."""

    task: Any
    output: Path
    results: Path
    rows: Sequence[str]
    seeds: Sequence[int]  # of every row; none: each has those that its recipe gives it

    def of(self, row: str) -> Sequence[int]:
        """The seeds of a row."""
        return self.seeds or self.task.seeds_of(row)


@dataclass(frozen=True)
class Kind:
    """A kind of study: its seeds, the rows of a task, and its stages."""

    seed: Callable[[Any, int, Path], Any]  # of a task, a number and the folder of the run
    rows: Callable[[Any], Mapping[str, Any]]
    steps: Mapping[str, Callable[[Any, str], None]]  # what a job does with a seed
    jobs: Callable[[Run, str], Plan]  # of a stage
    ends: Mapping[str, Callable[[Run], None]]  # stages that one process does
    quick: Collection[str] = ("report", "shift")  # steps that take seconds

    @property
    def stages(self) -> tuple[str, ...]:
        """In their order."""
        return (*self.steps, *self.ends)

    def run(self, run: Run, stages: Sequence[str], workers: int = 1, minutes: float | None = None) -> None:
        """Run stages; all rows where none is named. What is there stays: a stopped run goes on.

        No job is begun after so many minutes; that some are left is an error then, raised as that of the first job that
        failed is: when all else, costs and storing too, is done.
        """
        start = time.monotonic()
        rows = self.rows(run.task)
        if wrong := [stage for stage in stages if stage not in self.stages]:
            raise ConfigError(f"stages are {', '.join(self.stages)}; got {', '.join(wrong)}")
        if wrong := [row for row in run.rows if row not in rows]:
            raise ConfigError(f"there are no rows {wrong} of {run.task.name}; it has {list(rows)}")
        run = run if run.rows else Run(run.task, run.output, run.results, list(rows), run.seeds)
        failed: list[Exception] = []
        with ExitStack() as stack:
            pool: Executor = Here()
            if workers > 1:
                arguments = (self.seed, self.steps, run.output, type(run.task), run.task.given)
                context = multiprocessing.get_context("spawn")
                pool = ProcessPoolExecutor(workers, context, initializer=_begin_apart, initargs=arguments)
                stack.callback(pool.shutdown, cancel_futures=True)
            _begin(self.seed, self.steps, run.output, run.task)
            plan = {
                job: needs for stage in stages if stage in self.steps for job, needs in self.jobs(run, stage).items()
            }
            until = None if minutes is None else start + 60 * minutes
            failed += do_all(plan, pool, workers, self.quick, until)
            try:
                for stage in filter(self.ends.__contains__, stages):
                    self.ends[stage](run)
            except Exception as error:  # it may come of a job that failed, which is what a user has to know
                failed.append(error)
        if failed:
            raise failed[0]


class Here(Executor):
    """Does what it is given at once, in this process."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **settings: Any) -> Future[Any]:
        """What came of it, an error too."""
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **settings))
        except Exception as error:
            future.set_exception(error)
        return future


def do_all(
    plan: Plan, pool: Executor, workers: int, quick: Collection[str] = (), until: float | None = None
) -> list[Exception]:
    """Do all jobs of a plan, those of quick steps as soon as they can be, and begin none after a time.

    One that fails is told and stops no other: its rows will be missing. Nor is it a failure where a seed has no
    members that differ: that is told, and the row is missing.
    """
    waited_for = _dependents(plan)
    waiting = sorted(plan, key=lambda job: (job[0] not in quick, -len(waited_for[job])))  # else in their order
    running: dict[Future[None], Job] = {}
    ended: set[Job] = set()
    failed: list[Exception] = []
    while waiting or running:
        late = until is not None and time.monotonic() >= until
        while not late and len(running) < workers and (job := _ready(waiting, plan, ended)) is not None:
            waiting.remove(job)
            try:
                running[pool.submit(_do, job)] = job
            except BrokenExecutor as error:  # a process was killed, and none of the others goes on
                return [*failed, error]
        if not running:
            if not late:
                raise RuntimeError(f"{len(waiting)} jobs wait for each other, {_named(waiting[0])} first")
            left = f"{_OWN['name']} has {len(waiting)} jobs left, {_named(waiting[0])} first"
            print(f"OUT OF TIME: {left}", flush=True)
            return [*failed, ConfigError(f"out of time: {left}; the same command goes on")]
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job = running.pop(future)
            ended.add(job)
            try:
                future.result()
            except SameMembersError as error:  # no member is left out and no setting changed: there is no such row
                print(f"NOT TO BE HAD: {_OWN['name']} {_named(job)}: {error}", flush=True)
            except Exception as error:
                traceback.print_exception(error)
                print(f"FAILED: {_OWN['name']} {_named(job)}: {error}", flush=True)
                failed.append(error)
    return failed


def _ready(waiting: Sequence[Job], plan: Plan, ended: Collection[Job]) -> Job | None:
    """The first job all of whose needs have ended, or are none of the plan's."""
    return next((job for job in waiting if all(need in ended or need not in plan for need in plan[job])), None)


def _dependents(plan: Plan) -> dict[Job, set[Job]]:
    """The jobs that wait for each one, those that wait for these, and so on; needs stand before in the plan."""
    dependents: dict[Job, set[Job]] = {job: set() for job in plan}
    for job in reversed(list(plan)):
        for need in plan[job]:
            if need in plan:
                dependents[need] |= {job, *dependents[job]}
    return dependents


def _named(job: Job) -> str:
    step, number, name = job
    return f"{step} {name}, seed {number}"


def _begin(seed: Callable[..., Any], steps: Mapping[str, Callable[..., None]], output: Path, task: Any) -> None:
    torch.set_float32_matmul_precision("high")
    _OWN.clear()
    _OWN.update(make=lambda number: seed(task, number, output), steps=steps, name=task.name)


def _begin_apart(seed: Any, steps: Any, output: Path, kind: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    _begin(seed, steps, output, kind(*arguments))


def _do(job: Job) -> None:
    step, number, name = job
    start = time.monotonic()
    if _OWN.get("number") != number:
        _OWN.update(number=number, seed=_OWN["make"](number))
    try:
        _OWN["steps"][step](_OWN["seed"], name)
    finally:
        torch.compiler.reset()  # a process compiles for models of many shapes, and from the eighth on none would be
        torch.cuda.empty_cache()  # the device is shared
    print(f"{_OWN['name']} {_named(job)}: {time.monotonic() - start:.0f} s", flush=True)


# --- what it costs ---------------------------------------------------------------------------------------------------


def made_with(device: torch.device) -> dict[str, str]:
    """On what, and by which code, a report is made."""
    return {"device": device_name(device), "torch": str(torch.__version__), "version": he.__version__}


def sizes(model: Any) -> dict[str, Any]:
    """What is known of a model's size."""
    if not isinstance(model, he.Ensemble):
        return {}
    described = model.describe()
    return {"parameters": described.parameters, "multiply_adds": described.multiply_adds, "members": model.num_members}


def timed(models: Mapping[str, Any], inputs: Any, device: torch.device) -> dict[str, dict[str, Any]]:
    """Latency and peak memory of models side by side, each as fast as the library runs it; the first is Single."""
    fast = device.type == "cuda"
    settings = {"dtype": torch.bfloat16} if fast else {}
    runs = {
        name: model.optimize(inputs, **settings) if isinstance(model, he.Ensemble) else model
        for name, model in models.items()
    }
    costs = measure_costs(runs, inputs, repeats=50 if fast else 5)
    return {cost.name: {**to_plain(cost), **sizes(models[cost.name])} for cost in costs}


def write_costs(study: Path, device: torch.device, batch: int, rows: Mapping[str, Any]) -> None:
    """What was measured of the rows of a study, and on what; where some rows of before were not, those stay."""
    about = {
        "device": device_name(device),
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
        "torch": torch.__version__,
        "batch": batch,
    }
    path = study / COSTS
    before = read_if_there(path)
    present = before["rows"] if before else rows
    write_json(path, newest_costs(study.name, before, {**about, "rows": dict(rows)}, present))
