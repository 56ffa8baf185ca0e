"""A study of classifiers, row by row and seed by seed: what half B chooses, what the test sets say, what it costs.

`choose` measures the settings of a row on half B of the first seed and seals the best one. `report` opens the test
sets, `shift` corrupts them. What is there stays, so that a stopped run goes on; rows and seeds are added one by one,
and may run side by side.
"""

import hashlib
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
    """Latency and peak memory of the rows that are reported, side by side, each as fast as the library runs it."""
    task, fast = seed.task, seed.task.device.type == "cuda"
    batch = task.settings["cost_batch"]
    inputs = seed.base.prepare(next(iter(SampleBatches(task.half_b, batch)))[0])
    runs: dict[str, Callable[[Any], Any]] = {}
    there = [name for name in names if name != SINGLE and (seed.folder / "report" / f"{slug(name)}.json").exists()]
    for name in (SINGLE, *there):
        model = rows_of(task)[name].model(seed, name)
        runs[name] = model.optimize(inputs, dtype=torch.bfloat16) if fast and isinstance(model, he.Ensemble) else model
    if fast and MC_DROPOUT in runs:  # draws anew with every call, and runs as it is
        runs[MC_DROPOUT] = torch.autocast("cuda", dtype=torch.bfloat16)(runs[MC_DROPOUT])
    taken = measure_costs(runs, inputs, repeats=50 if fast else 3)
    about = {"device": device_name(task.device), "torch": torch.__version__, "batch": batch}
    write_json(seed.study / COSTS, {**about, "rows": {one.name: to_plain(one) for one in taken}})


def collect(task: Task, output: Path, results: Path) -> None:
    """Every row and seed that is finished, beside what is stored: columns, one file a seed, all else in `study.json`.

    Runs that share no models have a Single each. One with all rows of a stored seed takes its place; of another, rows
    that are not stored yet are added, and `again-N-….npz` has the Single that they are held against.
    """
    study, place = output / task.name, results / task.name
    known = read_json(place / "study.json") if (place / "study.json").exists() else {}
    runs = dict(known.get("runs", {}))
    for number in sorted(int(folder.name.removeprefix("seed-")) for folder in study.glob("seed-*")):
        folder, file = study / f"seed-{number}", place / f"seed-{number}.npz"
        found = {kind: _finished(task, folder / kind) for kind in ("report", "shift")}
        columns = {name: read_columns(folder / "report" / f"{slug(name)}.npz") for name in found["report"]}
        before = runs.get(str(number), {"report": {}, "shift": {}})
        if set(before["report"]) <= set(found["report"]):
            for older in _parts(place, number):
                older.unlink()
            kept, runs[str(number)] = dict[str, Array](), found
        else:
            kept = read_columns(file)
            columns = {
                name: own for name, own in columns.items() if name not in before["report"] or _same(name, own, kept)
            }
            if columns and SINGLE not in columns and SINGLE in found["report"]:
                single = _named(SINGLE, read_columns(folder / "report" / f"{slug(SINGLE)}.npz"))
                told = hashlib.sha256(b"".join(single[key].tobytes() for key in sorted(single))).hexdigest()[:8]
                write_columns(place / f"again-{number}-{told}.npz", {"rows": np.array(list(columns)), **single})
            reports = {name: found["report"][name] for name in columns}
            runs[str(number)] = {
                "report": {**before["report"], **reports},
                "shift": {**before["shift"], **found["shift"]},
            }
        for name, own in columns.items():
            kept |= _named(name, own)
        write_columns(file, kept)
    choices = {one["row"]: one for one in map(read_json, sorted((study / CHOICES).glob("*.json")))}
    facts = {
        "format": FORMAT,
        "study": task.name,
        "recipe": {**task.settings, "tasks": {task.name: task.plain}},
        "inside": task.suite.id.name,
        "groups": task.groups("report"),
        "trainings": {name: row.trainings for name, row in rows_of(task).items()},
        "choices": {**known.get("choices", {}), **choices},
        "costs": read_json(study / COSTS) if (study / COSTS).exists() else known.get("costs"),
        "runs": {number: runs[number] for number in sorted(runs, key=int)},
    }
    write_json(place / "study.json", facts)


def single_of(folder: Path, number: int) -> dict[str, dict[str, Array]]:
    """Rows of a stored seed that came with a Single of their own, and its columns."""
    found: dict[str, dict[str, Array]] = {}
    for file in _parts(folder, number):
        columns, prefix = read_columns(file), f"{SINGLE}|"
        single = {key.removeprefix(prefix): one for key, one in columns.items() if key.startswith(prefix)}
        found |= dict.fromkeys(columns["rows"].tolist(), single)
    return found


def _parts(folder: Path, number: int) -> list[Path]:
    return sorted((*folder.glob(f"again-{number}.npz"), *folder.glob(f"again-{number}-*.npz")))


def _finished(task: Task, folder: Path) -> dict[str, Any]:
    places = {name: folder / f"{slug(name)}.json" for name in rows_of(task)}
    return {name: read_json(place) for name, place in places.items() if place.exists()}


def _named(row: str, columns: Mapping[str, Array]) -> dict[str, Array]:
    return {f"{row}|{key}": one for key, one in columns.items()}


def _same(row: str, columns: Mapping[str, Array], stored: Mapping[str, Array]) -> bool:
    return all(key in stored and np.array_equal(one, stored[key]) for key, one in _named(row, columns).items())
