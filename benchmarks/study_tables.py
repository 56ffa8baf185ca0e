"""The blocks of docs/results.md: tables from `results/studies/`, and the figures drawn from them."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hydra_ensembles.studies.recipe import STUDIES
from hydra_ensembles.studies.tables import TABLES, not_testable_table
from hydra_ensembles.studies.zero_shot.recipe import ZERO_SHOT
from hydra_ensembles.studies.zero_shot.tables import TABLES as ZERO_SHOT_TABLES
from hydra_ensembles.studies.zero_shot.tables import not_testable_table as zero_shot_not_testable

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
Table = Callable[[Mapping[str, Any]], str]


def study_tables(folder: Path) -> dict[str, Callable[[], str]]:
    """Every block by name: `study_<task>_<table>`, `study_<task>_plot`, `study_not_testable`."""
    blocks: dict[str, Callable[[], str]] = {
        "study_not_testable": not_testable_table,
        "study_zero_shot_not_testable": zero_shot_not_testable,
        "study_zero_shot_reliability": partial(figure, RELIABILITY, "Confidence against accuracy on unseen tasks"),
    }
    for study in (*STUDIES, ZERO_SHOT):
        tables: Mapping[str, Table] = ZERO_SHOT_TABLES if study == ZERO_SHOT else TABLES
        for name, table in tables.items():
            blocks[f"study_{task_of(study)}_{name}"] = partial(block, folder, study, table)
        text = "OOD AUROC of every method against its latency, over that of one model"
        blocks[f"study_{task_of(study)}_plot"] = partial(figure, f"study_{task_of(study)}.svg", text)
    return blocks


RELIABILITY = "study_zero_shot_reliability.svg"


def task_of(study: str) -> str:
    """The short name of a study's task."""
    return "zero_shot" if study == ZERO_SHOT else study.rpartition("-")[2]


def block(folder: Path, study: str, table: Table) -> str:
    """One table, or a line that says how to get it."""
    path = folder / f"{study}.json"
    if not path.exists():
        return f"*Not measured yet: `hydra-ensembles study {study}`.*"
    return table(json.loads(path.read_text()))


def figure(file: str, text: str) -> str:
    """A figure of the documents, where it was drawn."""
    if not (FIGURES / file).exists():
        return "*No figure yet: `python benchmarks/study_figures.py`.*"
    return f"![{text}](figures/{file})"
