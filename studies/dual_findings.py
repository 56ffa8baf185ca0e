"""What the documents show of the zero-shot study, made from its stored columns alone."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from statistics import mean
from typing import Any, TypeVar, get_args

from hydra_ensembles.metrics.distance import LearnedName

from .all_tasks import gains
from .cells import ACROSS_TOLD, BEYOND, MARKED, marked, measured_on, memory, parts, printed, ratio, shown
from .detection import PAPER, TITLE, detected
from .dual_rows import BAYES_VLM, HYDRA, NEG_LABEL, VILU
from .findings import claim_cells, not_testable_table, tested
from .measures import Columns, Number, numbers, plain_numbers
from .paper import Numbers, read_csv, zero_shot_numbers
from .results import markdown
from .stored import Study
from .storing import SINGLE, of_row

CLASSIFICATION = {
    "accuracy": "accuracy ↑",
    "nll": "NLL ↓",
    "brier": "Brier ↓",
    "own.ece": "ECE ↓",
    "own.aece": "aECE ↓",
    "calibrated.ece": "ECE, own temperature ↓",
    "own.aurc": "AURC ↓",
}
UNSEEN = "unseen"
MEANS = ("accuracy", "nll", "brier", "ece", "aece", "calibrated.ece", "aurc", "own.ece", "own.aece", "own.aurc")
OWN = get_args(LearnedName)  # scores that rows bring
BY_OWN = (
    "ViLU and NegLabel answer like Single and bring a score: OOD numbers of their rows, and ECE, aECE and AURC of "
    "ViLU, are by that score, those of all other rows by the largest probability."
)
LARGE = "FPR95 of sets of 1,000 images or more; a dash where there is none."
Value = TypeVar("Value")


def by_own_score(found: Mapping[str, Value]) -> dict[str, Value]:
    """The same numbers as `own.KEY`: by the score that a row brings where it has them, else as they are."""
    prefix = next((f"{score}:" for score in OWN if any(key.startswith(f"{score}:") for key in found)), "")
    return {f"own.{key}": found.get(f"{prefix}{key}", one) for key, one in found.items() if ":" not in key}


class DualStudy(Study):
    """The stored results of a zero-shot study: numbers of a task are `TASK.accuracy`, means `unseen.accuracy`.

    `TASK.own.KEY` is by the score that a row brings, where it brings one.
    """

    def numbers_of(self, columns: Columns) -> dict[str, Number]:
        found: dict[str, Number] = {}
        for task in self.facts["tasks"]:
            own = numbers(of_row(task, columns), task, self.groups(task))
            found |= {f"{task}.{key}": one for key, one in {**own, **by_own_score(own)}.items()}
        return found | self._means(found, Number.mean)

    def plain_of(self, columns: Columns, known: Mapping[str, Number]) -> dict[str, float]:
        found: dict[str, float] = {}
        for task in self.facts["tasks"]:
            own, made = f"{task}.", f"{task}.own."
            keys = [key for key in known if key.startswith(own) and not key.startswith(made)]
            mine = {key.removeprefix(own): known[key] for key in keys}
            plain = plain_numbers(of_row(task, columns), task, self.groups(task), mine)
            found |= {f"{task}.{key}": value for key, value in {**plain, **by_own_score(plain)}.items()}
        return found | self._means(found, mean)

    def _means(self, found: Mapping[str, Value], average: Callable[[list[Value]], Value]) -> dict[str, Value]:
        """Means over the tasks that count, where all of these have the number."""
        keys = {key: [f"{task}.{key}" for task in self.counted] for key in MEANS}
        whole = {key: names for key, names in keys.items() if names and all(one in found for one in names)}
        return {f"{UNSEEN}.{key}": average([found[one] for one in names]) for key, names in whole.items()}

    def groups(self, task: str) -> dict[str, list[str]]:
        """Names of the OOD sets of a task, by group."""
        return {group: list(sets) for group, sets in self.facts["tasks"][task].get("outside", {}).items()}

    @property
    def detections(self) -> list[str]:
        """Tasks that are held against OOD sets; the main one first."""
        return sorted((task for task in self.facts["tasks"] if self.groups(task)), key=lambda task: task == "cifar100")

    @cached_property
    def counted(self) -> list[str]:
        """Unseen tasks that count in means: those where Single is so many times better than chance, by the recipe."""
        least = float(self.facts["recipe"]["least_over_chance"])
        tasks = self.facts["tasks"]
        found = []
        for task, one in tasks.items():
            right = [self.columns(SINGLE, seed)[f"{task}|{task}|correct"].mean() for seed in self.seeds(SINGLE)]
            if one["domain"] == UNSEEN and mean(map(float, right)) >= least / one["classes"]:
                found.append(task)
        return found

    @property
    def left_out(self) -> list[str]:
        """Unseen tasks that do not count."""
        tasks = self.facts["tasks"]
        return [task for task, one in tasks.items() if one["domain"] == UNSEEN and task not in self.counted]

    def paper(self) -> Mapping[str, Numbers]:
        """The paper's numbers by row, under the keys of ours; those of a row are by the score that it brings."""
        found = zero_shot_numbers(list(self.facts["tasks"]), self.detections)
        return {
            row: {**one, **{key.replace(".", ".own.", 1): n for key, n in one.items()}} for row, one in found.items()
        }


def main_table(study: DualStudy) -> str:
    """Table 3: unseen tasks, and OOD sets of both ID tasks; what more it prints of these is in `detection`."""
    keys = {f"{UNSEEN}.{key}": head for key, head in CLASSIFICATION.items()} if study.counted else {}
    for task in study.detections:
        keys |= {f"{task}.own.{group}.auroc": f"{task} {group} ↑" for group in (*study.groups(task), "all")}
    lines = []
    paper = study.paper()
    measured = int(study.facts["costs"] is not None)  # columns of costs
    for row in study.rows:
        cost = study.cost(row)
        price = [ratio(cost)] * measured
        lines.append([row, *(shown(study, row, key) for key in keys), *price])
        lines += _of_paper(paper.get(row, {}), keys, measured)
    facts = study.facts
    first = next(iter(study.facts["runs"].values()))
    named = {"avg image+text": "of both towers", "avg image": "of the image tower alone"}
    ranked = [
        f"{named[name]} {one['id_samples']} + {one['ood_samples']} images, {one['pruned']} heads"
        for name, one in first["circuits"].items()
        if name in named
    ]
    note = (
        f"**{facts['model']['name']}.** {facts['model']['description']}\n\n"
        f"Means over {len(facts['runs'])} seeds{few_seeds(study)}, in per cent but for NLL and Brier score; **better** "
        f"and *worse* than Single beyond chance {BEYOND}; the paper's "
        f"numbers in brackets below; aECE has no interval.{parts(study)} Classification: mean over "
        f"{', '.join(study.counted) or 'no task'}. {left_out(study)} OOD: AUROC, mean over the near, the far and all "
        f"sets of an ID task. {BY_OWN} Circuits: {'; '.join(ranked) or 'none'}. "
        f"Temperatures on {first['samples']} images. "
        f"{facts['device']}, torch {facts['versions']['torch']}. From `results/studies/{study.name}/`."
    )
    return markdown(["row", *keys.values(), *["cost"] * measured], lines, note)


def few_seeds(study: DualStudy) -> str:
    """Rows that some seeds have not, and how many have them."""
    few = [f"{row} {len(found)}" for row in study.rows if len(found := study.seeds(row)) < len(study.facts["runs"])]
    return f" ({', '.join(few)})" if few else ""


def left_out(study: DualStudy) -> str:
    """The rule by which tasks leave the means, and which do."""
    least = study.facts["recipe"]["least_over_chance"]
    return f"Tasks where Single is below {least:g} times chance leave the means: {', '.join(study.left_out) or 'none'}."


def _of_paper(own: Mapping[str, float], keys: Iterable[str], after: int) -> list[list[str]]:
    """The paper's line with so many empty cells at its end; none where it gives none of these numbers."""
    found = [(own.get(key), key) for key in keys]
    cells = ["" if value is None else f"({printed(value, key)})" for value, key in found]
    return [[PAPER, *cells, *[""] * after]] if any(cells) else []


def tasks_table(study: DualStudy, key: str = "accuracy") -> str:
    """Table 24: a number of every task, by the score that a row brings where it has one."""
    tasks = study.facts["tasks"]
    paper = study.paper()
    keys = [*(f"{task}.{key}" for task in tasks), *([f"{UNSEEN}.{key}"] if study.counted else [])]
    lines = [["(chance)", *(f"({printed(1 / one['classes'], 'accuracy')})" for one in tasks.values())]]
    lines = [[*lines[0], *[""] * (len(keys) - len(tasks))]] if key == "accuracy" else []
    for row in study.rows:
        lines.append([row, *(shown(study, row, one) for one in keys)])
        lines += _of_paper(paper.get(row, {}), keys, 0)
    heads = [f"{task} ({one['domain']}, {one['samples']})" for task, one in tasks.items()]
    unseen = sum(one["domain"] == UNSEEN for one in tasks.values())
    marks = "aECE has no interval" if key == "own.aece" else MARKED
    note = (
        f"{marks}; the paper's numbers below, in brackets: ImageNet-1K for tinyimagenet, SUN397 for "
        f"scene15, DTD for dtd10. Mean: over {len(study.counted)} of {unseen} unseen tasks "
        f"({', '.join(study.counted)}), the paper's over its nine. {left_out(study)}"
    )
    note += " ViLU: of the confidence that it brings." if key.startswith("own.") else ""
    return markdown([CLASSIFICATION[key], *heads, *(["mean"] if study.counted else [])], lines, note)


def sets_table(study: DualStudy) -> str:
    """Tables 25 and 26: every OOD set of every ID task by itself."""
    places = [
        (task, group, name)
        for task in study.detections
        for group, names in study.groups(task).items()
        for name in names
    ]
    lines = detected(study, [f"{task}.own.ood.{name}" for task, _, name in places])
    heads = [f"{task}: {name} ({group})" for task, group, name in places]
    return markdown(["row", *heads], lines, f"{TITLE}, the paper's below: textures for dtd10. {LARGE} {BY_OWN}")


def detection_table(study: DualStudy) -> str:
    """What Table 3 prints of foreign inputs, near and far too; and AUROC by other scores."""
    scores = {"all.auroc": "all by MSP", "entropy:all.auroc": "all by entropy"}
    keys = {f"{task}.{key}": f"{task}, {told} ↑" for task in study.detections for key, told in scores.items()}
    places = [f"{task}.own.{group}" for task in study.detections for group in (*study.groups(task), "all")]
    lines = [
        [*line, *([""] * len(keys) if line[0] == PAPER else [marked(study, line[0], key) for key in keys])]
        for line in detected(study, places)
    ]
    heads = [place.replace(".own.", " ") for place in places]
    note = f"{TITLE}, means over OOD sets, the paper's below; then AUROC. {LARGE} {BY_OWN}"
    return markdown(["row", *heads, *keys.values()], lines, note)


def price_table(study: DualStudy) -> str:
    """What every row takes."""
    lines = []
    for row in study.rows:
        cost = study.cost(row)
        stored = f"{cost['parameters'] / 1e6:.1f} M" if cost.get("parameters") else "–"
        trained = f"{study.facts['trainings'][row]:g}"
        lines.append([row, stored, ratio(cost), memory(cost), trained, len(study.seeds(row))])
    costs = study.facts["costs"]
    where = f"Cost and memory: {measured_on(costs)}. " if costs else ""
    note = f"{where}A dash: not measured, or Single's with a temperature. Trainings: of a text side, Single's too."
    return markdown(["row", "parameters", "cost ↓", "peak memory ↓", "trainings ↓", "seeds"], lines, note)


def claims(study: DualStudy) -> list[dict[str, Any]]:
    """What the paper claims, each with its margin: reproduced, not reproduced, or a tie."""
    paper = study.paper()
    return [
        tested(study, {**one, "scope": scope}, f"{scope}.{one['metric']}", paper, "not testable")
        for one in read_csv("zero_shot_claims")
        for scope in (study.detections if one["scope"] == "each ID task" else [UNSEEN])
    ]


def claims_table(study: DualStudy) -> str:
    """The claims, the paper's difference beside ours."""
    found = claims(study)
    lines = [[one["scope"], *claim_cells(one)] for one in found]
    note = (
        f"Here: paired differences ± half a 95 % interval over {len(study.facts['runs'])} seeds{few_seeds(study)} and "
        "test samples, in points but for NLL; AUROC by the largest probability, ViLU's by its own score. A claim is "
        "reproduced when the whole interval lies on its side of the margin, which is how much less still counts as "
        "equal, not reproduced when it lies on the other, else a tie. The paper's: of ImageNet-1K for tinyimagenet, "
        "over its nine sets for unseen."
    ) + (f" {ACROSS_TOLD}" if any(one["across"] for one in found) else "")
    return markdown(["where", "claim", "margin", "paper", "here", "verdict"], lines, note, left=2)


def choices_table(study: DualStudy) -> str:
    """What held-out names said of every way to learn, and what was taken."""
    found = study.facts["choice"]
    if found is None:
        return "*Nothing was chosen.*"
    lines = []
    for one in found["measured"]:
        taken = "taken" if all(one[key] == value for key, value in found["choice"].items()) else ""
        cells = [f"{one[key]:g}" for key in ("steps", "learning_rate", "projection_rate")]
        lines.append([*cells, printed(one["accuracy"], "accuracy"), taken])
    head = ["steps", "rate of the text tower", "projections, over it", "accuracy on held-out names", ""]
    return markdown(head, lines, f"{found['measured'][0]['names']} names of which no image was learnt from.", left=0)


def settings_table(study: DualStudy) -> str:
    """What held-out images said of the settings of a row, and how often each was taken."""
    found: dict[tuple[str, str], list[tuple[float, bool]]] = {}
    for run in study.facts["runs"].values():
        for row, one in run.get("choices", {}).items():
            for measured in one["measured"]:
                setting = {key: measured[key] for key in one["setting"]}
                texts = {key: one if isinstance(one, str) else f"{one:g}" for key, one in setting.items()}
                text = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in texts.items())
                found.setdefault((row, text), []).append((measured["nll"], setting == one["setting"]))
    lines = [
        [row, text, f"{mean(loss for loss, _ in told):.3f}", f"{sum(taken for _, taken in told)} of {len(told)}"]
        for (row, text), told in found.items()
    ]
    if not lines:
        return "*Nothing was chosen.*"
    of_vilu = "; of ViLU, of whether Single is right" if any(row == VILU for row, _ in found) else ""
    note = f"NLL on held-out images, of the right class{of_vilu}."
    return markdown(["row", "setting", "NLL", "seeds that took it"], lines, note, left=2)


OFFERED = {
    "Temperature Scaling": "held-out labelled images",
    BAYES_VLM: "pairs of images and texts, or factors that others publish",
    VILU: "labelled images, to train a small network on",
    NEG_LABEL: "a list of words",
    HYDRA: "images of the task and foreign ones, to rank heads; three passes",
}


def methods_table(study: DualStudy) -> str:
    """What methods for zero-shot models need, and what they gain over Single: for whoever picks one."""
    gained = {f"gain on {UNSEEN} tasks": [f"{UNSEEN}.{key}" for key in ("accuracy", "nll", "own.ece")]}
    for task in study.detections:
        gained[f"gain at OOD sets, {task}"] = [f"{task}.own.{group}.auroc" for group in ("near", "far")]
    lines = []
    for row, needs in OFFERED.items():
        if row in study.rows:
            cells = [gains(study, row, keys) for keys in gained.values()]
            lines.append([row, needs, f"{study.facts['trainings'][row]:g}", *cells, str(len(study.seeds(row)))])
    note = (
        "Trainings of a text side, Single's among them. Gain over Single: accuracy ↑ / NLL ↓ / ECE ↓; AUROC near ↑ / "
        "far ↑; in points but for NLL; **better** and *worse* beyond chance "
        f"{BEYOND}. {BY_OWN}"
    )
    return markdown(["method", "what it needs", "trainings", *gained, "seeds"], lines, note, left=2)


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


def blocks(study: DualStudy, shown: Collection[str]) -> dict[str, str]:
    """Tables of the stored study by their names in the documents, `study_zero_shot_main` and so on, where shown."""
    named = {f"study_zero_shot_{name}": table for name, table in TABLES.items()}
    return {name: table(study) for name, table in named.items() if name in shown}
