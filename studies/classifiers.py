"""A study of classifiers, row by row and seed by seed: what half B chooses, what the test sets say, what it costs.

`choose` measures the settings of a row on half B of the first seed and seals the best one. `report` opens the test
sets, `shift` corrupts them. What is there stays, so that a stopped run goes on; rows and seeds are added one by one,
and may run side by side.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

import hydra_ensembles as he
from hydra_ensembles.files import read_json, write_json
from hydra_ensembles.model.cost import measure_costs
from hydra_ensembles.schema import to_plain

from .evidence import Judged, stored, under_shift
from .measures import Array, plain_numbers, read_columns, write_columns
from .row import rate_of
from .rows import CIRC_AVG, MC_DROPOUT, SINGLE, rows_of
from .samples import SampleBatches, alone, device_name
from .seed import CHOICES, Heads, Seed, slug
from .task import Stage, Task

FORMAT = "hydra_ensembles.study 3"
COSTS, SHIFTED = "costs.json", "shifted.npz"


def choose(seed: Seed, name: str) -> None:
    """Measure every setting of a row on half B, and write down the one with the smallest NLL."""
    row, task = rows_of(seed.task)[name], seed.task
    place, options = seed.study / CHOICES / f"{slug(name)}.json", row.options(task)
    if not options or place.exists():
        return
    measured: list[dict[str, Any]] = []
    for setting in options:
        columns = all_columns(Judged(task, row.make(seed, setting)), "held_out")
        found = plain_numbers(columns, task.suite.id.name, task.groups("held_out"))
        measured.append({"setting": dict(setting), **found})
    best = min(measured, key=lambda one: one["calibrated.nll"])
    write_json(place, {"row": name, "seed": seed.number, "setting": best["setting"], "measured": measured})


def report(seed: Seed, name: str) -> None:
    """Ask a row's model about the test sets, and keep what it says."""
    place, task = seed.folder / "report" / f"{slug(name)}.json", seed.task
    if not place.exists():
        model = rows_of(task)[name].model(seed, name)
        judge = Judged(task, model)
        write_columns(place.with_suffix(".npz"), all_columns(judge, "report"))
        where = {"device": device_name(task.device), "torch": str(torch.__version__), "version": he.__version__}
        write_json(place, {"row": name, "temperature": list(judge.calibration.temperature), **sizes(model), **where})


def shift(seed: Seed, name: str) -> None:
    """Ask a row's model about corrupted test images."""
    place, task = seed.folder / "shift" / f"{slug(name)}.json", seed.task
    if "corruptions" in task.plain and seed.number in task.settings["shift"]["seeds"] and not place.exists():
        write_json(place, under_shift(Judged(task, rows_of(task)[name].model(seed, name)), seed.study / SHIFTED))


def corrupt(seed: Seed, _: str) -> None:
    """Corrupt the test images that all rows are asked about."""
    with alone(seed.study / SHIFTED):
        if not (seed.study / SHIFTED).exists():
            seed.task.corrupt(seed.study / SHIFTED)


def train(seed: Seed, name: str) -> None:
    """Make the fine-tunings that almost every row is made of; `name` says which one."""
    seed.single(int(name))


def option(seed: Seed, name: str) -> None:
    """Make the model of one setting that half B is to choose from; `name` says of which row, and which one."""
    row, _, place = name.rpartition("#")
    found = rows_of(seed.task)[row]
    if not (seed.study / CHOICES / f"{slug(row)}.json").exists():
        found.make(seed, found.options(seed.task)[int(place)])


def recover(seed: Seed, name: str) -> None:
    """Make one member of the paper's, at the rate that was chosen; `name` says by which heads, and which one."""
    kind, _, index = name.partition(" ")
    seed.recovered(cast(Heads, kind), int(index), rate_of(seed.chosen(CIRC_AVG)))


STEPS: Mapping[str, Callable[[Seed, str], None]] = {
    "train": train,
    "corrupt": corrupt,
    "option": option,
    "choose": choose,
    "recover": recover,
    "report": report,
    "shift": shift,
}
STAGES = (*STEPS, "cost", "store")
Job = tuple[str, int, str]  # step, seed, and what of it


def jobs_of(task: Task, stage: str, rows: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """What a stage has to do; its jobs do not wait for each other, but for those of the stages before."""
    first, known = int(task.settings["seeds"][0]), rows_of(task)
    choosing = dict.fromkeys(known[row].like or row for row in rows)  # rows whose settings are chosen
    match stage:
        case "train":
            singles = range(task.settings["members"])
            return [(stage, seed, str(index)) for index in singles for seed in dict.fromkeys((first, *seeds))]
        case "corrupt":
            return [(stage, first, "")] if "corruptions" in task.plain else []
        case "option":
            options = {row: known[row].options(task) for row in choosing}
            return [(stage, first, f"{row}#{place}") for row, found in options.items() for place in range(len(found))]
        case "choose":
            return [(stage, first, row) for row in choosing if known[row].options(task)]
        case "recover":
            named = (known[row].paper or ("circuits", 0) for row in rows)
            members = dict.fromkeys(f"{kind} {index}" for kind, count in named for index in range(count))
            return [(stage, seed, member) for member in members for seed in seeds]
        case "report" | "shift":
            return [(stage, seed, row) for row in rows for seed in seeds]
    return []


def all_columns(judge: Judged, stage: Stage) -> dict[str, Array]:
    """The columns of all sets of a stage, by `set|column`."""
    task = judge.task
    own = stored(judge.columns(task.inside(stage), labelled=True))
    found = {f"{task.suite.id.name}|{key}": one for key, one in own.items()}
    for sets in task.outside(stage).values():
        for name, samples in sets.items():
            found |= {f"{name}|{key}": one for key, one in stored(judge.columns(samples, labelled=False)).items()}
    return found


def sizes(model: Any) -> dict[str, Any]:
    """What is known of a model's size."""
    if not isinstance(model, he.Ensemble):
        return {}
    described = model.describe()
    return {"parameters": described.parameters, "multiply_adds": described.multiply_adds, "members": model.num_members}


def cost(seed: Seed, names: Sequence[str]) -> None:
    """Latency and peak memory of every row's model side by side, each as fast as the library runs it."""
    task, fast = seed.task, seed.task.device.type == "cuda"
    batch = task.settings["cost_batch"]
    inputs = seed.base.prepare(next(iter(SampleBatches(task.half_b, batch)))[0])
    runs: dict[str, Callable[[Any], Any]] = {}
    for name in (SINGLE, *(name for name in names if name != SINGLE)):
        model = rows_of(task)[name].model(seed, name)
        runs[name] = model.optimize(inputs, dtype=torch.bfloat16) if fast and isinstance(model, he.Ensemble) else model
    if fast and MC_DROPOUT in runs:  # draws anew with every call, and runs as it is
        runs[MC_DROPOUT] = torch.autocast("cuda", dtype=torch.bfloat16)(runs[MC_DROPOUT])
    taken = measure_costs(runs, inputs, repeats=50 if fast else 3)
    about = {"device": device_name(task.device), "torch": torch.__version__, "batch": batch}
    write_json(seed.study / COSTS, {**about, "rows": {one.name: to_plain(one) for one in taken}})


def collect(task: Task, output: Path, results: Path) -> None:
    """Every row and seed that is finished: columns, one file a seed, and all else in `NAME.json`."""
    study, runs = output / task.name, dict[str, Any]()
    for number in sorted(int(folder.name.removeprefix("seed-")) for folder in study.glob("seed-*")):
        folder, columns = study / f"seed-{number}", dict[str, Array]()
        runs[str(number)] = {"report": {}, "shift": {}}
        for name in rows_of(task):
            place = folder / "report" / f"{slug(name)}.json"
            if place.exists():
                runs[str(number)]["report"][name] = read_json(place)
                own = read_columns(place.with_suffix(".npz"))
                columns |= {f"{name}|{key}": one for key, one in own.items()}
            if (folder / "shift" / place.name).exists():
                runs[str(number)]["shift"][name] = read_json(folder / "shift" / place.name)
        write_columns(results / task.name / f"seed-{number}.npz", columns)
    facts = {
        "format": FORMAT,
        "study": task.name,
        "recipe": {**task.settings, "tasks": {task.name: task.plain}},
        "inside": task.suite.id.name,
        "groups": task.groups("report"),
        "trainings": {name: row.trainings for name, row in rows_of(task).items()},
        "choices": {one["row"]: one for one in map(read_json, sorted((study / CHOICES).glob("*.json")))},
        "costs": read_json(study / COSTS) if (study / COSTS).exists() else None,
        "runs": runs,
    }
    write_json(results / task.name / "study.json", facts)


def collect_again(task: Task, output: Path, results: Path) -> None:
    """What a second run made once more of a stored study, Single at least, and which of the stored rows are its own.

    A stored row is of this run where all its columns are equal.
    """
    for folder in sorted((output / task.name).glob("seed-*")):
        known, own, twice = read_columns(results / task.name / f"{folder.name}.npz"), [], dict[str, Array]()
        for name in rows_of(task):
            place = folder / "report" / f"{slug(name)}.npz"
            columns = read_columns(place) if place.exists() else {}
            made = {f"{name}|{key}": one for key, one in columns.items()}
            if made and all(key in known and np.array_equal(one, known[key]) for key, one in made.items()):
                own.append(name)
            else:
                twice |= made
        place = results / task.name / f"{folder.name.replace('seed', 'again')}.npz"
        write_columns(place, {"rows": np.array(own), **twice})
