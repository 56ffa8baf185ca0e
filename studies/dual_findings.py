"""Tables of the zero-shot study for the documents, made only from its stored columns."""

from collections.abc import Callable, Mapping
from statistics import mean

from .cells import (
    ACROSS_TOLD,
    BEYOND,
    MARKED,
    gains,
    later_runs,
    marked,
    measured_on,
    memory,
    printed,
    ratio,
    with_paper,
)
from .claims import claim_cells, claims, not_testable_table
from .dual_rows import BAYES_VLM, NEG_LABEL, VILU
from .findings import TITLE, metrics
from .results import markdown
from .rows import HYDRA_CIRC
from .stored import UNSEEN, DualStudy

CLASSIFICATION = {
    "accuracy": "accuracy ↑",
    "nll": "NLL ↓",
    "brier": "Brier ↓",
    "own.ece": "ECE ↓",
    "own.aece": "aECE ↓",
    "calibrated.ece": "ECE, own temperature ↓",
    "own.aurc": "AURC ↓",
}
BY_OWN = (
    "ViLU and NegLabel answer like Single and bring a score: OOD numbers of their rows, and ECE, aECE and AURC of "
    "ViLU, are by that score, those of all other rows by the largest probability."
)
LARGE = "FPR95 of sets of 1,000 images or more; a dash where there is none."


def main_table(study: DualStudy) -> str:
    """Table 3: unseen tasks, and OOD sets of both ID tasks; `detection` has the rest of that table."""
    keys = {f"{UNSEEN}.{key}": head for key, head in CLASSIFICATION.items()} if study.counted else {}
    for task in study.detections:
        keys |= {f"{task}.own.{group}.auroc": f"{task} {group} ↑" for group in (*study.groups(task), "all")}
    measured = int(study.facts["costs"] is not None)  # number of cost columns
    lines = with_paper(study, [[key] for key in keys], lambda row: [ratio(study.cost(row))] * measured)
    facts = study.facts
    run = next(iter(study.facts["runs"].values()))
    titles = {"avg image+text": "of both towers", "avg image": "of the image tower alone"}
    ranked = [
        f"{titles[name]} {circuit['id_samples']} + {circuit['ood_samples']} images, {circuit['pruned']} heads"
        for name, circuit in run["circuits"].items()
        if name in titles
    ]
    note = (
        f"**{facts['model']['name']}.** {facts['model']['description']}\n\n"
        f"Means over {len(facts['runs'])} seeds{few_seeds(study)}, in per cent except NLL and Brier score; **better** "
        f"or *worse* than Single where significant {BEYOND}; the paper's "
        f"numbers in brackets below; aECE has no interval.{later_runs(study)} Classification: mean over "
        f"{', '.join(study.counted) or 'no task'}. {left_out(study)} OOD: AUROC, mean over the near, the far and all "
        f"sets of an ID task. {BY_OWN} Circuits: {'; '.join(ranked) or 'none'}. "
        f"Temperatures on {run['samples']} images. {priced(study)}"
        f"{facts['device']}, torch {facts['versions']['torch']}. From `results/studies/{study.name}/`."
    )
    return markdown(["row", *keys.values(), *["cost"] * measured], lines, note)


def few_seeds(study: DualStudy) -> str:
    """Rows that some seeds lack, with their number of seeds."""
    few = [f"{row} {len(seeds)}" for row in study.rows if len(seeds := study.seeds(row)) < len(study.facts["runs"])]
    return f" ({', '.join(few)})" if few else ""


def left_out(study: DualStudy) -> str:
    """The rule that excludes tasks from the means, and the tasks it excludes."""
    least = study.facts["recipe"]["least_over_chance"]
    return f"Tasks where Single is below {least:g} times chance leave the means: {', '.join(study.left_out) or 'none'}."


def tasks_table(study: DualStudy, key: str = "accuracy") -> str:
    """Table 24: one metric for every task, by a row's own score if it has one."""
    tasks = study.facts["tasks"]
    keys = [*(f"{task}.{key}" for task in tasks), *([f"{UNSEEN}.{key}"] if study.counted else [])]
    chance = [f"({printed(1 / facts['classes'], 'accuracy')})" for facts in tasks.values()]
    lines = [["(chance)", *chance, *[""] * (len(keys) - len(tasks))]] if key == "accuracy" else []
    lines += with_paper(study, [[one] for one in keys])
    heads = [f"{task} ({facts['domain']}, {facts['samples']})" for task, facts in tasks.items()]
    unseen = sum(facts["domain"] == UNSEEN for facts in tasks.values())
    marks = "aECE has no interval" if key == "own.aece" else MARKED
    note = (
        f"{marks}; the paper's numbers below, in brackets: ImageNet-1K for tinyimagenet, SUN397 for "
        f"scene15, DTD for dtd10. Mean: over {len(study.counted)} of {unseen} unseen tasks "
        f"({', '.join(study.counted)}), the paper's over its nine. {left_out(study)}"
    )
    note += " ViLU: of the confidence that it brings." if key.startswith("own.") else ""
    return markdown([CLASSIFICATION[key], *heads, *(["mean"] if study.counted else [])], lines, note)


def sets_table(study: DualStudy) -> str:
    """Tables 25 and 26: every OOD set of every ID task separately."""
    sets = [
        (task, group, name)
        for task in study.detections
        for group, names in study.groups(task).items()
        for name in names
    ]
    lines = with_paper(study, metrics([f"{task}.own.ood.{name}" for task, _, name in sets]))
    heads = [f"{task}: {name} ({group})" for task, group, name in sets]
    return markdown(["row", *heads], lines, f"{TITLE}, the paper's below: textures for dtd10. {LARGE} {BY_OWN}")


def detection_table(study: DualStudy) -> str:
    """The other OOD metrics of Table 3, near and far; and AUROC by other scores."""
    scores = {"all.auroc": "all by MSP", "entropy:all.auroc": "all by entropy"}
    keys = {f"{task}.{key}": f"{task}, {title} ↑" for task in study.detections for key, title in scores.items()}
    scopes = [f"{task}.own.{group}" for task in study.detections for group in (*study.groups(task), "all")]
    lines = with_paper(study, metrics(scopes), lambda row: [marked(study, row, key) for key in keys])
    heads = [scope.replace(".own.", " ") for scope in scopes]
    note = f"{TITLE}, means over OOD sets, the paper's below; then AUROC. {LARGE} {BY_OWN}"
    return markdown(["row", *heads, *keys.values()], lines, note)


def priced(study: DualStudy) -> str:
    """What the costs were measured on, and of which rows they say less than the method's price."""
    costs = study.facts["costs"]
    about = "Cost (of an answer, relative to Single's; ViLU's and NegLabel's without their scores) and memory"
    return f"{about}: {measured_on(costs)}. " if costs else ""


def price_table(study: DualStudy) -> str:
    """The costs of every row."""
    lines = []
    for row in study.rows:
        cost = study.cost(row)
        stored = f"{cost['parameters'] / 1e6:.1f} M" if cost.get("parameters") else "–"
        trained = f"{study.facts['trainings'][row]:g}"
        lines.append([row, stored, ratio(cost), memory(cost), trained, len(study.seeds(row))])
    note = f"{priced(study)}A dash: Single's, with a temperature. Trainings: of a text side, Single's too."
    return markdown(["row", "parameters", "cost ↓", "peak memory ↓", "trainings ↓", "seeds"], lines, note)


def claims_table(study: DualStudy) -> str:
    """The claims, with the paper's difference and ours."""
    tried = claims(study)
    lines = [[claim["scope"], *claim_cells(claim)] for claim in tried]
    note = (
        f"Here: paired differences ± half a 95 % interval over {len(study.facts['runs'])} seeds{few_seeds(study)} and "
        "test samples, in points except NLL; AUROC by the largest probability, ViLU's by its own score. A claim is "
        "reproduced when the whole interval lies on its side of the margin, which is how much less still counts as "
        "equal, not reproduced when it lies on the other, else a tie. The paper's: of ImageNet-1K for tinyimagenet, "
        "over its nine sets for unseen."
    ) + (f" {ACROSS_TOLD}" if any(claim["across"] for claim in tried) else "")
    return markdown(["where", "claim", "margin", "paper", "here", "verdict"], lines, note, align="ll")


def choices_table(study: DualStudy) -> str:
    """The accuracy on held-out names of every training setting, and which one was chosen."""
    choice = study.facts["choice"]
    if choice is None:
        return "*Nothing was chosen.*"
    lines = []
    for option in choice["measured"]:
        taken = "taken" if all(option[key] == value for key, value in choice["choice"].items()) else ""
        cells = [f"{option[key]:g}" for key in ("steps", "learning_rate", "projection_rate")]
        lines.append([*cells, printed(option["accuracy"], "accuracy"), taken])
    head = ["steps", "rate of the text tower", "projections, over it", "accuracy on held-out names", ""]
    return markdown(head, lines, f"{choice['measured'][0]['names']} names of which no image was learnt from.", align="")


def settings_table(study: DualStudy) -> str:
    """The NLL on held-out images of each setting of a row, and how often it was chosen."""
    settings: dict[tuple[str, str], list[tuple[float, bool]]] = {}
    for run in study.facts["runs"].values():
        for row, choice in run.get("choices", {}).items():
            for measured in choice["measured"]:
                setting = {key: measured[key] for key in choice["setting"]}
                texts = {key: value if isinstance(value, str) else f"{value:g}" for key, value in setting.items()}
                text = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in texts.items())
                settings.setdefault((row, text), []).append((measured["nll"], setting == choice["setting"]))
    lines = [
        [row, text, f"{mean(loss for loss, _ in runs):.3f}", f"{sum(taken for _, taken in runs)} of {len(runs)}"]
        for (row, text), runs in settings.items()
    ]
    if not lines:
        return "*Nothing was chosen.*"
    of_vilu = "; of ViLU, of whether Single is right" if any(row == VILU for row, _ in settings) else ""
    note = f"NLL on held-out images, of the right class{of_vilu}."
    return markdown(["row", "setting", "NLL", "seeds that took it"], lines, note, align="ll")


OFFERED = {
    "Temperature Scaling": "held-out labelled images",
    BAYES_VLM: "pairs of images and texts, or factors that others publish",
    VILU: "labelled images, to train a small network on",
    NEG_LABEL: "a list of words",
    HYDRA_CIRC: "images of the task and OOD images, to rank heads; three passes",
}


def methods_table(study: DualStudy) -> str:
    """What methods for zero-shot models need, and what they gain over Single; for choosing a method."""
    gained = {f"gain on {UNSEEN} tasks": [f"{UNSEEN}.{key}" for key in ("accuracy", "nll", "own.ece")]}
    for task in study.detections:
        gained[f"gain at OOD sets, {task}"] = [f"{task}.own.{group}.auroc" for group in ("near", "far")]
    lines = []
    for row, needs in OFFERED.items():
        if row in study.rows:
            cells = [gains(study, row, keys) for keys in gained.values()]
            lines.append([row, needs, f"{study.facts['trainings'][row]:g}", *cells, str(len(study.seeds(row)))])
    note = (
        "Trainings: of a text side, Single's included. Gain over Single: accuracy ↑ / NLL ↓ / ECE ↓; AUROC near ↑ / "
        "far ↑; in points except NLL; **better** or *worse* where significant "
        f"{BEYOND}. {BY_OWN}"
    )
    return markdown(["method", "what it needs", "trainings", *gained, "seeds"], lines, note, align="ll")


TABLES: Mapping[str, Callable[[DualStudy], str]] = {
    "main": main_table,
    "tasks": tasks_table,
    "brier": lambda study: tasks_table(study, "brier"),
    "nll": lambda study: tasks_table(study, "nll"),
    "ece": lambda study: tasks_table(study, "own.ece"),
    "aece": lambda study: tasks_table(study, "own.aece"),
    "sets": sets_table,
    "detection": detection_table,
    "price": price_table,
    "methods": methods_table,
    "claims": claims_table,
    "choices": choices_table,
    "settings": settings_table,
    "not_testable": lambda study: not_testable_table(study, "dual"),
}
"""Every table by its name in the documents."""
