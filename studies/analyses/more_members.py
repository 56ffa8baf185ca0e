"""What more members bring and cost (B.6, Table 10), and what averaging their MLPs loses (B.7, Table 11).

Times mean something only where nothing else runs on the device.
"""

from collections.abc import Callable
from typing import Any

import torch

import hydra_ensembles as he
from hydra_ensembles import HeadRanking
from hydra_ensembles.heads.members import CIRCUIT_ORDER, circuit_members
from hydra_ensembles.model.cost import measure_costs

from ..samples import SampleBatches
from ..seed import Seed
from .analysis import (
    ALL,
    CLASSIFICATION,
    Analysis,
    Found,
    asked,
    by_seed,
    few_steps,
    measured,
    rows_table,
    side_by_side,
)

APART = "MLPs apart"


def run(seed: Seed) -> dict[str, Any]:
    """Numbers and times by the number of members, fused and not."""
    base, task, chosen = seed.base, seed.task, asked(seed.task, "members")
    counts, pool = chosen["counts"], round(chosen["pool"] * seed.prune)
    rankings: dict[str, HeadRanking] = {one: seed.circuit(one) for one in CIRCUIT_ORDER}
    rankings["avg"] = seed.circuit("avg", pool)
    heads = circuit_members(rankings, seed.prune, max(counts), pool, seed.number)
    trained = side_by_side(seed, "members", lambda: [he.prune(base, one) for one in heads])
    models = {"Single": base, "Deep Ensembles, 3": he.Ensemble.stack(seed.singles)}
    for count in counts:
        some = trained[:count]
        models[f"Hydra (Circ), {count}"] = he.fuse(some, mlp="mean") if count > 1 else some[0]
        if count > 1:
            models[f"{APART}, {count}"] = he.fuse(some, mlp="separate")
    rows = {name: measured(seed, model) for name, model in models.items()}
    timed = {name: model for name, model in models.items() if not name.startswith(APART)}
    for batch in chosen["batches"]:
        for name, (taken, ratio) in times(seed, timed, batch).items():
            rows[name] |= {f"milliseconds.{batch}": taken, f"ratio.{batch}": ratio}
    return {"prune": seed.prune, "steps": few_steps(task).steps, "batches": chosen["batches"], "rows": rows}


def times(seed: Seed, models: dict[str, he.Ensemble], batch: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of a batch, and how many times Single's that is; on a GPU in bfloat16, each by its fastest plan."""
    task, fast = seed.task, seed.task.device.type == "cuda"
    inputs = seed.base.prepare(next(iter(SampleBatches(task.half_b, batch)))[0])
    runs: dict[str, Callable[[Any], Any]] = {
        name: model.optimize(inputs, dtype=torch.bfloat16) if fast else model for name, model in models.items()
    }
    taken = measure_costs(runs, inputs, repeats=50 if fast else 2, warmup=3 if fast else 0)
    return {one.name: (one.latency_ms, one.latency_ratio) for one in taken}


def table(found: Found) -> str:
    """Tables 10 and 11."""
    batches = by_seed(found, "batches")[0]
    spent = {f"milliseconds.{one}": f"ms, batch {one}" for one in batches}
    spent |= {f"ratio.{one}": f"× Single, batch {one}" for one in batches}
    prune, steps = by_seed(found, "prune")[0], by_seed(found, "steps")[0]
    note = (
        f"Members lose {prune} heads each (CircAvg, CircAcc, CircOOD, then draws from CircAvg) and are trained side by "
        f"side for {steps} steps; Deep Ensembles are whole fine-tunings."
    )
    columns = {**spent, **CLASSIFICATION, **{key: f"all {head}" for key, head in ALL.items()}}
    return rows_table(found, columns, "10", "ImageNet-1K", note=note)


ANALYSIS = Analysis("What more members bring and cost (Tables 10 and 11)", run, table, kinds=("image",))
