"""Members: what makes them differ (B.5, Tables 8 and 9), and what more of them bring and cost (B.6, B.7).

Each source of diversity is fixed or free by itself: which heads a member loses is a draw from a circuit, the order of
the batches (with their augmentation) and the dropout have a seed each in the recipe. Times mean something only where
nothing else runs on the device.
"""

from typing import Any

import hydra_ensembles as he
from hydra_ensembles import HeadRanking
from hydra_ensembles.heads.members import CIRCUIT_ORDER, circuit_members, sampled_members

from ..engine import timed
from ..samples import SampleBatches
from ..seed import Seed
from . import analysis
from .analysis import ALL, CLASSIFICATION, Analysis, Found, asked, by_seed, few_steps, measured, rows_table

VARIANTS = {  # what is free, and whether that is the heads, the order, the noise of back-propagation
    "heads": (1, 0, 0),
    "order": (0, 1, 0),
    "noise": (0, 0, 1),
    "order and noise": (0, 1, 1),
    "heads, order and noise": (1, 1, 1),
    "nothing": (0, 0, 0),
}
DIVERSITY = {
    "mutual_information": "ID MI",
    "disagreement": "ID disagreement",
    "all.mutual_information": "OOD MI",
    "all.disagreement": "OOD disagreement",
}
COLUMNS = {**CLASSIFICATION, **{key: f"all {head}" for key, head in ALL.items()}}
TASK = "ImageNet-1K"  # the only one that the paper shows
APART = "MLPs apart"


def run_diversity(seed: Seed) -> dict[str, Any]:
    """Numbers of ensembles whose members differ in some of the sources, beside Single and a Deep Ensemble."""
    base, asked_for = seed.base, asked(seed.task, "diversity")
    chosen = analysis.of_task(seed.task, asked_for["tasks"], "diversity")
    prune, steps = analysis.counted(base, chosen["prune"]), asked_for["steps"]
    pool = round(asked_for["pool"] * prune)
    heads = sampled_members(seed.circuit("avg", pool), prune, pool, seed.members, seed.number)

    def member(drawn: int, order: int, noise: int, again: int = 0) -> he.Ensemble:
        """One training; `again` counts those with all seeds the same, which only the hardware tells apart."""
        draws = {"seed": seed.derived("noise", noise), "order_seed": seed.derived("order", order)}
        training = few_steps(seed.task, steps=steps, dropout=chosen["dropout"], **draws)
        name = f"{analysis.marked(seed.task, 'diversity')}-{drawn}{order}{noise}-{again}"
        return seed.trained(name, lambda: he.prune(base, heads[drawn]), training)

    rows = {"Single": measured(seed, base), "one member": measured(seed, member(0, 0, 0))}
    rows["Deep Ensembles"] = measured(seed, he.Ensemble.stack(seed.singles))
    for title, free in VARIANTS.items():
        parts = []
        for index in range(seed.members):
            drawn, order, noise = (index * one for one in free)
            parts.append(member(drawn, order, noise, again=0 if any(free) else index))
        rows[f"free: {title}"] = measured(seed, he.fuse(parts, mlp="mean"))
    taken = few_steps(seed.task, steps=steps).steps
    return {"prune": prune, "pool": pool, "members": seed.members, "steps": taken, "rows": rows}


def diversity_table(found: Found) -> str:
    """Tables 8 and 9."""
    prune, pool, members, steps = (by_seed(found, key)[0] for key in ("prune", "pool", "members", "steps"))
    note = (
        f"{members} members that each lose {prune} heads out of the first {pool} of CircAvg, trained for {steps} steps "
        "and fused; dropout is the noise. With nothing free, only the hardware tells trainings apart. The paper's OOD "
        f"numbers with the order free are those of its Deep Ensembles in Table 1, all of them of {TASK}."
    )
    return "\n\n".join([rows_table(found, COLUMNS, "8", TASK, note=note), rows_table(found, DIVERSITY, "9", TASK)])


def run_members(seed: Seed) -> dict[str, Any]:
    """Numbers and times by the number of members, fused and not."""
    base, task, chosen = seed.base, seed.task, asked(seed.task, "members")
    steps = few_steps(task).steps  # refused here where no rate is chosen, before anything is made
    counts, pool = chosen["counts"], round(chosen["pool"] * seed.prune)
    rankings: dict[str, HeadRanking] = {one: seed.circuit(one) for one in CIRCUIT_ORDER}
    rankings["avg"] = seed.circuit("avg", pool)
    heads = circuit_members(rankings, seed.prune, max(counts), pool, seed.number)
    trained = analysis.side_by_side(seed, "members", lambda: [he.prune(base, one) for one in heads])
    models = {"Single": base, "Deep Ensembles, 3": he.Ensemble.stack(seed.singles)}
    for count in counts:
        some = trained[:count]
        models[f"Hydra (Circ), {count}"] = he.fuse(some, mlp="mean") if count > 1 else some[0]
        if count > 1:
            models[f"{APART}, {count}"] = he.fuse(some, mlp="separate")
    rows = {name: measured(seed, model) for name, model in models.items()}
    together = {name: model for name, model in models.items() if not name.startswith(APART)}
    for batch in chosen["batches"]:
        inputs = base.prepare(next(iter(SampleBatches(task.half_b, batch)))[0])
        for name, one in timed(together, inputs, seed.device).items():
            rows[name] |= {f"milliseconds.{batch}": one["latency_ms"], f"ratio.{batch}": one["latency_ratio"]}
    return {"prune": seed.prune, "steps": steps, "batches": chosen["batches"], "rows": rows}


def members_table(found: Found) -> str:
    """Tables 10 and 11."""
    prune, steps, batches = (by_seed(found, key)[0] for key in ("prune", "steps", "batches"))
    spent = {f"milliseconds.{one}": f"ms, batch {one}" for one in batches}
    spent |= {f"ratio.{one}": f"× Single, batch {one}" for one in batches}
    note = (
        f"Members lose {prune} heads each (CircAvg, CircAcc, CircOOD, then draws from CircAvg) and are trained side by "
        f"side for {steps} steps; Deep Ensembles are whole fine-tunings. Times in bfloat16. The paper's: {TASK}."
    )
    return rows_table(found, {**spent, **COLUMNS}, "10", TASK, note=note)


DIFFERENCES = Analysis("What makes members differ (Tables 8 and 9)", run_diversity, diversity_table)
MORE = Analysis("What more members bring and cost (Tables 10 and 11)", run_members, members_table, kinds=("image",))
