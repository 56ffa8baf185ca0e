"""What the documents show of the studies: tables in Markdown, from results files alone, and figures.

The paper's numbers stand in italics below ours.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from hydra_ensembles.files import read_json

from .methods import DEEP, HYDRA, HYDRA_TRUNK, SINGLE
from .paper import STANDS_FOR, Numbers, paper_numbers, read_csv
from .recipe import CLASSIFIERS
from .results import Results
from .sets import read_yaml

matplotlib.use("Agg")
from matplotlib import pyplot

Facts = Mapping[str, Any]
Table = Callable[[Facts], str]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "studies"
FIGURES = ROOT / "docs" / "figures"
SHARES = ("accuracy", "auroc", "fpr95", "aupr", "ece", "aece", "aurc")  # shown in percent
CLASSIFICATION = {"accuracy": "Acc ↑", "brier": "Brier ↓", "nll": "NLL ↓", "ece": "ECE ↓", "aece": "aECE ↓"}
DETECTION = {"auroc": "AUROC ↑", "fpr95": "FPR95 ↓", "aupr": "AUPR ↑"}
HEADS = {**CLASSIFICATION, **DETECTION}
GROUPS = ("near", "far", "all")
OPEN = "–"  # a number that is not there
SUMMARY = (SINGLE, DEEP, HYDRA, HYDRA_TRUNK)
SETTINGS = {"paper": "as in the paper", "chosen": "chosen on half B"}
MARKS = {SINGLE: "s", DEEP: "D", HYDRA: "*", HYDRA_TRUNK: "P"}  # the four to look at; others are dots
COLOURS = {SINGLE: "black", DEEP: "tab:blue", HYDRA: "tab:red", HYDRA_TRUNK: "tab:orange"}


# --- numbers and lines, as all tables show them ----------------------------------------------------------------------


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
    return paper_numbers("classifier", STANDS_FOR[facts["study"]])


def paper_line(numbers: Numbers, keys: Iterable[str], after: int = 0) -> list[list[str]]:
    """The paper's row with so many empty cells at its end; none where it gives none of these numbers."""
    given = [f"*{printed(numbers[key], key)}*" if key in numbers else "" for key in keys]
    return [["*paper*", *given, *[""] * after]] if any(given) else []


# --- the tables ------------------------------------------------------------------------------------------------------


def main_table(facts: Facts) -> str:
    """Tables 1 and 2 of the paper: every method, mean ± sd over seeds."""
    paper = of_paper(facts)
    keys = dict(CLASSIFICATION)
    keys |= {f"all.{metric}": head for metric, head in DETECTION.items()}
    keys |= {f"{group}.auroc": f"{group} AUROC ↑" for group in ("near", "far")}
    keys["chosen.all.auroc"] = "AUROC ↑ (own score)"
    lines = []
    for method, row in facts["rows"].items():
        cells = [shown(row[key], key) if key in row else OPEN for key in keys]
        own = facts["scores"][method].replace("_", " ")
        lines += [[method, *cells, own, ratio(facts, method)], *paper_line(paper.get(method, {}), keys, 2)]
    return markdown(["Method", *keys.values(), "own score", "cost"], lines, _how(facts))


def sets_table(facts: Facts) -> str:
    """Tables 15 to 17: every OOD set by itself, and their means."""
    task, paper = next(iter(facts["tasks"].values())), of_paper(facts)
    groups = {group: task.get(group, {}) for group in ("near", "far", "apart")}
    sets = {name: f"{name} ({group}, {count})" for group, found in groups.items() for name, count in found.items()}
    places = {f"ood.{name}": head for name, head in sets.items()} | {group: group for group in GROUPS}
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


def claims_table(facts: Facts) -> str:
    """The sign of every comparison the paper makes."""
    lines = []
    for one in facts["claims"]:
        metric, where = one["metric"], SETTINGS[one["setting"]]
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


def _how(facts: Facts) -> str:
    """How the numbers of the main table were made."""
    texts = read_yaml("texts")
    more = {"cost": "" if facts["costs"] is None else texts["cost"].format_map(facts["costs"])}
    more["tests"] = next(iter(facts["tasks"].values()))["samples"]
    return str(texts["classifier"].format_map({**facts, **more}))


TABLES: Mapping[str, Table] = {
    "main": main_table,
    "claims": claims_table,
    "contrasts": contrasts_table,
    "sets": sets_table,
    "calibration": calibration_table,
}
"""Every table by its name in docs/results.md."""


def written(facts: Facts) -> str:
    """All tables of a study, one below the other."""
    return "\n\n".join(f"### {facts['study']}: {name}\n\n{table(facts)}" for name, table in TABLES.items())


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


# --- blocks of docs/results.md ---------------------------------------------------------------------------------------


def study_blocks(folder: Path = RESULTS) -> dict[str, str]:
    """Every block by name: `study_<task>_<table>`, `study_<task>_plot`, `study_summary`, …."""
    found = {study: read(folder, study) for study in CLASSIFIERS}
    blocks = {
        "study_not_testable": not_testable_table("classifier"),
        "study_summary": summary_table([facts for facts in map(found.get, CLASSIFIERS) if facts]),
    }
    for study, facts in found.items():
        task, missing = task_of(study), f"*Not measured yet: `python -m studies run {study}`.*"
        for name, table in TABLES.items():
            blocks[f"study_{task}_{name}"] = missing if facts is None else table(facts)
        text = "OOD AUROC of every method against its latency, over that of one model"
        blocks[f"study_{task}_plot"] = f"![{text}](figures/study_{task}.svg)"
    return blocks


def task_of(study: str) -> str:
    """The short name of a study's task."""
    return study.rpartition("-")[2]


def read(folder: Path, study: str) -> Facts | None:
    """What the results file of a study says; None where it was not run."""
    path = folder / f"{study}.json"
    return read_json(path) if path.exists() else None


# --- figures ---------------------------------------------------------------------------------------------------------


def draw_figures(results: Results, folder: Path = FIGURES) -> list[Path]:
    """The figure of a study, OOD AUROC against cost, where that was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    if results.facts["costs"] is None:
        return []
    metric, axis = "chosen.all.auroc", "OOD AUROC (%), mean over sets, score chosen on half B"
    return [_draw_costs(results.facts, folder / f"study_{task_of(results.name)}.svg", metric, axis)]


def _draw_costs(facts: Facts, path: Path, metric: str, axis: str) -> Path:
    """One point a method: mean over seeds, a bar of one standard deviation."""
    canvas, axes = _axes(7, 4.2, "latency of a batch, over that of one model", axis)
    muted: Any = pyplot.get_cmap("tab20b")
    for index, (name, cost) in enumerate(facts["costs"]["costs"].items()):
        values = [100 * value for value in facts["rows"][name][metric]]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        place = (cost["latency_ratio"], statistics.mean(values))
        mark, size = MARKS.get(name, "o"), 9 if name in MARKS else 4
        colour = COLOURS.get(name, muted.colors[7 * index % len(muted.colors)])  # neighbours differ in hue
        axes.errorbar(*place, yerr=spread, fmt=mark, color=colour, markersize=size, capsize=2, label=name)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7, frameon=False)
    axes.set_title(f"{facts['study']}: {facts['costs']['device']}, {facts['costs']['dtype']}")
    return _saved(canvas, path)


def _axes(width: float, height: float, across: str, up: str) -> tuple[Any, Any]:
    matplotlib.rcParams.update({"svg.hashsalt": "studies", "svg.fonttype": "none", "font.size": 9})
    canvas, axes = pyplot.subplots(figsize=(width, height))
    axes.set(xlabel=across, ylabel=up)
    axes.grid(alpha=0.3)
    return canvas, axes


def _saved(canvas: Any, path: Path) -> Path:
    canvas.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(canvas)
    return path
