"""The engine of every study: data and methods go in, rows come out.

A *task* has data, by purpose, and methods; a *lab* is one seed of it, whose models and rankings are made once and
kept in its folder; a *method* makes a model in a lab. `run` chooses the settings of each method on held-out data of the
first seed, opens the test sets, and stores what every method says of each sample: a stopped run resumes. Seeds may run
in several processes at once, after the first seed has chosen.
"""

import gc
import re
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

import hydra_ensembles as he
from hydra_ensembles import HeadRanking, Prediction
from hydra_ensembles._utils import derive_seed
from hydra_ensembles.calibrate import fit_temperature
from hydra_ensembles.errors import ConfigError, DataError, SameMembersError
from hydra_ensembles.files import read_json
from hydra_ensembles.metrics.probabilities import at_labels, squared_errors
from hydra_ensembles.model.cost import measure_costs
from hydra_ensembles.model.metadata import Calibration
from hydra_ensembles.store import TENSORS, Form, Store

from .measures import SPREAD, plain_numbers
from .rows import SINGLE, Array, Rows, write_rows
from .samples import SampleBatches, Samples
from .tables import Study, write_csv, write_tables

CIRCUIT_MEMORY = 4e9  # bytes a circuit may use, so that several processes fit on a GPU
MODELS: Form[Any] = Form("", he.load, lambda path, model: model.save_pretrained(path))
RANKINGS: Form[HeadRanking] = Form(".json", HeadRanking.load, lambda path, ranking: ranking.save(path))
Stage = Literal["held_out", "report", "shift"]
Setting = Mapping[str, Any]
Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Set:
    """A set that methods answer: of a task (its test set has its name), with its group and the task's classes."""

    task: str
    name: str
    group: str  # `id`, `held-out`, `near`, `far` or `shift`
    samples: Samples
    classes: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Its name in rows."""
        return f"{self.task}|{self.name}"

    @property
    def labelled(self) -> bool:
        """Whether its labels are the task's."""
        return self.group in ("id", "held-out", "shift")


@dataclass(frozen=True)
class Method:
    """A method: its model in a lab with a setting, and the full model trainings that it needs, including Single's."""

    make: Callable[[Any, Any], Any]  # from a lab and a setting (zero-shot: class names)
    trainings: float = 1
    settings: Callable[[Any], Sequence[Setting]] = lambda _: ()  # that held-out data chooses from
    like: str | None = None  # the method whose setting it uses


class Task(ABC):
    """The data of a study by purpose, and its methods."""

    name: str
    device: torch.device

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """All settings that decide its models."""

    @property
    @abstractmethod
    def methods(self) -> Mapping[str, Method]:
        """The methods, in the order of the tables."""

    @abstractmethod
    def seeds_of(self, method: str) -> Sequence[int]:
        """The seeds of a method in the report."""

    @abstractmethod
    def sets(self, stage: Stage) -> Iterator[Set]:
        """The sets of a stage, every task's test set before its OOD sets."""

    @abstractmethod
    def calibration(self) -> Set:
        """Held-out ID samples that fit the temperatures, and nothing else."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What the rows' file says: the OOD sets by task and group, and facts for tables."""

    @abstractmethod
    def lab(self, number: int, store: Store, choices: Path) -> "Lab":
        """One seed."""

    @property
    def ranking_precision(self) -> str:
        """The precision of products while heads are ranked: small differences decide."""
        return "highest"

    def batches(self, samples: Samples) -> SampleBatches:
        """Batches for evaluation."""
        return SampleBatches(samples, 500)


class Lab(ABC):
    """One seed of a task: makes each model and ranking once, and keeps it in its folder."""

    def __init__(self, task: Any, number: int, store: Store, choices: Path) -> None:
        self.task, self.number, self.store, self.choices = task, number, store, choices
        self._once: dict[Any, Any] = {}

    @abstractmethod
    def answering(self, method: str, setting: Setting) -> Callable[[Set], Prediction]:
        """How a method answers the samples of a set, before calibration."""

    @abstractmethod
    def whole(self, method: str) -> Any:
        """A method as one model, for its size and speed."""

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """A value that is made on first use and stays in memory."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]

    def derived(self, *purpose: str | int) -> int:
        """A random seed for a purpose, the same on every machine."""
        return derive_seed(self.number, *purpose) % (1 << 31)

    def kept(self, name: str, make: Callable[[], Made]) -> Made:
        """A model by name."""
        return self.store.step(f"models/{name}", make, MODELS).to(self.task.device).eval()

    def ranked(self, name: str, rank: Callable[[], HeadRanking]) -> HeadRanking:
        """A ranking by name; computed in full float32 unless the task says otherwise."""
        return self.store.step(f"rankings/{name}", lambda: products(self.task.ranking_precision)(rank)(), RANKINGS)

    def extracted(self, name: str, sides: Callable[[], tuple[Any, ...]], **how: Any) -> HeadRanking:
        """An exact circuit by name; `sides` returns the model, ID and OOD batches, and optionally class names."""

        def extract() -> HeadRanking:
            model, inside, outside, *names = sides()
            settings: dict[str, Any] = {"method": "exact", "max_memory": CIRCUIT_MEMORY, "progress": False, **how}
            return he.extract_circuit(
                model, inside, outside, **settings, **({"class_names": names[0]} if names else {})
            )

        return self.ranked(name, extract)

    def setting(self, method: str) -> Setting:
        """The setting that held-out data chose for a method; the only one, or none, if there was nothing to choose."""
        name = self.task.methods[method].like or method
        options = self.task.methods[name].settings(self.task)
        if len(options) < 2:
            return options[0] if options else {}
        path = self.choices / f"{slug(name)}.json"
        if not path.exists():
            raise DataError(f"no setting of {name!r} is chosen yet for {self.task.name}; run its first seed")
        return read_json(path)["setting"]


def slug(name: str) -> str:
    """The name of a method in file names."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Multiply with another precision: `highest` is full float32, where studies otherwise use TF32 (`high`)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# --- columns ---------------------------------------------------------------------------------------------------------


def columns_of(lab: Lab, method: str, setting: Setting, stage: Stage) -> tuple[dict[str, Array], dict[str, Any]]:
    """What a method says of the sets of a stage, as `TASK|SET|COLUMN`, and its temperature."""
    answer = lab.answering(method, setting)
    held = lab.task.calibration()
    logits = answer(held).member_logits
    calibration = temperature_of(logits, held.samples.labels)
    scaled = getattr(lab.task.methods[method], "calibrated", False)
    columns: dict[str, Array] = {}
    for one in lab.task.sets(stage):
        answers = answer(one)
        after = calibration.prediction(answers.member_logits)
        if scaled:
            answers = Prediction.from_logits(after.log_probs[None])  # [1, N, C]
        labels = one.samples.labels.to(answers.label.device) if one.labelled else None
        columns |= {f"{one.place}|{name}": column for name, column in of_set(answers, after, labels).items()}
    return columns, {"temperature": calibration.temperature}


def temperature_of(member_logits: Tensor, labels: Tensor) -> Calibration:
    """The calibration of a method's answers to held-out samples."""
    return Calibration(fit_temperature(member_logits, labels.to(member_logits.device)))


def of_set(answers: Prediction, after: Prediction, labels: Tensor | None) -> dict[str, Array]:
    """The columns of a set, `[N]` each: scores, and with labels what is right and the losses; see `rows`."""
    scores: tuple[Any, ...] = () if answers.unfamiliarity is None else answers.unfamiliarity.score_names
    columns: dict[str, Tensor] = {"doubt": answers.score("msp")}
    columns |= {name: answers.score(name) for name in ("entropy", SPREAD, *scores)}
    if labels is not None:
        columns |= {"label": labels, "prediction": answers.label, "correct": answers.label == labels}
        for prefix, given in (("", answers), ("calibrated_", after)):
            columns[f"{prefix}nll"] = -at_labels(given.probs, labels).log()
            columns[f"{prefix}brier"] = squared_errors(given.probs, labels)
        columns["calibrated_doubt"] = after.probs.scatter(-1, after.label[:, None], 0.0).sum(dim=-1)
    if not all(bool(column.isfinite().all()) for column in columns.values()):
        raise DataError("a model answered with numbers that are not finite; its training diverged: lower the rate")
    kept = {k: v.clamp(-60000, 60000).half() if v.is_floating_point() else v for k, v in columns.items()}
    return {name: column.cpu().numpy() for name, column in kept.items()}


def held_out_numbers(lab: Lab, method: str, setting: Setting) -> dict[str, float]:
    """Metrics of a method on the held-out sets of a study with one task."""
    columns, _ = columns_of(lab, method, setting, "held_out")
    groups: dict[str, list[str]] = {}
    for one in lab.task.sets("held_out"):
        groups.setdefault(one.group, []).append(one.name)
    (inside,) = groups.pop("id")
    return plain_numbers({key.removeprefix(f"{inside}|"): value for key, value in columns.items()}, inside, groups)


# --- a run -----------------------------------------------------------------------------------------------------------


def run(
    task: Task,
    output: Path,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    stages: Sequence[str] = ("choose", "report", "shift", "cost", "tables"),
) -> Path:
    """Run a study, for all methods and the seeds of the recipe unless some are named; returns its folder.

    A method that fails is told and stops no other; the first error is raised at the end. A seed without distinct
    members is not a failure: the method is missing.
    """
    if unknown := [method for method in methods if method not in task.methods]:
        raise ConfigError(f"there are no methods {unknown} of {task.name}; it has {list(task.methods)}")
    folder = output / task.name
    failed: list[Exception] = []
    chosen = [method for method in task.methods if not methods or method in methods]
    by_method = {method: list(seeds or task.seeds_of(method)) for method in chosen}
    numbers = sorted({seed for one in by_method.values() for seed in one})
    steps: dict[str, Callable[[Lab, str, Any], None]] = {"choose": choose, "report": report, "shift": report}
    for number in numbers:
        with opened(task, folder, number) as lab:
            for method in (method for method in chosen if number in by_method[method]):
                for stage in stages:
                    if stage in steps:
                        failed += attempted(steps[stage], lab, method, stage)
            if "cost" in stages and number == numbers[0]:
                failed += attempted(lambda lab, *_: cost(lab, chosen), lab, "cost", "")
        gc.collect()
    if "tables" in stages:
        collect(task, folder)
    if failed:
        raise failed[0]
    return folder


@contextmanager
def opened(task: Task, folder: Path, number: int) -> Iterator[Lab]:
    """One seed of a task, with its folder open."""
    torch.set_float32_matmul_precision("high")
    with Store(folder / f"seed-{number}", task.identity, "a study") as store:
        yield task.lab(number, store, folder / "choices")


def attempted(step: Callable[[Lab, str, Any], None], lab: Lab, method: str, stage: str) -> list[Exception]:
    """Do a step; an error is told and returned."""
    told = f"{lab.task.name} {stage} {method}, seed {lab.number}"
    try:
        step(lab, method, stage)
    except SameMembersError as error:  # by design no member or setting is changed
        print(f"UNAVAILABLE: {told}: {error}", flush=True)
    except Exception as error:
        traceback.print_exception(error)
        print(f"FAILED: {told}: {error}", flush=True)
        return [error]
    finally:
        torch.compiler.reset()  # a process compiles models of many shapes
        if lab.task.device.type == "cuda":
            torch.cuda.empty_cache()
    return []


def choose(lab: Lab, method: str, _: str = "") -> None:
    """Measure every setting of a method on held-out data, and store the one with the smallest NLL.

    A setting that cannot be measured, because its training diverged, is told and left out; raises if none is left.
    """
    name = lab.task.methods[method].like or method
    options = lab.task.methods[name].settings(lab.task)
    if len(options) < 2:
        return
    if name != SINGLE and lab.task.methods[SINGLE].settings(lab.task):
        choose(lab, SINGLE)

    def measured() -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        left_out: list[dict[str, Any]] = []
        for setting in options:
            try:
                found.append({"setting": dict(setting), **held_out_numbers(lab, name, setting)})
            except DataError as error:
                print(f"LEFT OUT: {lab.task.name} {name} {dict(setting)}: {error}", flush=True)
                left_out.append({"setting": dict(setting), "why": str(error)})
        if not found:
            raise DataError(f"no setting of {name!r} is left for {lab.task.name}; the last: {left_out[-1]['why']}")
        best = min(found, key=lambda one: one["calibrated.nll"])
        return {"method": name, "seed": lab.number, "setting": best["setting"], "measured": found, "left_out": left_out}

    if not (lab.choices / f"{slug(name)}.json").exists():
        with Store(lab.choices, lab.task.identity, "the choices of a study") as store:
            store.step(slug(name), measured)


def report(lab: Lab, method: str, stage: Stage) -> None:
    """Store what a method says of the test sets, or of the corrupted ones."""
    place = f"{stage}/{slug(method)}"
    if lab.store.has(place, TENSORS) or not any(True for _ in lab.task.sets(stage)):
        return
    columns, facts = columns_of(lab, method, lab.setting(method), stage)
    if stage == "report":
        lab.store.step(f"facts/{slug(method)}", lambda: {"method": method, **facts, **sizes(lab.whole(method))})
    lab.store.step(place, lambda: {name: torch.from_numpy(column) for name, column in columns.items()}, TENSORS)


def sizes(model: Any) -> dict[str, Any]:
    """Parameters, multiply-adds and members of a model, if known."""
    if not isinstance(model, he.Ensemble):
        return {}
    described = model.describe()
    return {"parameters": described.parameters, "multiply_adds": described.multiply_adds, "members": model.num_members}


def cost(lab: Lab, methods: Iterable[str]) -> None:
    """Measure latency and peak memory of the methods, each optimized by the library and beside Single."""
    device = lab.task.device
    fast = device.type == "cuda"
    models = {
        name: lab.whole(name) for name in dict.fromkeys((SINGLE, *methods)) if lab.store.has(f"facts/{slug(name)}")
    }
    samples = lab.task.calibration().samples
    inputs = models[SINGLE].prepare(next(iter(SampleBatches(samples, 128 if fast else 8)))[0])
    settings = {"dtype": torch.bfloat16} if fast else {}
    runs = {name: one.optimize(inputs, **settings) if hasattr(one, "optimize") else one for name, one in models.items()}
    costs = measure_costs(runs, inputs, repeats=50 if fast else 5)
    about = torch.cuda.get_device_name(device) if fast else "CPU"
    memory = {name: peak_memory(one, inputs) if fast else None for name, one in runs.items()}
    lines = [[one.name, one.latency_ms, one.latency_ratio, memory[one.name], about] for one in costs]
    head = ["method", "milliseconds", "time", "peak_memory_bytes", "device"]
    write_csv(lab.choices.parent / "tables" / f"{lab.task.name}_times.csv", [head, *lines])


def peak_memory(run: Any, inputs: Any) -> int:
    """Bytes of the weights, plus the peak allocation of one run on a GPU; other models there do not count."""
    if hasattr(run, "choice_for"):  # optimized: its graphs allocated at recording, so the module behind them runs
        inputs = run.prepare(inputs)
        run = run.module(run.choice_for(inputs).plan)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        run(inputs)
    torch.cuda.synchronize()
    weights = [*run.parameters(), *run.buffers()] if isinstance(run, torch.nn.Module) else []
    return sum(one.nbytes for one in weights) + torch.cuda.max_memory_allocated() - before


def collect(task: Task, folder: Path) -> None:
    """Write the rows of all finished methods and seeds, and the tables made from them."""
    by_run: dict[tuple[str, int], dict[str, Array]] = {}
    facts: list[tuple[str, int, float, Any]] = []
    numbers = sorted(int(path.name.removeprefix("seed-")) for path in folder.glob("seed-*"))
    for method in task.methods:
        for number in numbers:
            with Store(folder / f"seed-{number}", task.identity, "a study") as store:
                columns: dict[str, Array] = {}
                for stage in ("report", "shift"):
                    if store.has(place := f"{stage}/{slug(method)}", TENSORS):
                        columns |= {key: one.numpy() for key, one in store.step(place, dict, TENSORS).items()}
                if columns:
                    by_run[method, number] = columns
                    facts.append(
                        (method, number, task.methods[method].trainings, store.step(f"facts/{slug(method)}", dict))
                    )
    if not by_run:
        raise DataError(f"{folder} has no finished methods; run the stage `report`")
    about = {"study": task.name, **task.about()}
    write_rows(folder / "rows.parquet", about, by_run)
    keys = ("members", "parameters", "multiply_adds", "temperature")
    lines = [[method, seed, trainings, *(one.get(key) for key in keys)] for method, seed, trainings, one in facts]
    write_csv(folder / "tables" / f"{task.name}_models.csv", [["method", "seed", "trainings", *keys], *lines])
    write_csv(folder / "tables" / f"{task.name}_choices.csv", choices_lines(folder / "choices"))
    write_tables(Study(Rows.read(folder / "rows.parquet")), folder / "tables")


def choices_lines(folder: Path) -> Iterator[Sequence[Any]]:
    """What held-out data said of every setting, and which was taken."""
    keys = ("accuracy", "calibrated.nll", "all.auroc")
    yield "method", "setting", *keys, "chosen"
    for choice in (read_json(path) for path in sorted(folder.glob("*.json")) if path.name != "run.json"):
        for one in choice["measured"]:
            taken = "taken" if one["setting"] == choice["setting"] else ""
            yield choice["method"], one["setting"], *(one.get(key) for key in keys), taken
        for one in choice.get("left_out", ()):
            yield choice["method"], one["setting"], "", "", "", "left out"
