"""The blocks of docs/results.md: tables from `results/studies/`, and the figures drawn from them."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from studies.recipe import STUDIES
from studies.tables import TABLES, not_testable_table
from studies.zero_shot.recipe import ZERO_SHOT
from studies.zero_shot.tables import TABLES as ZERO_SHOT_TABLES
from studies.zero_shot.tables import not_testable_table as zero_shot_not_testable

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
Table = Callable[[Mapping[str, Any]], str]


def study_tables(folder: Path) -> dict[str, Callable[[], str]]:
    """Every block by name: `study_<task>_<table>`, `study_<task>_plot`, `study_not_testable`."""
    blocks: dict[str, Callable[[], str]] = {
        "study_not_testable": not_testable_table,
        "study_zero_shot_not_testable": zero_shot_not_testable,
        "study_zero_shot_reliability": partial(figure, RELIABILITY, "Confidence against accuracy on unseen tasks"),
        "study_summary": partial(summary, folder),
        "study_rates": partial(rates, folder.parent / "backbone_rates.json"),
        "study_cifar10_before": partial(trial, folder.parent / "trials" / "vision-cifar10-second-run.json"),
        "study_tinyimagenet_by_class": partial(trial, folder.parent / "trials" / "vision-tinyimagenet-by-class.json"),
        "study_stored": partial(stored, folder.parent / "stored_logits.json"),
    }
    for study in (*STUDIES, ZERO_SHOT):
        tables: Mapping[str, Table] = ZERO_SHOT_TABLES if study == ZERO_SHOT else TABLES
        for name, table in tables.items():
            blocks[f"study_{task_of(study)}_{name}"] = partial(block, folder, study, table)
        text = "OOD AUROC of every method against its latency, over that of one model"
        blocks[f"study_{task_of(study)}_plot"] = partial(figure, f"study_{task_of(study)}.svg", text)
    return blocks


RELIABILITY = "study_zero_shot_reliability.svg"
SUMMARY = ("Single", "Deep Ensembles", "Hydra (Circ)", "Hydra (Circ), shared trunk")
TRIAL_LEAVES_OUT = ("Temperature Scaling", "MC Dropout", "Taylor", "CircAvg", "CircAcc", "CircOOD")
STORED = ("accuracy", "auroc", "fpr95", "ece", "nll")


def task_of(study: str) -> str:
    """The short name of a study's task."""
    return "zero_shot" if study == ZERO_SHOT else study.rpartition("-")[2]


def not_measured(command: str) -> str:
    """What stands where a results file is missing."""
    return f"*Not measured yet: `{command}`.*"


def block(folder: Path, study: str, table: Table) -> str:
    """One table, or a line that says how to get it."""
    path = folder / f"{study}.json"
    if not path.exists():
        return not_measured(f"hydra-ensembles study {study}")
    return table(json.loads(path.read_text()))


def summary(folder: Path) -> str:
    """The headline rows of the supervised studies that were measured."""
    rows = []
    for path in (folder / f"{study}.json" for study in STUDIES):
        if not path.exists():
            continue
        facts = json.loads(path.read_text())
        costs = {} if facts["costs"] is None else facts["costs"]["costs"]
        for method in SUMMARY:
            row = facts["rows"][method]
            cells = [in_percent(row[metric]) for metric in ("accuracy", "chosen.all.auroc", "calibrated.ece")]
            latency = f"{costs[method]['latency_ratio']:.2f}x" if method in costs else ""
            rows.append(f"| {path.stem} | {method} | {' | '.join(cells)} | {latency} |")
    if not rows:
        return not_measured(f"hydra-ensembles study {STUDIES[0]}")
    head = ["| study | method | accuracy | OOD AUROC | ECE, calibrated | latency |", "|---|---|---:|---:|---:|---:|"]
    note = (
        "Mean and deviation over seeds; OOD AUROC with each method's own score, mean over all OOD sets; latency on a "
        "GPU, over that of the single model. From `results/studies/`."
    )
    return "\n".join([*head, *rows, "", note])


def in_percent(values: Sequence[float]) -> str:
    """Mean and deviation over seeds in percent; one seed has no deviation."""
    deviation = f" ± {100 * stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.2f}{deviation}"


def rates(path: Path) -> str:
    """How the vision backbones could have been trained, on half B."""
    if not path.exists():
        return not_measured("python benchmarks/backbone_rates.py")
    lines = [
        "| study | rate | classifier's rate | epochs | accuracy | OOD AUROC |  |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for study, one in json.loads(path.read_text()).items():
        for row in one["rows"]:
            chosen = all(row[name] == value for name, value in one["chosen"].items())
            lines.append(
                f"| {study} | {row['learning_rate']:g} | {row['learning_rate'] * row['classifier_rate']:g} "
                f"| {row['epochs']} | {100 * row['accuracy']:.2f} | {100 * row['auroc']:.2f} "
                f"| {'**chosen**' if chosen else ''} |"
            )
    return "\n".join([*lines, "", "One training each, on half B. From `results/backbone_rates.json`."])


def trial(path: Path) -> str:
    """A run of a study that is not its result: rows without the single pruned models."""
    facts = json.loads(path.read_text())
    lines = [
        "| method | accuracy | AUROC, maximum probability | own score | AUROC, own score | cost |",
        "|---|---:|---:|---|---:|---:|",
    ]
    for method, row in facts["rows"].items():
        if method in TRIAL_LEAVES_OUT:
            continue
        accuracy, by_msp, by_own = (in_percent(row[key]) for key in ("accuracy", "all.auroc", "chosen.all.auroc"))
        score = facts["decision"]["decision"]["scores"][method].replace("_", " ")
        cost = facts["costs"]["costs"][method]["latency_ratio"]
        lines.append(f"| {method} | {accuracy} | {by_msp} | {score} | {by_own} | {cost:.2f}x |")
    note = f"{facts['device']}, seeds {facts['seeds']}. From `results/trials/{path.name}`, without stored logits."
    return "\n".join([*lines, "", note])


def stored(path: Path) -> str:
    """The largest differences between tables from full and from stored logits."""
    if not path.exists():
        return not_measured("python benchmarks/stored_logits.py")
    lines = ["| study | " + " | ".join(STORED) + " |", "|---|" + "---:|" * len(STORED)]
    for study, one in json.loads(path.read_text()).items():
        gaps = [one["largest"][metric]["difference"] * (1 if metric == "nll" else 100) for metric in STORED]
        cells = [f"{gap:.3f}" if metric == "nll" else f"{gap:.2f}" for metric, gap in zip(STORED, gaps, strict=True)]
        lines.append(f"| {study} | " + " | ".join(cells) + " |")
    note = (
        "Largest over all methods and sets of one seed, in points (NLL: as it is). From `results/stored_logits.json`."
    )
    return "\n".join([*lines, "", note])


def figure(file: str, text: str) -> str:
    """A figure of the documents, where it was drawn."""
    if not (FIGURES / file).exists():
        return "*No figure yet: `python benchmarks/study_figures.py`.*"
    return f"![{text}](figures/{file})"
