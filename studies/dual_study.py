"""A zero-shot study, row by row and seed by seed: members and temperatures are fixed, then the test sets are opened.

Stages: `choose` how the dual encoder learns, `train` it, `rank` its heads, `fix` members and temperatures (on held-out
images of the main task), `report` what every row says about every set, `cost`, `store`. What is there stays: a stopped
run goes on.

`seed-N.npz` of the results has columns as `evidence` describes them, by `row|task|set|column`; the test set of a task
has its name. Rows that are calibrated answer with their temperature throughout.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import hydra_ensembles as he
from hydra_ensembles import Prediction, fit_calibration
from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.files import read_json, write_json
from hydra_ensembles.heads.members import CIRCUIT_ORDER
from hydra_ensembles.model.cost import measure_costs
from hydra_ensembles.schema import to_plain

from . import dual_rows
from .classifiers import COSTS, FORMAT, sizes
from .dual_recipe import DualRecipe
from .dual_seed import (
    BOTH,
    BOTH_TUNED,
    CHOICE,
    IMAGE,
    IMAGE_TUNED,
    MORE,
    ONE,
    ONE_TAYLOR,
    RANDOM,
    TOWERS,
    DualRow,
    DualSeed,
    DualTask,
)
from .evidence import columns_of, stored
from .measures import Array, read_columns, write_columns
from .samples import SampleBatches, device_name
from .seed import CHOICES, slug
from .workers import Failures

SINGLE, HYDRA = "Single", "Hydra (Circ)"
FIXED = "fixed.json"
ROWS: Mapping[str, DualRow] = {
    SINGLE: DualRow(ONE),
    "Temperature Scaling": DualRow(ONE, calibrated=True),
    **dual_rows.ROWS,
    "Taylor": DualRow(ONE_TAYLOR),
    "CircAvg": DualRow(BOTH, first=True),
    "Random heads": DualRow(RANDOM),
    HYDRA: DualRow(BOTH),
    "Hydra (Circ) + Temperature Scaling": DualRow(BOTH, calibrated=True),
    "Hydra (Circ), six more heads pruned": DualRow(MORE),
    "Hydra (Circ), image tower only": DualRow(IMAGE),
    "Hydra (Circ), image tower only, text fine-tuned": DualRow(IMAGE_TUNED, trainings=4),
    "Hydra (Circ), text fine-tuned": DualRow(BOTH_TUNED, trainings=4),
}
"""In the order of the tables."""


def rows_of(recipe: DualRecipe) -> dict[str, DualRow]:
    """The rows of a study; without those that learn where there is nothing to learn from."""
    learning = {name for name, row in ROWS.items() if row.learns or (row.family and row.family.tuned)}
    return {name: row for name, row in ROWS.items() if recipe.trains_text or name not in learning}


def run(
    task: DualTask, output: Path, results: Path, stages: Sequence[str], numbers: Sequence[int], rows: Sequence[str]
) -> None:
    """Run stages for seeds and rows."""
    unknown = [stage for stage in stages if stage not in task.recipe.STAGES]
    if unknown:
        raise ConfigError(f"stages {unknown} do not exist; choose from {', '.join(task.recipe.STAGES)}")
    failed = Failures()
    for stage in (one for one in task.recipe.STAGES if one in stages):
        if stage == "store":
            collect(task, output, results)
            continue
        for number in numbers[:1] if stage in ("choose", "cost") else numbers:
            seed = DualSeed(task, number, output)
            match stage:
                case "choose":
                    choose(seed)
                case "train":
                    seed.dual  # noqa: B018 (made, and stays)
                case "rank":
                    rank(seed)
                case "fix" | "report":
                    for row in rows:
                        with failed.noted(f"{task.recipe.name} {stage} {row}, seed {number}"):
                            (fix if stage == "fix" else report)(seed, row)
                case "cost":
                    cost(seed, rows)
    failed.raise_first()


def choose(seed: DualSeed) -> None:
    """Train by every choice without a fifth of the names, and write down the one that knows most of these."""
    place = seed.study / CHOICE
    if seed.recipe.model is None and len(seed.recipe.choices) > 1 and not place.exists():
        measured = seed.task.measured(seed.number)
        best = max(measured, key=lambda one: one["accuracy"])
        choice = {key: best[key] for key in ("steps", "learning_rate", "projection_rate")}
        write_json(place, {"choice": choice, "seed": seed.number, "measured": measured})


def rank(seed: DualSeed) -> None:
    """Every ranking of a seed."""
    for towers in TOWERS:
        for score in CIRCUIT_ORDER:
            seed.circuit(score, towers)
    seed.taylor()


def fix(seed: DualSeed, name: str) -> None:
    """Make the members of a row, fit its temperature, and write down what they are; no test set is open.

    Rows that come later are added; what is written stays.
    """
    place, row = seed.folder / FIXED, rows_of(seed.recipe)[name]
    known: dict[str, Any] = read_json(place) if place.exists() else {"heads": {}, "temperatures": {}}
    if name in known["temperatures"]:
        return
    held = seed.task.held_out
    known["samples"] = len(held.samples)
    logits = row.asked(seed, held).member_logits
    fit = fit_calibration(logits, held.samples.labels.to(logits.device))
    known["temperatures"][name] = fit.calibration.temperature[0]
    if row.family is not None and not row.family.tuned:
        known["heads"][row.family.name] = [[str(head) for head in member] for member in seed.heads(row.family)]
    write_json(place, known)


def reported(seed: DualSeed, name: str) -> Path:
    """Where the report of a row is."""
    return seed.folder / "report" / f"{slug(name)}.json"


def report(seed: DualSeed, name: str) -> None:
    """Ask a row about every test set, and keep what it says; refused before its temperature is fixed."""
    place, row = reported(seed, name), rows_of(seed.recipe)[name]
    if place.exists():
        return
    fixed = seed.folder / FIXED
    temperatures = read_json(fixed)["temperatures"] if fixed.exists() else {}
    if name not in temperatures:
        raise DataError(
            f"nothing is fixed yet for {name!r} in {fixed}; run the stage `fix` before test sets are opened"
        )
    temperature, columns = temperatures[name], dict[str, Array]()
    for one in seed.task.test_sets:
        said = row.asked(seed, one)
        after = Prediction.from_logits(said.member_logits, temperature=temperature, calibrates="probs")
        if row.calibrated:
            said = Prediction.from_logits(after.log_probs[None])  # [1, N, C]
        labels = one.samples.labels.to(said.member_logits.device) if one.group == "id" else None
        kept = stored(columns_of(said, after, labels))
        columns |= {f"{one.task}|{one.name}|{key}": column for key, column in kept.items()}
    write_columns(place.with_suffix(".npz"), columns)
    where = {"device": device_name(seed.device), "torch": str(torch.__version__), "version": he.__version__}
    write_json(place, {"row": name, "temperature": temperature, **where})


def cost(seed: DualSeed, names: Sequence[str]) -> None:
    """Latency and peak memory of rows that are reported, for the classes of the main task, each as fast as can be."""
    held, fast, rows = seed.task.held_out, seed.device.type == "cuda", rows_of(seed.recipe)
    batch = seed.recipe.cost_batch
    inputs = seed.dual.image.prepare(next(iter(SampleBatches(held.samples, batch)))[0])
    runs: dict[str, Any] = {}
    about: dict[str, dict[str, Any]] = {}
    asked = [name for name in names if name != SINGLE and not rows[name].calibrated and reported(seed, name).exists()]
    for name in (SINGLE, *asked):
        model = rows[name].whole(seed, held.classes)
        about[name] = sizes(model)
        runs[name] = model.optimize(inputs, dtype=torch.bfloat16) if fast and isinstance(model, he.Ensemble) else model
    taken = {
        one.name: {**to_plain(one), **about[one.name]} for one in measure_costs(runs, inputs, repeats=50 if fast else 3)
    }
    machine = {"device": device_name(seed.device), "torch": torch.__version__, "batch": batch}
    write_json(seed.study / COSTS, {**machine, "rows": taken})


def collect(task: DualTask, output: Path, results: Path) -> None:
    """Every row and seed that is finished: columns, one file a seed, and all else in `study.json`."""
    recipe = task.recipe
    study, runs = output / recipe.name, dict[str, Any]()
    for number in sorted(int(folder.name.removeprefix("seed-")) for folder in study.glob("seed-*")):
        seed, columns = DualSeed(task, number, output), dict[str, Array]()
        found = [name for name in rows_of(recipe) if reported(seed, name).exists()]
        for name in found:
            own = read_columns(reported(seed, name).with_suffix(".npz"))
            columns |= {f"{name}|{key}": one for key, one in own.items()}
        if found:
            reports = {name: read_json(reported(seed, name)) for name in found}
            chosen = {one["row"]: one for one in map(read_json, sorted((seed.folder / CHOICES).glob("*.json")))}
            known = {**read_json(seed.folder / FIXED), "circuits": circuit_facts(seed), "choices": chosen}
            runs[str(number)] = {**known, "report": reports}
            write_columns(results / recipe.name / f"seed-{number}.npz", columns)
    if not runs:
        raise DataError(f"{study} has no finished rows; run the stage `report`")
    tasks: dict[str, Any] = {}
    for one in task.test_sets:
        if one.group == "id":
            tasks[one.task] = {"domain": one.domain, "classes": len(one.classes), "samples": len(one.samples)}
        else:
            tasks[one.task].setdefault("outside", {}).setdefault(one.group, {})[one.name] = len(one.samples)

    def told(key: str) -> str:  # where reports were made, which need not be where they are stored
        return " and ".join(sorted({one[key] for run in runs.values() for one in run["report"].values()}))

    facts = {
        "format": FORMAT,
        "study": recipe.name,
        "recipe": to_plain(recipe),
        "model": task.about(),
        "images": task.sets.name,
        "tasks": tasks,
        "trainings": {name: row.trainings for name, row in rows_of(recipe).items()},
        "choice": read_json(study / CHOICE) if (study / CHOICE).exists() else None,
        "costs": read_json(study / COSTS) if (study / COSTS).exists() else None,
        "runs": runs,
        "device": told("device"),
        "versions": {"torch": told("torch"), "hydra_ensembles": told("version")},
    }
    write_json(results / recipe.name / "study.json", facts)


def circuit_facts(seed: DualSeed) -> dict[str, Any]:
    """Of every circuit there is: samples, the score with all heads, and that without those that a member loses."""
    found = {}
    for towers, count in (("image+text", seed.recipe.prune), ("image", seed.recipe.image_prune)):
        for score in (one for one in CIRCUIT_ORDER if seed.has_circuit(one, towers)):
            ranking = seed.circuit(score, towers)
            known = {name: ranking.provenance[name] for name in ("id_samples", "ood_samples", "start")}
            found[f"{score} {towers}"] = {**known, "end": ranking.scores[count - 1], "pruned": count}
    return found
