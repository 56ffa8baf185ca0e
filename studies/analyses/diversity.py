"""What makes members differ (B.5, Tables 8 and 9): heads, the order of batches, the noise of back-propagation.

Each source is fixed or free by itself: which heads a member loses is a draw from a circuit, the order of the batches
(with their augmentation) and the dropout have a seed each in the recipe.
"""

from typing import Any

import hydra_ensembles as he
from hydra_ensembles.heads.members import sampled_members

from ..seed import Seed
from .analysis import (
    ALL,
    CLASSIFICATION,
    Analysis,
    Found,
    asked,
    by_seed,
    counted,
    few_steps,
    marked,
    measured,
    of_task,
    rows_table,
)

SOURCES = ("heads", "order", "noise")
VARIANTS = {
    "heads": (1, 0, 0),
    "order": (0, 1, 0),
    "noise": (0, 0, 1),
    "order and noise": (0, 1, 1),
    "heads, order and noise": (1, 1, 1),
    "nothing": (0, 0, 0),
}
"""What is free, and which of `SOURCES` that is."""
DIVERSITY = {
    "mutual_information": "ID MI",
    "disagreement": "ID disagreement",
    "all.mutual_information": "OOD MI",
    "all.disagreement": "OOD disagreement",
}


def run(seed: Seed) -> dict[str, Any]:
    """Numbers of ensembles whose members differ in some of the sources, beside Single and a Deep Ensemble."""
    base, asked_for = seed.base, asked(seed.task, "diversity")
    chosen = of_task(seed.task, asked_for["tasks"], "diversity")
    prune = counted(base, chosen["prune"])
    pool = round(asked_for["pool"] * prune)
    heads = sampled_members(seed.circuit("avg", pool), prune, pool, seed.members, seed.number)

    steps = few_steps(seed.task, steps=asked_for["steps"]).steps

    def member(drawn: int, order: int, noise: int, again: int = 0) -> he.Ensemble:
        """One training; `again` counts those with all seeds the same, which only the hardware tells apart."""
        training = few_steps(
            seed.task,
            steps=asked_for["steps"],
            dropout=chosen["dropout"],
            seed=seed.derived("noise", noise),
            order_seed=seed.derived("order", order),
        )
        name = f"{marked(seed.task, 'diversity')}-{drawn}{order}{noise}-{again}"
        return seed.trained(name, lambda: he.prune(base, heads[drawn]), training)

    rows = {"Single": measured(seed, base), "one member": measured(seed, member(0, 0, 0))}
    rows["Deep Ensembles"] = measured(seed, he.Ensemble.stack(seed.singles))
    for title, free in VARIANTS.items():
        parts = []
        for index in range(seed.members):
            drawn, order, noise = (index * one for one in free)
            parts.append(member(drawn, order, noise, again=0 if any(free) else index))
        rows[f"free: {title}"] = measured(seed, he.fuse(parts, mlp="mean"))
    return {"prune": prune, "pool": pool, "members": seed.members, "steps": steps, "rows": rows}


def table(found: Found) -> str:
    """Tables 8 and 9."""
    prune, pool, members, steps = (by_seed(found, key)[0] for key in ("prune", "pool", "members", "steps"))
    note = (
        f"{members} members that each lose {prune} heads out of the first {pool} of CircAvg, trained for {steps} steps "
        "and fused; dropout is the noise. With nothing free, only the hardware tells trainings apart. The paper's OOD "
        "numbers with the order free are those of its Deep Ensembles in Table 1."
    )
    columns = {**CLASSIFICATION, **{key: f"all {head}" for key, head in ALL.items()}}
    task = "ImageNet-1K"  # the only one that the paper shows
    return "\n\n".join([rows_table(found, columns, "8", task, note=note), rows_table(found, DIVERSITY, "9", task)])


ANALYSIS = Analysis("What makes members differ (Tables 8 and 9)", run, table)
