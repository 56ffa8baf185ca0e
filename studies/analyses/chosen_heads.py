"""Which heads are chosen: what circuits and Taylor scores have in common (B.2.2), how much a draw of data decides."""

from itertools import combinations
from statistics import mean
from typing import Any

import numpy as np

import hydra_ensembles as he
from hydra_ensembles import HeadRanking
from hydra_ensembles.data import subset
from hydra_ensembles.heads import jensen_shannon, overlap, stability
from hydra_ensembles.heads.masking import existing_heads

from ..results import markdown
from ..samples import SampleBatches
from ..seed import Seed
from ..sets import given
from .analysis import Analysis, Found, about, asked, by_seed, cell, heads_of, paper, paper_task
from .drawing import DARK, DASHES, OURS, Panel, fields, legend, rows_figure

CIRCUIT, TAYLOR, GLOBAL = "CircAvg", "Taylor", "Taylor, all layers at once"


def run_overlap(seed: Seed) -> dict[str, Any]:
    """Overlap and divergence of every two choices, beside those of random ones."""
    count, base = seed.prune, seed.base
    chosen: dict[str, HeadRanking] = {
        CIRCUIT: seed.circuit("avg"),
        "CircAcc": seed.circuit("acc"),
        "CircOOD": seed.circuit("ood"),
        TAYLOR: seed.taylor(),
        GLOBAL: seed.ranked(f"taylor-global-{count}", lambda: global_taylor(seed, count)),
    }
    pairs = {
        f"{one}, {other}": {
            "overlap": overlap(chosen[one], chosen[other], count),
            "divergence": jensen_shannon(chosen[one], chosen[other], count),
        }
        for one, other in combinations(chosen, 2)
    }
    return {"prune": count, "heads": heads_of(base), "pairs": pairs, "chance": chance(seed, chosen[CIRCUIT], count)}


def global_taylor(seed: Seed, count: int) -> HeadRanking:
    """The Taylor ranking over all layers, on the batches of the ranking by layers."""
    task = seed.task
    batches = SampleBatches(task.train, 128, training=True)
    how: dict[str, Any] = {"seed": seed.derived("taylor", 0), "calibration_batches": task.settings["taylor_batches"]}
    return he.taylor(seed.base, batches, budget=count, scope="global", **how)


def chance(seed: Seed, circuit: HeadRanking, count: int) -> dict[str, float]:
    """Mean overlap and divergence of random choices with a circuit."""
    heads = existing_heads(seed.base.config)
    draws = np.random.default_rng(0)
    found = []
    for _ in range(asked(seed.task, "overlap")["draws"]):
        rows = draws.permutation(len(heads))[:count]
        other = HeadRanking(tuple(heads[row] for row in rows), (0.0,) * count, "random", "random")
        found.append((overlap(circuit, other, count), jensen_shannon(circuit, other, count)))
    return {"overlap": mean(one for one, _ in found), "divergence": mean(one for _, one in found)}


def overlap_table(found: Found) -> str:
    """Every pair beside chance and the paper."""
    there = paper("B.2.2", "ImageNet-1K")
    lines = []
    for pair in by_seed(found, "pairs")[0]:
        cells = [cell(by_seed(found, "pairs", pair, one), one, _shown) for one in ("overlap", "divergence")]
        known = there.get(pair, {}) if paper_task(found) == "ImageNet-1K" else {}
        lines.append([pair, *cells, known.get("overlap", ""), known.get("divergence", "")])
    random = [cell(by_seed(found, "chance", one), one, _shown) for one in ("overlap", "divergence")]
    lines.append(["*CircAvg, random heads*", *random, "", ""])
    note = f"{by_seed(found, 'prune')[0]} of {by_seed(found, 'heads')[0]} heads each. {about(found)}"
    head = ["two choices", "overlap %", "Jensen–Shannon", "paper: overlap %", "Jensen–Shannon"]
    return markdown(head, lines, note)


def overlap_figure(found: Found) -> Any:
    """Every pair, and what random heads give."""
    there = paper("B.2.2", "ImageNet-1K")
    rows = list(by_seed(found, "pairs")[0])
    panels = []
    for column, title, scale in (("overlap", "heads in common %", 100), ("divergence", "Jensen–Shannon divergence", 1)):
        ours = {row: [scale * one for one in by_seed(found, "pairs", row, column)] for row in rows}
        known = [row for row in rows if column in there.get(row, {}) and paper_task(found) == "ImageNet-1K"]
        random = scale * mean(by_seed(found, "chance", column))
        panels.append(Panel(title, ours, {row: float(there[row][column]) for row in known}, random))
    names = {row: row.replace(GLOBAL, "global Taylor") for row in rows}
    return rows_figure(panels, names, "here", "paper, ImageNet-1K", "CircAvg and random heads")


def _shown(value: float, column: str) -> str:
    return f"{100 * value:.1f}" if column == "overlap" else f"{value:.3f}"


# --- stability -------------------------------------------------------------------------------------------------------


def run_stability(seed: Seed) -> dict[str, Any]:
    """How many heads circuits of several draws of the data have in common, by the size of the draws."""
    task = seed.task
    base = seed.base
    count = seed.prune
    chosen = asked(seed.task, "stability")
    inside = task.source.load(given(task.suite, "validation"))
    outside = task.source.load(task.suite.circuit_ood)
    rows: dict[str, Any] = {}
    for size in chosen["sizes"]:
        known, foreign = min(size, len(inside) // 2), min(size, len(outside) // 2)
        if known < size:  # two draws would be nearly the same
            continue
        rankings, start = [], []
        for draw in range(chosen["draws"]):

            def sides(known: int = known, foreign: int = foreign, draw: int = draw) -> tuple[Any, Any, Any]:
                some = task.samples(subset(inside, known, draw, stratified=True))
                other = task.samples(subset(outside, foreign, draw))
                return base, task.batches(some), task.batches(other)

            name = f"draw-{chosen['score']}-{count}-{size}-{draw}"
            rankings.append(seed.extracted(name, sides, budget=count, score=chosen["score"]))
            start.append(rankings[-1].scores[-1])
        rows[str(size)] = {
            "inside": known,
            "outside": foreign,
            "stability": stability(rankings, count),
            "divergence": mean(jensen_shannon(*pair, count) for pair in combinations(rankings, 2)),
            "score": mean(start),
            "removed": [[str(head) for head in one.first(count)] for one in rankings],
        }
    return {"prune": count, "heads": heads_of(base), "draws": chosen["draws"], "rows": rows}


def stability_table(found: Found) -> str:
    """Sizes one below the other, and chance."""
    lines = []
    for size in by_seed(found, "rows")[0]:
        values = [cell(by_seed(found, "rows", size, one), one, _share_of) for one in ("stability", "score")]
        sides = [str(by_seed(found, "rows", size, one)[0]) for one in ("inside", "outside")]
        lines.append([*sides, *values])
    prune, heads = by_seed(found, "prune")[0], by_seed(found, "heads")[0]
    note = (
        f"{by_seed(found, 'draws')[0]} draws of each size, {prune} of {heads} heads by the exact CircAvg; chance gives "
        f"{100 * prune / heads:.1f} %. S is that on the data of the draw, after the last removal. {about(found)}"
    )
    return markdown(["ID samples", "OOD samples", "heads in common %", "S %"], lines, note)


def stability_figure(found: Found) -> Any:
    """Heads in common by the size of the draws, every two of them and the mean, and the score on the draws."""
    sizes = list(by_seed(found, "rows")[0])
    drawing, ((common, scores),) = fields(1, 2, 2.6)
    for number, own in enumerate(found["seeds"].values()):
        label = "" if number else "two draws"
        counts = own["prune"]
        for size in sizes:
            pairs = combinations([set(one) for one in own["rows"][size]["removed"]], 2)
            shared = [100 * len(one & other) / counts for one, other in pairs]
            common.plot([int(size)] * len(shared), shared, "_", color=OURS, markersize=10, alpha=0.7, label=label)
            label = ""
    style: dict[str, Any] = {"marker": "o", "color": OURS, "markersize": 5}
    for place, key, title in ((common, "stability", "heads in common %"), (scores, "score", "S on the draw %")):
        means = [100 * mean(by_seed(found, "rows", size, key)) for size in sizes]
        place.plot([int(size) for size in sizes], means, label="mean", **style)
        place.set(xscale="log", ylim=(0, 100), title=title, xlabel="ID samples of a draw")
        place.set_xticks([int(size) for size in sizes], [f"{int(size):,}" for size in sizes])
        place.minorticks_off()
    chance = 100 * by_seed(found, "prune")[0] / by_seed(found, "heads")[0]
    common.axhline(chance, color=DARK, linewidth=1, linestyle=DASHES, label="chance")
    legend(drawing, common)
    return drawing


def _share_of(value: float, _: str) -> str:
    return f"{100 * value:.1f}"


OVERLAP = Analysis("What choices of heads have in common (B.2.2)", run_overlap, overlap_table, overlap_figure)
STABILITY = Analysis("How stable circuits are", run_stability, stability_table, stability_figure)
