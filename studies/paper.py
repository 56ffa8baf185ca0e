"""The paper's own numbers, read from the CSV files beside the code; percentages become fractions.

`classifiers.csv`: Tables 1, 2 and 15 to 17 (M = 3, maximum softmax probability); near and far of BatchEnsemble and LoRA
Ensembles on ImageNet-1K are from Tables 21 and 22, because Table 15 mixes them up. `shift.csv`: Tables 13 and 14, by
severity, and their average as `shift`. `classifier_sets.csv`: Tables 18 to 23, set by set, and CIFAR-10 of Table 16;
without MIMO and MC Dropout of Table 23, whose rows repeat those of other methods. `zero_shot.csv`: Tables 3 and 24 to
28 (OpenCLIP ViT-B/32); `average` is the mean over its nine data sets; Brier of Temperature Scaling and far AUPR of
CircAvg are recomputed from the sets. `zero_shot_tasks.csv` and `zero_shot_sets.csv`: set by set, without Single's NLL
on CIFAR-100, which contradicts its mean, and without Texture, MNIST and SVHN of Single and ViLU in Table 26, which it
swaps. `analyses.csv`: Tables 4 to 6 and 8 to 12, B.1 and B.2.2; near and far of Single on SST-2 are from Table 17,
because Table 4 prints averages. `…_claims.csv`: the claims that the paper makes about these numbers.
"""

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "paper"
AVERAGE = "average"
STANDS_FOR: Mapping[str, str] = {
    "tinyimagenet": "ImageNet-1K",
    "imagenet": "ImageNet-1K",
    "cifar100": "CIFAR-100",
    "sst2": "SST-2",
}
"""The paper's task that an ID set is, or stands for."""
LIKE: Mapping[str, str] = {"dtd10": "textures", "miniplaces": "places365"}
"""The paper's OOD set that a set with another name stands for."""
COLUMN: Mapping[str, str] = {"tinyimagenet": "imagenet", "scene15": "sun397", "dtd10": "dtd"}
"""The data set of the paper's Table 24 that a task with another name stands for."""
SHARES = ("accuracy", "auroc", "fpr95", "aupr")  # printed in per cent
FILES = {"classifier": ("classifiers", SHARES), "dual": ("zero_shot", (*SHARES, "ece", "aece"))}
SETS = {"classifier": "classifier_sets", "dual": "zero_shot_sets"}

Numbers = Mapping[str, float]


@cache
def read_csv(name: str) -> Sequence[Mapping[str, str]]:
    """The rows of a CSV file."""
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def paper_numbers(kind: str, task: str) -> dict[str, dict[str, float]]:
    """Numbers by method for one task (`ImageNet-1K`, `SST-2`; zero-shot: `average`); empty cells are skipped."""
    name, shares = FILES[kind]
    by_method: dict[str, dict[str, float]] = {}
    for row in (*read_csv(name), *(read_csv("shift") if kind == "classifier" else ())):
        if row["task"] == task:
            cells = {key: cell for key, cell in row.items() if key not in ("task", "method") and cell}
            plain = {key: float(cell) / (100 if key.rpartition(".")[2] in shares else 1) for key, cell in cells.items()}
            by_method.setdefault(row["method"], {}).update(plain)
    return by_method


def set_numbers(kind: str, task: str) -> dict[str, dict[str, float]]:
    """Numbers by method on a task's OOD sets, such as `ood.mnist.auroc`; also under the names of stand-in sets."""
    by_method: dict[str, dict[str, float]] = {}
    for row in (row for row in read_csv(SETS[kind]) if row["task"] == task):
        for name in (row["set"], *(ours for ours, theirs in LIKE.items() if theirs == row["set"])):
            numbers = {f"ood.{name}.{key}": float(row[key]) / 100 for key in ("auroc", "fpr95", "aupr")}
            by_method.setdefault(row["method"], {}).update(numbers)
    return by_method


def classifier_numbers(inside: str) -> Mapping[str, Numbers]:
    """All of the paper's numbers for the rows of a study, by the name of its ID set; empty for other tasks."""
    if inside not in STANDS_FOR:
        return {}
    sets = set_numbers("classifier", STANDS_FOR[inside])
    return {row: plain | sets.get(row, {}) for row, plain in paper_numbers("classifier", STANDS_FOR[inside]).items()}


def zero_shot_numbers(tasks: Sequence[str], detections: Sequence[str]) -> Mapping[str, Numbers]:
    """All of the paper's numbers for the rows of a zero-shot study, under the same keys as ours."""
    by_method: dict[str, dict[str, float]] = {}
    stands_for = {task: STANDS_FOR[task] for task in detections if task in STANDS_FOR}
    for prefix, name in {"unseen": AVERAGE, **stands_for}.items():
        for method, numbers in paper_numbers("dual", name).items():
            by_method.setdefault(method, {}).update({f"{prefix}.{key}": value for key, value in numbers.items()})
    for row in read_csv("zero_shot_tasks"):
        metric = row["metric"]
        unit = 100 if row["metric"] in FILES["dual"][1] else 1
        cells = {f"{task}.{metric}": row.get(COLUMN.get(task, task)) for task in tasks}
        by_method.setdefault(row["method"], {}).update({key: float(cell) / unit for key, cell in cells.items() if cell})
    for task, name in stands_for.items():
        for method, numbers in set_numbers("dual", name).items():
            by_method.setdefault(method, {}).update({f"{task}.{key}": value for key, value in numbers.items()})
    return by_method


def numbers_of(about: Mapping[str, Any]) -> Mapping[str, Numbers]:
    """The paper's numbers for the methods of a study, by the keys of ours; `about` is that of its rows."""
    tasks: Mapping[str, Any] = about["tasks"]
    if len(tasks) == 1:
        return classifier_numbers(next(iter(tasks)))
    theirs = zero_shot_numbers(list(tasks), [task for task, groups in tasks.items() if groups])
    return {
        method: {**found, **{key.replace(".", ".own.", 1): number for key, number in found.items()}}
        for method, found in theirs.items()
    }
