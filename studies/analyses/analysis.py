"""Shared by all analyses: metrics of a model on the reported sets, short trainings, tables with the paper's numbers."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import hydra_ensembles as he
from hydra_ensembles import Recipe
from hydra_ensembles.errors import ConfigError

from ..evidence import Judged, stored
from ..measures import Array, plain_numbers
from ..paper import SHARES, read_csv
from ..results import fixed, markdown
from ..seed import Seed
from ..task import Drawn, Task

CLASSIFICATION = {"accuracy": "Acc ↑", "brier": "Brier ↓", "nll": "NLL ↓", "ece": "ECE ↓", "aece": "aECE ↓"}
DETECTION = {"auroc": "AUROC ↑", "fpr95": "FPR95 ↓", "aupr": "AUPR ↑"}
ALL = {f"all.{key}": head for key, head in DETECTION.items()}
NEAR_AND_FAR = {f"{group}.{key}": f"{group} {head}" for group in ("near", "far") for key, head in DETECTION.items()}
OPEN = "–"  # a missing number

Result = Mapping[str, Any]
"""The result of an analysis: `task`, `seeds` (what `run` returned, by seed), and how it was made."""
Columns = Mapping[str, str]
"""Names of metrics, and their column headings."""


@dataclass(frozen=True)
class Analysis:
    """One analysis: how it runs on a seed, and its table and figure."""

    title: str
    run: Callable[[Seed], dict[str, Any]] | None  # None if it reads stored studies
    table: Callable[[Result], str]
    figure: Callable[[Result], Any]
    kinds: Sequence[str] = ("image", "text")  # of tasks that it runs on
    read: Callable[[Path, str], dict[str, Any]] | None = None  # from the folder of stored studies, and a task


def asked(task: Task, name: str) -> Any:
    """A setting of the analyses for a task."""
    return task.settings["analyses"][name]


def of_task(task: Task, by_task: Mapping[str, Any], name: str) -> Any:
    """The setting chosen for a task; raises if there is none, because an unvalidated one silently ruins members."""
    if task.name not in by_task:
        names = ", ".join(by_task)
        raise ConfigError(
            f"no setting of {name} is chosen for {task.name} ({names} have one); put what half B chose there"
        )
    return by_task[task.name]


def marked(task: Task, name: str) -> str:
    """The name of an analysis's files in a run folder, with a hash of its settings."""
    chosen = {key: asked(task, key) for key in ("samples", "training", name) if key in task.settings["analyses"]}
    return f"{name}-{hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]}"


# --- models and metrics ----------------------------------------------------------------------------------------------


def measured(seed: Seed, model: he.Ensemble, familiar: bool = False) -> dict[str, float]:
    """Every metric of a model on the reported sets, with the disagreement of its members."""
    task = seed.task
    judge = Judged(task, model, familiar)
    inside = task.suite.id.name
    limit = asked(task, "samples")
    outside = task.outside("report")
    groups = {key: list(sets) for key, sets in outside.items()}
    columns: dict[str, Array] = {}
    disagreement: dict[str, float] = {}
    sets = {inside: task.inside("report")} | {name: some for group in outside.values() for name, some in group.items()}
    for name, samples in sets.items():
        drawn = Drawn(samples, limit)
        answers = judge.answers(drawn)
        of_set = stored(judge.columns_of(answers, drawn.labels if name == inside else None))
        columns |= {f"{name}|{key}": column for key, column in of_set.items()}
        disagreement[name] = float(answers.disagreement.double().mean())
    numbers = plain_numbers(columns, inside, groups) | {"disagreement": disagreement.pop(inside)}
    return {key: float(value) for key, value in numbers.items()} | {"all.disagreement": mean(disagreement.values())}


def heads_of(model: he.Ensemble) -> int:
    """The number of heads of a model with one member."""
    return sum(len(layer) for layer in model.heads[0])


def counted(model: he.Ensemble, share: float) -> int:
    """A share of a model's heads, at least one."""
    return max(1, round(share * heads_of(model)))


def few_steps(task: Task, **changes: Any) -> Recipe:
    """D.2 with the few steps of an analysis; a trial has fewer still."""
    plain = dict(asked(task, "training"))
    plain |= {"learning_rate": of_task(task, plain.pop("rates"), "D.2"), **changes}
    if task.share < 1:
        plain["steps"] = max(2, round(task.share * plain["steps"]))
    return task.recovery(**plain)


def side_by_side(seed: Seed, name: str, members: Callable[[], Sequence[he.Ensemble]]) -> list[he.Ensemble]:
    """Train members by D.2 on the same batches in one pass: each gets the gradient it would get on its own."""
    training = few_steps(seed.task, seed=seed.derived(name))
    trained = seed.trained(marked(seed.task, name), lambda: he.Ensemble.stack(members()), training)
    return [trained.member(index) for index in range(trained.num_members)]


# --- tables ----------------------------------------------------------------------------------------------------------


def paper(table: str, task: str) -> dict[str, dict[str, str]]:
    """The paper's numbers in a table about a task, by row."""
    rows: dict[str, dict[str, str]] = {}
    for line in read_csv("analyses"):
        if (line["table"], line["task"]) == (table, task):
            rows.setdefault(line["row"], {})[line["column"]] = line["value"]
    return rows


def by_seed(result: Result, *path: str) -> list[Any]:
    """The value of every seed at a path."""
    values = []
    for value in result["seeds"].values():
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        values.append(value)
    return values


PER_CENT = (*SHARES, "aurc")  # like the studies' tables


def printed(value: float, column: str) -> str:
    """Format a number for a table: shares in per cent."""
    return fixed(100 * value, 2) if column.rpartition(".")[2] in PER_CENT else fixed(value, 3)


def cell(values: Sequence[Any], column: str, form: Callable[[float, str], str] = printed) -> str:
    """The mean over seeds, with its standard deviation if there are several."""
    numbers = [float(value) for value in values if value is not None]
    if not numbers:
        return OPEN
    spread = f" ± {form(stdev(numbers), column)}" if len(numbers) > 1 else ""
    return f"{form(mean(numbers), column)}{spread}"


def rows_table(result: Result, columns: Columns, table: str, task: str, note: str = "") -> str:
    """The `rows` of every seed, with the paper's numbers in italics below each; rows may lack some seeds."""
    printed_there = paper(table, task)
    lines = []
    for row in dict.fromkeys(row for rows in by_seed(result, "rows") for row in rows):
        cells = [cell(by_seed(result, "rows", row, column), column) for column in columns]
        seeds = [number for number, facts in result["seeds"].items() if row in facts["rows"]]
        fewer = "" if len(seeds) == len(result["seeds"]) else f" (seeds {', '.join(seeds)})"
        lines.append([f"{row}{fewer}", *cells])
        if row in printed_there:
            theirs = printed_there[row]
            lines.append(["*paper*", *(f"*{theirs[column]}*" if column in theirs else "" for column in columns)])
    return markdown(["Method", *columns.values()], lines, " ".join(filter(None, [note, about(result)])))


def about(result: Result) -> str:
    """How an analysis was made, in one line."""
    seeds = ", ".join(result["seeds"])
    share = result.get("share", 1.0)
    trial = "" if share == 1 else f" A trial with {100 * share:g} % of the data."
    several = "Mean ± standard deviation over seeds" if len(result["seeds"]) > 1 else "Seed"
    seconds = f", {result['seconds']:.0f} s" if result["seconds"] else ""
    return f"{several} {seeds}; {result['device']}{seconds}.{trial}"
