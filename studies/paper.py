"""The paper's own numbers, from the CSV files beside the code, as the paper prints them there; as fractions here.

`classifiers.csv`: Tables 1, 2 and 15 to 17 (M = 3, maximum softmax probability); near and far of BatchEnsemble and LoRA
Ensembles on ImageNet-1K are those of Tables 21 and 22, for Table 15 mixes them up. `zero_shot.csv`: Tables 3 and 24 to
28 (OpenCLIP ViT-B/32), `average` is the mean over its nine data sets; `zero_shot_tasks.csv` and `zero_shot_sets.csv`:
set by set, without rows that do not give their own mean. `claims.csv`: every comparison it makes.
"""

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "paper"
AVERAGE = "average"

STANDS_FOR: Mapping[str, str] = {
    "vision-cifar10": "CIFAR-100",
    "vision-tinyimagenet": "ImageNet-1K",
    "text-sst2": "SST-2",
}
"""The task of the paper that each study of classifiers stands for: few classes and little data, many classes, text."""

ID_TASK: Mapping[str, str] = {"tinyimagenet": "ImageNet-1K", "imagenet": "ImageNet-1K", "cifar100": "CIFAR-100"}
"""The ID set of the paper's zero-shot part that a task of ours stands for."""

TASK_COLUMN: Mapping[str, str] = {
    "tinyimagenet": "IN-1K",
    "imagenet": "IN-1K",
    "cifar100": "C100",
    "cifar10": "C10",
    "food101": "Food",
    "scene15": "SUN",
    "sun397": "SUN",
    "pets": "Pet",
    "dtd10": "DTD",
    "dtd": "DTD",
    "eurosat": "EuroSat",
    "caltech101": "Caltech",
}
"""The data set of the paper's Table 24 that a task of ours is, or stands for."""

SHARES = ("accuracy", "auroc", "fpr95", "aupr")  # printed in percent
ZERO_SHOT_SHARES = (*SHARES, "ece", "aece")

Numbers = Mapping[str, float]


@cache
def read_csv(name: str) -> Sequence[Mapping[str, str]]:
    """The lines of a file."""
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _numbers(row: Mapping[str, str], keys: Sequence[str], shares: Sequence[str]) -> Numbers:
    """What a row gives; an empty cell is a number that the paper does not give."""
    return {
        key: float(cell) / (100 if key.rpartition(".")[2] in shares else 1)
        for key, cell in row.items()
        if key not in keys and cell
    }


def classifier_numbers(task: str) -> Mapping[str, Numbers]:
    """Numbers by method of one task: `ImageNet-1K`, `CIFAR-100` or `SST-2`."""
    return {
        row["method"]: _numbers(row, ("task", "method"), SHARES)
        for row in read_csv("classifiers")
        if row["task"] == task
    }


def zero_shot_numbers(task: str) -> Mapping[str, Numbers]:
    """Numbers by method: `average` classifies, `ImageNet-1K` and `CIFAR-100` detect OOD data; empty for others."""
    return {
        row["method"]: _numbers(row, ("task", "method"), ZERO_SHOT_SHARES)
        for row in read_csv("zero_shot")
        if row["task"] == task
    }


def zero_shot_task_row(metric: str, method: str) -> Numbers | None:
    """A row of Table 24 or 27 by data set; None where the paper has no such row."""
    whole = 100.0 if metric in ZERO_SHOT_SHARES else 1.0
    for row in read_csv("zero_shot_tasks"):
        if (row["metric"], row["method"]) == (metric, method):
            return {key: float(cell) / whole for key, cell in row.items() if key not in ("metric", "method")}
    return None


def zero_shot_set_numbers(task: str, method: str) -> Numbers:
    """Numbers of Table 25 or 26 on sets that we have as well, as `SET.metric`; DTD10 stands for Texture."""
    return {
        f"{row['set']}.{metric}": float(row[metric]) / 100
        for row in read_csv("zero_shot_sets")
        if (row["task"], row["method"]) == (task, method)
        for metric in ("auroc", "fpr95", "aupr")
    }


def claimed(kind: str, scope: str) -> list[tuple[str, str, str]]:
    """Comparisons that the paper makes: metric, first and second method; the sign is that of its own numbers."""
    rows = (row for row in read_csv("claims") if (row["kind"], row["scope"]) == (kind, scope))
    return [(row["metric"], row["first"], row["second"]) for row in rows]


def not_testable(kind: str) -> list[list[str]]:
    """What these data and models cannot test, and why."""
    return [[row["claim"], row["why"]] for row in read_csv("not_testable") if row["kind"] == kind]
