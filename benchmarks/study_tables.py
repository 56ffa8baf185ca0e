"""The blocks of docs/results.md: tables from `results/studies/`, and the figures drawn from them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hydra_ensembles.studies.recipe import STUDIES
from hydra_ensembles.studies.tables import TABLES, not_testable_table

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"


def study_tables(folder: Path) -> dict[str, Callable[[], str]]:
    """Every block by name: `study_<task>_<table>`, `study_<task>_plot`, `study_not_testable`."""
    blocks: dict[str, Callable[[], str]] = {"study_not_testable": not_testable_table}
    for study in STUDIES:
        for table in TABLES:
            blocks[f"study_{task_of(study)}_{table}"] = partial(block, folder, study, table)
        blocks[f"study_{task_of(study)}_plot"] = partial(plot, study)
    return blocks


def task_of(study: str) -> str:
    """The short name of a study's task."""
    return study.rpartition("-")[2]


def block(folder: Path, study: str, table: str) -> str:
    """One table, or a line that says how to get it."""
    path = folder / f"{study}.json"
    if not path.exists():
        return f"*Not measured yet: `hydra-ensembles study {study}`.*"
    return TABLES[table](json.loads(path.read_text()))


def plot(study: str) -> str:
    """The figure of OOD AUROC against cost, where it was drawn."""
    file = FIGURES / f"study_{task_of(study)}.svg"
    if not file.exists():
        return "*No figure yet: `python benchmarks/study_figures.py`.*"
    return f"![OOD AUROC of every method against its latency, over that of one model](figures/{file.name})"
