"""The tables of a study in Markdown, from its results file alone; the paper's numbers stand in italics below ours."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from .methods import DEEP, HYDRA, HYDRA_TRUNK, SINGLE
from .paper import Numbers, paper_rows, read_csv

Facts = Mapping[str, Any]
Table = Callable[[Facts], str]

SHARES = ("accuracy", "auroc", "fpr95", "aupr", "ece", "aece", "aurc")  # shown in percent
CLASSIFICATION = {"accuracy": "Acc ↑", "brier": "Brier ↓", "nll": "NLL ↓", "ece": "ECE ↓", "aece": "aECE ↓"}
DETECTION = {"auroc": "AUROC ↑", "fpr95": "FPR95 ↓", "aupr": "AUPR ↑"}
HEADS = {**CLASSIFICATION, **DETECTION}
GROUPS = ("near", "far", "all")
OPEN = "–"  # a number that is not there
SUMMARY = (SINGLE, DEEP, HYDRA, HYDRA_TRUNK)
SETTINGS = {"paper": "as in the paper", "chosen": "chosen on half B"}


# Numbers and lines, as all tables show them.


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]], note: str = "", left: int = 1) -> str:
    """A table, so many columns of it to the left and the others to the right; and a note below."""
    rule = "|".join(["---"] * left + ["---:"] * (len(head) - left))
    table = [f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(line)} |" for line in lines)]
    return "\n".join([*table, "", note] if note else table)


def printed(value: float, metric: str, sign: str = "") -> str:
    """A number as tables show it; `+` for a difference."""
    is_share = metric.rpartition(".")[2] in SHARES
    return f"{100 * value:{sign}.2f}" if is_share else f"{value:{sign}.3f}"


def mean(values: Sequence[float], metric: str) -> str:
    """Mean over seeds."""
    return printed(statistics.mean(values), metric)


def shown(values: Sequence[float], metric: str) -> str:
    """Mean ± standard deviation over seeds; without the latter for a single seed."""
    spread = f" ± {printed(statistics.stdev(values), metric)}" if len(values) > 1 else ""
    return mean(values, metric) + spread


def interval(low: float, high: float, metric: str) -> str:
    """Both ends of an interval of differences."""
    return f"{printed(low, metric, '+')} to {printed(high, metric, '+')}"


def headline(metric: str) -> str:
    """What a column calls a metric, of a group of OOD sets maybe."""
    group, _, name = metric.rpartition(".")
    return f"{group} {HEADS[name]}".strip()


def ratio(facts: Facts, method: str) -> str:
    """Latency over that of the single model; empty where it was not measured."""
    costs = {} if facts["costs"] is None else facts["costs"]["costs"]
    return f"{costs[method]['latency_ratio']:.2f}x" if method in costs else ""


def of_paper(facts: Facts) -> Mapping[str, Numbers]:
    """The paper's numbers by method, under the keys of our rows."""
    return paper_rows(facts["kind"], facts["study"], list(facts["tasks"]), facts.get("detections", ()))


def paper_line(numbers: Numbers, keys: Iterable[str], after: int = 0) -> list[list[str]]:
    """The paper's row with so many empty cells at its end; none where it gives none of these numbers."""
    given = [f"*{printed(numbers[key], key)}*" if key in numbers else "" for key in keys]
    return [["*paper*", *given, *[""] * after]] if any(given) else []


# The tables.


def main_table(facts: Facts) -> str:
    """Tables 1 to 3 of the paper: every method, mean ± sd over seeds."""
    dual, paper = facts["kind"] == "dual", of_paper(facts)
    task, scope = (f"{facts['detections'][0]}.", "unseen.") if dual else ("", "")
    keys = {f"{scope}{metric}": head for metric, head in CLASSIFICATION.items()}
    keys |= {f"{task}all.{metric}": head for metric, head in DETECTION.items()}
    keys |= {f"{task}{group}.auroc": f"{group} AUROC ↑" for group in ("near", "far")}
    if not dual:
        keys["chosen.all.auroc"] = "AUROC ↑ (own score)"
    lines = []
    for method, row in facts["rows"].items():
        cells = [shown(row[key], key) if key in row else OPEN for key in keys]
        own = [] if dual else [facts["scores"][method].replace("_", " ")]
        lines += [[method, *cells, *own, ratio(facts, method)], *paper_line(paper.get(method, {}), keys, len(own) + 1)]
    head = ["Method", *keys.values(), *([] if dual else ["own score"]), "cost"]
    return markdown(head, lines, _how_dual(facts) if dual else _how_classifiers(facts))


def sets_table(facts: Facts, position: int = 0) -> str:
    """Tables 15 to 17, 25 and 26: every OOD set of one ID task by itself, and their means."""
    tasks = list(facts.get("detections", facts["tasks"]))
    if position >= len(tasks):
        return "*This study has no further ID task.*"
    task, dual, paper = tasks[position], facts["kind"] == "dual", of_paper(facts)
    groups = {group: facts["tasks"][task].get(group, {}) for group in ("near", "far", "apart")}
    sets = {name: f"{name} ({group}, {count})" for group, found in groups.items() for name, count in found.items()}
    places = {f"{task}.{name}" if dual else f"ood.{name}": head for name, head in sets.items()}
    places |= {f"{task}.{group}" if dual else group: group for group in GROUPS}
    lines = []
    for method, row in facts["rows"].items():
        theirs = paper.get(method, {})
        lines.append([method, *(" / ".join(mean(row[f"{one}.{key}"], key) for key in DETECTION) for one in places)])
        given = [[theirs.get(f"{one}.{key}") for key in DETECTION] for one in places]
        if any(None not in one for one in given):
            cells = ["" if None in one else f"*{' / '.join(f'{100 * number:.2f}' for number in one)}*" for one in given]  # type: ignore[operator]
            lines.append(["*paper*", *cells])
    note = "AUROC / FPR95 / AUPR with the maximum softmax probability, mean over seeds."
    return markdown(["Method", *places.values()], lines, note)


def calibration_table(facts: Facts) -> str:
    """Calibration before and after a temperature that was fitted on half B."""
    metrics = ("brier", "nll", "ece", "aece")
    lines = []
    for method, row in facts["rows"].items():
        found = [facts["temperatures"][str(seed)][method] for seed in facts["seeds"]]
        pairs = [shown(row[key], one) for one in metrics for key in (one, f"calibrated.{one}")]
        lines.append([method, f"{statistics.mean(found):.2f}", *pairs])
    head = ["Method", "temperature", *(f"{HEADS[one]} {when}" for one in metrics for when in ("before", "after"))]
    return markdown(head, lines)


def tasks_table(facts: Facts) -> str:
    """Table 24 of the paper: every metric on every task."""
    tasks, paper = facts["tasks"], of_paper(facts)
    names = [f"{name} ({one['domain']}, {one['samples']})" for name, one in tasks.items()]
    lines = [["", "chance", *(printed(1 / one["classes"], "accuracy") for one in tasks.values()), "", ""]]
    for metric, head in CLASSIFICATION.items():
        keys = [*(f"task.{name}.{metric}" for name in tasks), f"unseen.{metric}", f"seen.{metric}"]
        for method, row in facts["rows"].items():
            ours = [mean(row[key], key) if key in row else OPEN for key in keys]
            lines += [[head, *line] for line in ([method, *ours], *paper_line(paper.get(method, {}), keys))]
    note = (
        f"Mean over seeds {facts['seeds']}. {_left_out(facts)} The paper's columns: IN-1K for tinyimagenet, SUN397 for "
        "scene15, DTD for dtd10; its mean is over nine sets."
    )
    return markdown(["metric", "Method", *names, "mean unseen", "mean seen"], lines, note, left=2)


def claims_table(facts: Facts) -> str:
    """The sign of every comparison the paper makes."""
    lines = []
    for one in facts["claims"]:
        metric, where = one["metric"], one["scope"] if "scope" in one else SETTINGS[one["setting"]]
        ours = [OPEN, OPEN]
        if one["ours"] is not None:
            ours = [printed(one["ours"], metric, "+"), interval(one["low"], one["high"], metric)]
        named = [where, headline(metric), f"{one['first']} − {one['second']}"]
        lines.append([*named, printed(one["paper"], metric, "+"), *ours, f"**{one['verdict']}**"])
    return markdown(["where", "metric", "difference", "paper", "ours", "95 % interval", "sign"], lines, left=3)


def contrasts_table(facts: Facts) -> str:
    """Hydra (Circ), its trunk and the controls against the methods that matter."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for first, found in facts["contrasts"].items():
        for key, (value, low, high) in found.items():
            metric, _, second = key.partition(" − ")
            cell = f"{printed(value, metric, '+')} ({interval(low, high, metric)})"
            lines.setdefault((first, metric), {})[second] = cell
    seconds = list(dict.fromkeys(second for found in lines.values() for second in found))
    named = [
        [one, headline(metric), *(found.get(key, "") for key in seconds)] for (one, metric), found in lines.items()
    ]
    note = "Each method with its own score; in brackets the 95 % interval of a paired bootstrap over test samples."
    return markdown(["method", "metric", *(f"− {second}" for second in seconds)], named, note, left=2)


def _how_classifiers(facts: Facts) -> str:
    counts, tests = facts["samples"], next(iter(facts["tasks"].values()))["samples"]
    return (
        f"{facts['device']}, torch {facts['versions']['torch']}, seeds {facts['seeds']}; {counts['train']} training "
        f"samples, circuits on {counts['rank_id']} + {counts['rank_ood']} of half A, settings chosen on "
        f"{counts['choose_id']} + {counts['choose_ood']} of half B, {tests} test samples. AUROC, FPR95 and AUPR: "
        f"maximum softmax probability, mean over OOD sets.{_costs(facts)} From `results/studies/{facts['study']}.json`."
    )


def _how_dual(facts: Facts) -> str:
    recipe, circuits = facts["recipe"], next(iter(facts["circuits"].values()))
    both, image = circuits["avg image+text"], circuits["avg image"]
    most = [
        "all" if recipe["counts"][name] is None else f"{recipe['counts'][name]:,}" for name in ("test", "detection")
    ]
    prompts = {"paper": "`A photo of a {label}.`", "ensemble": "many sentences, averaged"}[recipe["templates"]]
    return (
        f"**{facts['model']['name']}.** {facts['model']['description']}\n\n"
        f"{facts['device']}, torch {facts['versions']['torch']}, seeds {facts['seeds']}. Circuits of both towers on "
        f"{both['id_samples']} + {both['ood_samples']} images, {recipe['prune']} heads pruned; of the image tower "
        f"alone on {image['id_samples']} + {image['ood_samples']}, {recipe['image_prune']} heads. Temperatures on "
        f"{facts['calibrated_on']} images (the paper: 5,000). At most {most[0]} images of a task and {most[1]} of an "
        f"OOD set. Prompts: {prompts}. Classification: mean over unseen tasks. {_left_out(facts)} OOD: maximum softmax "
        f"probability, {facts['detections'][0]} as ID data, mean over all sets.{_costs(facts)} From "
        f"`results/studies/{facts['study']}.json`."
    )


def _costs(facts: Facts) -> str:
    costs = facts["costs"]
    if costs is None:
        return ""
    return f" Cost: latency of a batch of {costs['batch']} in {costs['dtype']}, over Single's."


def _left_out(facts: Facts) -> str:
    rule = f"Tasks where Single is below {facts['recipe']['least_over_chance']:g} times chance leave the means"
    return f"{rule}: {', '.join(facts['left_out']) or 'none does'}."


TABLES: Mapping[str, Mapping[str, Table]] = {
    "classifier": {
        "main": main_table,
        "claims": claims_table,
        "contrasts": contrasts_table,
        "sets": sets_table,
        "calibration": calibration_table,
    },
    "dual": {
        "main": main_table,
        "claims": claims_table,
        "tasks": tasks_table,
        "first": sets_table,
        "second": partial(sets_table, position=1),
    },
}
"""Every table by kind of study and by its name in docs/results.md."""


def written(facts: Facts) -> str:
    """All tables of a study, one below the other."""
    tables = TABLES[facts["kind"]]
    return "\n\n".join(f"### {facts['study']}: {name}\n\n{table(facts)}" for name, table in tables.items())


def paper_table(facts: Facts) -> str:
    """The paper's numbers beside ours: every number that it gives."""
    lines = []
    for method, numbers in of_paper(facts).items():
        for key, paper in numbers.items():
            values = facts["rows"].get(method, {}).get(key)
            gap = "" if values is None else printed(statistics.mean(values) - paper, key, "+")
            lines.append([method, key, printed(paper, key), OPEN if values is None else shown(values, key), gap])
    return markdown(["method", "number", "paper", "ours", "ours − paper"], lines, left=2)


def not_testable_table(kind: str) -> str:
    """Claims that these data and models cannot test."""
    found = [[row["claim"], row["why"]] for row in read_csv("not_testable") if row["kind"] == kind]
    return markdown(["claim", "why it is not testable here"], found, left=2)


def summary_table(studies: Sequence[Facts]) -> str:
    """The headline rows of studies of classifiers."""
    keys = {"accuracy": "accuracy", "chosen.all.auroc": "OOD AUROC", "calibrated.ece": "ECE, calibrated"}
    lines = [
        [facts["study"], method, *(shown(facts["rows"][method][key], key) for key in keys), ratio(facts, method)]
        for facts in studies
        for method in SUMMARY
    ]
    note = (
        "Mean and deviation over seeds; OOD AUROC with each method's own score, mean over all OOD sets; latency on a "
        "GPU, over that of the single model. From `results/studies/`."
    )
    return markdown(["study", "method", *keys.values(), "latency"], lines, note, left=2)
