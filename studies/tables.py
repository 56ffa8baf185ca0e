"""The tables of a study in Markdown, from its results file alone."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hydra_ensembles.schema import from_plain

from .decision import Chosen, rate_name
from .methods import DEEP, HYDRA, HYDRA_TRUNK, MC_DROPOUT, SINGLE
from .paper import COLUMN_OF, NOT_TESTABLE, PAPER

Facts = Mapping[str, Any]

SHARES = ("accuracy", "auroc", "fpr95", "aupr", "ece", "aece", "aurc")  # shown in percent
NAMES = {
    "accuracy": "Acc ↑",
    "brier": "Brier ↓",
    "nll": "NLL ↓",
    "ece": "ECE ↓",
    "aece": "aECE ↓",
    "all.auroc": "AUROC ↑",
    "all.fpr95": "FPR95 ↓",
    "all.aupr": "AUPR ↑",
    "near.auroc": "near AUROC ↑",
    "far.auroc": "far AUROC ↑",
}
OPEN = "–"  # a number that is not there
CONTRASTS = "contrasts"
GAIN_KEPT = 0.8  # of Hydra's gain over the single model that a shared trunk is to keep
TRUNK_COST = 1.5


def main_table(facts: Facts) -> str:
    """Table 1 or 2 of the paper: every method, mean ± sd over seeds, and the paper's row below where it has one."""
    column = COLUMN_OF[facts["study"]]
    head = ["Method", *NAMES.values(), "own score", "AUROC ↑ (own score)", "cost"]
    lines = []
    for method in _with_later(facts):
        row = facts["rows"].get(method)
        if row is None:
            lines.append([method, *later(len(NAMES)), "", "", ""])
        else:
            score = facts["decision"]["decision"]["scores"][method].replace("_", " ")
            numbers = [shown(row[metric], metric) for metric in NAMES]
            lines.append([method, *numbers, score, shown(row["chosen.all.auroc"], "auroc"), ratio(facts, method)])
        lines += _paper_line(column, method, NAMES, 3)
    return markdown(head, lines) + "\n\n" + _provenance(facts)


def groups_table(facts: Facts) -> str:
    """Tables 15 to 17 of the paper: near, far and all OOD sets, with the maximum softmax probability."""
    column = COLUMN_OF[facts["study"]]
    metrics = [f"{group}.{one}" for group in ("near", "far", "all") for one in ("auroc", "fpr95", "aupr")]
    arrows = {"auroc": "AUROC ↑", "fpr95": "FPR95 ↓", "aupr": "AUPR ↑"}
    lines = []
    for method in _with_later(facts):
        row = facts["rows"].get(method)
        numbers = later(len(metrics)) if row is None else [shown(row[metric], metric) for metric in metrics]
        lines += [[method, *numbers], *_paper_line(column, method, metrics, 0)]
    head = [f"{group} {arrows[one]}" for group, _, one in (metric.partition(".") for metric in metrics)]
    return markdown(["Method", *head], lines)


def sets_table(facts: Facts) -> str:
    """AUROC / FPR95 on every OOD set by itself."""
    names = [name for name, one in facts["sets"].items() if one["group"] != "id"]
    head = ["Method", *(f"{name} ({facts['sets'][name]['group']}, {facts['sets'][name]['samples']})" for name in names)]
    lines = [
        [
            method,
            *(
                f"{shown(row[f'ood.{name}.auroc'], 'auroc')} / {mean(row[f'ood.{name}.fpr95'], 'fpr95')}"
                for name in names
            ),
        ]
        for method, row in facts["rows"].items()
    ]
    return markdown(head, lines)


def calibration_table(facts: Facts) -> str:
    """Calibration before and after a temperature that was fitted on half B."""
    metrics = ("brier", "nll", "ece", "aece")
    head = ["Method", "temperature", *(f"{NAMES[one]} {when}" for one in metrics for when in ("before", "after"))]
    lines = []
    for method, row in facts["rows"].items():
        found = [facts["temperatures"][str(seed)][method] for seed in facts["seeds"]]
        pairs = [shown(row[key], one) for one in metrics for key in (one, f"calibrated.{one}")]
        lines.append([method, f"{statistics.mean(found):.2f}", *pairs])
    return markdown(head, lines)


def diversity_table(facts: Facts) -> str:
    """How much the members differ: mutual information and disagreement, on ID and OOD data."""
    names = {"mutual_information": "ID MI", "disagreement": "ID disagreement"}
    names |= {"all.mutual_information": "OOD MI", "all.disagreement": "OOD disagreement"}
    lines = [
        [method, *(shown(row[metric], metric) for metric in names)]
        for method, row in facts["rows"].items()
        if max(row["disagreement"]) > 0 or max(row["all.mutual_information"]) > 0
    ]
    return markdown(["Method", *names.values()], lines)


def choice_table(facts: Facts) -> str:
    """What was compared on half B, and what was chosen; every setting with all scores, the best one in bold."""
    decision = facts["decision"]["decision"]
    scores = list(dict.fromkeys(one["score"] for one in decision["candidates"]))
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for one in decision["candidates"]:
        found.setdefault((one["method"], one["model"]), {})[one["score"]] = one
    keys = ((HYDRA, "hydra"), (HYDRA_TRUNK, "trunk"))
    chosen = {method: from_plain(Chosen, decision[key], key).name for method, key in keys}
    if "dropout" in decision:  # results from when the rate was not chosen do not say it
        chosen[MC_DROPOUT] = rate_name(decision["dropout"])
    lines = []
    for (method, model), by_score in found.items():
        best = max(by_score.values(), key=lambda one: float(one["value"]))
        mark = "**chosen**" if chosen.get(method) == model else ""
        cost = "" if best["cost"] is None else f"{best['cost']:.2f}x"
        cells = [f"{100 * by_score[score]['auroc']:.2f}" if score in by_score else "" for score in scores]
        cells[scores.index(best["score"])] = f"**{cells[scores.index(best['score'])]}**"
        lines.append([method, model, f"{100 * best['accuracy']:.2f}", *cells, cost, mark])
    names = [f"AUROC, {score.replace('_', ' ')}" for score in scores]
    head = ["Method", "setting", "Acc (half B)", *names, "multiply-adds", ""]
    note = f"Decision {facts['decision']['digest']}, from half B of seeds {decision['seeds']}; no test set was open."
    return markdown(head, lines) + "\n\n" + note


def claims_table(facts: Facts) -> str:
    """The sign of every comparison the paper makes."""
    column = COLUMN_OF[facts["study"]]
    lines = []
    for one in facts["claims"]:
        metric = one["metric"]
        setting = "chosen on half B" if one["setting"] == "chosen" else "as in the paper"
        interval = f"{difference(one['low'], metric)} to {difference(one['high'], metric)}"
        name = NAMES.get(metric, metric)
        lines.append(
            [
                name,
                f"{one['first']} − {one['second']}",
                setting,
                difference(one["paper"], metric),
                difference(one["ours"], metric),
                interval,
                f"**{one['verdict']}**",
            ]
        )
    head = ["metric", "difference", "our setting", f"paper ({column})", "ours", "95 % interval", "sign"]
    return markdown(head, lines)


def contrasts_table(facts: Facts) -> str:
    """Hydra (Circ), its trunk and the controls against the methods that matter."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for first, found in facts[CONTRASTS].items():
        for key, (value, low, high) in found.items():
            metric, _, second = key.partition(" − ")
            interval = f"{difference(low, metric)} to {difference(high, metric)}"
            lines.setdefault((first, metric), {})[second] = f"{difference(value, metric)} ({interval})"
    seconds = list(dict.fromkeys(second for cells in lines.values() for second in cells))
    named = [
        [first, NAMES[metric], *(cells.get(second, "") for second in seconds)]
        for (first, metric), cells in lines.items()
    ]
    note = "Each method with its own score; in brackets the 95 % interval of a paired bootstrap over test samples."
    return markdown(["method", "metric", *(f"− {second}" for second in seconds)], named) + "\n\n" + note


def targets_table(facts: Facts) -> str:
    """What this project set itself as a target, with the numbers that decide."""
    rows = facts["rows"]

    def number(method: str, metric: str) -> float:
        return statistics.mean(rows[method][metric])

    metric = "chosen.all.auroc"
    single, hydra, deep, trunk = (number(name, metric) for name in (SINGLE, HYDRA, DEEP, HYDRA_TRUNK))
    gain = (trunk - single) / (hydra - single) if hydra > single else None
    cost = None if facts["costs"] is None else facts["costs"]["costs"][HYDRA_TRUNK]["latency_ratio"]
    own, after = (number(name, "calibrated.ece") for name in (SINGLE, HYDRA))
    lines = [
        [
            "Hydra (Circ) ≥ Deep Ensembles, OOD AUROC",
            f"{100 * hydra:.2f} against {100 * deep:.2f}",
            _met(hydra >= deep),
        ],
        ["Hydra (Circ) ≥ Single, OOD AUROC", f"{100 * hydra:.2f} against {100 * single:.2f}", _met(hydra >= single)],
        [
            "ECE of Hydra (Circ) after calibration ≤ Single's, calibrated too",
            f"{100 * after:.2f} against {100 * own:.2f} (Single without: {100 * number(SINGLE, 'ece'):.2f})",
            _met(after <= own),
        ],
        [
            f"shared trunk keeps {GAIN_KEPT:.0%} of the gain at ≤ {TRUNK_COST}x the cost",
            f"{'no gain' if gain is None else f'{gain:.0%}'} at {'unmeasured' if cost is None else f'{cost:.2f}x'}",
            _met(gain is not None and gain >= GAIN_KEPT and cost is not None and cost <= TRUNK_COST),
        ],
    ]
    return markdown(["target", "found", ""], lines)


def not_testable_table() -> str:
    """Claims that this data and these models cannot test."""
    return markdown(["claim", "why it is not testable here"], [list(one) for one in NOT_TESTABLE])


TABLES: Mapping[str, Callable[[Facts], str]] = MappingProxyType(
    {
        "main": main_table,
        "groups": groups_table,
        "sets": sets_table,
        "calibration": calibration_table,
        "diversity": diversity_table,
        "choice": choice_table,
        "claims": claims_table,
        "contrasts": contrasts_table,
        "targets": targets_table,
    }
)
"""Every table of a study by its name in docs/results.md."""


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table: the first column left, the others right."""
    rule = "|".join(["---", *["---:"] * (len(head) - 1)])
    return "\n".join([f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(line)} |" for line in lines)])


def shown(values: Sequence[float], metric: str) -> str:
    """Mean ± standard deviation over seeds; without the latter for a single seed."""
    if len(values) < 2:
        return mean(values, metric)
    return f"{mean(values, metric)} ± {printed(statistics.stdev(values), metric)}"


def mean(values: Sequence[float], metric: str) -> str:
    """Mean over seeds."""
    return printed(statistics.mean(values), metric)


def printed(value: float, metric: str) -> str:
    """A number as tables show it: shares in percent."""
    return f"{100 * value:.2f}" if metric.rpartition(".")[2] in SHARES else f"{value:.3f}"


def difference(value: float, metric: str) -> str:
    """A difference with its sign."""
    share = metric.rpartition(".")[2] in SHARES
    return f"{100 * value:+.2f}" if share else f"{value:+.3f}"


def ratio(facts: Facts, method: str) -> str:
    """Latency over that of the single model; empty where it was not measured."""
    costs = facts["costs"]
    if costs is None or method not in costs["costs"]:
        return ""
    return f"{costs['costs'][method]['latency_ratio']:.2f}x"


def _with_later(facts: Facts) -> list[str]:
    """All rows; baselines that the paper has and this study has not yet stand after MC Dropout."""
    found = list(facts["rows"])
    missing = [method for method in PAPER[COLUMN_OF[facts["study"]]] if method not in found]
    at = found.index(MC_DROPOUT) + 1
    return [*found[:at], *missing, *found[at:]]


def later(cells: int) -> list[str]:
    """The cells of a baseline that is still missing."""
    return ["later", *[OPEN] * (cells - 1)]


def _paper_line(column: str, method: str, metrics: Iterable[str], empty: int) -> list[list[str]]:
    """The paper's row, or none."""
    if method not in PAPER[column]:
        return []
    numbers = [f"*{printed(PAPER[column][method][metric], metric)}*" for metric in metrics]
    return [[f"*paper, {column}*", *numbers, *[""] * empty]]


def _provenance(facts: Facts) -> str:
    counts, sets = facts["samples"], facts["sets"]
    tests = sum(one["samples"] for one in sets.values() if one["group"] == "id")
    costs = facts["costs"]
    measured = (
        "" if costs is None else f" Cost: latency of a batch of {costs['batch']} in {costs['dtype']}, over Single's."
    )
    return (
        f"{facts['device']}, torch {facts['versions']['torch']}, seeds {facts['seeds']}; {counts['train']} training "
        f"samples, circuits on {counts['rank_id']} + {counts['rank_ood']} of half A, settings chosen on "
        f"{counts['choose_id']} + {counts['choose_ood']} of half B, {tests} test samples. AUROC, FPR95 and AUPR: "
        f"maximum softmax probability, mean over OOD sets.{measured} From `results/studies/{facts['study']}.json`."
    )


def _met(yes: bool) -> str:
    return "**met**" if yes else "not met"
