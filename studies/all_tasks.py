"""Tables of all studies side by side: what each row costs and gains over Single on every task; the figure; and CSV."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

from hydra_ensembles.files import write_atomically

from . import dual_findings, findings
from .cells import BEYOND, gains, gap_text, judged_text, marked, measured_on, memory, ratio
from .measures import FEWEST_SEEDS, Difference
from .results import FIGURES, as_csv, fixed, markdown, pyplot, save_figure
from .rows import BASELINES, DEEP, HYDRA, HYDRA_CIRC, HYDRA_TAYLOR, MC_DROPOUT, SINGLE, SOUP
from .stored import DualStudy, Study
from .storing import same_columns

GAINS = ("accuracy", "calibrated.nll", "near.auroc", "far.auroc")
LEADING = {"calibrated.nll": "NLL ↓", "near.auroc": "near ↑"}  # metrics of the tables of gains
GAINING = (
    "Single, trained as long",
    "Laplace (last layer)",
    SOUP,
    DEEP,
    "Deep Ensembles, MLPs averaged",
    HYDRA,
    "Single, D.2, nothing pruned",
    "Random heads",
    HYDRA_TAYLOR,
    HYDRA_CIRC,
)
TITLES = {  # task names in tables with several tasks
    "vision-cifar100": "CIFAR-100",
    "vision-cifar10": "CIFAR-10",
    "vision-tinyimagenet": "TinyImageNet-200",
    "text-sst2": "SST-2",
    "vision-eurosat-scratch": "EuroSAT, from scratch",
}
OFFERED = ("Single, trained as long", MC_DROPOUT, *BASELINES, SOUP, DEEP, HYDRA, HYDRA_CIRC)
UNSHOWN = ("Deep Ensembles, MLPs averaged", "Random heads")  # rows of GAINING that short tables omit
COMPARED = (SINGLE, *(row for row in GAINING if row not in UNSHOWN))
GIVEN = {  # columns of the README
    "accuracy": "accuracy ↑",
    "calibrated.nll": "NLL ↓",
    "aurc": "own mistakes, AURC ↓",
    "all.auroc": "OOD, unsure ↑",
    "mahalanobis:all.auroc": "OOD, unfamiliar ↑",
}
TABLES = "tables"  # folder with the CSV files of a study, which nothing reads
GAINED = (
    "Gain over Single: accuracy ↑ / NLL ↓ after calibration / OOD AUROC near ↑ / far ↑ by the largest probability, "
    f"in points except NLL; **better** or *worse* where significant {BEYOND}."
)


def seeds_cell(studies: Sequence[Study], row: str) -> str:
    """The number of seeds of a row on every task."""
    return ", ".join(str(len(study.seeds(row)) or "–") for study in studies)


def price_cell(studies: Sequence[Study], row: str) -> str:
    """Batch time relative to Single's on the first task that measured it; otherwise multiply-adds, in brackets."""
    with_row = [study for study in studies if row in study.rows]
    timed = [ratio(cost) for study in with_row if (cost := study.cost(row))]
    work = with_row[0].work(row)
    return timed[0] if timed else f"({work})" if work != "–" else work


def priced(studies: Sequence[Study]) -> str:
    """A sentence that explains the prices in a table."""
    timed = {TITLES[study.name]: measured_on(study.facts["costs"]) for study in studies if study.facts["costs"]}
    if not timed:
        return "Price, in brackets: multiply-adds relative to Single's; no time was measured."
    devices = "; ".join(dict.fromkeys(timed.values()))
    return (
        f"Price: inference time relative to Single's ({devices}), on the first task that has the row; in brackets "
        "multiply-adds, where no time was measured."
    )


def same_models(studies: Sequence[Study], rows: Sequence[str]) -> str:
    """Name rows that are the same model on a task, because held-out data chose another row's setting."""
    sentences = []
    for study in studies:
        for first, second in combinations([row for row in rows if row in study.rows], 2):
            seeds = study.seeds(first)
            if seeds == study.seeds(second) and all(
                same_columns(study.columns(first, seed), study.columns(second, seed)) for seed in seeds
            ):
                sentences.append(f" On {TITLES[study.name]} *{first}* and *{second}* are the same model.")
    return "".join(sentences)


def summary_table(studies: Sequence[Study]) -> str:
    """The table of the results' first page: what each row gains in both leading metrics, without intervals."""
    shown = leading(studies)
    lines = [
        [
            row,
            f"{shown[0].facts['trainings'][row]:g}",
            price_cell(shown, row),
            *(gains(one, row, [key]) for one, key in product(shown, LEADING)),
        ]
        for row in COMPARED
        if row != SINGLE
    ]
    note = (
        "Gains over Single on the same seeds: NLL after calibration; *near*: AUROC of near-OOD inputs by the largest "
        f"probability, in points. **Better** or *worse* where significant {BEYOND}. Trainings: of a whole model, "
        "Single's included. Price: inference time relative to Single's, on CIFAR-100. *D.2*: the paper's training "
        "after pruning. Intervals and more rows: [findings](findings.md#gains-with-intervals)."
    )
    columns = [title for study in shown for title in (f"{TITLES[study.name]}: NLL ↓", "near ↑")]
    return markdown(["", "trainings ↓", "price ↓", *columns], lines, note)


def prices_table(studies: Sequence[Study]) -> str:
    """What each row costs: trainings, size and work on the first task, inference time on every task."""
    shown = leading(studies)
    first = shown[0]
    lines = [
        [
            row,
            f"{first.facts['trainings'][row]:g}",
            first.parameters(row),
            first.work(row),
            *(ratio(one.cost(row)) for one in shown),
            memory(first.cost(row)),
        ]
        for row in COMPARED
    ]
    note = (
        f"Inference time relative to Single's: {measured_on(first.facts['costs'])}. Trainings: of a whole model, "
        f"Single's included. Parameters, work (multiply-adds) and peak memory: on {TITLES[first.name]}. From "
        "`results/studies/`."
    )
    head = ["method", "trainings ↓", "parameters ↓", "work ↓", *(TITLES[one.name] for one in shown), "memory ↓"]
    return markdown(head, lines, note)


def gains_table(studies: Sequence[Study]) -> str:
    """What the main rows gain over Single on every task that has Hydra, with intervals: one table per metric."""
    shown = leading(studies)
    tables = []
    for key, title in LEADING.items():
        lines = []
        for row in GAINING:
            if with_row := [study for study in shown if row in study.rows]:
                costs = [f"{with_row[0].facts['trainings'][row]:g}", price_cell(shown, row)]
                gaps = [study.difference(row, SINGLE, key) for study in shown]
                cells = ["–" if gap is None else judged_text(gap_text(gap, key), gap, key) for gap in gaps]
                lines.append([row, *costs, *cells, seeds_cell(shown, row)])
        head = [f"{title}, minus Single's", "trainings ↓", "price ↓", *(TITLES[study.name] for study in shown), "seeds"]
        tables.append(markdown(head, lines))
    note = (
        "NLL after calibration; near: OOD AUROC by the largest probability, in points. ± half an interval; **better** "
        f"or *worse* where significant {BEYOND}. Trainings: of a whole model, Single's included. {priced(shown)}"
        f"{same_models(shown, GAINING)}"
    )
    return "\n\n".join([*tables, note])


def of_tasks(studies: Sequence[Study]) -> list[Study]:
    """Studies of classifiers that appear in tables of all tasks; control studies do not."""
    return [study for study in studies if study.name in TITLES]


def leading(studies: Sequence[Study]) -> list[Study]:
    """Studies on the first page: those that have Hydra."""
    return [study for study in of_tasks(studies) if HYDRA in study.rows]


def intervals(studies: Sequence[Study], table: str) -> Iterator[Difference]:
    """Every interval of a table of all tasks, `gains` or `methods`, that can mark a cell as better or worse."""
    rows, keys = {"gains": (GAINING, list(LEADING)), "methods": (OFFERED, list(GAINS))}[table]
    for study, row, key in product((leading if table == "gains" else of_tasks)(studies), rows, keys):
        gap = study.difference(row, SINGLE, key)
        if gap is not None and gap.seeds >= FEWEST_SEEDS:
            yield gap


def methods_table(studies: Sequence[Study]) -> str:
    """What each method costs on the first task that has it, and what it gains on every task; for choosing a method."""
    lines = []
    for row in OFFERED:
        if with_row := [study for study in studies if row in study.rows]:
            first = with_row[0]
            costs = [f"{first.facts['trainings'][row]:g}", first.parameters(row), price_cell(studies, row)]
            lines.append([row, *costs, *(gains(study, row, GAINS) for study in studies), seeds_cell(studies, row)])
    singles = ", ".join(f"{TITLES[study.name]} {study.parameters(SINGLE)}" for study in studies)
    note = (
        f"A dash: not run, or not for this task; {MC_DROPOUT} has Single's parameters and takes five of its passes, "
        "timed in plain PyTorch where the other rows are compiled. "
        "Trainings: of a whole model, Single's included; parameters on the "
        f"first task that has the row (Single: {singles}). {priced(studies)} {GAINED}"
    )
    head = ["method", "trainings ↓", "parameters ↓", "price ↓", *(TITLES[study.name] for study in studies), "seeds"]
    return markdown(head, lines, note)


def compared_table(study: Study) -> str:
    """The README's table: costs and results of the methods on one task."""
    rows = [row for row in COMPARED if row in study.rows]
    lines = [
        [row, f"{study.facts['trainings'][row]:g}", study.work(row), *(marked(study, row, key) for key in GIVEN)]
        for row in rows
    ]
    fewest, most = (choose(len(study.seeds(row)) for row in rows) for choose in (min, max))
    about = (
        f"{TITLES[study.name]}, per cent except NLL, which is after calibration; AURC and *unsure* by the largest "
        "probability before it, *unfamiliar* by Mahalanobis distance, fitted to training data. **Better** or *worse* "
        f"than Single where significant (95 % intervals, paired). A row is Single's mean plus what the method gained "
        f"over it on its own {fewest} to {most} seeds. Work: multiply-adds. From `results/studies/`."
    )
    return markdown(["method", "trainings ↓", "work ↓", *GIVEN.values()], lines, about)


def tables_of(study: Study) -> Mapping[str, Callable[[Any], str]]:
    """The tables of a study by their names."""
    return dual_findings.TABLES if isinstance(study, DualStudy) else findings.TABLES


def made(study: Study) -> dict[str, str]:
    """Every table of a study by its name."""
    return {name: table(study) for name, table in tables_of(study).items()}


def blocks(studies: Mapping[str, Study], tables: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Tables by their names in the documents: those of each study as `study_NAME_TABLE`, and those of all studies."""
    of_studies = {
        f"study_{study}_{name}".replace("zero-shot", "zero_shot"): table
        for study, by_name in tables.items()
        for name, table in by_name.items()
    }
    classifiers = of_tasks(list(studies.values()))
    of_all = {
        "study_summary": summary_table(classifiers),
        "study_prices": prices_table(classifiers),
        "study_gains": gains_table(classifiers),
        "study_methods": methods_table(classifiers),
    }
    return {**of_studies, **of_all, "compared": compared_table(classifiers[0])}


def csv_files(tables: Mapping[str, str]) -> dict[str, str]:
    """The tables of a study as CSV, by file name; a text with several tables has a file for each: `shift-2.csv`."""
    return {
        f"{name}-{number}.csv" if number > 1 else f"{name}.csv": content
        for name, text in tables.items()
        for number, content in enumerate(as_csv(text), 1)
    }


def filed(study: Study, tables: Mapping[str, str]) -> bool:
    """Whether the CSV files of a study are these tables."""
    return {path.name: path.read_text("utf-8") for path in (study.folder / TABLES).glob("*.csv")} == csv_files(tables)


def file(study: Study, tables: Mapping[str, str]) -> None:
    """Write the tables of a study as CSV below its folder, in place of older ones."""
    files = csv_files(tables)
    for path in (study.folder / TABLES).glob("*.csv"):
        if path.name not in files:
            path.unlink()
    for name, content in files.items():
        write_atomically(study.folder / TABLES / name, content.encode())


# --- the figure -------------------------------------------------------------------------------------------------------

MARKS = {  # marker and colour of every row in the figure
    "Laplace (last layer)": ("v", "tab:brown"),
    "LoRA-Ensemble": ("^", "tab:gray"),
    "Single, trained as long": ("P", "tab:olive"),
    "Single, D.2, nothing pruned": ("X", "tab:pink"),
    SOUP: ("s", "tab:orange"),
    DEEP: ("D", "tab:blue"),
    HYDRA: ("*", "tab:red"),
    HYDRA_TAYLOR: ("<", "tab:cyan"),
    HYDRA_CIRC: (">", "tab:purple"),
    "CircAvg": ("o", "tab:green"),
}
APART = 0.03  # relative horizontal shift between rows with the same price
FIGURE = FIGURES / "gain_against_price.svg"


def points(study: Study) -> Iterator[tuple[str, Difference, float, bool]]:
    """For every row in `MARKS`: its gain in AUROC by the largest probability, its price, and whether that was timed."""
    key = f"{study.detections[0]}.all.auroc" if isinstance(study, DualStudy) else "all.auroc"
    for row in (row for row in MARKS if row in study.rows):
        gain, (price, measured) = study.difference(row, SINGLE, key), price_of(study, row)
        if gain is not None and price is not None:
            yield row, gain, price, measured


def figure(studies: Sequence[Study]) -> Any:
    """One panel per task: gain in AUROC by the largest probability with its interval; hollow marks: price not timed."""
    size = {"figsize": (2.1 * len(studies) + 2.2, 3.2), "sharey": True, "squeeze": False}
    canvas, (fields,) = pyplot().subplots(1, len(studies), **size)
    for field, study in zip(fields, studies, strict=True):
        prices: list[float] = []
        for row, gain, price, measured in points(study):
            while any(abs(price - other) < APART * price for other in prices):
                price *= 1 + APART
            prices.append(price)
            mark, colour = MARKS[row]
            field.errorbar(
                price,
                100 * gain.value,
                yerr=100 * gain.half_width if gain.seeds > 1 else None,
                fmt=mark,
                color=colour,
                markersize=10 if row == HYDRA else 6,
                markerfacecolor=colour if measured else "white",
                elinewidth=0.8,
            )
        field.axhline(0, color="0.5", linewidth=1)
        field.set_xscale("log")
        field.set_xticks([1, 2, 3], ["1", "2", "3"])
        field.set_xticks([], minor=True)
        field.set_xlim(0.94 * min([0.9, *prices]), 3.8)
        field.grid(alpha=0.25)
        field.set_title("zero-shot" if isinstance(study, DualStudy) else TITLES[study.name], fontsize=9)
    fields[0].set_ylabel("gain in OOD AUROC (points)")
    canvas.supxlabel("price of an answer over Single's", fontsize=9, y=-0.06)
    rows = [row for row in MARKS if any(row in study.rows for study in studies)]
    marks = [
        pyplot().Line2D([], [], marker=MARKS[row][0], color=MARKS[row][1], linestyle="", label=row) for row in rows
    ]
    fields[-1].legend(handles=marks, loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8, frameon=False)
    return canvas


def price_of(study: Study, row: str) -> tuple[float | None, bool]:
    """Price relative to Single's: batch time if measured, otherwise multiply-adds; and whether it was timed."""
    if cost := study.cost(row):
        return float(cost["latency_ratio"]), True
    work = study.work(row)
    return (None if work == "–" else float(work.removesuffix("x"))), False


def priced_studies(studies: Sequence[Study]) -> list[Study]:
    """Studies in the figure: they have Hydra or are zero-shot, and have at least one price."""
    shown = [*leading(studies), *(study for study in studies if isinstance(study, DualStudy))]
    return [study for study in shown if any(price_of(study, row)[0] for row in study.rows)]


def digest(studies: Sequence[Study]) -> str:
    """A hash of the numbers in the figure, rounded so that invisible differences do not change it."""
    marks = [
        [study.name, row, gain.seeds, measured, *(fixed(number, 6) for number in (gain.value, gain.half_width, price))]
        for study in priced_studies(studies)
        for row, gain, price, measured in points(study)
    ]
    return f"sha256 {hashlib.sha256(json.dumps(marks).encode()).hexdigest()}"


def drawn(studies: Sequence[Study], path: Path = FIGURE) -> bool:
    """Whether the figure exists and was drawn from these numbers."""
    return path.exists() and digest(studies) in path.read_text(encoding="utf-8")


def draw(studies: Sequence[Study], path: Path = FIGURE) -> Path:
    """Write the figure as SVG, with the hash of its numbers inside."""
    return save_figure(figure(priced_studies(studies)), path, digest(studies))
