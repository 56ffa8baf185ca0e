"""Every number of a zero-shot study, method by method and seed by seed, from the stored logits."""

import statistics

from hydra_ensembles.metrics.calibration import accuracy, adaptive_ece, brier, ece, nll
from hydra_ensembles.metrics.ood import aupr, auroc, fpr95

from ..rows import DIGITS, Rows
from .methods import SINGLE
from .results import StoredZeroShot

CLASSIFICATION = {"accuracy": accuracy, "brier": brier, "nll": nll, "ece": ece, "aece": adaptive_ece}
DETECTION = {"auroc": auroc, "fpr95": fpr95, "aupr": aupr}
GROUPS = ("near", "far", "all")


def zero_shot_rows(study: StoredZeroShot) -> Rows:
    """All rows: `task.NAME.metric`, means `unseen.metric` and `seen.metric`, `TASK.SET.metric`, `TASK.all.metric`."""
    rows: Rows = {}
    for method in study.methods:
        for seed in study.seeds:
            for metric, value in method_numbers(study, method, seed).items():
                rows.setdefault(method, {}).setdefault(metric, []).append(round(value, DIGITS))
    counted = counted_tasks(study, rows)
    for row in rows.values():
        for domain, tasks in counted.items():
            for metric in CLASSIFICATION:
                row[f"{domain}.{metric}"] = [
                    round(statistics.mean(values), DIGITS)
                    for values in zip(*(row[f"task.{task}.{metric}"] for task in tasks), strict=True)
                ]
    return rows


def method_numbers(study: StoredZeroShot, method: str, seed: int) -> dict[str, float]:
    """Numbers of one method and seed on every task and every OOD set, with the maximum softmax probability."""
    found: dict[str, float] = {}
    for task in study.tasks():
        prediction, labels = study.on_task(method, seed, task)
        found |= {f"task.{task}.{name}": metric(prediction.probs, labels) for name, metric in CLASSIFICATION.items()}
    for task in study.detections:
        inside = study.on_task(method, seed, task)[0].score("msp")
        for name in study.outside(task, "all"):
            outside = study.on_outside(method, seed, task, name).score("msp")
            found |= {f"{task}.{name}.{key}": metric(inside, outside) for key, metric in DETECTION.items()}
        for group in GROUPS:
            for key in DETECTION:
                values = [found[f"{task}.{name}.{key}"] for name in study.outside(task, group)]
                found[f"{task}.{group}.{key}"] = statistics.mean(values)
    return found


def chance(study: StoredZeroShot, task: str) -> float:
    """The accuracy of guessing."""
    return 1 / int(study.facts["tasks"][task]["classes"])


def counted_tasks(study: StoredZeroShot, rows: Rows) -> dict[str, list[str]]:
    """The tasks of each domain that count in its mean: the single model is several times better than chance there.

    The rule stands in the recipe. Where no task of a domain is left, the domain has no mean.
    """
    least = float(study.facts["recipe"]["least_over_chance"])
    found = {}
    for domain in ("unseen", "seen"):
        tasks = [
            task
            for task in study.tasks(domain)
            if statistics.mean(rows[SINGLE][f"task.{task}.accuracy"]) >= least * chance(study, task)
        ]
        if tasks:
            found[domain] = tasks
    return found
