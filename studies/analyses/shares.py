"""How many heads can go (B.3, Figures 5 and 6): shares of them, by who chose them, without and with training after."""

from typing import Any

import hydra_ensembles as he
from hydra_ensembles.heads import Head
from hydra_ensembles.heads.members import random_members

from ..results import markdown, pyplot
from ..seed import Seed
from .analysis import (
    ALL,
    DETECTION,
    Analysis,
    Found,
    about,
    asked,
    by_seed,
    cell,
    counted,
    few_steps,
    heads_of,
    measured,
    side_by_side,
)

COLOURS = {"Taylor": "#b2182b", "CircAvg": "#2166ac", "random": "#9aa3ae"}
COLUMNS = {"accuracy": "Acc ↑", **{key: f"all {head}" for key, head in ALL.items()}}
WHOLE = "none|0"  # nothing goes: what training alone does
STATES = {"untrained": "without training", "trained": "trained after (D.2)"}


def run(seed: Seed) -> dict[str, Any]:
    """Numbers by number of heads and by who chose them, without training and after; the whole model is trained too."""
    base, task = seed.base, seed.task
    removed = chosen_heads(seed)
    pruned = {name: he.prune(base, heads) for name, heads in removed.items()}
    found: dict[str, Any] = {"heads": heads_of(base), "whole": measured(seed, base)}
    found["untrained"] = {name: measured(seed, model) for name, model in pruned.items()}
    started = {WHOLE: base, **pruned}
    members = side_by_side(seed, "shares", lambda: list(started.values()))
    found["trained"] = {name: measured(seed, one) for name, one in zip(started, members, strict=True)}
    return found | {"steps": few_steps(task).steps}


def chosen_heads(seed: Seed) -> dict[str, tuple[Head, ...]]:
    """The heads that go, by `who|count`."""
    base = seed.base
    counts = [counted(base, share) for share in asked(seed.task, "shares")]
    circuit = seed.circuit("avg", max(counts))
    found: dict[str, tuple[Head, ...]] = {}
    for count in counts:
        found[f"Taylor|{count}"] = seed.taylor(0, count).first(count)
        found[f"CircAvg|{count}"] = circuit.first(count)
        found[f"random|{count}"] = random_members(base, count, 1, seed.number)[0]
    return found


def table(found: Found) -> str:
    """Both figures as numbers; the paper prints none."""
    lines = []
    for state, title in STATES.items():
        for name in by_seed(found, state)[0]:
            who, _, count = name.partition("|")
            cells = [cell(by_seed(found, state, name, column), column) for column in COLUMNS]
            lines.append([title, count, who, *cells])
    whole = ["", "0", "none", *(cell(by_seed(found, "whole", column), column) for column in COLUMNS)]
    steps = by_seed(found, "steps")[0]
    after = "" if steps is None else f"Trained after: {steps} steps, side by side, the classifier kept. "
    note = f"Of {by_seed(found, 'heads')[0]} heads. {after}The paper shows curves without numbers. {about(found)}"
    return markdown(["", "heads removed", "chosen by", *COLUMNS.values()], [whole, *lines], note, left=3)


def figure(found: Found) -> Any:
    """Figures 5 (above) and 6 (below)."""
    states = [state for state in STATES if by_seed(found, state)[0]]
    metrics = {"accuracy": "accuracy", **{f"all.{key}": head for key, head in DETECTION.items()}}
    drawing, axes = pyplot().subplots(len(states), len(metrics), figsize=(11, 2.6 * len(states)), squeeze=False)
    for row, state in zip(axes, states, strict=True):
        for place, (metric, title) in zip(row, metrics.items(), strict=True):
            for who, colour in COLOURS.items():
                counts = [int(name.partition("|")[2]) for name in by_seed(found, state)[0] if name.startswith(who)]
                start = ("whole",) if state == "untrained" else (state, WHOLE)
                curve = [(0, _mean(by_seed(found, *start, metric)))]
                curve += [(one, _mean(by_seed(found, state, f"{who}|{one}", metric))) for one in counts]
                known = [(one, 100 * value) for one, value in curve if value is not None]
                if known:
                    place.plot(*zip(*known, strict=True), "o-", color=colour, label=who, markersize=3)
            place.set(xlabel="heads removed", title=f"{title}, {STATES[state]}")
            place.title.set_fontsize(7)
    axes[0][0].legend(frameon=False, fontsize=7)
    drawing.tight_layout()
    return drawing


def _mean(values: list[Any]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) / len(known) if known else None


ANALYSIS = Analysis("How many heads can go (Figures 5 and 6)", run, table, figure)
