"""The stages of a study of classifiers: settings are chosen on half B, then test sets, corruptions and costs.

`choose` measures the settings of a row on half B of the first seed and fixes the best one; settings that diverge are
reported. `report` opens the test sets, `shift` corrupts them. Existing results are kept, so that a stopped run resumes;
rows and seeds can be added one at a time, and run in parallel.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from hydra_ensembles._utils import require_same_run
from hydra_ensembles.errors import DataError, DivergedError, SameMembersError
from hydra_ensembles.files import write_json
from hydra_ensembles.heads.members import CIRCUIT_ORDER, Score

from .column_files import write_columns
from .engine import COSTS, Job, Kind, Plan, Run, made_with, sizes, timed, write_costs
from .evidence import Judged, stored, under_shift
from .measures import SHIFT, Array, plain_numbers
from .rows import CIRC_AVG, MC_DROPOUT, SINGLE, rate_of, rows_of
from .samples import SampleBatches, alone
from .seed import Heads, NotChosenError, Seed, Setting
from .seed_folder import CHOICES, RANKED, slug
from .storing import STUDY, choices_in, facts_of, named, read_if_there, store, store_shift
from .task import Stage, Task, decisive

SHIFTED = "shifted.npz"  # corrupted images, shared by all rows of a run
RANKINGS: Mapping[Heads, Sequence[str]] = {"circuits": CIRCUIT_ORDER, "taylor": ("taylor",), "random": ()}


def train(seed: Seed, name: str) -> None:
    """Train one of the fine-tunings that almost every row uses; `name` is its index."""
    seed.single(int(name))


def corrupt(seed: Seed, _: str) -> None:
    """Corrupt the test images, once for all rows."""
    with alone(seed.study / SHIFTED):
        if not (seed.study / SHIFTED).exists():
            seed.task.corrupt(seed.study / SHIFTED)


def rank(seed: Seed, name: str) -> None:
    """Rank the heads that the paper's members lose: by a circuit score, or by Taylor scores."""
    if name == "taylor":
        seed.heads("taylor")
    else:
        seed.circuit(cast(Score, name))


def option(seed: Seed, name: str) -> None:
    """Train the model of one setting that half B chooses from; `name` is `row#index`."""
    row, _, number = name.rpartition("#")
    method = rows_of(seed.task)[row]
    if not (seed.study / CHOICES / f"{slug(row)}.json").exists():
        setting = method.options(seed.task)[int(number)]
        try:
            method.make(seed, setting)
        except DivergedError as error:
            tell_left_out(seed, row, setting, error)


def tell_left_out(seed: Seed, row: str, setting: Setting, error: DataError) -> None:
    """Print which setting is excluded from the choice on half B, and why."""
    print(f"LEFT OUT: {seed.task.name} {row} {dict(setting)}: {error}", flush=True)


def choose(seed: Seed, name: str) -> None:
    """Measure every setting of a row on half B, and store the one with the smallest NLL.

    A setting that cannot be measured, because its training diverged, is reported and excluded; raise if none is left.
    """
    row = rows_of(seed.task)[name]
    task = seed.task
    path = seed.study / CHOICES / f"{slug(name)}.json"
    options = row.options(task)
    if not options or path.exists():
        return
    measured: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    for setting in options:
        try:
            numbers = held_out_numbers(task, row.make(seed, setting))
        except DataError as error:  # from training, or from fitting to outputs that are not finite
            tell_left_out(seed, name, setting, error)
            left_out.append({"setting": dict(setting), "why": str(error)})
            continue
        measured.append({"setting": dict(setting), **numbers})
    if not measured:
        raise DataError(f"no setting of {name!r} is left for {task.name}; the last: {left_out[-1]['why']}")
    best = min(measured, key=lambda entry: entry["calibrated.nll"])
    choice = {"row": name, "seed": seed.number, "setting": best["setting"], "measured": measured}
    write_json(path, {**choice, "left_out": left_out} if left_out else choice)


def recover(seed: Seed, name: str) -> None:
    """Train one of the paper's members at the chosen learning rate; `name` is the kind of its heads, and its index."""
    kind, _, index = name.partition(" ")
    seed.recovered(cast(Heads, kind), int(index), rate_of(seed.chosen(CIRC_AVG)))


def make(seed: Seed, name: str) -> None:
    """Train what a row needs besides fine-tunings and the paper's members."""
    rows_of(seed.task)[name].model(seed, name)


def report(seed: Seed, name: str) -> None:
    """Run a row's model on the test sets, and store its outputs."""
    path = seed.reported(name)
    task = seed.task
    if not path.exists():
        model = rows_of(task)[name].model(seed, name)
        judge = Judged(task, model)
        write_columns(path.with_suffix(".parquet"), all_columns(judge, "report"))
        facts = {"temperature": list(judge.calibration.temperature), **sizes(model), **made_with(task.device)}
        write_json(path, {"row": name, **facts})


def shift(seed: Seed, name: str) -> None:
    """Run a row's model on corrupted test images."""
    path = seed.folder / SHIFT / f"{slug(name)}.parquet"
    task = seed.task
    if "corruptions" in task.plain and seed.number in task.settings["shift"]["seeds"] and not path.exists():
        judge = Judged(task, rows_of(task)[name].model(seed, name), familiar=False)
        write_columns(path, under_shift(judge, seed.study / SHIFTED))


def held_out_numbers(task: Task, model: Any) -> dict[str, float]:
    """Metrics of a model on half B and the held-out OOD sets."""
    return plain_numbers(all_columns(Judged(task, model), "held_out"), task.suite.id.name, task.groups("held_out"))


def all_columns(judge: Judged, stage: Stage) -> dict[str, Array]:
    """The columns of all sets of a stage, as `set|column`."""
    task = judge.task
    columns = named(task.suite.id.name, stored(judge.columns(task.inside(stage), labelled=True)))
    for sets in task.outside(stage).values():
        for name, samples in sets.items():
            columns |= named(name, stored(judge.columns(samples, labelled=False)))
    return columns


def jobs(run: Run, stage: str) -> Plan:
    """The jobs of a stage, each with the jobs of this or earlier stages that it depends on."""
    task, rows = run.task, run.rows
    asked = sorted(((seed, row) for row in rows for seed in run.of(row)), key=lambda pair: pair[0])
    first = int(task.settings["seeds"][0])
    methods = rows_of(task)
    wanted = dict.fromkeys((SINGLE, *(methods[row].like or row for row in rows)))
    chosen = choices_in(run.output / task.name)
    choosing = [row for row in wanted if methods[row].options(task) and row not in chosen]  # on the first seed
    every = [*asked, *((first, row) for row in choosing if row != SINGLE)]

    def trained(seed: int, row: str) -> list[Job]:
        count = methods[row].fine_tunings
        return [("train", seed, str(index)) for index in range(task.settings["members"] if count is None else count)]

    def ranked(seed: int, row: str) -> list[Job]:
        kind, _ = methods[row].paper or methods[methods[row].like or row].paper or ("random", 0)
        return [("rank", seed, name) for name in RANKINGS[kind]]

    def members(row: str) -> list[str]:
        kind, count = methods[row].paper or ("circuits", 0)
        return [f"{kind} {index}" for index in range(count)]

    def options(row: str) -> list[Job]:
        return [("option", first, f"{row}#{number}") for number in range(len(methods[row].options(task)))]

    match stage:
        case "train":  # if there are several rates, one is chosen first
            plan: dict[Job, list[Job]] = {}
            if SINGLE in choosing:
                plan = {**{job: [] for job in options(SINGLE)}, ("choose", first, SINGLE): options(SINGLE)}
            return plan | {job: [("choose", first, SINGLE)] for seed, row in every for job in trained(seed, row)}
        case "corrupt":
            return {(stage, first, ""): []} if "corruptions" in task.plain else {}
        case "rank":
            return {job: trained(seed, row)[:1] for seed, row in every for job in ranked(seed, row)}
        case "option":
            return {
                job: [] if row == SINGLE else [*trained(first, row), *ranked(first, row), ("choose", first, SINGLE)]
                for row in choosing
                for job in options(row)
            }
        case "choose":
            return {(stage, first, row): options(row) for row in choosing}
        case "recover":
            return {
                (stage, seed, member): [("choose", first, CIRC_AVG), *trained(seed, row)[:1], *ranked(seed, row)]
                for seed, row in asked
                for member in members(row)
            }
        case "shift":
            return {(stage, seed, row): [("report", seed, row), ("corrupt", first, "")] for seed, row in asked}
    return {
        (stage, seed, row): [
            *trained(seed, row),
            *ranked(seed, row),
            ("choose", first, methods[row].like or row),
            ("choose", first, SINGLE),
            *(("recover", seed, member) for member in members(row)),
            *([("make", seed, row)] if stage == "report" and methods[row].trains else []),
        ]
        for seed, row in asked
        if stage == "report" or methods[row].trains
    }


def cost(run: Run) -> None:
    """Measure latency and peak memory of the rows.

    Neither depends on weights, so models with the rows' shapes are made from the settings chosen in this run or stored,
    with one step of every training. Heads are those that the first seed of the run ranked: members share the layers
    before the first one in which their heads differ. Without such a ranking a few samples are ranked, and that layer
    may differ from the one in the reported rows.
    """
    task = run.task
    batch = task.settings["cost_batch"][task.device.type]
    models = {}
    with TemporaryDirectory() as folder:
        seed = Seed(task.shortened(), run.of(SINGLE)[0], Path(folder))
        facts = read_if_there(run.results / task.name / STUDY) or {}
        for name, choice in {**facts.get("choices", {}), **choices_in(run.output / task.name)}.items():
            write_json(seed.study / CHOICES / f"{slug(name)}.json", choice)
        if (ranked := run.output / task.name / seed.folder.name / RANKED).exists():
            shutil.copytree(ranked, seed.folder / RANKED)
        inputs = seed.base.prepare(next(iter(SampleBatches(task.half_b, batch)))[0])
        for name in dict.fromkeys((SINGLE, *run.rows)):
            try:
                models[name] = rows_of(task)[name].model(seed, name)
            except (SameMembersError, NotChosenError) as error:  # such a row may be missing from the report, too
                print(f"UNAVAILABLE: {task.name} cost {name}: {error}", flush=True)
    if task.device.type == "cuda" and MC_DROPOUT in models:  # samples at every call, so it runs eagerly
        models[MC_DROPOUT] = torch.autocast("cuda", dtype=torch.bfloat16)(models[MC_DROPOUT])
    write_costs(run.output / task.name, task.device, batch, timed(models, inputs, task.device))


def collect(run: Run) -> None:
    """Store what is finished; refuse to mix it with rows of another recipe."""
    task = run.task
    study = run.output / run.task.name
    rows = rows_of(run.task)
    recipe = {**task.settings, "tasks": {task.name: task.plain}}
    if (before := facts_of(run.results / task.name)) is not None:
        require_same_run(decisive(before["recipe"], task.name), decisive(recipe, task.name), run.results, "the study")
    facts = {
        "recipe": recipe,
        "inside": task.suite.id.name,
        "groups": task.groups("report"),
        "trainings": {name: row.trainings for name, row in rows.items()},
        "choices": choices_in(study),
        "costs": read_if_there(study / COSTS),
    }
    store(study, run.results, facts, lambda _: {})
    for folder in study.glob(f"seed-*/{SHIFT}"):
        store_shift(folder, run.results / task.name, rows)


CLASSIFIERS = Kind(
    Seed,
    rows_of,
    {step.__name__: step for step in (train, corrupt, rank, option, choose, recover, make, report, shift)},
    jobs,
    {"cost": cost, "store": collect},
)
