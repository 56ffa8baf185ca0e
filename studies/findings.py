"""Tables of the studies of classifiers for the documents, made only from their stored columns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .cells import (
    ACROSS,
    ACROSS_TOLD,
    BEYOND,
    MARKED,
    gap_text,
    level,
    marked,
    measured_on,
    memory,
    printed,
    ratio,
    with_paper,
)
from .claims import claims_table, not_testable_table
from .measures import FEWEST, SEVERITIES, SHIFT
from .paper import LIKE, STANDS_FOR, paper_numbers
from .results import markdown
from .rows import DEEP, HYDRA, HYDRA_CIRC, HYDRA_TAYLOR, MC_DROPOUT, ROWS, SINGLE, SOUP, TUNED
from .stored import Study

MAIN = {
    "accuracy": "accuracy ↑",
    "calibrated.nll": "NLL ↓",
    "calibrated.brier": "Brier ↓",
    "calibrated.ece": "ECE ↓",
    "aurc": "AURC ↓",
    "near.auroc": "near ↑",
    "far.auroc": "far ↑",
    "entropy:all.auroc": "entropy ↑",
    "mahalanobis:all.auroc": "Mahalanobis ↑",
    "far.fpr95": "far FPR95 ↓",
}
METRICS = ("auroc", "fpr95", "aupr")
TITLE = "AUROC ↑ / FPR95 ↓ / AUPR ↑"


def main_table(study: Study) -> str:
    """Every row of a study, with the costs that were measured."""
    costs = study.facts["costs"]
    counted = costs and costs["rows"][SINGLE]["peak_memory_bytes"]  # not measured on a CPU
    measured = ["cost ↓", "memory ↓"] if counted else ["cost ↓"] if costs else []
    lines = []
    for row in study.rows:
        cost = study.cost(row)
        cells = [marked(study, row, key) for key in MAIN]
        price = [ratio(cost), memory(cost)][: len(measured)]
        trained = [f"{study.facts['trainings'][row]:g}", str(len(study.seeds(row)))]
        lines.append([row, *cells, study.parameters(row), *price, *trained])
    head = ["row", *MAIN.values(), "parameters", *measured, "trainings ↓", "seeds"]
    priced = f" Cost{' and memory' * bool(counted)}: {measured_on(costs)}." if costs else ""
    note = (
        f"{level(study, study.rows)}. In per cent except NLL and Brier score; **better** or *worse* than Single "
        f"where significant {BEYOND}. NLL, Brier score and ECE after "
        "calibration on held-out data. OOD AUROC by the largest probability, near and far; by entropy and Mahalanobis "
        "distance, mean over all sets. FPR95 of sets of 1,000 samples or more, at the first threshold that flags 95 % "
        "of them. "
        f"Trainings: of a whole model, Single's included.{priced} From `results/studies/{study.name}/`."
    )
    return markdown(head, lines, note)


def metrics(scopes: Sequence[str]) -> list[list[str]]:
    """The three metrics of scopes such as `near` or `ood.mnist`, one cell per scope."""
    return [[f"{scope}.{metric}" for metric in METRICS] for scope in scopes]


def detection_table(study: Study) -> str:
    """Tables 15 to 17: near, far and all OOD sets."""
    groups = [*study.facts["groups"], "all"]
    small = small_sets(study)
    left_out = f" FPR95 leaves out {', '.join(small)}: under 1,000 samples." if small else ""
    return markdown(
        ["row", *groups], with_paper(study, metrics(groups)), f"Means over OOD sets: {_note(study)}{left_out}"
    )


def scores_table(study: Study) -> str:
    """AUROC by scores other than the largest probability, near and far."""
    columns = {
        f"{title}, {group}": f"{score}:{group}.auroc"
        for score, title in {"entropy": "entropy", "mahalanobis": "Mahalanobis"}.items()
        for group in study.facts["groups"]
    }
    lines = [[row, *(marked(study, row, key) for key in columns.values())] for row in study.rows]
    note = (
        "AUROC ↑ by entropy and by Mahalanobis distance, means over OOD sets, in per cent. "
        f"{level(study, study.rows)}. {MARKED}."
    )
    return markdown(["row", *columns], lines, note)


def sets_table(study: Study) -> str:
    """Tables 18 to 23: every OOD set separately."""
    groups = study.facts["groups"]
    sizes = set_sizes(study)
    heads = [f"{name} ({group}, {sizes[name]:,})" for group, names in groups.items() for name in names]
    lines = with_paper(study, metrics([f"ood.{name}" for name in study.outside]))
    like = [f"{LIKE[name]} for {name}" for name in study.outside if name in LIKE] if study.paper() else []
    stand_ins = f" The paper's are of {', '.join(like)}." if like else ""
    note = (
        f"{_note(study)}{stand_ins} In brackets samples of a set, which AUPR depends on, beside "
        f"{sizes[study.facts['inside']]:,} of the task; FPR95 of sets of 1,000 or more."
    )
    return markdown(["row", *heads], lines, note)


def _note(study: Study) -> str:
    """A note on the metrics, and on the paper's numbers below them."""
    paper = study.paper()
    inside = study.facts["inside"]
    missing = [row for row in paper if row not in study.rows]
    below = f" Below, in brackets, the paper's on {STANDS_FOR[inside]} and its sets." if paper else ""
    below += f" Rows of the paper that are not here: {', '.join(missing)}." if missing else ""
    return (
        f"{TITLE} by the largest probability, in per cent. {level(study, study.rows)}. {MARKED}; FPR95 and AUPR have "
        f"no interval.{below}"
    )


def set_sizes(study: Study) -> dict[str, int]:
    """Number of samples of the test set and of every OOD set."""
    columns = study.columns(study.rows[0], study.seeds(study.rows[0])[0])
    return {name: len(columns[f"{name}|msp"]) for name in (study.facts["inside"], *study.outside)}


def small_sets(study: Study) -> list[str]:
    """OOD sets too small for FPR95."""
    sizes = set_sizes(study)
    return [name for name in study.outside if sizes[name] < FEWEST]


def shift_table(study: Study) -> str:
    """Tables 13 and 14, and NLL: one table per metric, rows by severity, means over fifteen corruptions and seeds."""
    theirs = paper_numbers("classifier", study.stands_for)
    levels = (*SEVERITIES, SHIFT)
    rows = [row for row in study.rows if study.mean(row, f"{SHIFT}.accuracy") is not None]
    if not rows:
        return "*Not run.*"

    def cell(row: str, key: str) -> str:
        paper = theirs.get(row, {}).get(key)
        return marked(study, row, key) + ("" if paper is None else f" ({printed(paper, key)})")

    def seeds(row: str) -> str:
        return str(sum(f"{SHIFT}.accuracy" in study.numbers(row, seed) for seed in study.seeds(row)))

    tables = []
    for metric, title in {"accuracy": "accuracy ↑", "brier": "Brier ↓", "nll": "NLL ↓"}.items():
        lines = [[row, *(cell(row, f"{level}.{metric}") for level in levels), seeds(row)] for row in rows]
        tables.append(markdown([title, *SEVERITIES, "mean", "seeds"], lines))
    brackets = f" In brackets the paper's on {study.stands_for}." if f"{SHIFT}.accuracy" in theirs[SINGLE] else ""
    note = (
        f"{study.facts['recipe']['shift']['images']} test images under each of the fifteen corruptions of ImageNet-C, "
        "means over corruptions and seeds, before calibration; **better** or *worse* than Single where significant "
        f"(95 % intervals over seeds and images, paired; from three seeds on).{brackets} "
        f"From `results/studies/{study.name}/`."
    )
    return "\n\n".join([*tables, note])


def contrast_table(study: Study) -> str:
    """The contribution of each part of the method: paired differences between rows."""
    longer, whole = "Single, trained as long", "Single, D.2, nothing pruned"
    less: Mapping[str, Sequence[str]] = {
        **dict.fromkeys((longer, whole, SOUP, DEEP), (SINGLE,)),
        HYDRA: (SINGLE, DEEP, SOUP, longer),
        TUNED: (HYDRA,),
        "Branches, heads pruned": (HYDRA,),
        HYDRA_CIRC: (SINGLE, DEEP, whole, "Random heads", HYDRA_TAYLOR),
        "Hydra (Circ) and the whole model": (HYDRA_CIRC,),
        "CircAvg, 10,000 steps": ("CircAvg",),
        "Deep Ensembles, MLPs averaged": (DEEP,),
    }
    pairs = [(first, second) for first, others in less.items() for second in others]
    keys = ["accuracy", "calibrated.nll", "aurc", "near.auroc", "far.auroc", "mahalanobis:all.auroc"]
    lines = []
    for first, second in pairs:
        gaps = [study.difference(first, second, key) for key in keys]
        if any(gap is not None for gap in gaps):
            cells = [
                "–" if gap is None else f"**{text}**" if gap.certain else text
                for gap, key in zip(gaps, keys, strict=True)
                for text in ["" if gap is None else gap_text(gap, key)]
            ]
            runs = f" {ACROSS}" if study.across(first, second) else ""
            lines.append([first, f"{second}{runs}", *cells, str(max(gap.seeds for gap in gaps if gap is not None))])
    head = ["row", "less", *(MAIN[key] for key in keys), "seeds"]
    note = (
        "Paired differences ± half a 95 % interval over seeds and test samples; bold without zero, from three seeds on."
    )
    note += f" {ACROSS_TOLD}" if any(ACROSS in line[1] for line in lines) else ""
    return markdown(head, lines, note, "ll")


WITH_AMAZON = {"source": "text/amazon_both"}  # a held-out set as the stored SST-2 has it: with the near set's texts
IMDB = "ood.imdb.auroc"  # of its other held-out set
TOO_FEW = "fewer than three rows have settings that it chose, which correlate with nothing"


def choices_table(study: Study) -> str:
    """Metrics on half B of every setting, and which one was chosen."""
    lines = []
    for row, choice in study.facts["choices"].items():
        for option in choice["measured"]:
            taken = "taken" if option["setting"] == choice["setting"] else ""
            cells = [printed(option[key], key) for key in ("accuracy", "calibrated.nll", "all.auroc")]
            lines.append([row, setting_text(option["setting"]), *cells, taken])
        for option in choice.get("left_out", ()):  # not measured, for example because training diverged
            lines.append([row, setting_text(option["setting"]), "–", "–", "–", "left out"])
    said = {"NLL": ("calibrated.nll", "calibrated.nll"), "OOD AUROC": ("all.auroc", "all.auroc")}
    if WITH_AMAZON in study.facts["recipe"]["tasks"][study.name].get("held_out", ()):
        said["OOD AUROC of IMDB alone (the other held-out set contains the near set Amazon)"] = (IMDB, "all.auroc")
    correlations = [
        f"of {name} {correlation[0]:+.2f} over {correlation[1]} rows"
        for name, keys in said.items()
        for correlation in [foretold(study, *keys)]
        if correlation is not None
    ]
    note = f"Rank correlation of what held-out data said with what the test said: {', '.join(correlations) or TOO_FEW}."
    return markdown(["row", "setting", "accuracy", "NLL", "AUROC, held-out sets", ""], lines, note, align="ll")


WHAT: Mapping[str, str] = {
    SINGLE: "the model a user has",
    "Single, trained as long": "one training as long as three",
    "Single, D.2, nothing pruned": "Single, trained on by the paper's recipe",
    MC_DROPOUT: "Single, five passes with dropout",
    "LoRA-Ensemble": "three low-rank updates of the attention of one pretrained model",
    "LoRA-single": "the first of them",
    "BatchEnsemble": "three scalings of weights that are shared",
    "MIMO": "one network for three images at once",
    "Packed-Ensembles": "three narrow models in one",
    "OBA": "Single without the weights that matter least, then D.2",
    "Laplace (last layer)": "20 classifiers drawn around Single's",
    "Snapshot": "three points along one training",
    "SWAG": "three draws around where Single's training goes on",
    "Deep Ensembles (classifiers)": "three classifiers on one frozen Single",
    SOUP: "mean of three fine-tunings",
    DEEP: "three trainings like Single's",
    "Deep Ensembles, MLPs averaged": "three fine-tunings with the mean of their MLPs",
    "Taylor": "heads pruned by gradients, then D.2",
    "CircAvg": "heads pruned by accuracy and OOD detection, then D.2",
    "CircAvg, 100 steps": "the same with 100 steps of D.2",
    "CircAvg, 1,000 steps": "the same with 1,000 steps of D.2",
    "CircAvg, 10,000 steps": "the same with all 10,000 steps of D.2",
    "CircAcc": "heads pruned by accuracy, then D.2",
    "CircOOD": "heads pruned by OOD detection, then D.2",
    "Random heads": "three models without random heads, then D.2, MLPs averaged",
    HYDRA_TAYLOR: "three draws of Taylor, MLPs averaged",
    HYDRA_CIRC: "CircAvg, CircAcc and CircOOD, MLPs averaged: the paper",
    "Hydra (Circ), MLPs apart": "the same three, nothing averaged",
    "Hydra (Circ) and the whole model": "the same three, and Single after D.2 as a fourth",
    "Branches, heads pruned": "Hydra without a tenth of the heads above the trunk",
    HYDRA: "three fine-tunings above the mean of their first layers",
    TUNED: "the same, with the trunk that held-out data chose",
}
"""Every row in a few words."""
SUMMARY = (
    SINGLE,
    "Single, trained as long",
    SOUP,
    DEEP,
    HYDRA,
    TUNED,
    "Single, D.2, nothing pruned",
    "CircAvg",
    HYDRA_CIRC,
)
SUMMARY_KEYS = (
    "accuracy",
    "calibrated.nll",
    "calibrated.ece",
    "aurc",
    "near.auroc",
    "far.auroc",
    "mahalanobis:all.auroc",
)


def recipes_table(study: Study) -> str:
    """A description of every row, and the setting that held-out data chose for it."""
    lines = []
    for row in study.rows:
        choice = study.facts["choices"].get(ROWS[row].like or row)
        lines.append([row, WHAT[row], "–" if choice is None else setting_text(choice["setting"])])
    return markdown(["row", "what it is", "setting"], lines, align="lll")


def setting_text(setting: Mapping[str, Any]) -> str:
    """Format a setting."""
    return ", ".join(f"{key} {value}" for key, value in setting.items())


def summary_table(study: Study) -> str:
    """The main rows, with the metrics that users ask for."""
    trained = study.facts["trainings"]
    lines = [
        [row, WHAT[row], f"{trained[row]:g}", *(marked(study, row, key) for key in SUMMARY_KEYS)]
        for row in SUMMARY
        if row in study.rows
    ]
    head = ["row", "what it is", "trainings", *(MAIN[key] for key in SUMMARY_KEYS)]
    note = (
        f"{level(study, SUMMARY)}. In per cent except NLL; **better** or *worse* than Single where "
        f"significant {BEYOND}. NLL and ECE after calibration; OOD AUROC near "
        "and far by the largest probability, over all sets by Mahalanobis distance. From "
        f"`results/studies/{study.name}/`."
    )
    return markdown(head, lines, note, align="ll")


PRINTED = {  # columns of Tables 1 and 2, and near and far of Tables 15 to 17
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


def paper_table(study: Study) -> str:
    """The paper's table of the task: our numbers, with the paper's in brackets."""
    theirs = paper_numbers("classifier", study.stands_for)
    lines = [
        [row, *(f"{printed(study.mean(row, key), key)} ({printed(numbers.get(key), key)})" for key in PRINTED)]
        for row, numbers in ((row, theirs[row]) for row in study.rows if row in theirs)
    ]
    small = small_sets(study)
    note = (
        f"Ours, and in brackets the paper's on {study.stands_for}; before calibration, OOD by the largest probability "
        f"over all sets, in per cent except NLL and Brier score. {level(study, list(theirs))}. AUPR depends on the "
        "number of samples in a set."
    ) + (f" Our FPR95 leaves out sets under 1,000 samples: {', '.join(small)}." if small else "")
    return markdown(["row", *PRINTED.values()], lines, note)


def foretold(study: Study, said: str, key: str) -> tuple[float, int] | None:
    """Rank correlation of what held-out data said of chosen settings with a metric on the test, and number of rows."""
    from scipy.stats import spearmanr  # takes a second to import, and only one table needs it

    predicted, measured = [], []
    for row, choice in study.facts["choices"].items():
        if row in study.rows:
            chosen = next(option for option in choice["measured"] if option["setting"] == choice["setting"])
            predicted.append(chosen[said])
            measured.append(study.mean(row, key))
    return (float(spearmanr(predicted, measured).statistic), len(predicted)) if len(predicted) > 2 else None


TABLES: Mapping[str, Callable[[Study], str]] = {
    "main": main_table,
    "summary": summary_table,
    "recipes": recipes_table,
    "contrasts": contrast_table,
    "claims": claims_table,
    "paper": paper_table,
    "detection": detection_table,
    "scores": scores_table,
    "sets": sets_table,
    "shift": shift_table,
    "choices": choices_table,
    "not_testable": not_testable_table,
}
"""Every table by its name in the documents."""
