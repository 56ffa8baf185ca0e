"""What studies have stored, in the form of the paper's tables: eight seeds (Table 12), and E.3.2 (Tables 27 and 28)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..dual_findings import DualStudy
from ..paper import zero_shot_numbers
from ..results import fixed, markdown
from ..rows import DEEP, HYDRA, HYDRA_CIRC, SINGLE
from ..stored import Study
from .analysis import ALL, CLASSIFICATION, Analysis, Found, about, by_seed, cell, paper_task, printed, rows_table
from .drawing import Panel, gains, panel, rows_figure, stored

ROWS = (SINGLE, DEEP, HYDRA_CIRC, HYDRA)
VISION = {
    "Hydra (Circ)": "both towers pruned",
    "Hydra (Circ), six more heads pruned": "both towers, six more heads",
    "Hydra (Circ), image tower only": "image tower",
    "Hydra (Circ), image tower only, text fine-tuned": "image tower, text fine-tuned",
}
ZERO_SHOT = "zero-shot"
FOUND = {"accuracy": "Acc ↑", "nll": "NLL ↓", "ece": "ECE ↓"}


def read_seeds(studies: Path, task: str) -> dict[str, Any]:
    """Numbers of every seed of a study that is stored."""
    study = Study(task, studies)
    found = {row: dict(zip(map(str, study.seeds(row)), study.plain(row), strict=True)) for row in ROWS}
    runs = study.facts["runs"]
    rows = {number: {row: one[number] for row, one in found.items() if number in one} for number in runs}
    seeds = {number: {"rows": one} for number, one in rows.items() if one}
    made_on = {one["device"] for run in runs.values() for one in run["report"].values()}
    return {"seeds": seeds, "device": ", ".join(sorted(made_on))}


def seeds_table(found: Found) -> str:
    """Table 12."""
    columns = {**CLASSIFICATION, **{key: f"all {head}" for key, head in ALL.items()}}
    note = "The paper: eight seeds, of Hydra (Circ) alone."
    return rows_table(found, columns, "12", paper_task(found), note=note)


def seeds_figure(found: Found) -> Any:
    """Every seed, the mean, and the paper's mean."""
    task = paper_task(found)
    rows = dict.fromkeys(row for one in by_seed(found, "rows") for row in one)
    columns = {"accuracy": "accuracy %", "ece": "ECE ↓", "all.auroc": "OOD AUROC %", "all.fpr95": "OOD FPR95 % ↓"}
    panels = [panel(found, key, title, list(rows), "12", task) for key, title in columns.items()]
    return rows_figure(panels, {row: row for row in rows}, "here, mean", f"paper, {task}")


def read_towers(studies: Path, task: str) -> dict[str, Any]:
    """The rows of a zero-shot study that prune one tower or both, by seed."""
    study = DualStudy(task, studies)
    rows = [row for row in VISION if row in study.rows]
    seeds = {
        number: {
            "rows": {
                row: {key: one.value for key, one in study.numbers(row, int(number)).items()}
                for row in rows
                if int(number) in study.seeds(row)
            }
        }
        for number in study.facts["runs"]
    }
    facts = study.facts
    return {"seeds": seeds, "device": facts["device"], "detections": study.detections, "tasks": list(facts["tasks"])}


def towers_table(found: Found) -> str:
    """Tables 27 and 28: means over unseen tasks, and OOD detection for every ID task."""
    there: Mapping[str, Mapping[str, float]] = zero_shot_numbers(found["tasks"], found["detections"])
    columns = {f"unseen.{key}": head for key, head in FOUND.items()}
    for task in found["detections"]:
        columns |= {f"{task}.{group}.auroc": f"{task}: {group} AUROC ↑" for group in ("near", "far", "all")}
    lines = []
    for row, title in VISION.items():
        if not by_seed(found, "rows", row)[0]:
            continue
        lines.append([title, *(cell(by_seed(found, "rows", row, one), one, _shown) for one in columns)])
        known = there.get(row, {})
        lines.append(["*paper*", *(f"*{_shown(known[one], one)}*" if one in known else "" for one in columns)])
    note = f"Zero-shot Hydra (Circ), means over unseen tasks. {about(found)}"
    return markdown(["pruned", *columns.values()], lines, note)


def towers_figure(found: Found) -> Any:
    """What other prunings do less pruning both towers, in points: ours seed by seed, and the paper's."""
    there = zero_shot_numbers(found["tasks"], found["detections"])
    first, *others = [row for row in VISION if any(by_seed(found, "rows", row))]
    columns = {"unseen.accuracy": "accuracy, unseen tasks"}
    columns |= {f"{task}.all.auroc": f"AUROC, {task} as ID" for task in found["detections"]}
    panels = []
    for key, title in columns.items():
        theirs = {row: 100 * there[row][key] for row in (first, *others) if key in there.get(row, {})}
        panels.append(gains(Panel("", stored(found, key, [first, *others]), theirs), title, first))
    names = {row: VISION[row] for row in others}
    return rows_figure(panels, names, "here, mean", "paper", "both towers pruned (points)")


def _shown(value: float, column: str) -> str:
    return fixed(100 * value, 2) if column.endswith("ece") else printed(value, column)


SEEDS = Analysis("Over seeds (Table 12)", None, seeds_table, seeds_figure, read=read_seeds)
TOWERS = Analysis("One tower or both, zero-shot (E.3.2)", None, towers_table, towers_figure, read=read_towers)
