"""Heads taken out and nothing trained after (B.1, Table 4), and whether a circuit excels at its own task (Table 6)."""

from typing import Any

import hydra_ensembles as he
from hydra_ensembles.heads.members import random_members

from ..seed import Seed
from .analysis import ALL, NEAR_AND_FAR, Analysis, Found, by_seed, measured, paper_task, rows_table

COLUMNS = {"accuracy": "Acc ↑", "ece": "ECE ↓", **NEAR_AND_FAR}


def run(seed: Seed) -> dict[str, Any]:
    """Numbers of Single and of what is left of it without the paper's share of heads, by who chose them."""
    count, base = seed.prune, seed.base
    chosen = {
        "Taylor": seed.taylor().first(count),
        "CircAvg": seed.circuit("avg").first(count),
        "CircAcc": seed.circuit("acc").first(count),
        "CircOOD": seed.circuit("ood").first(count),
        "Random": random_members(base, count, 1, seed.number)[0],
    }
    rows = {"Single": measured(seed, base)}
    return {"prune": count, "rows": rows | {name: measured(seed, he.prune(base, one)) for name, one in chosen.items()}}


def table(found: Found) -> str:
    """Tables 4 and 6 as one: the paper's rows of either stand below ours."""
    note = f"Without {by_seed(found, 'prune')[0]} heads and without any training after."
    task = paper_task(found)
    return "\n\n".join(
        [
            rows_table(found, COLUMNS, "4", task, note=note),
            rows_table(
                {**found, "seeds": {seed: _circuits(one) for seed, one in found["seeds"].items()}},
                {"accuracy": "Acc ↑", **NEAR_AND_FAR, **{key: f"all {head}" for key, head in ALL.items()}},
                "6",
                task,
                note="Each circuit at its own task.",
            ),
        ]
    )


def _circuits(one: Found) -> dict[str, Any]:
    return {"rows": {name: one["rows"][name] for name in ("CircOOD", "CircAcc")}}


ANALYSIS = Analysis("Pruned without training (Tables 4 and 6)", run, table)
