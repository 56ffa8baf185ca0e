"""Every setting of the paper's experiments by name, as the code resolves it, beside its place in the paper.

`paper/settings.csv` has what appendices C to E state. `plan` says what a task will do, before anything is computed, and
`python -m studies paper NAME --dry-run` prints it; a test finds the same in what the functions of a run received.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from hydra_ensembles import baselines
from hydra_ensembles.data import TrainTransform
from hydra_ensembles.model.dual_encoder import DEFAULT_TEMPLATES
from hydra_ensembles.training.recipe import DataRecipe, Recipe

from .methods import ALONE, CLASSIFIER_ALONE, LORA, MIMO
from .paper import read_csv
from .paper_task import PaperTask, methods_of_table, named, used
from .suites import given
from .zero_shot import ZeroShotTask

Plan = dict[str, str]
OPEN = ("grid", "seed", "order_seed", "precision", "compile")  # fields of recipes that have another name, or are ours
PRESETS = {"imagenet21k": "pretraining", "clip-text": "clip-text"}  # not run here: their data are not to be had


def spelled(value: Any) -> str:
    """A setting as the table spells it."""
    if isinstance(value, list | tuple | range):
        return " ".join(map(spelled, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def of_recipe(name: str, recipe: Recipe) -> Plan:
    """The settings of a training; `learning_rate` has all rates that are tried."""
    known = {field.name: getattr(recipe, field.name) for field in fields(recipe) if field.name not in OPEN}
    return {f"{name}.{key}": spelled(value) for key, value in (known | {"learning_rate": recipe.rates}).items()}


def of_settings(name: str, settings: Any) -> Plan:
    """The settings of a baseline."""
    return {f"{name}.{field.name}": spelled(getattr(settings, field.name)) for field in fields(settings)}


def plan(task: PaperTask | ZeroShotTask) -> Plan:
    """Every setting of a task by the names of `paper/settings.csv`."""
    return of_classifiers(task) if isinstance(task, PaperTask) else of_zero_shot(task)


def of_classifiers(task: PaperTask) -> Plan:
    """The settings of Table 1 or 2."""
    settings, members = task.settings, int(task.settings["members"])
    found = of_recipe("single", task.training()) | of_recipe("pruned", task.recovery())
    found |= {"heads.pruned": spelled(task.plain["recovery"]["prune"]), "circuit.ties": settings["ties"]}
    found |= {"hydra.members": spelled(members), "seeds": spelled(task.seeds_of(LORA))}
    found |= of_settings("lora", baselines.LoRA(members))
    if task.kind == "text":
        return found | {"text.max_length": spelled(task.plain["input_size"])}
    if CLASSIFIER_ALONE in task.methods:
        found |= of_recipe("alone", task.recovery(ALONE))
    (mimo,) = task.methods[MIMO].settings(task)
    found |= of_settings("mimo", baselines.MIMO(members, mimo["rho"], mimo["repeat"]))
    found |= of_settings("oba", baselines.OBA(task.plain["oba"], **settings["oba_size"]))
    cropped = {field.name: field.default for field in fields(TrainTransform)}
    found |= {f"augment.{key}": spelled(cropped[key]) for key in ("crop_scale", "flip_probability")}
    return found | {"evaluate.crop_fraction": spelled(task.plain["crop"]), "evaluate.resize_mode": "squash"}


def of_zero_shot(task: ZeroShotTask) -> Plan:
    """The settings of Table 3."""
    settings = task.settings
    found = {f"vilu.{key}": spelled(value) for key, value in settings["vilu"].items()}
    found |= {"model": str(settings["model"]), "prompt": DEFAULT_TEMPLATES[0]}
    found |= {"calibration": spelled(task.counts.calibration), "heads.pruned": spelled(settings["prune"])}
    found["taylor.pruned"] = spelled(settings["taylor_prune"])
    return found | {"bayes.pseudo_count": spelled(settings["pseudo_count"])}


def of_presets() -> dict[str, Plan]:
    """The paper's trainings that are recipes alone, by task of the table."""
    return {task: of_recipe(name, DataRecipe.preset(name)) for name, task in PRESETS.items()}


def stated(task: str) -> Iterator[Mapping[str, str]]:
    """What the paper states about a task: rows of `paper/settings.csv`."""
    return (row for row in read_csv("settings") if task in row["task"].split())


def told(name: str, task: PaperTask | ZeroShotTask) -> Iterator[str]:
    """The plan of a task as lines: sets with their folders, rows with seeds and cost, settings with their places."""
    if isinstance(task, PaperTask):
        yield "sets:"
        for reference in (given(task.suite, "train"), given(task.suite, "validation"), *used(task.suite)):
            yield f"  {reference.name}: {task.source.root / named(reference)[0]}, or {reference.source}"
        yield "rows, their seeds, and trainings of the whole model a seed:"
        for method in methods_of_table(task):
            yield f"  {method}: {spelled(task.seeds_of(method))}; {task.methods[method].trainings:g}"
    else:
        yield f"rows: {', '.join(task.methods)}"
        yield f"sets, in {task.source.root}: {', '.join(one.name for one in task.images_of.main.tasks)}, and OpenOOD's"
    yield "settings:"
    places = {row["name"]: row for row in stated(name)}
    for key, value in plan(task).items():
        place = places.get(key)
        said = "not stated" if place is None else place["section"]
        differs = "" if place is None or place["value"] == value else f"; the paper: {place['value']}"
        yield f"  {key} = {value}  ({said}{differs})"
