"""What is left without heads: by who chose them (B.1, Tables 4 and 6), by their share (B.3, Figures 5 and 6).

Circuits may also keep a distance of features high instead of a confidence, which is not in the paper.
"""

from collections.abc import Mapping
from typing import Any

import hydra_ensembles as he
from hydra_ensembles.heads import Head
from hydra_ensembles.heads.members import Score, random_members

from ..results import markdown
from ..seed import Seed
from . import analysis
from .analysis import ALL, DETECTION, NEAR_AND_FAR, Analysis, Found, by_seed, cell, measured, paper_task, rows_table
from .drawing import COLOURS, Panel, fields, legend, panel, printed, rows_figure, stored

CHOOSERS = {"Taylor": "s", "CircAvg": "o", "random": "^"}  # and their marks
GROUPS = ("near", "far")
ACCURACY = {"accuracy": "Acc ↑"}
ALL_SETS = {key: f"all {head}" for key, head in ALL.items()}
WHOLE = "none|0"  # nothing goes: what training alone does
STATES = {"untrained": "without training", "trained": "trained after (D.2)"}
BY_DISTANCE = "by distance"
GOALS: Mapping[Score, str] = {"ood": "CircOOD", "avg": "CircAvg"}  # of circuits by distance


# --- without training ------------------------------------------------------------------------------------------------


def run_untrained(seed: Seed) -> dict[str, Any]:
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


def untrained_table(found: Found) -> str:
    """Tables 4 and 6 as one: the paper's rows of either stand below ours."""
    task = paper_task(found)
    note = f"Without {by_seed(found, 'prune')[0]} heads and without any training after."
    circuits = {
        seed: {"rows": {name: one["rows"][name] for name in ("CircOOD", "CircAcc")}}
        for seed, one in found["seeds"].items()
    }
    first = rows_table(found, {**ACCURACY, "ece": "ECE ↓", **NEAR_AND_FAR}, "4", task, note=note)
    own = {**ACCURACY, **NEAR_AND_FAR, **ALL_SETS}
    second = rows_table({**found, "seeds": circuits}, own, "6", task, note="Each circuit at its own task.")
    return f"{first}\n\n{second}"


def untrained_figure(found: Found) -> Any:
    """Accuracy and AUROC of every choice; what the paper has in Table 6 alone is taken from there."""
    task = paper_task(found)
    rows = list(by_seed(found, "rows")[0])
    columns = {"accuracy": "accuracy %", **{f"{group}.auroc": f"AUROC %, {group} OOD" for group in GROUPS}}
    fields = [
        Panel(title, stored(found, column, rows), printed("6", task, column, rows) | printed("4", task, column, rows))
        for column, title in columns.items()
    ]
    names = {row: "Single, whole" if row == "Single" else row for row in rows}
    return rows_figure(fields, names, "here, not trained after", f"paper, {task}")


def run_distance(seed: Seed) -> dict[str, Any]:
    """Single, circuits by confidence and circuits by Mahalanobis distance, without training; judged by both scores."""
    task, base, count = seed.task, seed.base, seed.prune
    knows = he.fit_familiarity(base, task.familiar(), "mahalanobis")
    rows = {"Single": measured(seed, base, familiar=True)}
    removed = {}
    for score, title in GOALS.items():
        how: dict[str, Any] = {"score": score, "budget": count, "ood_score": "mahalanobis"}
        by_distance = seed.extracted(f"{score}-{count}-far", lambda: (knows, *seed.sides()[1:]), **how)
        chosen = {title: seed.circuit(score), f"{title} {BY_DISTANCE}": by_distance}
        for name, ranking in chosen.items():
            rows[name] = measured(seed, he.prune(base, ranking.first(count)), familiar=True)
            removed[name] = [str(head) for head in ranking.first(count)]
    return {"prune": count, "rows": rows, "removed": removed}


def distance_table(found: Found) -> str:
    """One row a circuit, and what two of one goal have in common."""
    shared = []
    for title in GOALS.values():
        pairs = zip(by_seed(found, "removed", title), by_seed(found, "removed", f"{title} {BY_DISTANCE}"), strict=True)
        common = [len(set(one) & set(other)) for one, other in pairs]
        shared.append(f"{title} {sum(common) / len(common):.1f}")
    count = by_seed(found, "prune")[0]
    groups = ("near", "far", "all")
    columns = {**ACCURACY, **{f"{group}.auroc": f"{group} AUROC by MSP ↑" for group in groups}}
    columns |= {f"mahalanobis:{group}.auroc": f"{group} AUROC by Mahalanobis ↑" for group in groups}
    note = (
        f"Without {count} heads and without training; the distance is fitted anew to what is left. Heads that the "
        f"circuits of either kind have in common: {', '.join(shared)} of {count}. Not in the paper."
    )
    return rows_table(found, columns, "", "", note=note)


def distance_figure(found: Found) -> Any:
    """Each circuit by the score that it was judged by, and by the other."""
    rows = list(by_seed(found, "rows")[0])
    columns = {"accuracy": "accuracy %", "all.auroc": "AUROC % by confidence"}
    columns["mahalanobis:all.auroc"] = "AUROC % by distance"
    names = {row: "Single, whole" if row == "Single" else row for row in rows}
    return rows_figure([panel(found, key, title, rows) for key, title in columns.items()], names, "not trained after")


# --- by shares -------------------------------------------------------------------------------------------------------


def run_shares(seed: Seed) -> dict[str, Any]:
    """Numbers by number of heads and by who chose them, without training and after; the whole model is trained too."""
    base = seed.base
    steps = analysis.few_steps(seed.task).steps  # refused here where no rate is chosen
    pruned = {name: he.prune(base, heads) for name, heads in chosen_heads(seed).items()}
    found: dict[str, Any] = {"heads": analysis.heads_of(base), "whole": measured(seed, base)}
    found["untrained"] = {name: measured(seed, model) for name, model in pruned.items()}
    started = {WHOLE: base, **pruned}
    members = analysis.side_by_side(seed, "shares", lambda: list(started.values()))
    found["trained"] = {name: measured(seed, one) for name, one in zip(started, members, strict=True)}
    return found | {"steps": steps}


def chosen_heads(seed: Seed) -> dict[str, tuple[Head, ...]]:
    """The heads that go, by `who|count`."""
    base = seed.base
    counts = [analysis.counted(base, share) for share in analysis.asked(seed.task, "shares")]
    circuit = seed.circuit("avg", max(counts))
    found: dict[str, tuple[Head, ...]] = {}
    for count in counts:
        found[f"Taylor|{count}"] = seed.taylor(0, count).first(count)
        found[f"CircAvg|{count}"] = circuit.first(count)
        found[f"random|{count}"] = random_members(base, count, 1, seed.number)[0]
    return found


def shares_table(found: Found) -> str:
    """Both figures as numbers; the paper prints none."""
    columns = {**ACCURACY, **ALL_SETS}
    lines = [["", "0", "none", *(cell(by_seed(found, "whole", column), column) for column in columns)]]
    for state, title in STATES.items():
        for name in by_seed(found, state)[0]:
            who, _, count = name.partition("|")
            cells = [cell(by_seed(found, state, name, column), column) for column in columns]
            lines.append([title, count, who, *cells])
    steps = by_seed(found, "steps")[0]
    after = "" if steps is None else f"Trained after: {steps} steps, side by side, the classifier kept. "
    told = f"{after}The paper shows curves without numbers. {analysis.about(found)}"
    note = f"Of {by_seed(found, 'heads')[0]} heads. {told}"
    return markdown(["", "heads removed", "chosen by", *columns.values()], lines, note, left=3)


def shares_figure(found: Found) -> Any:
    """Figures 5 (above) and 6 (below)."""
    states = [state for state in STATES if by_seed(found, state)[0]]
    metrics = {"accuracy": "accuracy % ↑", **{f"all.{key}": f"OOD {head}" for key, head in DETECTION.items()}}
    drawing, axes = fields(len(states), len(metrics), 1.9, sharex=True, sharey="col")
    for row, state in zip(axes, states, strict=True):
        for place, metric in zip(row, metrics, strict=True):
            for who, mark in CHOOSERS.items():
                counts = [int(name.partition("|")[2]) for name in by_seed(found, state)[0] if name.startswith(who)]
                start = ("whole",) if state == "untrained" else (state, WHOLE)
                curve = [(0, _mean(by_seed(found, *start, metric)))]
                curve += [(one, _mean(by_seed(found, state, f"{who}|{one}", metric))) for one in counts]
                known = [(one, 100 * value) for one, value in curve if value is not None]
                style: dict[str, Any] = {"marker": mark, "color": COLOURS[who], "markersize": 4, "linewidth": 1.2}
                if known:
                    place.plot(*zip(*known, strict=True), label=who, **style)
        row[0].set_ylabel(STATES[state])
    for first, last, title in zip(axes[0], axes[-1], metrics.values(), strict=True):
        first.set_title(title)
        last.set_xlabel(f"removed, of {by_seed(found, 'heads')[0]}")
    legend(drawing, axes[0][0])
    return drawing


def _mean(values: list[Any]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) / len(known) if known else None


UNTRAINED = Analysis("Pruned without training (Tables 4 and 6)", run_untrained, untrained_table, untrained_figure)
DISTANCE = Analysis("Circuits by a distance of features", run_distance, distance_table, distance_figure)
SHARES = Analysis("How many heads can go (Figures 5 and 6)", run_shares, shares_table, shares_figure)
