"""Members: what makes them differ (B.5, Tables 8 and 9), and what more of them gain and cost (B.6, B.7).

Each source of diversity is fixed or free on its own: a member's heads are drawn from a circuit, and the order of the
batches (with their augmentation) and the dropout each have a seed in the recipe. Times are meaningful only if nothing
else runs on the device.
"""

from collections.abc import Mapping
from typing import Any

import hydra_ensembles as he
from hydra_ensembles import HeadRanking
from hydra_ensembles.heads.members import CIRCUIT_ORDER, circuit_members, sampled_members

from ..engine import timed
from ..samples import SampleBatches
from ..seed import Seed
from . import analysis
from .analysis import ALL, CLASSIFICATION, Analysis, Result, asked, by_seed, few_steps, measured, paper, rows_table
from .drawing import DARK, DASHES, GREY, OURS, SMALL, Panel, fields, gains, legend, means, panel, rows_figure

VARIANTS = {  # whether heads, data order and dropout noise are free
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
TASK = "ImageNet-1K"  # the only task that the paper shows
APART = "MLPs apart"
TIME = "milliseconds.4"  # the paper's batches have 4 images
KINDS: Mapping[str, dict[str, Any]] = {  # marker of each kind of ensemble
    "Hydra (Circ)": {"color": OURS, "marker": "o", "markersize": 4.5},
    APART: {"color": GREY, "marker": "s", "markersize": 4.5},
    "Deep Ensembles": {"color": DARK, "marker": "D", "markersize": 5},
}
OPEN_MARK = {"markerfacecolor": "white", "linestyle": "", "markersize": 6.5}


def run_diversity(seed: Seed) -> dict[str, Any]:
    """Metrics of ensembles whose members differ in some of the sources, with Single and a Deep Ensemble."""
    base = seed.base
    asked_for = asked(seed.task, "diversity")
    chosen = analysis.of_task(seed.task, asked_for["tasks"], "diversity")
    prune = analysis.counted(base, chosen["prune"])
    steps = asked_for["steps"]
    pool = round(asked_for["pool"] * prune)
    heads = sampled_members(seed.circuit("avg", pool), prune, pool, seed.members, seed.number)

    def member(drawn: int, order: int, noise: int, again: int = 0) -> he.Ensemble:
        """One training; `again` numbers those with all seeds equal, which differ only by hardware nondeterminism."""
        draws = {"seed": seed.derived("noise", noise), "order_seed": seed.derived("order", order)}
        training = few_steps(seed.task, steps=steps, dropout=chosen["dropout"], **draws)
        name = f"{analysis.marked(seed.task, 'diversity')}-{drawn}{order}{noise}-{again}"
        return seed.trained(name, lambda: he.prune(base, heads[drawn]), training)

    rows = {"Single": measured(seed, base), "one member": measured(seed, member(0, 0, 0))}
    rows["Deep Ensembles"] = measured(seed, he.Ensemble.stack(seed.singles))
    for title, free in VARIANTS.items():
        members = []
        for index in range(seed.members):
            drawn, order, noise = (index * flag for flag in free)
            members.append(member(drawn, order, noise, again=0 if any(free) else index))
        rows[f"free: {title}"] = measured(seed, he.fuse(members, mlp="mean"))
    steps_taken = few_steps(seed.task, steps=steps).steps
    return {"prune": prune, "pool": pool, "members": seed.members, "steps": steps_taken, "rows": rows}


def diversity_table(result: Result) -> str:
    """Tables 8 and 9."""
    prune, pool, members, steps = (by_seed(result, key)[0] for key in ("prune", "pool", "members", "steps"))
    note = (
        f"{members} members that each lose {prune} heads out of the first {pool} of CircAvg, trained for {steps} steps "
        "and fused; dropout is the noise. With nothing free, only the hardware tells trainings apart. The paper's OOD "
        f"numbers with the order free are those of its Deep Ensembles in Table 1, all of them of {TASK}."
    )
    return "\n\n".join([rows_table(result, COLUMNS, "8", TASK, note=note), rows_table(result, DIVERSITY, "9", TASK)])


def diversity_figure(result: Result) -> Any:
    """How often members disagree, by what is free, and the gain over one of them."""
    names = {f"free: {title}": title for title in VARIANTS if title != "nothing"}
    rows = ["one member", *names]
    panels = list[Panel]()
    for key, title in {"disagreement": "disagree, ID", "all.disagreement": "disagree, OOD"}.items():
        panels.append(panel(result, key, title, list(names), "9", TASK))
    for key, title in {"accuracy": "accuracy gained", "all.auroc": "AUROC gained"}.items():
        panels.append(gains(panel(result, key, "", rows, "8", TASK), title, "one member"))
    return rows_figure(panels, names, "here", f"paper, {TASK}", "one member (gains: points)")


def run_members(seed: Seed) -> dict[str, Any]:
    """Metrics and times by the number of members, fused and separate."""
    base = seed.base
    task = seed.task
    chosen = asked(seed.task, "members")
    steps = few_steps(task).steps  # raises if no rate is chosen, before any work is done
    counts = chosen["counts"]
    pool = round(chosen["pool"] * seed.prune)
    rankings: dict[str, HeadRanking] = {score: seed.circuit(score) for score in CIRCUIT_ORDER}
    rankings["avg"] = seed.circuit("avg", pool)
    heads = circuit_members(rankings, seed.prune, max(counts), pool, seed.number)
    trained = analysis.side_by_side(seed, "members", lambda: [he.prune(base, lost) for lost in heads])
    models = {"Single": base, "Deep Ensembles, 3": he.Ensemble.stack(seed.singles)}
    for count in counts:
        members = trained[:count]
        models[f"Hydra (Circ), {count}"] = he.fuse(members, mlp="mean") if count > 1 else members[0]
        if count > 1:
            models[f"{APART}, {count}"] = he.fuse(members, mlp="separate")
    rows = {name: measured(seed, model) for name, model in models.items()}
    together = {name: model for name, model in models.items() if not name.startswith(APART)}
    for batch in chosen["batches"]:
        inputs = base.prepare(next(iter(SampleBatches(task.half_b, batch)))[0])
        for name, cost in timed(together, inputs, seed.device).items():
            rows[name] |= {f"milliseconds.{batch}": cost["latency_ms"], f"ratio.{batch}": cost["latency_ratio"]}
    return {"prune": seed.prune, "steps": steps, "batches": chosen["batches"], "rows": rows}


def members_table(result: Result) -> str:
    """Tables 10 and 11."""
    prune, steps, batches = (by_seed(result, key)[0] for key in ("prune", "steps", "batches"))
    spent = {f"milliseconds.{batch}": f"ms, batch {batch}" for batch in batches}
    spent |= {f"ratio.{batch}": f"× Single, batch {batch}" for batch in batches}
    note = (
        f"Members lose {prune} heads each (CircAvg, CircAcc, CircOOD, then draws from CircAvg) and are trained side by "
        f"side for {steps} steps; Deep Ensembles are whole fine-tunings. Times in bfloat16. The paper's: {TASK}."
    )
    return rows_table(result, {**spent, **COLUMNS}, "10", TASK, note=note)


def members_figure(result: Result) -> Any:
    """Points over Single and time relative to Single by the number of members; the paper's as open marks."""
    rows = list(by_seed(result, "rows")[0])
    theirs = paper("10", TASK)
    drawing, ((accuracy, foreign, spent),) = fields(1, 3, 3.0)
    for field, key, title in ((accuracy, "accuracy", "accuracy"), (foreign, "all.auroc", "OOD AUROC")):
        gained = gains(panel(result, key, "", rows, "10", TASK), "", "Single")
        for kind, style in KINDS.items():
            field.plot(*counted(means(gained), kind), label=kind, **style)
            field.plot(*counted(gained.paper, kind), **style | OPEN_MARK)
        field.axhline(0, color=DARK, linewidth=1, linestyle=DASHES, label="Single")
        field.set(title=f"{title}, points over Single", xlabel="members")
    for batch, dashes in zip(by_seed(result, "batches")[0], ("-", "--", ":"), strict=False):
        times = means(panel(result, f"ratio.{batch}", "", rows))
        for kind in ("Hydra (Circ)", "Deep Ensembles"):
            label = f"batch of {batch}" if kind != "Deep Ensembles" else "_"
            spent.plot(*counted(times, kind), label=label, **KINDS[kind] | {"linestyle": dashes})
    slower = {row: float(cells[TIME]) / float(theirs["Single"][TIME]) for row, cells in theirs.items() if TIME in cells}
    for kind, style in KINDS.items():
        spent.plot(*counted(slower, kind), **style | OPEN_MARK)
    spent.set(title="time over Single's", xlabel="members", ylim=(0, None))
    spent.legend(frameon=False, fontsize=SMALL)
    accuracy.plot([], [], marker="o", label=f"open: paper, {TASK}", **OPEN_MARK)
    legend(drawing, accuracy)
    return drawing


def counted(values: Mapping[str, float], kind: str) -> tuple[list[int], list[float]]:
    """Values of a kind of ensemble by its number of members."""
    pairs = sorted((int(row.rpartition(", ")[2]), mean) for row, mean in values.items() if row.startswith(f"{kind}, "))
    return [count for count, _ in pairs], [mean for _, mean in pairs]


DIFFERENCES = Analysis("What makes members differ (Tables 8 and 9)", run_diversity, diversity_table, diversity_figure)
MORE = Analysis(
    "What more members bring and cost (Tables 10 and 11)", run_members, members_table, members_figure, ("image",)
)
