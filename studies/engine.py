"""The engine of all studies: stages that go on where they stopped, sealed records, test sets, evaluation, costs.

What differs between kinds of studies is one subclass of `SeedRun` each: which models there are and which data they
read. Whatever takes long is a product of the run folder of its seed.
"""

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hydra_ensembles import Ensemble, HeadRanking, __version__, extract_circuit, fit_calibration
from hydra_ensembles.batches import move, read_batch
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.files import checksum, read_object, write_json
from hydra_ensembles.heads.members import Members, Score
from hydra_ensembles.heads.ranking import Head
from hydra_ensembles.model.cost import measure_costs
from hydra_ensembles.run_folder import RunFolder, read_finished
from hydra_ensembles.schema import from_plain, to_plain

from .methods import CALIBRATED, SINGLE, Units, all_units
from .recipe import ClassifierRecipe, digest_of
from .results import FORMAT, HELD_OUT, Array, Results, read_arrays, stored_columns, write_arrays
from .samples import SampleBatches, Samples

Group = Literal["id", "near", "far", "apart"]
CIRCUIT_BATCH = 100
SPARE = 2  # heads ranked beyond those pruned, for circuits that would otherwise be equal
EVALUATED, COLUMNS, COSTS = "evaluated", "columns.npz", "costs"


@dataclass(frozen=True, eq=False)
class StudySet:
    """A set that methods are held against."""

    task: str  # whose classes it is asked for; the test set of a task has its name
    name: str
    group: Group  # what it is reported in; `apart` is in no mean
    samples: Samples
    classes: tuple[str, ...]  # what those of the task are called
    domain: str | None = None  # of zero-shot tasks: `seen` or `unseen`

    @property
    def place(self) -> str:
        """Its key among answers and columns."""
        return f"{self.task}/{self.name}"


class SeedRun(ABC):
    """One seed of a study: its models and data, made when they are first needed."""

    RECORD: ClassVar[type[Any]]  # what is sealed before test sets are opened
    RECORD_STAGE: ClassVar[str]  # the stage that seals it

    def __init__(self, recipe: ClassifierRecipe, seed: int, output: Path, device: torch.device) -> None:
        self.seed, self.device, self.study = seed, device, output / recipe.name
        self.digest, self.cost_batch = digest_of(recipe), recipe.cost_batch
        self.kind, self.known = recipe.KIND, recipe.STAGES
        self.path = self.study / f"seed-{seed}"
        self.folder = RunFolder(
            self.path,
            {"study": recipe.name, "seed": seed, "recipe": to_plain(recipe)},
            what=f"the study {recipe.name}",
            device=device,
            announce=lambda name, seconds: print(f"{recipe.name} seed {seed}: {name} {seconds:.2f} s", flush=True),
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
    def calibrates(self) -> Sequence[str]:
        """Methods that get a temperature."""

    @property
    @abstractmethod
    def held_out(self) -> Sequence[StudySet]:
        """Half B: data that no circuit read and no table reports; ID data first."""

    @abstractmethod
    def test_sets(self) -> Sequence[StudySet]:
        """Every set that is reported, the test set of a task before its others; only `open_test_sets` calls it."""

    @abstractmethod
    def answers(self, unit: str, sets: Sequence[StudySet]) -> dict[str, Tensor]:
        """Member logits `[M, N, C]` of a unit on every set, by its place."""

    @abstractmethod
    def whole_model(self, method: str, units: Units) -> Any:
        """A method as one model that answers the inputs of `held_out`, for its cost."""

    @abstractmethod
    def facts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What results say beside columns: facts that all seeds share, and those of this seed."""

    def seal(self, record: Any) -> None:
        """Write down a frozen dataclass of choices with its digest, so that nobody changes it unnoticed."""
        write_json(self.record_path, {"digest": digest_of(record), "record": to_plain(record)})

    def record(self) -> Any:
        """What was sealed; refused where nothing was, or where it was changed since."""
        path, stage = self.record_path, self.RECORD_STAGE
        try:
            plain = read_object(path)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read ({error}); run the stage `{stage}` first: test sets are opened only after "
                "everything is fixed"
            ) from error
        found = from_plain(self.RECORD, plain.get("record"), str(path))
        if digest_of(found) != plain.get("digest"):
            raise DataError(f"{path} was changed after it was written; delete it and run the stage `{stage}` again")
        return found

    def half_b(self, *units: str) -> dict[str, Tensor]:
        """Member logits of units on the held-out sets, as one ensemble, by place."""

        def asked(unit: str) -> dict[str, Tensor]:
            return self.folder.tensors(f"half-b/{unit}", lambda: self.answers(unit, self.held_out))

        parts = [asked(unit) for unit in units]
        return {key: torch.cat([part[key] for part in parts]).cpu() for key in parts[0]}

    @cached_property
    def held_out_labels(self) -> Tensor:
        """Labels of the ID part of half B."""
        return self.held_out[0].samples.labels

    def temperatures(self) -> dict[str, float]:
        """The temperature of each method that gets one, fitted on half B."""

        def fitted(units: Units) -> float:
            inside = next(one for key, one in self.half_b(*units).items() if key.endswith(f"/{HELD_OUT}"))
            return fit_calibration(inside, self.held_out_labels).calibration.temperature[0]

        def make() -> dict[str, float]:
            methods = self.methods()
            return {method: fitted(methods[method]) for method in self.calibrates}

        return dict(self.folder.json("temperatures", make))

    def extracted(self, name: str, score: Score, budget: int, ready: Callable[[], tuple[Any, ...]]) -> HeadRanking:
        """A circuit; a longer one goes on where a shorter one of the same name ended.

        `ready` gives what it is extracted from: the model, ID samples, OOD samples, and further options.
        """

        def make() -> HeadRanking:
            model, *data, options = ready()
            inside, outside = (SampleBatches(samples, CIRCUIT_BATCH) for samples in data)
            options |= {"score": score, "budget": budget, "journal": self.folder.place(f"rankings/{name}.journal")}
            as_the_paper: dict[str, Any] = {"method": "exact", "ties": "order", "progress": False}
            return extract_circuit(model, inside, outside, **as_the_paper | options)

        return self.folder.ranking(f"rankings/{name}-{budget}", make)


def run_stages(runs: Sequence[SeedRun], stages: Sequence[str] = ()) -> None:
    """Run stages (all of them by default), each for all seeds; what is in the run folders already is not made again."""
    known = runs[0].known
    unknown = [stage for stage in stages if stage not in known]
    if unknown:
        raise ConfigError(f"stages {unknown} do not exist; choose from {', '.join(known)}")
    for stage in (one for one in known if one in (stages or known)):
        for run in runs:
            if stage == "evaluate":
                evaluate(run)
            elif stage != "cost":
                run.stages[stage]()
            elif run is runs[0]:  # costs are those of one seed, measured once
                measure(run)
            if run.device.type == "cuda":  # the processes of several seeds may share it
                torch.cuda.empty_cache()


def open_test_sets(run: SeedRun, record: Any) -> Sequence[StudySet]:
    """Read every set that is reported. The stage `evaluate` is the only caller.

    Whoever calls shows the record that fixed all settings; one made for another recipe does not count.
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

        def asked(unit: str) -> dict[str, Tensor]:
            found = run.folder.tensors(f"test/{unit}", lambda: run.answers(unit, tests))
            return {**run.half_b(unit), **{place: logits.cpu() for place, logits in found.items()}}

        units = {unit: asked(unit) for unit in all_units(methods)}
        calibrated = [name for name in CALIBRATED if name in methods]
        arrays: dict[str, Array] = {}
        tasks: dict[str, Any] = {}
        for one in (*run.held_out, *tests):
            own = {unit: found[one.place] for unit, found in units.items()}
            labels = one.samples.labels if one.group == "id" else None
            made = stored_columns(own, methods, labels, temperatures, calibrated)
            arrays |= {f"{one.place}/{key}": array for key, array in made.items()}
        for one in tests:
            if one.group == "id":
                tasks[one.task] = {"domain": one.domain, "classes": len(one.classes), "samples": len(one.samples)}
            else:
                tasks[one.task].setdefault(one.group, {})[one.name] = len(one.samples)
        write_arrays(run.path / COLUMNS, arrays)
        digest = checksum(run.path / COLUMNS)
        shared, own_facts = run.facts()
        return {
            "study": {
                "kind": run.kind,
                "methods": {name: list(found) for name, found in methods.items()},
                "units": {unit: len(next(iter(found.values()))) for unit, found in units.items()},
                "calibrated": calibrated,
                "calibrates": "probs",
                "tasks": tasks,
                "device": device_name(run.device),
                "versions": {"torch": str(torch.__version__), "hydra_ensembles": __version__},
                **shared,
            },
            "seed": {"temperatures": temperatures, "record": digest_of(record), **own_facts},
            "columns": digest,
        }

    run.folder.json(EVALUATED, make)
    require_own_record(run)


def require_own_record(run: SeedRun) -> None:
    """Refuse a seed whose numbers were made under another sealed record than it holds now."""
    file = run.path / f"{EVALUATED}.json"
    if file.exists() and read_object(file)["seed"]["record"] != digest_of(run.record()):
        raise DataError(f"{run.path} was evaluated by another record; delete it and run the seed again")


@torch.no_grad()
def answered(ask: Callable[[Any], Tensor], samples: Samples, batch_size: int, device: torch.device) -> Tensor:
    """What a model says `[M, N, …]` batch by batch; in float32 on every device, so that numbers do not depend on it."""
    pieces = []
    for batch in SampleBatches(samples, batch_size):
        inputs, _ = read_batch(batch)
        pieces.append(ask(move(inputs, device, torch.float32)).float())
    found = torch.cat(pieces, dim=1)
    if not bool(found.isfinite().all()):
        raise DataError("a model answered with numbers that are not finite; its training diverged: lower the rate")
    return found


def measure(run: SeedRun) -> None:
    """Latency of one batch for every method, each run as fast as the library can; ratios to the single model.

    On a GPU the ensembles are frozen, in bfloat16, with the fastest plan and a recorded graph; MC Dropout draws anew
    with every call and runs as it is. A temperature costs nothing and has no row.
    """

    def make() -> dict[str, Any]:
        fast, held = run.device.type == "cuda", run.held_out[0]
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
            "classes": len(held.classes),
            "costs": {one.name: {**to_plain(one), **sizes.get(one.name, {})} for one in costs},
        }

    run.folder.json(COSTS, make)


def device_name(device: torch.device) -> str:
    """What a reader calls the machine's accelerator."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def collect(recipe: ClassifierRecipe, output: Path) -> Results:
    """The seeds of a run folder as one study, still without tables; all must be finished, with the same facts."""
    folders = {seed: output / recipe.name / f"seed-{seed}" for seed in recipe.seeds}
    found: dict[int, Any] = {}
    arrays: dict[str, Array] = {}
    for seed, folder in folders.items():
        try:
            found[seed] = read_finished(folder, f"{EVALUATED}.json")
            if found[seed].get("columns") not in (None, checksum(folder / COLUMNS)):  # of before: not known
                raise DataError(f"{folder / COLUMNS} was changed after it was written")
        except (OSError, ValueError) as error:
            raise DataError(f"seed {seed} of {recipe.name} is not finished ({error}); run `evaluate`") from error
        arrays |= {f"{seed}/{key}": array for key, array in read_arrays(folder / COLUMNS).items()}
    first = found[recipe.seeds[0]]
    shared = [one["study"] for one in found.values()]
    differ = [key for key, value in first["study"].items() if any(one.get(key) != value for one in shared)]
    if differ:
        raise DataError(f"the seeds of {recipe.name} differ in {differ}; run them again with the same data and machine")
    costs = [folder / f"{COSTS}.json" for folder in folders.values()]
    facts = {
        "format": FORMAT,
        "study": recipe.name,
        "seeds": list(recipe.seeds),
        "recipe": to_plain(recipe),
        **first["study"],
        **{key: {str(seed): one["seed"][key] for seed, one in found.items()} for key in first["seed"]},
        "costs": next((read_finished(path.parent, path.name) for path in costs if path.exists()), None),
    }
    return Results(facts, arrays)


def distinct(rankings: Sequence[HeadRanking], count: int) -> Members:
    """The first heads of each ranking; one that would repeat an earlier member goes a head further for its last."""
    chosen: list[tuple[Head, ...]] = []
    for ranking in rankings:
        options = [(*ranking.heads[: count - 1], last) for last in ranking.heads[count - 1 :]]
        new = (heads for heads in options if all(set(heads) != set(other) for other in chosen))
        heads = next(new, None)
        if heads is None:
            raise ConfigError(f"the circuits remove the same {count} heads of {len(ranking)}; prune another number")
        chosen.append(heads)
    return tuple(chosen)
