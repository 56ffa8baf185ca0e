"""Evaluations side by side: the one table and its writers, the columns, and checks that the data are the same."""

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from ..errors import ConfigError, DataError
from ..evaluation.evaluation import PROMISED, UNNAMED, Evaluation
from ..files import expanded, read_object, write_json
from ..metrics.distance import FittedName
from ..model.cost import Cost
from ..settings import from_plain, to_plain

T = TypeVar("T")
Direction = Literal["higher", "lower", "neither"]


@dataclass(frozen=True)
class Column:
    """One column of a comparison."""

    key: str  # name of the number in `Evaluation.numbers`, a field of `Cost`, or `heads`
    title: str  # heading
    group: str = ""  # heading above several columns
    better: Direction = "neither"
    digits: int = 2  # after the point
    scale: float = 1.0  # factor applied before printing: 100 for percent, 1e-6 for millions
    suffix: str = ""  # printed after the number

    @property
    def heading(self) -> str:
        """Title with an arrow in the better direction."""
        return self.title + {"higher": " ↑", "lower": " ↓", "neither": ""}[self.better]

    def number(self, value: float) -> str:
        """Format a number; small counts are not rounded to zero."""
        text = f"{value * self.scale:.{self.digits}f}"
        return f"{value * self.scale:.1g}" if value and self.scale < 1 and float(text) == 0 else text

    def write(self, value: float, spread: float | None = None) -> str:
        """Format a number, optionally with its spread."""
        text = self.number(value)
        return text + self.suffix if spread is None else f"{text} ± {spread * self.scale:.{self.digits}f}{self.suffix}"


@dataclass(frozen=True)
class Cell:
    """One number of a comparison."""

    text: str  # as shown; a dash if there is no number
    value: float | None = None  # the number; the mean over several runs
    spread: float | None = None  # standard deviation over the runs; None for one run
    best: bool = False  # of its column; numbers that look equal are marked alike


@dataclass(frozen=True, repr=False)
class Comparison:
    """A table of methods and metrics; printed it is Markdown, `to_csv` writes all digits."""

    columns: tuple[Column, ...]  # that at least one method has a number for
    rows: Mapping[str, tuple[Cell, ...]]  # by method, in the order given
    notes: tuple[str, ...]  # what a reader must know: the sets, the score, the convention, the number of runs

    def __repr__(self) -> str:
        return to_markdown(self)

    _repr_markdown_ = __repr__  # for notebooks


def tabulated(
    columns: Sequence[Column], rows: Mapping[str, T], cell: Callable[[Column, T], Cell], notes: tuple[str, ...]
) -> Comparison:
    """Make a table of `cell(column, row)`, the best marked; columns without any number are left out."""
    shown: list[tuple[Column, list[Cell]]] = []  # each column with its cells from top to bottom
    for column in columns:
        cells = [cell(column, row) for row in rows.values()]
        if any(number.text != "–" for number in cells):
            shown.append((column, marked(cells, column)))
    lines = {name: tuple(cells[index] for _, cells in shown) for index, name in enumerate(rows)}
    return Comparison(tuple(column for column, _ in shown), lines, notes)


def marked(cells: list[Cell], column: Column) -> list[Cell]:
    """Mark the best of the displayed numbers; nothing if all are equal."""
    shown = [None if cell.value is None else float(column.number(cell.value)) for cell in cells]
    known = {value for value in shown if value is not None}
    if column.better == "neither" or len(known) < 2:
        return cells
    best = max(known) if column.better == "higher" else min(known)
    return [replace(cell, best=value == best) for cell, value in zip(cells, shown, strict=True)]


def to_markdown(comparison: Comparison) -> str:
    """A Markdown table that reads as text, too: best bold, notes below.

    With more columns than methods it lies on its side, to fit into a terminal.
    """
    headings = ["Method", *(f"{column.group} {column.heading}".strip() for column in comparison.columns)]
    lines = [[_markdown(heading) for heading in headings]]
    for name, cells in comparison.rows.items():
        lines.append(
            [_markdown(name), *(("**{}**" if cell.best else "{}").format(_markdown(cell.text)) for cell in cells)]
        )
    if len(comparison.columns) > len(comparison.rows):
        lines = [list(line) for line in zip(*lines, strict=True)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    table = [f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:])]
    return "\n".join([*table, "", *map(_markdown, comparison.notes), ""])


def _markdown(text: str) -> str:
    """Text as a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def to_csv(comparison: Comparison) -> str:
    """Comma-separated values at full precision, under the names of `Evaluation.numbers`.

    A column of standard deviations follows each column in which some method has several runs.
    """
    rows: list[dict[str, Any]] = []
    for name, cells in comparison.rows.items():
        rows.append({"method": name})
        for column, cell in zip(comparison.columns, cells, strict=True):
            rows[-1][column.key] = cell.text if column.key == "heads" else cell.value
            if cell.spread is not None:
                rows[-1][f"{column.key}_sd"] = cell.spread
    names = [f"{column.key}{end}" for column in comparison.columns for end in ("", "_sd")]
    return csv_text(rows, ["method", *(name for name in names if any(name in row for row in rows))])


def csv_text(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> str:
    """CSV text with a header."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


# --- comparing evaluations -------------------------------------------------------------------------------------------

_BY_TEMPERATURE = ("brier", "nll", "ece", "aece")  # metrics that calibration changes

Runs = Mapping[str, Evaluation | Sequence[Evaluation]] | Iterable[Evaluation]


def _detection(mean: str, group: str) -> tuple[Column, ...]:
    return (
        Column(f"{mean}.auroc", "AUROC", group, "higher", scale=100),
        Column(f"{mean}.fpr95", "FPR95", group, "lower", scale=100),
        Column(f"{mean}.aupr", "AUPR", group, "higher", scale=100),
    )


_MEANS = {"near": "Near-OOD", "far": "Far-OOD", "all": "OOD avg"}
HEADS = Column("heads", "Heads")
CLASSIFICATION = (
    Column("accuracy", "Acc", better="higher", scale=100),
    Column("brier", "Brier", better="lower", digits=3),
    Column("nll", "NLL", better="lower", digits=3),
    Column("ece", "ECE", better="lower", digits=3),
    Column("aece", "aECE", better="lower", digits=3),
)
OOD = tuple(column for mean, group in _MEANS.items() for column in _detection(mean, group))
SHIFT = Column("shift.accuracy", "Acc", "Shift avg", "higher", scale=100)
COST = (
    Column("parameters", "Params (M)", better="lower", scale=1e-6),
    Column("multiply_adds", "MAdds (G)", better="lower", scale=1e-9),
    Column("latency_ratio", "Latency", better="lower", suffix="×"),
)
ASKED = Column("asked", "Asked %", better="lower", scale=100)  # of a cascade
ANSWERABLE = tuple(
    Column(f"answerable@{risk}", f"{risk:.0%}", "Answered % under a promise of", "higher", scale=100)
    for risk in PROMISED
)
PROMISE = (
    Column("promise.accepted", "Answered %", "Promise", scale=100),
    Column("promise.errors", "Wrong %", "Promise", scale=100),
    Column("mixed.promise.errors", "Wrong %, with OOD", "Promise", scale=100),
)


def columns_for(evaluations: Iterable[Evaluation], sets: Sequence[str] = ()) -> tuple[Column, ...]:
    """Default columns: those of the paper's tables, what may be answered under a promise, costs, and what was fitted.

    Declined shares are not ranked: models may promise different shares. `sets` are OOD sets to show by themselves, as
    `ood.NAME`.
    """
    runs = list(evaluations)
    fitted = list(
        dict.fromkeys(
            score for run in runs for score in run.scores if score in get_args(FittedName) and score != run.score
        )
    )
    alone = {name: name.removeprefix("ood.") for name in sets}
    titles = {**_MEANS, **alone}
    added = [
        Column(f"{score}:{key}.auroc", title, f"AUROC by {score}", "higher", scale=100)
        for score in fitted
        for key, title in titles.items()
    ]
    if any("familiar" in run.sets[run.id_name].columns for run in runs):
        added.append(Column("selective.accepted", "ID", "Accepted %", scale=100))
        added += (Column(f"{key}.abstained", title, "Declined %", scale=100) for key, title in titles.items())
    single = (column for key, title in alone.items() for column in _detection(key, title))
    return (HEADS, *CLASSIFICATION, *ANSWERABLE, *PROMISE, *OOD, SHIFT, *added, *COST, ASKED, *single)


def compare(
    evaluations: Runs,
    costs: Iterable[Cost] | None = None,
    columns: Sequence[Column] | None = None,
) -> Comparison:
    """Put evaluations side by side.

    Args:
        evaluations: By method name, one evaluation or several (seeds), which are shown as mean ± standard
            deviation; or evaluations with names, where equal names are runs of one method. Evaluations without a name
            are separate rows, `model 1` and so on.
        costs: Rows of `measure_costs`, found by method name.
        columns: What to show, from left to right; by default `columns_for(evaluations)`. Columns without any number
            are left out.

    Raises:
        DataError: There is nothing to compare, or the evaluations are of different sets, sizes or labels. Inputs that
            differ while labels agree are noted: models may need different preprocessing.
        ConfigError: They use different scores or conventions.

    Examples:
        >>> methods = {"whole": base, "pruned": he.prune(base, [(5, 0), (5, 1)])}
        >>> found = {name: he.evaluate(model, batches, progress=False) for name, model in methods.items()}
        >>> table = he.compare(found)
        >>> list(table.rows)
        ['whole', 'pruned']
    """
    methods = group_runs(evaluations)
    notes = _describe(methods)
    by_name = {cost.name: cost for cost in costs or ()}
    rows = {name: (runs, by_name.get(name)) for name, runs in methods.items()}
    if columns is None:
        columns = columns_for(run for runs in methods.values() for run in runs)
    if _calibration_note(methods):
        columns = [replace(one, better="neither") if one.key in _BY_TEMPERATURE else one for one in columns]
    return tabulated(columns, rows, lambda column, row: _cell(column, *row), notes)


def group_runs(evaluations: Runs) -> dict[str, list[Evaluation]]:
    """Evaluations by method name, in the given order; of a list, those without a name are numbered."""
    methods: dict[str, list[Evaluation]] = {}
    if isinstance(evaluations, Mapping):
        methods = {name: [one] if isinstance(one, Evaluation) else list(one) for name, one in evaluations.items()}
    else:
        listed = list(evaluations)
        unnamed = [index for index, run in enumerate(listed) if run.name == UNNAMED]
        for index, run in enumerate(listed):
            numbered = index in unnamed and len(unnamed) > 1
            name = f"{UNNAMED} {unnamed.index(index) + 1}" if numbered else run.name
            methods.setdefault(name, []).append(run)
    if not methods or not all(methods.values()):
        raise DataError("nothing to compare: give at least one evaluation of each method")
    return methods


def _cell(column: Column, runs: Sequence[Evaluation], cost: Cost | None) -> Cell:
    if column.key == "heads":
        return Cell(" / ".join(sorted({run.model.heads for run in runs} - {""})) or "–")
    numbers = [run.numbers().get(column.key) for run in runs]
    varies = any(value is not None for value in numbers)  # costs do not vary with the seed
    if not varies:
        numbers = [getattr(cost, column.key, None) or getattr(run.model, column.key, None) for run in runs]
    values = [float(value) for value in numbers if value is not None]
    if not values:
        return Cell("–")
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) if len(values) > 1 and (varies or len(set(values)) > 1) else None
    return Cell(column.write(mean, spread), mean, spread)


def _describe(methods: Mapping[str, Sequence[Evaluation]]) -> tuple[str, ...]:
    """Check that the evaluations are comparable; return notes on the data and the methods."""
    (first_name, first), *others = [(name, run) for name, runs in methods.items() for run in runs]
    notes = [_data_note(first)]
    for name, run in others:
        if (run.score, run.convention) != (first.score, first.convention):
            ours, theirs = f"{first.score} ({first.convention})", f"{run.score} ({run.convention})"
            raise ConfigError(f"{first_name!r} was evaluated with {ours}, {name!r} with {theirs}; use the same")
        if run.samples != first.samples:
            raise DataError(f"{name} was evaluated on {run.samples}, {first_name} on {first.samples}; give the same")
        pairs = {key: (one, first.sets[key]) for key, one in run.sets.items()}
        if other := [key for key, (one, known) in pairs.items() if not _same_labels(one.columns, known.columns)]:
            raise DataError(f"the labels of {', '.join(other)} differ between {name} and {first_name}; give the same")
        if other := [key for key, (one, known) in pairs.items() if one.digest != known.digest]:
            why = "other samples, or the same prepared differently"
            notes.append(f"{name} was given other inputs than {first_name} in {', '.join(other)}: {why}.")
    if any(len(runs) > 1 for runs in methods.values()):
        counts = ", ".join(f"{name}: {len(runs)}" for name, runs in methods.items())
        notes.append(f"Mean ± standard deviation over runs ({counts}).")
    return tuple(dict.fromkeys(filter(None, [*notes, _calibration_note(methods)])))


def _same_labels(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether two sets have equally many samples of each class, however the models number the classes."""
    counts = [columns["label"].bincount().sort().values for columns in (ours, theirs) if "label" in columns]
    return len(counts) < 2 or torch.equal(*(one[one > 0] for one in counts))


def _calibration_note(methods: Mapping[str, Sequence[Evaluation]]) -> str:
    """A note on which methods have a temperature, which changes probabilities, if not all or none do."""
    rules = {name: [run.model.calibration for run in runs] for name, runs in methods.items()}
    warm = {name: {rule is not None and rule.temperature != 1.0 for rule in each} for name, each in rules.items()}
    if len(set().union(*warm.values())) == 1:
        return ""
    kinds = {"Calibrated": {True}, "not": {False}, "in part": {True, False}}
    listed = {kind: ", ".join(name for name in warm if warm[name] == which) for kind, which in kinds.items()}
    text = "; ".join(f"{kind}: {names}" for kind, names in listed.items() if names)
    return f"{text}. Compare Brier, NLL, ECE and aECE only among the calibrated, or only among the others."


def _data_note(evaluation: Evaluation) -> str:
    groups: dict[str, list[str]] = {}
    for name, one in evaluation.foreign.items():
        groups.setdefault("OOD" if one.group == "ungrouped" else one.group, []).append(name.removeprefix("ood."))
    sets = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
    samples = evaluation.samples[evaluation.id_name]
    share = (samples * evaluation.numbers()["accuracy"] + 2) / (samples + 4)  # Agresti-Coull: not 1 if all are correct
    known = f"accuracy to ±{196 * math.sqrt(share * (1 - share) / (samples + 4)):.2g} points (95 %)"
    text = f"In distribution: {evaluation.id_name} ({samples:,} samples), which give {known}."
    if not sets:
        return text
    return f"{text} Out of distribution, {sets}. Score: {evaluation.score}; convention: {evaluation.convention}."


FORMAT = "hydra_ensembles costs"


def save_costs(path: str | Path, costs: Iterable[Cost]) -> None:
    """Write the rows of `measure_costs` as JSON."""
    write_json(expanded(path), {"format": FORMAT, "costs": to_plain(tuple(costs))})


def load_costs(path: str | Path) -> tuple[Cost, ...]:
    """Read a file that `save_costs` wrote."""
    data = read_object(expanded(path))
    if data.get("format") != FORMAT or not isinstance(data.get("costs"), list):
        raise DataError(f"{path} is not a table of costs, as `bench --output` writes")
    return tuple(from_plain(Cost, row, f"{path}.costs[{index}]") for index, row in enumerate(data["costs"]))
