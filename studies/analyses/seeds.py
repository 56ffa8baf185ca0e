"""Stored studies in the form of the paper's tables: eight seeds (Table 12), and E.3.2 (Tables 27 and 28)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..paper import zero_shot_numbers
from ..results import fixed, markdown
from ..rows import DEEP, HYDRA, HYDRA_CIRC, SINGLE
from ..stored import DualStudy, Study
from .analysis import ALL, CLASSIFICATION, Analysis, Result, about, by_seed, cell, printed, rows_table
from .drawing import Panel, gains, panel, rows_figure, stored

ROWS = (SINGLE, DEEP, HYDRA_CIRC, HYDRA)
VISION = {
    "Hydra (Circ)": "both towers pruned",
    "Hydra (Circ), six more heads pruned": "both towers, six more heads",
    "Hydra (Circ), image tower only": "image tower",
    "Hydra (Circ), image tower only, text fine-tuned": "image tower, text fine-tuned",
}
FOUND = {"accuracy": "Acc ↑", "nll": "NLL ↓", "ece": "ECE ↓"}


def read_seeds(studies: Path, task: str) -> dict[str, Any]:
    """Metrics of every seed of a stored study."""
    study = Study(task, studies)
    by_row = {row: {str(seed): numbers for seed, numbers in study.plain(row).items()} for row in ROWS}
    runs = study.facts["runs"]
    rows = {number: {row: numbers[number] for row, numbers in by_row.items() if number in numbers} for number in runs}
    seeds = {number: {"rows": numbers} for number, numbers in rows.items() if numbers}
    made_on = {report["device"] for run in runs.values() for report in run["report"].values()}
    return {"seeds": seeds, "device": ", ".join(sorted(made_on))}


def seeds_table(result: Result) -> str:
    """Table 12."""
    columns = {**CLASSIFICATION, **{key: f"all {head}" for key, head in ALL.items()}}
    note = "The paper: eight seeds, of Hydra (Circ) alone."
    return rows_table(result, columns, "12", result["stands_for"], note=note)


def seeds_figure(result: Result) -> Any:
    """Every seed, the mean, and the paper's mean."""
    task = result["stands_for"]
    rows = dict.fromkeys(row for of_seed in by_seed(result, "rows") for row in of_seed)
    columns = {"accuracy": "accuracy %", "ece": "ECE ↓", "all.auroc": "OOD AUROC %", "all.fpr95": "OOD FPR95 % ↓"}
    panels = [panel(result, key, title, list(rows), "12", task) for key, title in columns.items()]
    return rows_figure(panels, {row: row for row in rows}, "here, mean", f"paper, {task}")


def read_towers(studies: Path, task: str) -> dict[str, Any]:
    """The rows of a zero-shot study that prune one tower or both, by seed."""
    study = DualStudy(task, studies)
    rows = [row for row in VISION if row in study.rows]
    seeds = {
        number: {
            "rows": {
                row: {key: measured.value for key, measured in study.numbers(row, int(number)).items()}
                for row in rows
                if int(number) in study.seeds(row)
            }
        }
        for number in study.facts["runs"]
    }
    facts = study.facts
    return {"seeds": seeds, "device": facts["device"], "detections": study.detections, "tasks": list(facts["tasks"])}


def towers_table(result: Result) -> str:
    """Tables 27 and 28: means over unseen tasks, and OOD detection for every ID task."""
    paper: Mapping[str, Mapping[str, float]] = zero_shot_numbers(result["tasks"], result["detections"])
    columns = {f"unseen.{key}": head for key, head in FOUND.items()}
    for task in result["detections"]:
        columns |= {f"{task}.{group}.auroc": f"{task}: {group} AUROC ↑" for group in ("near", "far", "all")}
    lines = []
    for row, title in VISION.items():
        if not by_seed(result, "rows", row)[0]:
            continue
        lines.append([title, *(cell(by_seed(result, "rows", row, key), key, _shown) for key in columns)])
        numbers = paper.get(row, {})
        lines.append(["*paper*", *(f"*{_shown(numbers[key], key)}*" if key in numbers else "" for key in columns)])
    note = f"Zero-shot Hydra (Circ), means over unseen tasks. {about(result)}"
    return markdown(["pruned", *columns.values()], lines, note)


def towers_figure(result: Result) -> Any:
    """The difference of other prunings to pruning both towers, in points: ours by seed, and the paper's."""
    paper = zero_shot_numbers(result["tasks"], result["detections"])
    first, *others = [row for row in VISION if any(by_seed(result, "rows", row))]
    columns = {"unseen.accuracy": "accuracy, unseen tasks"}
    columns |= {f"{task}.all.auroc": f"AUROC, {task} as ID" for task in result["detections"]}
    panels = []
    for key, title in columns.items():
        theirs = {row: 100 * paper[row][key] for row in (first, *others) if key in paper.get(row, {})}
        panels.append(gains(Panel("", stored(result, key, [first, *others]), theirs), title, first))
    names = {row: VISION[row] for row in others}
    return rows_figure(panels, names, "here, mean", "paper", "both towers pruned (points)")


def _shown(value: float, column: str) -> str:
    return fixed(100 * value, 2) if column.endswith("ece") else printed(value, column)


SEEDS = Analysis("Over seeds (Table 12)", None, seeds_table, seeds_figure, read=read_seeds)
TOWERS = Analysis("One tower or both, zero-shot (E.3.2)", None, towers_table, towers_figure, read=read_towers)
