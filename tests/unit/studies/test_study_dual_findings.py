"""Tables of the zero-shot study, recomputed by independent code."""

from functools import cache

import numpy as np
import pytest
from other_code import assert_printed, by_other_code, on_level, price
from published import published_zero_shot

from studies.dual_findings import CLASSIFICATION, TABLES
from studies.measures import Columns
from studies.rows import HYDRA_CIRC
from studies.storing import in_rows


def row_of(table: str, row: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("| ").split("|")]


@cache
def by_task(row: str) -> list[dict[str, float]]:
    """Numbers of the stored study by seed and `TASK.key`, by independent code."""
    study = published_zero_shot()

    def numbers(columns: Columns) -> dict[str, float]:
        of_task = ((task, by_other_code(asked, task, study.groups(task))) for task, asked in in_rows(columns).items())
        return {f"{task}.{key}": value for task, found in of_task for key, value in found.items()}

    return on_level(study, row, numbers)


def means(found: list[dict[str, float]], tasks: list[str], key: str) -> list[float]:
    """For every seed the mean over tasks, if all of them have the number."""
    each = [[one.get(f"{task}.{key}") for task in tasks] for one in found]
    return [float(np.mean(one)) for one in each if None not in one]


@pytest.mark.parametrize("rows", [[HYDRA_CIRC, "ViLU"], pytest.param(None, marks=pytest.mark.slow, id="all rows")])
def test_the_published_main_table_by_other_code(rows: list[str] | None) -> None:
    """Printed rows: unseen tasks that count, and OOD sets of both ID tasks."""
    study = published_zero_shot()
    study.rows = rows or study.rows
    head, _, *lines = (line.strip("| ").split(" | ") for line in TABLES["main"](study).splitlines())
    ours = [line for line in lines if line[0] in study.rows]
    for row, cells in zip(study.rows, ours, strict=True):
        found = by_task(row)
        told = dict(zip(head, cells, strict=True))
        for key, title in CLASSIFICATION.items():
            assert_printed(told.pop(title), means(found, study.counted, key), key)
        for task in study.detections:
            for group in (*study.groups(task), "all"):
                assert_printed(told.pop(f"{task} {group} ↑"), means(found, [task], f"own.{group}.auroc"), "auroc")
        assert told == {"row": row, **({"cost": price(study, row)} if study.facts["costs"] else {})}


@pytest.mark.parametrize("row", [HYDRA_CIRC, "ViLU"])
def test_every_task_by_other_code(row: str) -> None:
    """One table per metric as printed, with the paper's numbers for the same task."""
    study = published_zero_shot()
    study.rows = [row]
    tasks = list(study.facts["tasks"])
    keys = {"tasks": "accuracy", "brier": "brier", "nll": "nll", "ece": "own.ece", "aece": "own.aece"}
    places = [*([task] for task in tasks), study.counted]
    for name, key in keys.items():
        for some, cell in zip(places, row_of(TABLES[name](study), row)[1:], strict=True):
            assert_printed(cell, means(by_task(row), some, key), key)
    paper = row_of(TABLES["aece"](study), "(paper)")[1:]
    assert paper[tasks.index("pets")] == {HYDRA_CIRC: "(2.31)", "ViLU": "(5.50)"}[row]
