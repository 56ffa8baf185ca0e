"""The engine of all studies: stages that go on where they stopped, sealed records, test sets, evaluation, costs.

What differs between kinds of studies is one subclass of `SeedRun` each: which models there are and which data they
read. Whatever takes long is a product of the run folder of its seed.
"""

import json
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from hydra_ensembles import Ensemble, HeadRanking, __version__, fit_calibration
from hydra_ensembles.batches import move, read_batch
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.heads.ranking import Head
from hydra_ensembles.model.cost import measure_costs
from hydra_ensembles.pipeline.run_folder import RunFolder, write_json
from hydra_ensembles.schema import from_plain, to_plain

from .methods import CALIBRATED, SINGLE, Units, all_units
from .recipe import StudyRecipe, digest_of
from .results import FORMAT, HELD_OUT, Answers, Array, Results, read_arrays, write_arrays
from .samples import SampleBatches, Samples

Group = Literal["id", "near", "far", "apart"]
T = TypeVar("T")

CIRCUIT_SCORES: tuple[Literal["avg", "acc", "ood"], ...] = ("avg", "acc", "ood")
CIRCUIT_BATCH = 100
SPARE = 2  # heads ranked beyond those pruned, for circuits that would otherwise be equal
EVALUATED, COLUMNS, COSTS = "evaluated", "columns.npz", "costs"


@dataclass(frozen=True, eq=False)
class TestSet:
    """A set that methods are held against: the task whose classes it is asked for, and the group it is reported in."""

    __test__ = False  # not a test of pytest's

    task: str
    name: str
    group: Group
    samples: Samples


@dataclass(frozen=True, eq=False)
class TestTask:
    """A task: its domain (of zero-shot tasks) and what its classes are called."""

    __test__ = False

    domain: str | None
    classes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class TestSets:
    """Tasks and their sets; the test set of a task has its name and the group `id`."""

    __test__ = False

    tasks: Mapping[str, TestTask]
    sets: Sequence[TestSet]

    def facts(self) -> dict[str, Any]:
        """Tasks with their sets and counts, as plain data."""
        found: dict[str, Any] = {
            name: {"domain": one.domain, "classes": len(one.classes)} for name, one in self.tasks.items()
        }
        for one in self.sets:
            if one.group == "id":
                found[one.task]["samples"] = len(one.samples)
            else:
                found[one.task].setdefault(one.group, {})[one.name] = len(one.samples)
        return found


class SeedRun(ABC):
    """One seed of a study: its models and data, made when they are first needed."""

    RECORD: ClassVar[type[Any]]
    """What is sealed before test sets are opened."""
    RECORD_STAGE: ClassVar[str]
    """The stage that seals it."""

    def __init__(self, recipe: StudyRecipe, seed: int, output: Path, device: torch.device) -> None:
        self.seed, self.device, self.study = seed, device, output / recipe.name
        self.digest, self.kind, self.cost_batch = digest_of(recipe), recipe.KIND, recipe.cost_batch
        label = f"{recipe.name} seed {seed}"
        self.folder = RunFolder(
            self.study / f"seed-{seed}",
            {"study": recipe.name, "seed": seed, "recipe": to_plain(recipe)},
            what=f"the study {recipe.name}",
            device=device,
            announce=lambda name, seconds: print(f"{label}: {name} {seconds:.2f} s", flush=True),
        )

    @property
    @abstractmethod
    def stages(self) -> Mapping[str, Callable[[], Any]]:
        """What each stage before `evaluate` does."""

    @property
    @abstractmethod
    def record_path(self) -> Path:
        """Where the record lies."""

    @abstractmethod
    def methods(self) -> Mapping[str, Units]:
        """Every method with its units, once the record is sealed."""

    @property
    @abstractmethod
    def held_out(self) -> TestSets:
        """Half B: data that no circuit read and no table reports."""

    @abstractmethod
    def test_sets(self) -> TestSets:
        """Every set that is reported; `open_test_sets` calls it and nobody else does."""

    @abstractmethod
    def answers(self, unit: str, sets: TestSets) -> dict[str, Tensor]:
        """Member logits `[M, N, C]` of a unit on every set, by `task/set`."""

    @abstractmethod
    def whole_model(self, method: str, units: Units) -> Any:
        """A method as one model that answers the inputs of `held_out`, for its cost."""

    @abstractmethod
    def facts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What results say beside columns: facts that all seeds share, and those of this seed."""

    @property
    def calibrates(self) -> Sequence[str]:
        """Methods that get a temperature."""
        return list(self.methods())

    def record(self) -> Any:
        """What was sealed.

        Raises:
            DataError: Nothing was, or it was changed since.
        """
        return unseal(self.RECORD, self.record_path, self.RECORD_STAGE)

    def half_b(self, units: Units) -> dict[str, Tensor]:
        """Member logits of units on the held-out sets, as one ensemble, by `task/set`."""
        parts = [
            self.folder.tensors(f"half-b/{unit}", lambda unit=unit: self.answers(unit, self.held_out))  # type: ignore[misc]
            for unit in units
        ]
        return {key: torch.cat([part[key] for part in parts]).cpu() for key in parts[0]}

    @cached_property
    def held_out_labels(self) -> Tensor:
        """Labels of the ID part of half B."""
        return next(one.samples.labels for one in self.held_out.sets if one.name == HELD_OUT)

    def temperatures(self) -> dict[str, float]:
        """The temperature of each method that gets one, fitted on half B."""

        def make() -> dict[str, float]:
            found, methods = {}, self.methods()
            for method in self.calibrates:
                logits = self.half_b(methods[method])
                inside = next(one for key, one in logits.items() if key.endswith(f"/{HELD_OUT}"))
                found[method] = fit_calibration(inside, self.held_out_labels).calibration.temperature[0]
            return found

        return dict(self.folder.json("temperatures", make))


def run_stages(runs: Sequence[SeedRun], stages: Sequence[str], known: Sequence[str]) -> None:
    """Run stages, each for all seeds; what is in the run folders already is not made again.

    Raises:
        ConfigError: A stage does not exist.
        DataError: Data are missing, or a stage comes before one that it needs.
    """
    unknown = [stage for stage in stages if stage not in known]
    if unknown:
        raise ConfigError(f"stages {unknown} do not exist; choose from {', '.join(known)}")
    for stage in (one for one in known if one in stages):
        for run in runs:
            if stage == "evaluate":
                evaluate(run)
            elif stage == "cost":
                if run is runs[0]:  # costs are those of one seed, measured once
                    measure(run)
            else:
                run.stages[stage]()
            if run.device.type == "cuda":  # the processes of several seeds may share it
                torch.cuda.empty_cache()


def seal(record: Any, path: Path) -> None:
    """Write down a frozen dataclass of choices with its digest, so that nobody changes it unnoticed."""
    write_json(path, {"digest": digest_of(record), "record": to_plain(record)})


def unseal(kind: type[T], path: Path, stage: str) -> T:
    """Read what `seal` wrote.

    Raises:
        DataError: There is none, or it was changed since.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); run the stage `{stage}` first: test sets are opened only after "
            "everything is fixed"
        ) from error
    found = from_plain(kind, plain.get("record"), str(path))
    if digest_of(found) != plain.get("digest"):
        raise DataError(f"{path} was changed after it was written; delete it and run the stage `{stage}` again")
    return found


def open_test_sets(run: SeedRun, record: Any) -> TestSets:
    """Read every set that is reported. The stage `evaluate` is the only caller.

    Whoever calls shows the record that fixed all settings; one made for another recipe does not count.

    Raises:
        DataError: The record belongs to another recipe, or a set is missing.
    """
    if record.recipe != run.digest:
        raise DataError(
            f"the record was made for recipe {record.recipe} and this one is {run.digest}; run the stage "
            f"`{run.RECORD_STAGE}` again before any test set is opened"
        )
    return run.test_sets()


def evaluate(run: SeedRun) -> None:
    """Run every unit on half B and on the test sets; columns go to `columns.npz`, all else to `evaluated.json`."""

    def make() -> dict[str, Any]:
        record = run.record()
        methods, temperatures = run.methods(), run.temperatures()
        tests = open_test_sets(run, record)
        units = {
            unit: {
                **run.half_b((unit,)),
                **run.folder.tensors(f"test/{unit}", lambda unit=unit: run.answers(unit, tests)),  # type: ignore[misc]
            }
            for unit in all_units(methods)
        }
        arrays: dict[str, Array] = {}
        for one in (*run.held_out.sets, *tests.sets):
            place = f"{one.task}/{one.name}"
            answers = Answers(
                units={unit: found[place].cpu() for unit, found in units.items()},
                methods=methods,
                labels=one.samples.labels if one.group == "id" else None,
                temperatures=temperatures,
                calibrated=[name for name in CALIBRATED if name in methods],
            )
            arrays |= {f"{place}/{key}": array for key, array in answers.arrays().items()}
        assert run.folder.path is not None
        write_arrays(run.folder.path / COLUMNS, arrays)
        shared, own = run.facts()
        return {
            "study": {
                "kind": run.kind,
                "methods": {name: list(found) for name, found in methods.items()},
                "units": {unit: len(next(iter(found.values()))) for unit, found in units.items()},
                "calibrated": [name for name in CALIBRATED if name in methods],
                "tasks": tests.facts(),
                "device": device_name(run.device),
                "versions": {"torch": str(torch.__version__), "hydra_ensembles": __version__},
                **shared,
            },
            "seed": {"temperatures": temperatures, "record": digest_of(record), **own},
        }

    run.folder.json(EVALUATED, make)


@torch.no_grad()
def member_logits(model: Any, samples: Samples, batch_size: int, device: torch.device) -> Tensor:
    """Member logits `[M, N, C]` on the CPU; in float32 on every device, so that numbers do not depend on it."""
    pieces = []
    for batch in SampleBatches(samples, batch_size):
        inputs, _ = read_batch(batch)
        pieces.append(model(move(inputs, device, torch.float32)).float().cpu())
    return finite(torch.cat(pieces, dim=1))


def finite(answers: Tensor) -> Tensor:
    """The answers as they are, provided that a model can be trusted to have been trained."""
    if not bool(answers.isfinite().all()):
        raise DataError("a model answered with numbers that are not finite; its training diverged: lower the rate")
    return answers


def measure(run: SeedRun) -> None:
    """Latency of one batch for every method, each run as fast as the library can; ratios to the single model.

    On a GPU the ensembles are frozen, in bfloat16, with the fastest plan and a recorded graph; MC Dropout draws anew
    with every call and runs as it is. A temperature costs nothing and has no row.
    """

    def make() -> dict[str, Any]:
        fast = run.device.type == "cuda"
        held = next(one for one in run.held_out.sets if one.name == HELD_OUT)
        inputs, _ = read_batch(next(iter(SampleBatches(held.samples, run.cost_batch))))
        inputs = move(inputs, run.device, torch.bfloat16 if fast else torch.float32)
        methods = {name: units for name, units in run.methods().items() if name not in CALIBRATED}
        runners: dict[str, Callable[[Any], Any]] = {}
        sizes: dict[str, dict[str, int]] = {}
        for name in sorted(methods, key=lambda name: name != SINGLE):  # the first is what others are held against
            model = run.whole_model(name, methods[name])
            if isinstance(model, Ensemble):
                described = model.describe()
                sizes[name] = {"parameters": described.parameters, "multiply_adds": described.multiply_adds}
                runners[name] = model.optimize(inputs, dtype=torch.bfloat16) if fast else model
            else:
                runners[name] = model.bfloat16() if fast else model
        costs = measure_costs(runners, inputs, repeats=30 if fast else 1, warmup=3 if fast else 0)
        return {
            "device": device_name(run.device),
            "dtype": "bfloat16" if fast else "float32",
            "batch": min(run.cost_batch, len(held.samples)),
            "classes": len(run.held_out.tasks[held.task].classes),
            "costs": {one.name: {**to_plain(one), **sizes.get(one.name, {})} for one in costs},
        }

    run.folder.json(COSTS, make)


def device_name(device: torch.device) -> str:
    """What a reader calls the machine's accelerator."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def collect(recipe: StudyRecipe, output: Path) -> Results:
    """The seeds of a run folder as one study, still without tables.

    Raises:
        DataError: A seed of the recipe is not finished, or the seeds do not belong together.
    """
    study = output / recipe.name
    found: dict[int, Any] = {}
    arrays: dict[str, Array] = {}
    for seed in recipe.seeds:
        folder = study / f"seed-{seed}"
        try:
            found[seed] = json.loads((folder / f"{EVALUATED}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"seed {seed} of {recipe.name} is not finished ({error}); run its stage `evaluate`"
            ) from error
        arrays |= {f"{seed}/{key}": array for key, array in read_arrays(folder / COLUMNS).items()}
    first = found[recipe.seeds[0]]
    differ = sorted(
        {key for one in found.values() for key in first["study"] if one["study"].get(key) != first["study"][key]}
    )
    if differ:
        raise DataError(f"the seeds of {recipe.name} differ in {differ}; run them again with the same data and machine")
    costs = [study / f"seed-{seed}" / f"{COSTS}.json" for seed in recipe.seeds]
    measured = [json.loads(path.read_text(encoding="utf-8")) for path in costs if path.exists()]
    facts = {
        "format": FORMAT,
        "study": recipe.name,
        "seeds": list(recipe.seeds),
        "recipe": to_plain(recipe),
        **first["study"],
        **{key: {str(seed): one["seed"][key] for seed, one in found.items()} for key in first["seed"]},
        "costs": measured[0] if measured else None,
    }
    return Results(facts, arrays)


def distinct(rankings: Sequence[HeadRanking], count: int) -> tuple[tuple[Head, ...], ...]:
    """The first heads of each ranking; one that would repeat an earlier member goes a head further for its last."""
    chosen: list[tuple[Head, ...]] = []
    for ranking in rankings:
        for last in range(count - 1, len(ranking)):
            heads = (*ranking.heads[: count - 1], ranking.heads[last])
            if all(set(heads) != set(other) for other in chosen):
                chosen.append(heads)
                break
        else:
            raise ConfigError(f"the circuits remove the same {count} heads of {len(ranking)}; prune another number")
    return tuple(chosen)
