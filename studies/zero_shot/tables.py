"""The tables of a zero-shot study in Markdown, from its results file alone."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from ..tables import NAMES, OPEN, Facts, difference, later, markdown, mean, printed, ratio, shown
from .methods import (
    BOTH,
    HYDRA,
    HYDRA_IMAGE,
    HYDRA_IMAGE_TUNED,
    HYDRA_MORE,
    HYDRA_TUNED,
    IMAGE,
    LATER,
    MORE,
    TEMPERATURE,
)
from .paper import AVERAGE, COLUMN_OF, DETECTED, NOT_TESTABLE
from .paper_details import TASK_COLUMN, paper_set_numbers, paper_task_row

CLASSIFICATION = ("accuracy", "brier", "nll", "ece", "aece")
DETECTION = ("auroc", "fpr95", "aupr")
HEADS = {
    **{metric: NAMES[metric] for metric in CLASSIFICATION},
    "auroc": "AUROC ↑",
    "fpr95": "FPR95 ↓",
    "aupr": "AUPR ↑",
}
PROMPTS = {"paper": "`A photo of a {label}.`", "ensemble": "many sentences, averaged"}
VARIANTS = (HYDRA, HYDRA_MORE, HYDRA_IMAGE, HYDRA_IMAGE_TUNED, HYDRA_TUNED)


def about_table(facts: Facts) -> str:
    """What the model is and is not, and how the numbers came about."""
    counts, recipe = facts["recipe"]["counts"], facts["recipe"]
    circuits = next(iter(facts["circuits"].values()))
    both = circuits["avg image+text"]
    image = circuits["avg image"]
    return (
        f"**{facts['model']['name']}.** {facts['model']['description']}\n\n"
        f"{facts['device']}, torch {facts['versions']['torch']}, seeds {facts['seeds']}. Circuits of both towers on "
        f"{both['id_samples']} + {both['ood_samples']} images, {recipe['prune']} heads pruned; of the image tower "
        f"alone on {image['id_samples']} + {image['ood_samples']}, {recipe['image_prune']} heads. Temperatures on "
        f"{facts['calibrated_on']} images (the paper: 5,000). At most {_limit(counts['test'])} images of a task and "
        f"{_limit(counts['detection'])} of an OOD set. Prompts: {PROMPTS[recipe['templates']]}. OOD score: maximum "
        f"softmax probability. {_left_out(facts)} From `results/studies/{facts['study']}.json`."
    )


def main_table(facts: Facts) -> str:
    """Table 3 of the paper: means over unseen tasks, OOD detection on the first ID task; the paper's row below."""
    task = next(iter(facts["detections"]))
    column = COLUMN_OF.get(task, "")
    metrics = {f"unseen.{one}": one for one in CLASSIFICATION} | {f"{task}.all.{one}": one for one in DETECTION}
    lines = []
    for method in _with_later(facts):
        lines.append([method, *_numbers(facts, method, metrics), ratio(facts, method)])
        paper = {**AVERAGE.get(method, {}), **_prefixed(DETECTED.get(column, {}).get(method, {}))}
        lines += _paper_line(paper, [*CLASSIFICATION, *(f"all.{one}" for one in DETECTION)], 1)
    head = ["Method", *HEADS.values(), "cost"]
    note = f"Classification: mean over unseen tasks. OOD: {task} as ID data, mean over all sets (paper: {column})."
    return markdown(head, lines) + "\n\n" + note + _cost_note(facts)


def tasks_table(facts: Facts) -> str:
    """Table 24 of the paper: every metric on every task."""
    tasks = facts["tasks"]
    names = [f"{name} ({one['domain']}, {one['samples']})" for name, one in tasks.items()]
    head = ["metric", "Method", *names, "mean unseen", "mean seen"]
    lines = [["chance", "", *(printed(1 / one["classes"], "accuracy") for one in tasks.values()), "", ""]]
    for metric in CLASSIFICATION:
        for method in _with_later(facts):
            keys = {f"task.{name}.{metric}": metric for name in tasks} | {
                f"{domain}.{metric}": metric for domain in ("unseen", "seen")
            }
            lines.append([HEADS[metric], method, *_numbers(facts, method, keys, spread=False)])
            paper = paper_task_row(metric, method)
            if paper is not None:
                cells = [
                    f"*{printed(paper[TASK_COLUMN[name]], metric)}*" if name in TASK_COLUMN else "" for name in tasks
                ]
                lines.append([HEADS[metric], "*paper*", *cells, f"*{printed(paper['Avg'], metric)}*", ""])
    note = "The paper's columns: IN-1K for tinyimagenet, SUN397 for scene15, DTD for dtd10; its mean is over nine sets."
    return markdown(head, lines) + "\n\n" + f"Mean over seeds {facts['seeds']}. {_left_out(facts)} {note}"


def detection_table(facts: Facts, position: int) -> str:
    """Table 25 or 26 of the paper: AUROC / FPR95 / AUPR on every OOD set of one ID task, and their means."""
    tasks = list(facts["detections"])
    if position >= len(tasks):
        return "*This study has no further ID task.*"
    task = tasks[position]
    groups = facts["detections"][task]
    sets = {name: f"{name} ({group}, {count})" for group in ("near", "far") for name, count in groups[group].items()}
    places = {**sets, "near": "near", "far": "far", "all": "all"}
    column = COLUMN_OF.get(task, "")
    lines = []
    for method in _with_later(facts):
        row = facts["rows"].get(method)
        lines.append(
            [method, *(later(len(places)) if row is None else (_three(row, f"{task}.{place}") for place in places))]
        )
        paper = {**DETECTED.get(column, {}).get(method, {}), **paper_set_numbers(column, method)}
        if paper:
            given = ["" if f"{one}.auroc" not in paper else f"*{_paper_three(paper, one)}*" for one in places]
            lines.append([f"*paper, {column}*", *given])
    return markdown(["Method", *places.values()], lines) + "\n\nAUROC / FPR95 / AUPR, mean over seeds."


def variants_table(facts: Facts) -> str:
    """Tables 27 and 28 of the paper: which towers are pruned, how many heads, with and without training."""
    metrics = {f"unseen.{one}": one for one in ("accuracy", "nll", "ece")}
    keys = dict(metrics)
    head = ["Method", "Acc ↑", "NLL ↓", "ECE ↓"]
    for task in facts["detections"]:
        keys |= {f"{task}.{group}.{one}": one for group in ("near", "far", "all") for one in ("auroc", "fpr95")}
        head += [f"{task} {group} {HEADS[one]}" for group in ("near", "far", "all") for one in ("auroc", "fpr95")]
    lines = []
    for method in VARIANTS:
        lines.append([method, *_numbers(facts, method, keys, spread=False)])
        paper: dict[str, float] = {f"unseen.{key}": value for key, value in AVERAGE.get(method, {}).items()}
        for task in facts["detections"]:
            found = DETECTED.get(COLUMN_OF.get(task, ""), {}).get(method, {})
            paper |= {f"{task}.{key}": value for key, value in found.items()}
        lines += _paper_line(paper, list(keys), 0)
    return markdown(head, lines)


def heads_table(facts: Facts) -> str:
    """How many heads of each tower every circuit takes, and what that does to the score it was made for."""
    lines = []
    for family in (BOTH.name, MORE.name, IMAGE.name):
        for index, score in enumerate(("avg", "acc", "ood")):
            cells = []
            for seed in facts["seeds"]:
                towers = Counter(head.partition(":")[0] for head in facts["heads"][str(seed)][family][index])
                cells.append(f"{towers['image']} + {towers['text']}")
            lines.append([f"{family}, {score}", *cells])
    return markdown(["circuit", *(f"seed {seed}: image + text" for seed in facts["seeds"])], lines)


def claims_table(facts: Facts) -> str:
    """The sign of every comparison the paper makes."""
    lines = []
    for one in facts["claims"]:
        metric = one["metric"]
        group, _, name = metric.rpartition(".")
        tested = one["ours"] is not None
        cells = [difference(one["ours"], metric), _interval(one, metric)] if tested else [OPEN, OPEN]
        lines.append(
            [
                one["scope"],
                f"{group} {HEADS[name]}".strip(),
                f"{one['first']} − {one['second']}",
                difference(one["paper"], metric),
                *cells,
                f"**{one['verdict']}**",
            ]
        )
    return markdown(["where", "metric", "difference", "paper", "ours", "95 % interval", "sign"], lines)


def not_testable_table(facts: Facts | None = None) -> str:
    """Claims that this data and this model cannot test."""
    return markdown(["claim", "why it is not testable here"], [list(one) for one in NOT_TESTABLE])


TABLES: Mapping[str, Callable[[Facts], str]] = MappingProxyType(
    {
        "about": about_table,
        "main": main_table,
        "tasks": tasks_table,
        "first": lambda facts: detection_table(facts, 0),
        "second": lambda facts: detection_table(facts, 1),
        "variants": variants_table,
        "heads": heads_table,
        "claims": claims_table,
    }
)
"""Every table of the study by its name in docs/results.md."""


def _with_later(facts: Facts) -> list[str]:
    """All rows; those of the baselines that are still missing stand after the single model."""
    found = list(facts["rows"])
    at = found.index(TEMPERATURE) + 1
    return [*found[:at], *LATER, *found[at:]]


def _numbers(facts: Facts, method: str, metrics: Mapping[str, str], spread: bool = True) -> list[str]:
    """One cell a metric; a dash where there is no such row, `later` in the first cell of a missing baseline."""
    row = facts["rows"].get(method)
    if row is None:
        return later(len(metrics)) if method in LATER else [OPEN] * len(metrics)
    show = shown if spread else mean
    return [show(row[key], name) if key in row else OPEN for key, name in metrics.items()]


def _paper_line(numbers: Mapping[str, float], keys: Sequence[str], empty: int) -> list[list[str]]:
    """The paper's row, or none."""
    if not numbers:
        return []
    cells = [f"*{printed(numbers[key], key)}*" if key in numbers else "" for key in keys]
    return [["*paper*", *cells, *[""] * empty]]


def _prefixed(numbers: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in numbers.items() if key.startswith("all.")}


def _three(row: Mapping[str, Sequence[float]], place: str) -> str:
    return " / ".join(mean(row[f"{place}.{one}"], one) for one in DETECTION)


def _paper_three(numbers: Mapping[str, float], place: str) -> str:
    return " / ".join(printed(numbers[f"{place}.{one}"], one) for one in DETECTION)


def _interval(one: Mapping[str, float], metric: str) -> str:
    return f"{difference(one['low'], metric)} to {difference(one['high'], metric)}"


def _limit(count: int | None) -> str:
    return "all" if count is None else f"{count:,}"


def _left_out(facts: Facts) -> str:
    least = facts["recipe"]["least_over_chance"]
    rule = f"Tasks where Single is below {least:g} times chance leave the means"
    return f"{rule}: {', '.join(facts['left_out']) or 'none does'}."


def _cost_note(facts: Facts) -> str:
    costs = facts["costs"]
    if costs is None:
        return ""
    measured = f"latency of a batch of {costs['batch']} in {costs['dtype']} for {costs['classes']} classes"
    return f" Cost: {measured}, over Single's."
