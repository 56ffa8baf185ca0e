"""Which heads are chosen: overlap of circuits and Taylor scores (B.2.2), and how much they depend on the data."""

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
from .analysis import Analysis, Result, about, asked, by_seed, cell, heads_of, paper
from .drawing import DARK, DASHES, OURS, Panel, fields, legend, rows_figure

CIRCUIT, TAYLOR, GLOBAL = "CircAvg", "Taylor", "Taylor, all layers at once"


def run_overlap(seed: Seed) -> dict[str, Any]:
    """Overlap and divergence of every pair of choices, and those of random ones."""
    count, base = seed.prune, seed.base
    chosen: dict[str, HeadRanking] = {
        CIRCUIT: seed.circuit("avg"),
        "CircAcc": seed.circuit("acc"),
        "CircOOD": seed.circuit("ood"),
        TAYLOR: seed.taylor(),
        GLOBAL: seed.ranked(f"taylor-global-{count}", lambda: global_taylor(seed, count)),
    }
    pairs = {
        f"{first}, {second}": {
            "overlap": overlap(chosen[first], chosen[second], count),
            "divergence": jensen_shannon(chosen[first], chosen[second], count),
        }
        for first, second in combinations(chosen, 2)
    }
    return {"prune": count, "heads": heads_of(base), "pairs": pairs, "chance": chance(seed, chosen[CIRCUIT], count)}


def global_taylor(seed: Seed, count: int) -> HeadRanking:
    """The Taylor ranking over all layers, on the same batches as the ranking by layer."""
    task = seed.task
    batches = SampleBatches(task.train, 128, training=True)
    draws: dict[str, Any] = {"seed": seed.derived("taylor", 0), "calibration_batches": task.settings["taylor_batches"]}
    return he.taylor(seed.base, batches, budget=count, scope="global", **draws)


def chance(seed: Seed, circuit: HeadRanking, count: int) -> dict[str, float]:
    """Mean overlap and divergence between random choices and a circuit."""
    heads = existing_heads(seed.base.config)
    draws = np.random.default_rng(0)
    pairs = []
    for _ in range(asked(seed.task, "overlap")["draws"]):
        rows = draws.permutation(len(heads))[:count]
        random = HeadRanking(tuple(heads[row] for row in rows), (0.0,) * count, "random", "random")
        pairs.append((overlap(circuit, random, count), jensen_shannon(circuit, random, count)))
    return {"overlap": mean(value for value, _ in pairs), "divergence": mean(value for _, value in pairs)}


def overlap_table(result: Result) -> str:
    """Every pair, with chance and the paper's numbers."""
    theirs = paper("B.2.2", "ImageNet-1K")
    lines = []
    for pair in by_seed(result, "pairs")[0]:
        cells = [cell(by_seed(result, "pairs", pair, column), column, _shown) for column in ("overlap", "divergence")]
        printed = theirs.get(pair, {}) if result["stands_for"] == "ImageNet-1K" else {}
        lines.append([pair, *cells, printed.get("overlap", ""), printed.get("divergence", "")])
    random = [cell(by_seed(result, "chance", column), column, _shown) for column in ("overlap", "divergence")]
    lines.append(["*CircAvg, random heads*", *random, "", ""])
    note = f"{by_seed(result, 'prune')[0]} of {by_seed(result, 'heads')[0]} heads each. {about(result)}"
    head = ["two choices", "overlap %", "Jensen–Shannon", "paper: overlap %", "Jensen–Shannon"]
    return markdown(head, lines, note)


def overlap_figure(result: Result) -> Any:
    """Every pair, with chance and the paper's numbers."""
    theirs = paper("B.2.2", "ImageNet-1K")
    rows = list(by_seed(result, "pairs")[0])
    panels = []
    for column, title, scale in (("overlap", "heads in common %", 100), ("divergence", "Jensen–Shannon divergence", 1)):
        ours = {row: [scale * value for value in by_seed(result, "pairs", row, column)] for row in rows}
        printed = [row for row in rows if column in theirs.get(row, {}) and result["stands_for"] == "ImageNet-1K"]
        random = scale * mean(by_seed(result, "chance", column))
        panels.append(Panel(title, ours, {row: float(theirs[row][column]) for row in printed}, random))
    names = {row: row.replace(GLOBAL, "global Taylor") for row in rows}
    return rows_figure(panels, names, "here", "paper, ImageNet-1K", "CircAvg and random heads")


def _shown(value: float, column: str) -> str:
    return f"{100 * value:.1f}" if column == "overlap" else f"{value:.3f}"


# --- stability -------------------------------------------------------------------------------------------------------


def run_stability(seed: Seed) -> dict[str, Any]:
    """The share of heads that circuits from several draws of the data have in common, by the size of the draws."""
    task = seed.task
    base = seed.base
    count = seed.prune
    chosen = asked(seed.task, "stability")
    inside = task.validation
    outside = task.source.load(task.suite.circuit_ood)
    rows: dict[str, Any] = {}
    for size in chosen["sizes"]:
        id_size, ood_size = min(size, len(inside) // 2), min(size, len(outside) // 2)
        if id_size < size:  # two draws would be nearly the same
            continue
        rankings, scores = [], []
        for draw in range(chosen["draws"]):

            def sides(id_size: int = id_size, ood_size: int = ood_size, draw: int = draw) -> tuple[Any, Any, Any]:
                id_samples = task.samples(subset(inside, id_size, draw, stratified=True))
                ood_samples = task.samples(subset(outside, ood_size, draw))
                return base, task.batches(id_samples), task.batches(ood_samples)

            name = f"draw-{chosen['score']}-{count}-{size}-{draw}"
            rankings.append(seed.extracted(name, sides, budget=count, score=chosen["score"]))
            scores.append(rankings[-1].scores[-1])
        rows[str(size)] = {
            "inside": id_size,
            "outside": ood_size,
            "stability": stability(rankings, count),
            "divergence": mean(jensen_shannon(*pair, count) for pair in combinations(rankings, 2)),
            "score": mean(scores),
            "removed": [[str(head) for head in ranking.first(count)] for ranking in rankings],
        }
    return {"prune": count, "heads": heads_of(base), "draws": chosen["draws"], "rows": rows}


def stability_table(result: Result) -> str:
    """One row per size, with chance in the note."""
    lines = []
    for size in by_seed(result, "rows")[0]:
        cells = [cell(by_seed(result, "rows", size, column), column, _share_of) for column in ("stability", "score")]
        sides = [str(by_seed(result, "rows", size, side)[0]) for side in ("inside", "outside")]
        lines.append([*sides, *cells])
    prune, heads = by_seed(result, "prune")[0], by_seed(result, "heads")[0]
    note = (
        f"{by_seed(result, 'draws')[0]} draws of each size, {prune} of {heads} heads by the exact CircAvg; chance "
        f"gives {100 * prune / heads:.1f} %. S is that on the data of the draw, after the last removal. {about(result)}"
    )
    return markdown(["ID samples", "OOD samples", "heads in common %", "S %"], lines, note)


def stability_figure(result: Result) -> Any:
    """Heads in common by the size of the draws, for every pair and on average; and the score on the draws."""
    sizes = list(by_seed(result, "rows")[0])
    drawing, ((common, scores),) = fields(1, 2, 2.6)
    for number, facts in enumerate(result["seeds"].values()):
        label = "" if number else "two draws"
        count = facts["prune"]
        for size in sizes:
            pairs = combinations([set(heads) for heads in facts["rows"][size]["removed"]], 2)
            shared = [100 * len(first & second) / count for first, second in pairs]
            common.plot([int(size)] * len(shared), shared, "_", color=OURS, markersize=10, alpha=0.7, label=label)
            label = ""
    style: dict[str, Any] = {"marker": "o", "color": OURS, "markersize": 5}
    for field, key, title in ((common, "stability", "heads in common %"), (scores, "score", "S on the draw %")):
        means = [100 * mean(by_seed(result, "rows", size, key)) for size in sizes]
        field.plot([int(size) for size in sizes], means, label="mean", **style)
        field.set(xscale="log", ylim=(0, 100), title=title, xlabel="ID samples of a draw")
        field.set_xticks([int(size) for size in sizes], [f"{int(size):,}" for size in sizes])
        field.minorticks_off()
    chance = 100 * by_seed(result, "prune")[0] / by_seed(result, "heads")[0]
    common.axhline(chance, color=DARK, linewidth=1, linestyle=DASHES, label="chance")
    legend(drawing, common)
    return drawing


def _share_of(value: float, _: str) -> str:
    return f"{100 * value:.1f}"


OVERLAP = Analysis("What choices of heads have in common (B.2.2)", run_overlap, overlap_table, overlap_figure)
STABILITY = Analysis("How stable circuits are", run_stability, stability_table, stability_figure)
