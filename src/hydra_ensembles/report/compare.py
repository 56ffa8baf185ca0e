"""Evaluations side by side: rows, notes, formats."""

import csv
import io
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, Literal, TypeVar

from .._utils import require
from ..arguments import checked
from ..errors import ConfigError, DataError
from ..evaluation.evaluation import UNNAMED, Evaluation, read_saved
from ..files import write_sealed
from ..fingerprints import unlike
from ..model.cost import Cost
from ..overlap import about
from ..schema import from_plain, to_plain
from .columns import CLASSIFICATION, COLUMNS, COST, DIVERSITY, OOD, Column, columns_for, promise, set_columns

__all__ = ["CLASSIFICATION", "COLUMNS", "COST", "DIVERSITY", "OOD", "Column", "set_columns"]  # also found here

T = TypeVar("T")
_BY_TEMPERATURE = ("brier", "nll", "ece", "aece")  # numbers that a calibration changes

Rank = Literal["best", "second", ""]
Runs = Mapping[str, Evaluation | Sequence[Evaluation]] | Iterable[Evaluation]


@dataclass(frozen=True)
class Cell:
    """One number of a comparison.

    Attributes:
        text: As it is shown; a dash where there is none.
        value: The number; the mean where there are several runs.
        spread: Standard deviation over the runs; None for one run.
        rank: Whether it is the best or second best of its column; numbers written alike share a rank.
    """

    text: str
    value: float | None = None
    spread: float | None = None
    rank: Rank = ""


@dataclass(frozen=True)
class Row:
    """One method."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, repr=False)
class Comparison:
    """A table of methods and metrics; printed it is Markdown, `to_latex`, `to_csv` and `to_rich` write it otherwise.

    Attributes:
        columns: Columns that at least one method has a number for.
        rows: Methods, in the order given.
        notes: What a reader must know: the sets, the score, the convention, the number of runs.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Comparison({', '.join(row.name for row in self.rows)}: {len(self.columns)} columns)"

    def __str__(self) -> str:
        return to_markdown(self)

    def _repr_markdown_(self) -> str:
        """What a notebook shows."""
        return to_markdown(self)


@checked
def compare(
    evaluations: Runs,
    costs: Iterable[Cost] | None = None,
    columns: Sequence[Column] | None = None,
    *,
    allow_mismatch: bool = False,
) -> Comparison:
    """Put evaluations side by side.

    Args:
        evaluations: By method name, one evaluation or several (seeds), which are shown as mean ± standard
            deviation; or evaluations that bring their names, where equal names are runs of one method: models of one
            make, which may keep other heads. Several that nobody named are rows of their own, `model 1` and so on.
        costs: Rows of `measure_costs`, found by method name.
        columns: What to show, from left to right: `COLUMNS`, and unless they are given also what a model with fitted
            familiarity declines, and the AUROC of its fitted scores. A column nobody has a number for is left out.
        allow_mismatch: Compare evaluations of different sets, sizes or labels all the same, and say so in the notes.
            Inputs that differ where labels do not are noted, never refused: models may want them prepared otherwise.

    Raises:
        DataError: There is nothing to compare, or the evaluations are not of the same data.
        ConfigError: They use different scores or conventions; or evaluations of models that differ are called the same.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> base = load_backbone()  # a small vision transformer: one member, 6 layers of 6 heads, 7 classes
        >>> batches = [(torch.randn(7, 3, 64, 64), torch.arange(7)) for _ in range(2)]  # or a DataLoader
        >>> methods = {"whole": base, "pruned": he.prune(base, [(5, 0), (5, 1)])}
        >>> found = {name: he.evaluate(model, batches, progress=False) for name, model in methods.items()}
        >>> table = he.compare(found)
        >>> [row.name for row in table.rows]
        ['whole', 'pruned']
        >>> from hydra_ensembles.report import to_markdown
        >>> "| whole |" in to_markdown(table)
        True
    """
    methods = group_runs(evaluations)
    notes = _describe(methods, allow_mismatch)
    by_name = {cost.name: cost for cost in (() if costs is None else costs)}
    rows = {name: (runs, by_name.get(name)) for name, runs in methods.items()}
    if columns is None:
        columns = columns_for(run for runs in methods.values() for run in runs)
    if _calibration_note(methods):
        columns = [replace(column, ranked=False) if column.key in _BY_TEMPERATURE else column for column in columns]
    return tabulated(columns, rows, lambda column, row: _cell(column, *row), notes)


def tabulated(
    columns: Sequence[Column], rows: Mapping[str, T], cell: Callable[[Column, T], Cell], notes: tuple[str, ...]
) -> Comparison:
    """A table of what `cell` makes of each row, ranked; a column without a number is left out."""
    shown: list[tuple[Column, list[Cell]]] = []  # each column with its cells from top to bottom
    for column in columns:
        cells = [cell(column, row) for row in rows.values()]
        if any(number.text != "–" for number in cells):
            shown.append((column, rank_cells(cells, column)))
    lines = tuple(Row(name, tuple(cells[index] for _, cells in shown)) for index, name in enumerate(rows))
    return Comparison(tuple(column for column, _ in shown), lines, notes)


def group_runs(evaluations: Runs) -> dict[str, list[Evaluation]]:
    """Evaluations by method name, in the order given; none at all is a `DataError`.

    Those that bring their names are runs of one method where the names are equal, so these must be of models of one
    make; those that nobody named are told apart by numbers. Whoever gives a mapping has said what belongs together.
    """
    methods: dict[str, list[Evaluation]] = {}
    if isinstance(evaluations, Mapping):
        for name, runs in evaluations.items():
            methods[name] = [runs] if isinstance(runs, Evaluation) else list(runs)
    else:
        listed = list(evaluations)
        numbers = itertools.count(1) if sum(run.name == UNNAMED for run in listed) > 1 else None
        for run in listed:
            name = run.name if numbers is None or run.name != UNNAMED else f"{UNNAMED} {next(numbers)}"
            methods.setdefault(name, []).append(run)
        for name, group in methods.items():
            _require_one_method(name, group)
    if not methods or not all(methods.values()):
        empty = [name for name, runs in methods.items() if not runs]
        raise DataError(f"there is nothing to compare: methods without an evaluation: {empty or 'no method at all'}")
    return methods


def _require_one_method(name: str, runs: Sequence[Evaluation]) -> None:
    """Refuse evaluations of one name that are not runs of one method."""
    advice = "name them apart, by name= (--name) of evaluate; or give compare a mapping, {name: evaluation or runs}"
    first, *others = (_make(run) for run in runs)
    for other in others:
        unlike = [f"{key} ({value} and {other[key]})" for key, value in first.items() if other[key] != value]
        if unlike:
            raise ConfigError(f"evaluations called {name!r} are of models that differ in {', '.join(unlike)}; {advice}")


def _make(run: Evaluation) -> dict[str, Any]:
    """What the models of one method have in common; seeds keep as many heads, and not always the same."""
    model = run.model
    plain = {key: getattr(model, key) for key in ("kind", "source", "members", "classes", "parameters")}
    return {**plain, "heads": model.heads_label, "calibrated": _is_calibrated(run)}


def _is_calibrated(run: Evaluation) -> bool:
    """Whether a temperature has changed the probabilities."""
    return run.model.calibration is not None and any(value != 1.0 for value in run.model.calibration.temperature)


def _cell(column: Column, runs: Sequence[Evaluation], cost: Cost | None) -> Cell:
    if column.key == "heads":
        labels = {run.model.heads_label for run in runs} - {None}
        return Cell(" / ".join(sorted(map(str, labels))) or "–")
    numbers = [run.numbers().get(column.key) for run in runs]
    varies = any(value is not None for value in numbers)  # what a method costs does not vary with the seed
    if not varies:
        numbers = [cost_of(run, cost, column.key) for run in runs]
    values = [float(value) for value in numbers if value is not None]
    if not values:
        return Cell("–")
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) if len(values) > 1 and (varies or len(set(values)) > 1) else None
    return Cell(column.write(mean, spread), mean, spread)


def cost_of(run: Evaluation, cost: Cost | None, key: str) -> float | None:
    """A cost as it was measured, else as the model knows it; None where nobody does."""
    measured = getattr(cost, key, None)
    value = getattr(run.model, key, None) if measured is None else measured
    return value if isinstance(value, int | float) else None


def rank_cells(cells: list[Cell], column: Column) -> list[Cell]:
    """Mark the best number as shown and, of three or more, the second best; where all are equal nothing is marked."""
    shown = [None if cell.value is None else float(f"{cell.value * column.scale:.{column.digits}f}") for cell in cells]
    distinct = sorted({value for value in shown if value is not None}, reverse=column.better == "higher")
    if column.better == "neither" or not column.ranked or len(distinct) < 2:
        return cells
    ranks: dict[float, Rank] = {distinct[0]: "best"}
    if len(cells) > 2:
        ranks[distinct[1]] = "second"
    return [
        cell if value is None else replace(cell, rank=ranks.get(value, ""))
        for cell, value in zip(cells, shown, strict=True)
    ]


def _describe(methods: Mapping[str, Sequence[Evaluation]], allow_mismatch: bool) -> tuple[str, ...]:
    """Notes on what was compared, after checking that it may be."""
    everything = [(name, run) for name, runs in methods.items() for run in runs]
    first_name, first = everything[0]
    notes = [_data_note(first)]
    for name, run in everything[1:]:
        if (run.score, run.convention) != (first.score, first.convention):
            raise ConfigError(
                f"{first_name!r} was evaluated with score {first.score!r} and convention {first.convention!r}, "
                f"{name!r} with {run.score!r} and {run.convention!r}; their numbers do not compare"
            )
        if run.samples != first.samples:
            other = f"{name} was evaluated on {run.samples}, {first_name} on {first.samples}"
            notes.append(_mismatch(other, allow_mismatch))
    notes += _sample_notes(everything, allow_mismatch)
    if any(len(runs) > 1 for runs in methods.values()):
        counts = ", ".join(f"{name}: {len(runs)}" for name, runs in methods.items())
        notes.append(f"Mean ± standard deviation over runs ({counts}).")
    notes += [note for note in (_calibration_note(methods), _reuse_note(methods), _decline_note(methods)) if note]
    return tuple(dict.fromkeys(notes))


def _sample_notes(everything: Sequence[tuple[str, Evaluation]], allow_mismatch: bool) -> list[str]:
    """Which methods saw, or may have seen, other samples than the first, in sets of one name and size."""
    (first_name, first), *others = everything
    notes = []
    unknown: dict[str, None] = {}  # names, each once
    for name, run in others:
        same = [key for key, count in run.samples.items() if first.samples.get(key) == count]
        differing = unlike(run.traces, first.traces, same)
        if differing.labels:
            other = f"the labels of {_listed(differing.labels)} are others for {name} than for {first_name}"
            notes.append(_mismatch(other, allow_mismatch))
        if differing.inputs:
            why = "other samples, or the same prepared in another way"
            notes.append(f"{name} was given other inputs than {first_name} in {_listed(differing.inputs)}: {why}.")
        if differing.unknown:
            unknown[name] = None
    if unknown:
        how = "sizes were compared, and labels where both have a trace of them"
        notes.append(f"Whether {', '.join(unknown)} saw the same samples as {first_name} is not known: {how}.")
    return notes


def _mismatch(what: str, allowed: bool) -> str:
    """The note on data that are not the same, where such may be compared."""
    if not allowed:
        raise DataError(f"{what}; evaluate both on the same data, or allow the mismatch")
    return f"Not the same data: {what}."


def _listed(names: Sequence[str]) -> str:
    """The first names of sets, and how many there are besides."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _calibration_note(methods: Mapping[str, Sequence[Evaluation]]) -> str:
    """Which methods are calibrated, where others are not."""
    kinds: dict[str, list[str]] = {"Calibrated": [], "not": [], "in part": []}
    for name, runs in methods.items():
        calibrated = {_is_calibrated(run) for run in runs}
        kinds["in part" if len(calibrated) > 1 else "Calibrated" if calibrated == {True} else "not"].append(name)
    text = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names)
    if kinds["in part"] or (kinds["Calibrated"] and kinds["not"]):
        return f"{text}. Brier, NLL, ECE and aECE compare among the calibrated, or among the others."
    return ""


def _reuse_note(methods: Mapping[str, Sequence[Evaluation]]) -> str:
    """Which methods were measured on samples that they were calibrated on."""
    shares = {name: max((run.reused or 0.0 for run in runs), default=0.0) for name, runs in methods.items()}
    listed = ", ".join(f"{name}, {about(share)}" for name, share in shares.items() if share)
    if not listed:
        return ""
    return f"Measured on samples that fitted calibration or familiarity ({listed} of the set): better than on new data."


def _decline_note(methods: Mapping[str, Sequence[Evaluation]]) -> str:
    """What a share that is declined means, where a model declines for two reasons."""
    everything = [(name, run) for name, runs in methods.items() for run in runs]
    if not any(run.selective is not None and run.selective.familiarity is not None for _, run in everything):
        return ""
    promises: dict[tuple[float, int], list[str]] = {}
    for name, run in everything:
        promised = promise(run)
        if promised is not None and name not in promises.setdefault(promised, []):
            promises[promised].append(name)
    text = "Declined: unsure, or unfamiliar by a fitted score of features."
    for (share, count), names in promises.items():
        thresholds = f"{count} thresholds, of which each promises" if count > 1 else "one threshold, which promises"
        text += f" {', '.join(names)}: {thresholds} to accept {100 * share:.4g} % in distribution."
    return text + (" Shares declined compare where the same is promised." if len(promises) > 1 else "")


def _data_note(evaluation: Evaluation) -> str:
    groups: dict[str, list[str]] = {}
    for name, result in evaluation.ood.items():
        groups.setdefault("OOD" if result.group == "ungrouped" else result.group, []).append(name)
    sets = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
    samples, right, common = evaluation.id.samples, evaluation.id.accuracy, evaluation.id.commonest
    share = (samples * right + 2) / (samples + 4)  # Agresti and Coull: not 1 where all are right
    known = f"accuracy to ±{196 * math.sqrt(share * (1 - share) / (samples + 4)):.2g} points (95 %)"
    text = f"In distribution: {evaluation.id_name} ({samples:,} samples), which tell {known}."
    if common is not None and 1 - right >= (1 - common) / 2:  # half the mistakes of a model that has learned nothing
        text += f" To name the most frequent class always is right on {100 * common:.4g} %."
    if not sets:
        return text
    return f"{text} Out of distribution, {sets}. Score: {evaluation.score}; convention: {evaluation.convention}."


_LATEX = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
    | {"±": r"$\pm$", "×": r"$\times$", "↑": r"$\uparrow$", "↓": r"$\downarrow$"}
)


def to_markdown(comparison: Comparison) -> str:
    """A Markdown table: best bold, second best underlined, notes below; names are shown letter by letter.

    Args:
        comparison: Of `compare`.

    Examples:
        >>> import torch, hydra_ensembles as he
        >>> from hydra_ensembles.demo import load_backbone
        >>> from hydra_ensembles.report import to_markdown
        >>> batches = [(torch.randn(7, 3, 64, 64), torch.arange(7))]
        >>> table = he.compare({"whole": he.evaluate(load_backbone(), batches, progress=False)})
        >>> to_markdown(table).splitlines()[0].startswith("| Method |")
        True
    """
    marks = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
    headings = ["Method", *(f"{column.group} {column.heading}".strip() for column in comparison.columns)]
    lines = [[_markdown(heading) for heading in headings], ["---", *["---:"] * len(comparison.columns)]]
    for row in comparison.rows:
        lines.append([_markdown(row.name), *(marks[cell.rank].format(_markdown(cell.text)) for cell in row.cells)])
    table = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([*table, "", *map(_markdown, comparison.notes), ""])


def _markdown(text: str) -> str:
    """Text that Markdown shows as it is: no HTML, emphasis, links (also bare addresses), code or cells of a table."""
    shown = re.sub(r"[\\`*\[\]|!]|\b_|_\b", r"\\\g<0>", escape(_one_line(text), quote=False))
    return re.sub(r"[~$@]|(?<=http):|(?<=https):|(?<=www)\.", lambda match: f"&#{ord(match[0])};", shown)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def to_latex(comparison: Comparison) -> str:
    """A LaTeX `tabular` for the packages `booktabs`; the notes are comments."""
    columns = comparison.columns
    lines = [f"% {_one_line(note)}" for note in comparison.notes]
    lines += [rf"\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\toprule"]
    if any(column.group for column in columns):
        headings = [""]
        rules = []
        position = 2
        for group, members in itertools.groupby(columns, key=lambda column: column.group):
            width = len(list(members))
            headings.append(rf"\multicolumn{{{width}}}{{c}}{{{group.translate(_LATEX)}}}")
            if group:
                rules.append(rf"\cmidrule(lr){{{position}-{position + width - 1}}}")
            position += width
        lines += [" & ".join(headings) + r" \\", " ".join(rules)]
    lines += [" & ".join(["Method", *(column.heading.translate(_LATEX) for column in columns)]) + r" \\", r"\midrule"]
    marks = {"best": r"\textbf{%s}", "second": r"\underline{%s}", "": "%s"}
    for row in comparison.rows:
        cells = [marks[cell.rank] % cell.text.translate(_LATEX) for cell in row.cells]
        lines.append(" & ".join([_one_line(row.name).translate(_LATEX), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def to_csv(comparison: Comparison) -> str:
    """Comma-separated values at full precision, under the names of `Evaluation.numbers`.

    A column of standard deviations follows each column in which some method has several runs.
    """
    rows: list[dict[str, Any]] = []
    for row in comparison.rows:
        rows.append({"method": row.name})
        for column, cell in zip(comparison.columns, row.cells, strict=True):
            rows[-1][column.key] = cell.text if column.key == "heads" else cell.value
            if cell.spread is not None:
                rows[-1][f"{column.key}_sd"] = cell.spread
    names = [f"{column.key}{end}" for column in comparison.columns for end in ("", "_sd")]
    return csv_text(rows, ["method", *(name for name in names if any(name in row for row in rows))])


def csv_text(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Comma-separated values under a line of names; a text that a spreadsheet would run gets an apostrophe in front."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(map(_no_formula, names))
    writer.writerows([_no_formula(row.get(name, "")) for name in names] for row in rows)
    return buffer.getvalue()


def _no_formula(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def to_rich(comparison: Comparison, title: str | None = None) -> Any:
    """A table for the terminal (for `rich.print`): best bold, second best underlined.

    On a terminal too narrow for all columns the table continues below.
    """
    require("rich", extra="report")
    return _Terminal(comparison, title)


@dataclass(frozen=True)
class _Terminal:
    """A comparison that fits itself to the width it is printed in."""

    comparison: Comparison
    title: str | None

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        text, box, table = (require(f"rich.{name}", extra="report") for name in ("text", "box", "table"))
        styles = {"best": "bold green", "second": "underline", "": ""}
        for number, positions in enumerate(self._blocks(options.max_width)):
            title = self.title if number == 0 else None
            part = table.Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
            part.add_column("Method", no_wrap=True)
            for column in (self.comparison.columns[position] for position in positions):
                heading = f"{column.group}\n{column.heading}" if column.group else column.heading
                part.add_column(text.Text(heading), justify="right", no_wrap=True, vertical="bottom")
            for row in self.comparison.rows:
                cells = [row.cells[position] for position in positions]
                part.add_row(text.Text(row.name), *(text.Text(cell.text, style=styles[cell.rank]) for cell in cells))
            yield part
        yield text.Text("\n".join(self.comparison.notes), style="dim")

    def _blocks(self, width: int) -> list[list[int]]:
        """Positions of the columns of each part of the table, so that no part is wider than the terminal."""
        rows = self.comparison.rows
        blocks: list[list[int]] = []
        room = 0
        for position, column in enumerate(self.comparison.columns):
            needed = 2 + max(len(column.group), len(column.heading), *(len(row.cells[position].text) for row in rows))
            if not blocks or needed > room:
                blocks.append([])
                room = width - max(len(row.name) for row in rows) - 2
            blocks[-1].append(position)
            room -= needed
        return blocks


FORMAT = "hydra_ensembles.costs"


def save_costs(path: str | Path, costs: Iterable[Cost]) -> None:
    """Write the rows of `measure_costs` as JSON, with its digest."""
    write_sealed(Path(path), {"format": FORMAT, "costs": to_plain(tuple(costs))})


def load_costs(path: str | Path) -> tuple[Cost, ...]:
    """Read what `save_costs` wrote.

    Raises:
        DataError: The file is missing or holds something else.
        ConfigError: A field does not hold what it should.
    """
    data = read_saved(path, "a table of costs")
    rows = data.get("costs") if data.get("format") == FORMAT else None
    if not isinstance(rows, list):
        raise DataError(f'{path} is not a table of costs: it lacks "format": "{FORMAT}", or the list of "costs"')
    return tuple(from_plain(Cost, row, f"{path}.costs[{index}]") for index, row in enumerate(rows))
