"""The tables of a study in Markdown, from its results file alone."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hydra_ensembles.schema import from_plain

from .methods import (
    BOTH,
    DEEP,
    HYDRA,
    HYDRA_IMAGE,
    HYDRA_IMAGE_TUNED,
    HYDRA_MORE,
    HYDRA_TRUNK,
    HYDRA_TUNED,
    IMAGE,
    LATER,
    MC_DROPOUT,
    MORE,
    SINGLE,
    TEMPERATURE,
    Chosen,
    rate_name,
)
from .paper import (
    AVERAGE,
    ID_TASK,
    STANDS_FOR,
    TASK_COLUMN,
    Numbers,
    classifier_numbers,
    not_testable,
    zero_shot_numbers,
    zero_shot_set_numbers,
    zero_shot_task_row,
)

Facts = Mapping[str, Any]
Table = Callable[[Facts], str]

SHARES = ("accuracy", "auroc", "fpr95", "aupr", "ece", "aece", "aurc")  # shown in percent
CLASSIFICATION = {"accuracy": "Acc ↑", "brier": "Brier ↓", "nll": "NLL ↓", "ece": "ECE ↓", "aece": "aECE ↓"}
DETECTION = {"auroc": "AUROC ↑", "fpr95": "FPR95 ↓", "aupr": "AUPR ↑"}
HEADS = {**CLASSIFICATION, **DETECTION}
MAIN = {
    **CLASSIFICATION,
    **{f"all.{metric}": head for metric, head in DETECTION.items()},
    "near.auroc": "near AUROC ↑",
    "far.auroc": "far AUROC ↑",
}
OPEN = "–"  # a number that is not there
GAIN_KEPT = 0.8  # of Hydra's gain over the single model that a shared trunk is to keep
TRUNK_COST = 1.5
PROMPTS = {"paper": "`A photo of a {label}.`", "ensemble": "many sentences, averaged"}
VARIANTS = (HYDRA, HYDRA_MORE, HYDRA_IMAGE, HYDRA_IMAGE_TUNED, HYDRA_TUNED)


# Numbers and lines, as all tables show them.


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table: the first column left, the others right."""
    rule = "|".join(["---", *["---:"] * (len(head) - 1)])
    return "\n".join([f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(line)} |" for line in lines)])


def is_share(metric: str) -> bool:
    """Whether a metric is shown in percent."""
    return metric.rpartition(".")[2] in SHARES


def printed(value: float, metric: str) -> str:
    """A number as tables show it."""
    return f"{100 * value:.2f}" if is_share(metric) else f"{value:.3f}"


def mean(values: Sequence[float], metric: str) -> str:
    """Mean over seeds."""
    return printed(statistics.mean(values), metric)


def shown(values: Sequence[float], metric: str) -> str:
    """Mean ± standard deviation over seeds; without the latter for a single seed."""
    if len(values) < 2:
        return mean(values, metric)
    return f"{mean(values, metric)} ± {printed(statistics.stdev(values), metric)}"


def difference(value: float, metric: str) -> str:
    """A difference with its sign."""
    return f"{100 * value:+.2f}" if is_share(metric) else f"{value:+.3f}"


def interval(low: float, high: float, metric: str) -> str:
    """Both ends of an interval of differences."""
    return f"{difference(low, metric)} to {difference(high, metric)}"


def ratio(facts: Facts, method: str) -> str:
    """Latency over that of the single model; empty where it was not measured."""
    costs = {} if facts["costs"] is None else facts["costs"]["costs"]
    return f"{costs[method]['latency_ratio']:.2f}x" if method in costs else ""


def in_order(facts: Facts) -> list[str]:
    """All rows, and after MC Dropout (zero-shot: Temperature Scaling) baselines of the paper that are missing here."""
    found, dual = list(facts["rows"]), facts["kind"] == "dual"
    paper = LATER if dual else classifier_numbers(STANDS_FOR[facts["study"]])
    at = found.index(TEMPERATURE if dual else MC_DROPOUT) + 1
    return [*found[:at], *(method for method in paper if method not in found), *found[at:]]


def cells(facts: Facts, method: str, metrics: Mapping[str, str] | Iterable[str], spread: bool = True) -> list[str]:
    """One cell a metric; dashes where a number is not there, and `later` first for a baseline that is not built."""
    row, wanted = facts["rows"].get(method), list(metrics)
    if row is None:
        later = facts["kind"] == "classifier" or method in LATER
        return ["later", *[OPEN] * (len(wanted) - 1)] if later else [OPEN] * len(wanted)
    show = shown if spread else mean
    return [show(row[metric], metric) if metric in row else OPEN for metric in wanted]


def paper_line(name: str, numbers: Numbers, metrics: Iterable[str], empty: int = 0) -> list[list[str]]:
    """The paper's row, with so many empty cells at its end; or none, where it has no numbers."""
    if not numbers:
        return []
    given = [f"*{printed(numbers[metric], metric)}*" if metric in numbers else "" for metric in metrics]
    return [[f"*{name}*", *given, *[""] * empty]]


# Studies of classifiers.


def main_table(facts: Facts) -> str:
    """Table 1 or 2 of the paper: every method, mean ± sd over seeds, and the paper's row below where it has one."""
    lines = []
    for method in in_order(facts):
        row = facts["rows"].get(method)
        own = (
            ["", ""]
            if row is None
            else [facts["scores"][method].replace("_", " "), shown(row["chosen.all.auroc"], "auroc")]
        )
        lines.append([method, *cells(facts, method, MAIN), *own, ratio(facts, method)])
        lines += _of_paper(facts, method, MAIN, 3)
    head = ["Method", *MAIN.values(), "own score", "AUROC ↑ (own score)", "cost"]
    return markdown(head, lines) + "\n\n" + _provenance(facts)


def groups_table(facts: Facts) -> str:
    """Tables 15 to 17 of the paper: near, far and all OOD sets, with the maximum softmax probability."""
    heads = {f"{group}.{one}": f"{group} {DETECTION[one]}" for group in ("near", "far", "all") for one in DETECTION}
    lines = []
    for method in in_order(facts):
        lines += [[method, *cells(facts, method, heads)], *_of_paper(facts, method, heads)]
    return markdown(["Method", *heads.values()], lines)


def sets_table(facts: Facts) -> str:
    """AUROC / FPR95 on every OOD set by itself."""
    task = next(iter(facts["tasks"].values()))
    sets = {
        name: f"{name} ({group}, {count})"
        for group in ("near", "far", "apart")
        for name, count in task.get(group, {}).items()
    }
    lines = [
        [
            method,
            *(f"{shown(row[f'ood.{one}.auroc'], 'auroc')} / {mean(row[f'ood.{one}.fpr95'], 'fpr95')}" for one in sets),
        ]
        for method, row in facts["rows"].items()
    ]
    return markdown(["Method", *sets.values()], lines)


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


def diversity_table(facts: Facts) -> str:
    """How much the members differ: mutual information and disagreement, on ID and OOD data."""
    names = {"mutual_information": "ID MI", "disagreement": "ID disagreement"}
    names |= {"all.mutual_information": "OOD MI", "all.disagreement": "OOD disagreement"}
    lines = [
        [method, *cells(facts, method, names)]
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
        apart = [f"{100 * by_score[score]['auroc']:.2f}" if score in by_score else "" for score in scores]
        apart[scores.index(best["score"])] = f"**{apart[scores.index(best['score'])]}**"
        lines.append([method, model, f"{100 * best['accuracy']:.2f}", *apart, cost, mark])
    names = [f"AUROC, {score.replace('_', ' ')}" for score in scores]
    head = ["Method", "setting", "Acc (half B)", *names, "multiply-adds", ""]
    note = f"Decision {facts['decision']['digest']}, from half B of seeds {decision['seeds']}; no test set was open."
    return markdown(head, lines) + "\n\n" + note


def claims_table(facts: Facts) -> str:
    """The sign of every comparison the paper makes."""
    lines = [
        [
            MAIN.get(one["metric"], one["metric"]),
            f"{one['first']} − {one['second']}",
            "chosen on half B" if one["setting"] == "chosen" else "as in the paper",
            *_compared(one),
        ]
        for one in facts["claims"]
    ]
    paper = f"paper ({STANDS_FOR[facts['study']]})"
    return markdown(["metric", "difference", "our setting", paper, "ours", "95 % interval", "sign"], lines)


def contrasts_table(facts: Facts) -> str:
    """Hydra (Circ), its trunk and the controls against the methods that matter."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for first, found in facts["contrasts"].items():
        for key, (value, low, high) in found.items():
            metric, _, second = key.partition(" − ")
            cell = f"{difference(value, metric)} ({interval(low, high, metric)})"
            lines.setdefault((first, metric), {})[second] = cell
    seconds = list(dict.fromkeys(second for found in lines.values() for second in found))
    named = [
        [first, MAIN[metric], *(found.get(second, "") for second in seconds)]
        for (first, metric), found in lines.items()
    ]
    note = "Each method with its own score; in brackets the 95 % interval of a paired bootstrap over test samples."
    return markdown(["method", "metric", *(f"− {second}" for second in seconds)], named) + "\n\n" + note


def targets_table(facts: Facts) -> str:
    """What this project set itself as a target, with the numbers that decide."""

    def number(method: str, metric: str) -> float:
        return statistics.mean(facts["rows"][method][metric])

    single, hydra, deep, trunk = (number(name, "chosen.all.auroc") for name in (SINGLE, HYDRA, DEEP, HYDRA_TRUNK))
    gain = (trunk - single) / (hydra - single) if hydra > single else None
    cost = None if facts["costs"] is None else facts["costs"]["costs"][HYDRA_TRUNK]["latency_ratio"]
    own, after = (number(name, "calibrated.ece") for name in (SINGLE, HYDRA))
    kept = f"{'no gain' if gain is None else f'{gain:.0%}'} at {'unmeasured' if cost is None else f'{cost:.2f}x'}"
    found = [
        ("Hydra (Circ) ≥ Deep Ensembles, OOD AUROC", f"{100 * hydra:.2f} against {100 * deep:.2f}", hydra >= deep),
        ("Hydra (Circ) ≥ Single, OOD AUROC", f"{100 * hydra:.2f} against {100 * single:.2f}", hydra >= single),
        (
            "ECE of Hydra (Circ) after calibration ≤ Single's, calibrated too",
            f"{100 * after:.2f} against {100 * own:.2f} (Single without: {100 * number(SINGLE, 'ece'):.2f})",
            after <= own,
        ),
        (
            f"shared trunk keeps {GAIN_KEPT:.0%} of the gain at ≤ {TRUNK_COST}x the cost",
            kept,
            gain is not None and gain >= GAIN_KEPT and cost is not None and cost <= TRUNK_COST,
        ),
    ]
    lines = [[target, numbers, "**met**" if met else "not met"] for target, numbers, met in found]
    return markdown(["target", "found", ""], lines)


def _of_paper(facts: Facts, method: str, metrics: Iterable[str], empty: int = 0) -> list[list[str]]:
    task = STANDS_FOR[facts["study"]]
    return paper_line(f"paper, {task}", classifier_numbers(task).get(method, {}), metrics, empty)


def _compared(one: Mapping[str, Any]) -> list[str]:
    """The paper's difference, ours, its interval and the verdict."""
    metric = one["metric"]
    tested = one["ours"] is not None
    ours = [difference(one["ours"], metric), interval(one["low"], one["high"], metric)] if tested else [OPEN, OPEN]
    return [difference(one["paper"], metric), *ours, f"**{one['verdict']}**"]


def _provenance(facts: Facts) -> str:
    counts, costs = facts["samples"], facts["costs"]
    tests = next(iter(facts["tasks"].values()))["samples"]
    measured = (
        "" if costs is None else f" Cost: latency of a batch of {costs['batch']} in {costs['dtype']}, over Single's."
    )
    return (
        f"{facts['device']}, torch {facts['versions']['torch']}, seeds {facts['seeds']}; {counts['train']} training "
        f"samples, circuits on {counts['rank_id']} + {counts['rank_ood']} of half A, settings chosen on "
        f"{counts['choose_id']} + {counts['choose_ood']} of half B, {tests} test samples. AUROC, FPR95 and AUPR: "
        f"maximum softmax probability, mean over OOD sets.{measured} From `results/studies/{facts['study']}.json`."
    )


# Zero-shot studies.


def about_table(facts: Facts) -> str:
    """What the model is and is not, and how the numbers came about."""
    counts, recipe = facts["recipe"]["counts"], facts["recipe"]
    circuits = next(iter(facts["circuits"].values()))
    both, image = circuits["avg image+text"], circuits["avg image"]
    most = ["all" if counts[name] is None else f"{counts[name]:,}" for name in ("test", "detection")]
    return (
        f"**{facts['model']['name']}.** {facts['model']['description']}\n\n"
        f"{facts['device']}, torch {facts['versions']['torch']}, seeds {facts['seeds']}. Circuits of both towers on "
        f"{both['id_samples']} + {both['ood_samples']} images, {recipe['prune']} heads pruned; of the image tower "
        f"alone on {image['id_samples']} + {image['ood_samples']}, {recipe['image_prune']} heads. Temperatures on "
        f"{facts['calibrated_on']} images (the paper: 5,000). At most {most[0]} images of a task and "
        f"{most[1]} of an OOD set. Prompts: {PROMPTS[recipe['templates']]}. OOD score: maximum "
        f"softmax probability. {_left_out(facts)} From `results/studies/{facts['study']}.json`."
    )


def zero_shot_main_table(facts: Facts) -> str:
    """Table 3 of the paper: means over unseen tasks, OOD detection on the first ID task; the paper's row below."""
    task = facts["detections"][0]
    column = ID_TASK.get(task, "")
    metrics = [*(f"unseen.{one}" for one in CLASSIFICATION), *(f"{task}.all.{one}" for one in DETECTION)]
    lines = []
    for method in in_order(facts):
        lines.append([method, *cells(facts, method, metrics), ratio(facts, method)])
        paper = dict(zero_shot_numbers(AVERAGE).get(method, {}))
        paper |= {key: one for key, one in zero_shot_numbers(column).get(method, {}).items() if key.startswith("all.")}
        lines += paper_line("paper", paper, [*CLASSIFICATION, *(f"all.{one}" for one in DETECTION)], 1)
    note = f"Classification: mean over unseen tasks. OOD: {task} as ID data, mean over all sets (paper: {column})."
    costs = facts["costs"]
    if costs is not None:
        measured = f"latency of a batch of {costs['batch']} in {costs['dtype']} for {costs['classes']} classes"
        note += f" Cost: {measured}, over Single's."
    return markdown(["Method", *HEADS.values(), "cost"], lines) + "\n\n" + note


def tasks_table(facts: Facts) -> str:
    """Table 24 of the paper: every metric on every task."""
    tasks = facts["tasks"]
    names = [f"{name} ({one['domain']}, {one['samples']})" for name, one in tasks.items()]
    lines = [["chance", "", *(printed(1 / one["classes"], "accuracy") for one in tasks.values()), "", ""]]
    for metric in CLASSIFICATION:
        keys = [*(f"task.{name}.{metric}" for name in tasks), f"unseen.{metric}", f"seen.{metric}"]
        for method in in_order(facts):
            lines.append([HEADS[metric], method, *cells(facts, method, keys, spread=False)])
            paper = zero_shot_task_row(metric, method)
            if paper is not None:
                given = [
                    f"*{printed(paper[TASK_COLUMN[name]], metric)}*" if name in TASK_COLUMN else "" for name in tasks
                ]
                lines.append([HEADS[metric], "*paper*", *given, f"*{printed(paper['Avg'], metric)}*", ""])
    note = "The paper's columns: IN-1K for tinyimagenet, SUN397 for scene15, DTD for dtd10; its mean is over nine sets."
    table = markdown(["metric", "Method", *names, "mean unseen", "mean seen"], lines)
    return table + "\n\n" + f"Mean over seeds {facts['seeds']}. {_left_out(facts)} {note}"


def detection_table(facts: Facts, position: int) -> str:
    """Table 25 or 26 of the paper: AUROC / FPR95 / AUPR on every OOD set of one ID task, and their means."""
    if position >= len(facts["detections"]):
        return "*This study has no further ID task.*"
    task = facts["detections"][position]
    one, column = facts["tasks"][task], ID_TASK.get(task, "")
    places = {name: f"{name} ({group}, {count})" for group in ("near", "far") for name, count in one[group].items()}
    places |= {group: group for group in ("near", "far", "all")}
    lines = []
    for method in in_order(facts):
        row = facts["rows"].get(method)
        ours = cells(facts, method, places)
        if row is not None:
            ours = [" / ".join(mean(row[f"{task}.{place}.{key}"], key) for key in DETECTION) for place in places]
        lines.append([method, *ours])
        paper = {**zero_shot_numbers(column).get(method, {}), **zero_shot_set_numbers(column, method)}
        if paper:
            given = [
                ""
                if f"{place}.auroc" not in paper
                else f"*{' / '.join(printed(paper[f'{place}.{key}'], key) for key in DETECTION)}*"
                for place in places
            ]
            lines.append([f"*paper, {column}*", *given])
    return markdown(["Method", *places.values()], lines) + "\n\nAUROC / FPR95 / AUPR, mean over seeds."


def variants_table(facts: Facts) -> str:
    """Tables 27 and 28 of the paper: which towers are pruned, how many heads, with and without training."""
    heads = {f"unseen.{one}": HEADS[one] for one in ("accuracy", "nll", "ece")}
    for task in facts["detections"]:
        for group in ("near", "far", "all"):
            heads |= {f"{task}.{group}.{one}": f"{task} {group} {HEADS[one]}" for one in ("auroc", "fpr95")}
    lines = []
    for method in VARIANTS:
        paper = {f"unseen.{key}": value for key, value in zero_shot_numbers(AVERAGE).get(method, {}).items()}
        for task in facts["detections"]:
            found = zero_shot_numbers(ID_TASK.get(task, "")).get(method, {})
            paper |= {f"{task}.{key}": value for key, value in found.items()}
        lines += [[method, *cells(facts, method, heads, spread=False)], *paper_line("paper", paper, heads)]
    return markdown(["Method", *heads.values()], lines)


def heads_table(facts: Facts) -> str:
    """How many heads of each tower every circuit takes."""
    lines = []
    for family in (BOTH.name, MORE.name, IMAGE.name):
        for index, score in enumerate(("avg", "acc", "ood")):
            found = []
            for seed in facts["seeds"]:
                towers = Counter(head.partition(":")[0] for head in facts["heads"][str(seed)][family][index])
                found.append(f"{towers['image']} + {towers['text']}")
            lines.append([f"{family}, {score}", *found])
    return markdown(["circuit", *(f"seed {seed}: image + text" for seed in facts["seeds"])], lines)


def zero_shot_claims_table(facts: Facts) -> str:
    """The sign of every comparison the paper makes."""
    lines = []
    for one in facts["claims"]:
        group, _, name = one["metric"].rpartition(".")
        metric = f"{group} {HEADS[name]}".strip()
        lines.append([one["scope"], metric, f"{one['first']} − {one['second']}", *_compared(one)])
    return markdown(["where", "metric", "difference", "paper", "ours", "95 % interval", "sign"], lines)


def _left_out(facts: Facts) -> str:
    rule = f"Tasks where Single is below {facts['recipe']['least_over_chance']:g} times chance leave the means"
    return f"{rule}: {', '.join(facts['left_out']) or 'none does'}."


TABLES: Mapping[str, Mapping[str, Table]] = {
    "classifier": {
        "main": main_table,
        "groups": groups_table,
        "sets": sets_table,
        "calibration": calibration_table,
        "diversity": diversity_table,
        "choice": choice_table,
        "claims": claims_table,
        "contrasts": contrasts_table,
        "targets": targets_table,
    },
    "dual": {
        "about": about_table,
        "main": zero_shot_main_table,
        "tasks": tasks_table,
        "first": lambda facts: detection_table(facts, 0),
        "second": lambda facts: detection_table(facts, 1),
        "variants": variants_table,
        "heads": heads_table,
        "claims": zero_shot_claims_table,
    },
}
"""Every table by kind of study and by its name in docs/results.md."""


def not_testable_table(kind: str) -> str:
    """Claims that these data and models cannot test."""
    return markdown(["claim", "why it is not testable here"], not_testable(kind))


def written(facts: Facts) -> str:
    """All tables of a study, one below the other."""
    tables = TABLES[facts["kind"]]
    return "\n\n".join(f"### {facts['study']}: {name}\n\n{table(facts)}" for name, table in tables.items())


def paper_table(facts: Facts) -> str:
    """The paper's numbers beside ours: every number that it gives of a method that the study has."""
    given: list[tuple[str, str, Mapping[str, Numbers]]] = []  # the paper's task, how our keys of it begin, its numbers
    if facts["kind"] == "classifier":
        task = STANDS_FOR[facts["study"]]
        given.append((task, "", classifier_numbers(task)))
    else:
        given.append((AVERAGE, "unseen.", zero_shot_numbers(AVERAGE)))
        there = [name for name in facts["detections"] if name in ID_TASK]
        given += [(ID_TASK[name], f"{name}.", zero_shot_numbers(ID_TASK[name])) for name in there]
    found = [
        (scope, method, f"{prefix}{key}", paper)
        for scope, prefix, numbers in given
        for method, row in numbers.items()
        for key, paper in row.items()
    ]
    lines = []
    for scope, method, key, paper in found:
        row = facts["rows"].get(method, {})
        ours = [shown(row[key], key), difference(statistics.mean(row[key]) - paper, key)] if key in row else [OPEN, ""]
        lines.append([scope, method, key, printed(paper, key), *ours])
    return markdown(["paper", "method", "number", "paper", "ours", "ours − paper"], lines)
