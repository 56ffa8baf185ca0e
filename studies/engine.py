"""Run a study of any kind: schedule the jobs of its stages over processes, and measure costs.

A job starts when its dependencies have ended and a process is free. Jobs that take seconds and complete a row come
first, so that a run that is out of time has whole rows; then those with the most dependents.
"""

import gc
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
Job = tuple[str, int, str]  # step, seed, and a name that the step interprets
Plan = Mapping[Job, Sequence[Job]]  # jobs with their dependencies, which may be missing from the plan
_OWN: dict[str, Any] = {}  # state of a process: its task, read once, the folder of the run, and its last seed


@dataclass(frozen=True)
class Run:
    """A request to run: the task, its rows and seeds, and the output folders."""

    task: Any
    output: Path
    results: Path
    rows: Sequence[str]
    seeds: Sequence[int]  # for every row; if empty, each row has its seeds from the recipe

    def of(self, row: str) -> Sequence[int]:
        """The seeds of a row."""
        return self.seeds or self.task.seeds_of(row)


@dataclass(frozen=True)
class Kind:
    """A kind of study: its seeds, the rows of a task, and its stages."""

    seed: Callable[[Any, int, Path], Any]  # from a task, a number and the folder of the run
    rows: Callable[[Any], Mapping[str, Any]]
    steps: Mapping[str, Callable[[Any, str], None]]  # by stage: what a job does with a seed
    jobs: Callable[[Run, str], Plan]  # the jobs of a stage
    ends: Mapping[str, Callable[[Run], None]]  # stages that run in one process
    quick: Collection[str] = ("report", "shift")  # steps that take seconds

    @property
    def stages(self) -> tuple[str, ...]:
        """All stages in order."""
        return (*self.steps, *self.ends)

    def run(self, run: Run, stages: Sequence[str], workers: int = 1, minutes: float | None = None) -> None:
        """Run stages, for all rows unless some are named. Existing results are kept: a stopped run resumes.

        After `minutes` no job is started, and remaining jobs are an error. It is raised, like that of the first failed
        job, when everything else, including costs and storing, is done.
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
            except Exception as error:  # may be caused by a failed job, whose error is the one to raise
                failed.append(error)
        if failed:
            raise failed[0]


class Here(Executor):
    """An executor that runs everything at once in this process."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **settings: Any) -> Future[Any]:
        """Run the function; the future has its result or its error."""
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **settings))
        except Exception as error:
            future.set_exception(error)
        return future


def do_all(
    plan: Plan, pool: Executor, workers: int, quick: Collection[str] = (), until: float | None = None
) -> list[Exception]:
    """Run all jobs of a plan, those of quick steps as early as possible; start none after `until`.

    A failed job is reported and stops no other: its rows will be missing. A seed without distinct members is not a
    failure: it is reported, and the row is missing.
    """
    waited_for = _dependents(plan)
    waiting = sorted(plan, key=lambda job: (job[0] not in quick, -len(waited_for[job])))  # stable sort
    running: dict[Future[None], Job] = {}
    ended: set[Job] = set()
    failed: list[Exception] = []
    while waiting or running:
        late = until is not None and time.monotonic() >= until
        while not late and len(running) < workers and (job := _ready(waiting, plan, ended)) is not None:
            waiting.remove(job)
            try:
                running[pool.submit(_do, job)] = job
            except BrokenExecutor as error:  # a process was killed, and the pool is unusable
                return [*failed, error]
        if not running:
            if not late:
                raise RuntimeError(f"{len(waiting)} jobs wait for each other, {_named(waiting[0])} first")
            left = f"{_OWN['name']} has {len(waiting)} jobs left, {_named(waiting[0])} first"
            print(f"OUT OF TIME: {left}", flush=True)
            return [*failed, ConfigError(f"out of time: {left}; the same command resumes")]
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job = running.pop(future)
            ended.add(job)
            try:
                future.result()
            except SameMembersError as error:  # by design no member or setting is changed: the row is missing
                print(f"UNAVAILABLE: {_OWN['name']} {_named(job)}: {error}", flush=True)
            except Exception as error:
                traceback.print_exception(error)
                print(f"FAILED: {_OWN['name']} {_named(job)}: {error}", flush=True)
                failed.append(error)
    return failed


def _ready(waiting: Sequence[Job], plan: Plan, ended: Collection[Job]) -> Job | None:
    """The first job whose dependencies have all ended or are not in the plan."""
    return next((job for job in waiting if all(need in ended or need not in plan for need in plan[job])), None)


def _dependents(plan: Plan) -> dict[Job, set[Job]]:
    """The direct and indirect dependents of each job; jobs come after their dependencies in the plan."""
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
        _OWN.update(number=None, seed=None)
        gc.collect()  # models refer to themselves: the last seed's would stay, gigabytes of them
        _OWN.update(number=number, seed=_OWN["make"](number))
    try:
        _OWN["steps"][step](_OWN["seed"], name)
    finally:
        torch.compiler.reset()  # a process compiles models of many shapes, and torch stops compiling at the eighth
        torch.cuda.empty_cache()  # the device is shared
    print(f"{_OWN['name']} {_named(job)}: {time.monotonic() - start:.0f} s", flush=True)


# --- costs -----------------------------------------------------------------------------------------------------------


def made_with(device: torch.device) -> dict[str, str]:
    """The device and versions that a report was made with."""
    return {"device": device_name(device), "torch": str(torch.__version__), "version": he.__version__}


def sizes(model: Any) -> dict[str, Any]:
    """Parameters, multiply-adds and members of a model, if known."""
    if not isinstance(model, he.Ensemble):
        return {}
    described = model.describe()
    return {"parameters": described.parameters, "multiply_adds": described.multiply_adds, "members": model.num_members}


def timed(models: Mapping[str, Any], inputs: Any, device: torch.device) -> dict[str, dict[str, Any]]:
    """Latency and peak memory of models, each optimized by the library; the first is Single."""
    fast = device.type == "cuda"
    settings = {"dtype": torch.bfloat16} if fast else {}
    runs = {
        name: model.optimize(inputs, **settings) if hasattr(model, "optimize") else model
        for name, model in models.items()
    }
    costs = measure_costs(runs, inputs, repeats=50 if fast else 5)
    return {cost.name: {**to_plain(cost), **sizes(models[cost.name])} for cost in costs}


def write_costs(study: Path, device: torch.device, batch: int, rows: Mapping[str, Any]) -> None:
    """Write the measured costs of a study's rows with device and dtype; keep the old ones if the new lack some rows."""
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
