"""Circuits that keep a distance of features high instead of a confidence: what each of them is good for."""

from collections.abc import Mapping
from typing import Any

import hydra_ensembles as he
from hydra_ensembles import HeadRanking
from hydra_ensembles.heads.members import Score

from ..samples import CIRCUIT_MEMORY
from ..seed import Seed
from .analysis import Analysis, Found, by_seed, measured, rows_table

SCORES: Mapping[Score, str] = {"ood": "CircOOD", "avg": "CircAvg"}
BY_DISTANCE = "by distance"
COLUMNS = {
    "accuracy": "Acc ↑",
    **{f"{group}.auroc": f"{group} AUROC by MSP ↑" for group in ("near", "far", "all")},
    **{f"mahalanobis:{group}.auroc": f"{group} AUROC by Mahalanobis ↑" for group in ("near", "far", "all")},
}


def run(seed: Seed) -> dict[str, Any]:
    """Single, circuits by confidence and circuits by Mahalanobis distance, without training; judged by both scores."""
    task, base, count = seed.task, seed.base, seed.prune
    knows = he.fit_familiarity(base, task.familiar(), "mahalanobis")
    rows, removed = {"Single": measured(seed, base, familiar=True)}, {}
    for score, title in SCORES.items():

        def extract(score: Any = score) -> HeadRanking:
            sides = task.batches(task.ranking), task.batches(task.foreign)
            how: dict[str, Any] = {"score": score, "budget": count, "max_memory": CIRCUIT_MEMORY, "progress": False}
            return he.extract_circuit(knows, *sides, ood_score="mahalanobis", **how)

        chosen = {title: seed.circuit(score), f"{title} {BY_DISTANCE}": seed.ranked(f"{score}-{count}-far", extract)}
        for name, ranking in chosen.items():
            rows[name] = measured(seed, he.prune(base, ranking.first(count)), familiar=True)
            removed[name] = [str(head) for head in ranking.first(count)]
    return {"prune": count, "rows": rows, "removed": removed}


def table(found: Found) -> str:
    """One row a circuit, and what two of one goal have in common."""
    shared = []
    for title in SCORES.values():
        pairs = zip(by_seed(found, "removed", title), by_seed(found, "removed", f"{title} {BY_DISTANCE}"), strict=True)
        common = [len(set(one) & set(other)) for one, other in pairs]
        shared.append(f"{title} {sum(common) / len(common):.1f}")
    count = by_seed(found, "prune")[0]
    note = (
        f"Without {count} heads and without training; the distance is fitted anew to what is left. Heads that the "
        f"circuits of either kind have in common: {', '.join(shared)} of {count}. Not in the paper."
    )
    return rows_table(found, COLUMNS, "", "", note=note)


ANALYSIS = Analysis("Circuits by a distance of features", run, table)
