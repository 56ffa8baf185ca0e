"""Pruned models: by how heads were chosen (B.1, Tables 4 and 6), and by their share (B.3, Figures 5 and 6).

Circuits can also preserve OOD detection by a feature distance instead of a confidence, which is not in the paper.
"""

from collections.abc import Mapping
from typing import Any

import hydra_ensembles as he
from hydra_ensembles.heads import Head
from hydra_ensembles.heads.members import Score, random_members

from ..results import markdown
from ..seed import Seed
from . import analysis
from .analysis import ALL, DETECTION, NEAR_AND_FAR, Analysis, Result, by_seed, cell, measured, rows_table
from .drawing import COLOURS, Panel, fields, legend, panel, printed, rows_figure, stored

CHOOSERS = {"Taylor": "s", "CircAvg": "o", "random": "^"}  # with their markers
GROUPS = ("near", "far")
ACCURACY = {"accuracy": "Acc ↑"}
ALL_SETS = {key: f"all {head}" for key, head in ALL.items()}
WHOLE = "none|0"  # nothing pruned: the effect of training alone
STATES = {"untrained": "without training", "trained": "trained after (D.2)"}
BY_DISTANCE = "by distance"
GOALS: Mapping[Score, str] = {"ood": "CircOOD", "avg": "CircAvg"}  # of circuits by distance


# --- without training ------------------------------------------------------------------------------------------------


def run_untrained(seed: Seed) -> dict[str, Any]:
    """Metrics of Single and of Single without the paper's share of heads, by how they were chosen."""
    count, base = seed.prune, seed.base
    chosen = {
        "Taylor": seed.taylor().first(count),
        "CircAvg": seed.circuit("avg").first(count),
        "CircAcc": seed.circuit("acc").first(count),
        "CircOOD": seed.circuit("ood").first(count),
        "Random": random_members(base, count, 1, seed.number)[0],
    }
    rows = {"Single": measured(seed, base)}
    rows |= {name: measured(seed, he.prune(base, heads)) for name, heads in chosen.items()}
    return {"prune": count, "rows": rows}


def untrained_table(result: Result) -> str:
    """Tables 4 and 6 combined, with the paper's rows below ours."""
    task = result["stands_for"]
    note = f"Without {by_seed(result, 'prune')[0]} heads and without any training after."
    circuits = {
        seed: {"rows": {name: facts["rows"][name] for name in ("CircOOD", "CircAcc")}}
        for seed, facts in result["seeds"].items()
    }
    first = rows_table(result, {**ACCURACY, "ece": "ECE ↓", **NEAR_AND_FAR}, "4", task, note=note)
    columns = {**ACCURACY, **NEAR_AND_FAR, **ALL_SETS}
    second = rows_table({**result, "seeds": circuits}, columns, "6", task, note="Each circuit at its own task.")
    return f"{first}\n\n{second}"


def untrained_figure(result: Result) -> Any:
    """Accuracy and AUROC of every choice; the paper's numbers are from Table 4, or else Table 6."""
    task = result["stands_for"]
    rows = list(by_seed(result, "rows")[0])
    columns = {"accuracy": "accuracy %", **{f"{group}.auroc": f"AUROC %, {group} OOD" for group in GROUPS}}
    panels = [
        Panel(title, stored(result, column, rows), printed("6", task, column, rows) | printed("4", task, column, rows))
        for column, title in columns.items()
    ]
    names = {row: "Single, whole" if row == "Single" else row for row in rows}
    return rows_figure(panels, names, "here, not trained after", f"paper, {task}")


def run_distance(seed: Seed) -> dict[str, Any]:
    """Single, circuits by confidence and by Mahalanobis distance, without training; evaluated with both scores."""
    task, base, count = seed.task, seed.base, seed.prune
    familiar = he.fit_familiarity(base, task.familiar(), "mahalanobis")
    rows = {"Single": measured(seed, base, familiar=True)}
    removed = {}
    for score, title in GOALS.items():
        settings: dict[str, Any] = {"score": score, "budget": count, "ood_score": "mahalanobis"}
        by_distance = seed.extracted(f"{score}-{count}-far", lambda: (familiar, *seed.sides()[1:]), **settings)
        chosen = {title: seed.circuit(score), f"{title} {BY_DISTANCE}": by_distance}
        for name, ranking in chosen.items():
            rows[name] = measured(seed, he.prune(base, ranking.first(count)), familiar=True)
            removed[name] = [str(head) for head in ranking.first(count)]
    return {"prune": count, "rows": rows, "removed": removed}


def distance_table(result: Result) -> str:
    """One row per circuit, and the heads that circuits with the same goal have in common."""
    shared = []
    for title in GOALS.values():
        removed = (by_seed(result, "removed", name) for name in (title, f"{title} {BY_DISTANCE}"))
        common = [len(set(one) & set(other)) for one, other in zip(*removed, strict=True)]
        shared.append(f"{title} {sum(common) / len(common):.1f}")
    count = by_seed(result, "prune")[0]
    groups = ("near", "far", "all")
    columns = {**ACCURACY, **{f"{group}.auroc": f"{group} AUROC by MSP ↑" for group in groups}}
    columns |= {f"mahalanobis:{group}.auroc": f"{group} AUROC by Mahalanobis ↑" for group in groups}
    note = (
        f"Without {count} heads and without training; the distance is fitted anew to what is left. Heads that the "
        f"circuits of either kind have in common: {', '.join(shared)} of {count}. Not in the paper."
    )
    return rows_table(result, columns, "", "", note=note)


def distance_figure(result: Result) -> Any:
    """Each circuit, evaluated with the score it was extracted by and with the other."""
    rows = list(by_seed(result, "rows")[0])
    columns = {"accuracy": "accuracy %", "all.auroc": "AUROC % by confidence"}
    columns["mahalanobis:all.auroc"] = "AUROC % by distance"
    names = {row: "Single, whole" if row == "Single" else row for row in rows}
    return rows_figure([panel(result, key, title, rows) for key, title in columns.items()], names, "not trained after")


# --- by share of heads -----------------------------------------------------------------------------------------------


def run_shares(seed: Seed) -> dict[str, Any]:
    """Metrics by number of heads and how they were chosen, before and after training; the whole model too."""
    base = seed.base
    steps = analysis.few_steps(seed.task).steps  # raises if no rate is chosen
    pruned = {name: he.prune(base, heads) for name, heads in chosen_heads(seed).items()}
    numbers: dict[str, Any] = {"heads": analysis.heads_of(base), "whole": measured(seed, base)}
    numbers["untrained"] = {name: measured(seed, model) for name, model in pruned.items()}
    started = {WHOLE: base, **pruned}
    members = analysis.side_by_side(seed, "shares", lambda: list(started.values()))
    numbers["trained"] = {name: measured(seed, model) for name, model in zip(started, members, strict=True)}
    return numbers | {"steps": steps}


def chosen_heads(seed: Seed) -> dict[str, tuple[Head, ...]]:
    """The heads to prune, by `who|count`."""
    base = seed.base
    counts = [analysis.counted(base, share) for share in analysis.asked(seed.task, "shares")]
    circuit = seed.circuit("avg", max(counts))
    heads: dict[str, tuple[Head, ...]] = {}
    for count in counts:
        heads[f"Taylor|{count}"] = seed.taylor(0, count).first(count)
        heads[f"CircAvg|{count}"] = circuit.first(count)
        heads[f"random|{count}"] = random_members(base, count, 1, seed.number)[0]
    return heads


def shares_table(result: Result) -> str:
    """Both figures as numbers; the paper prints none."""
    columns = {**ACCURACY, **ALL_SETS}
    lines = [["", "0", "none", *(cell(by_seed(result, "whole", column), column) for column in columns)]]
    for state, title in STATES.items():
        for name in by_seed(result, state)[0]:
            who, _, count = name.partition("|")
            cells = [cell(by_seed(result, state, name, column), column) for column in columns]
            lines.append([title, count, who, *cells])
    heads, steps = (by_seed(result, key)[0] for key in ("heads", "steps"))
    note = (
        f"Of {heads} heads. Trained after: {steps} steps, side by side, the classifier kept. The paper shows curves "
        f"without numbers. {analysis.about(result)}"
    )
    return markdown(["", "heads removed", "chosen by", *columns.values()], lines, note, align="lll")


def shares_figure(result: Result) -> Any:
    """Figures 5 (above) and 6 (below)."""
    metrics = {"accuracy": "accuracy % ↑", **{f"all.{key}": f"OOD {head}" for key, head in DETECTION.items()}}
    drawing, axes = fields(len(STATES), len(metrics), 1.9, sharex=True, sharey="col")
    for row, state in zip(axes, STATES, strict=True):
        for field, metric in zip(row, metrics, strict=True):
            for who, mark in CHOOSERS.items():
                counts = [int(name.partition("|")[2]) for name in by_seed(result, state)[0] if name.startswith(who)]
                start = ("whole",) if state == "untrained" else (state, WHOLE)
                curve = [(0, _mean(by_seed(result, *start, metric)))]
                curve += [(count, _mean(by_seed(result, state, f"{who}|{count}", metric))) for count in counts]
                points = [(count, 100 * value) for count, value in curve if value is not None]
                style: dict[str, Any] = {"marker": mark, "color": COLOURS[who], "markersize": 4, "linewidth": 1.2}
                if points:
                    field.plot(*zip(*points, strict=True), label=who, **style)
        row[0].set_ylabel(STATES[state])
    for top, bottom, title in zip(axes[0], axes[-1], metrics.values(), strict=True):
        top.set_title(title)
        bottom.set_xlabel(f"removed, of {by_seed(result, 'heads')[0]}")
    legend(drawing, axes[0][0])
    return drawing


def _mean(values: list[Any]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


UNTRAINED = Analysis("Pruned without training (Tables 4 and 6)", run_untrained, untrained_table, untrained_figure)
DISTANCE = Analysis("Circuits by a distance of features", run_distance, distance_table, distance_figure)
SHARES = Analysis("How many heads can go (Figures 5 and 6)", run_shares, shares_table, shares_figure)
