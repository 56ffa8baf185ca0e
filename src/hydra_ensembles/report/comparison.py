"""Several evaluations in one table, in the form of the paper's."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError, DataError
from ..evaluation.evaluation import Evaluation
from ..model.cost import Cost
from .columns import COLUMNS, Column, value_of

Rank = Literal["best", "second", ""]
Runs = Mapping[str, Evaluation | Sequence[Evaluation]] | Iterable[Evaluation]


@dataclass(frozen=True)
class Cell:
    """One number of a comparison.

    Attributes:
        text: As it is shown; a dash where there is none.
        value: The number; the mean where there are several runs.
        spread: Standard deviation over the runs; None for one run.
        rank: Whether it is the best or second best of its column, as shown: equal numbers share a rank.
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


@dataclass(frozen=True)
class Comparison:
    """A table of methods and metrics; `hydra_ensembles.report.formats` writes it.

    Attributes:
        columns: Columns that at least one method has a number for.
        rows: Methods, in the order given.
        notes: What a reader must know: the sets, the score, the convention, the number of runs.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def compare(
    evaluations: Runs,
    costs: Iterable[Cost] | None = None,
    columns: Sequence[Column] = COLUMNS,
    *,
    allow_mismatch: bool = False,
) -> Comparison:
    """Put evaluations side by side.

    Args:
        evaluations: By method name, one evaluation or several (seeds), which are shown as mean ± standard
            deviation; or evaluations that bring their names, where equal names are runs of one method.
        costs: Rows of `measure_costs`, found by method name.
        columns: What to show, from left to right. A column nobody has a number for is left out.
        allow_mismatch: Compare evaluations of different sets or sizes all the same, and say so in the notes.

    Raises:
        DataError: There is nothing to compare, or the evaluations are not of the same data.
        ConfigError: They use different scores or conventions.
    """
    methods = group_runs(evaluations)
    notes = _describe(methods, allow_mismatch)
    by_name = {cost.name: cost for cost in costs or ()}
    table = [
        [_cell(column, runs, by_name.get(name)) for column in columns]  # [method][column]
        for name, runs in methods.items()
    ]
    shown = [index for index in range(len(columns)) if any(row[index].text != "–" for row in table)]
    ranked = {index: _rank([row[index] for row in table], columns[index]) for index in shown}
    return Comparison(
        columns=tuple(columns[index] for index in shown),
        rows=tuple(
            Row(name, tuple(ranked[index][position] for index in shown)) for position, name in enumerate(methods)
        ),
        notes=notes,
    )


def group_runs(evaluations: Runs) -> dict[str, list[Evaluation]]:
    """Evaluations by method name, in the order given.

    Raises:
        DataError: There are none.
    """
    methods: dict[str, list[Evaluation]] = {}
    if isinstance(evaluations, Mapping):
        for name, runs in evaluations.items():
            methods[name] = [runs] if isinstance(runs, Evaluation) else list(runs)
    else:
        for evaluation in evaluations:
            methods.setdefault(evaluation.name, []).append(evaluation)
    if not methods or not all(methods.values()):
        empty = [name for name, runs in methods.items() if not runs]
        raise DataError(f"there is nothing to compare: methods without an evaluation: {empty or 'no method at all'}")
    return methods


def _cell(column: Column, runs: Sequence[Evaluation], cost: Cost | None) -> Cell:
    if column.key == "heads":
        labels = {run.model.heads_label for run in runs} - {None}
        return Cell(" / ".join(sorted(str(label) for label in labels)) or "–")
    values = [value for run in runs if (value := value_of(column, run, cost)) is not None]
    if not values:
        return Cell("–")
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) if len(values) > 1 else None
    if spread == 0 and column.key not in runs[0].numbers():
        spread = None  # what a method costs does not vary with the seed
    return Cell(column.write(mean, spread), mean, spread)


def _rank(cells: list[Cell], column: Column) -> list[Cell]:
    """Mark the best number as shown and, of three or more, the second best; where all are equal nothing is marked."""
    shown = [None if cell.value is None else float(f"{cell.value * column.scale:.{column.digits}f}") for cell in cells]
    distinct = sorted({value for value in shown if value is not None}, reverse=column.better == "higher")
    if column.better == "neither" or len(distinct) < 2:
        return cells
    ranks: dict[float, Rank] = {distinct[0]: "best"}
    if len(cells) > 2:
        ranks[distinct[1]] = "second"
    return [
        cell if value is None else Cell(cell.text, cell.value, cell.spread, ranks.get(value, ""))
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
            note = f"{name} was evaluated on {_sizes(run)}, {first_name} on {_sizes(first)}"
            if not allow_mismatch:
                raise DataError(f"{note}; evaluate both on the same data, or allow the mismatch")
            notes.append(f"Not the same data: {note}.")
    runs = sorted({len(runs) for runs in methods.values()})
    if runs != [1]:
        counts = ", ".join(f"{name}: {len(found)}" for name, found in methods.items())
        notes.append(f"Mean ± standard deviation over runs ({counts}).")
    return tuple(dict.fromkeys(notes))


def _data_note(evaluation: Evaluation) -> str:
    groups = {
        group: [name for name, result in evaluation.ood.items() if result.group == group]
        for group in ("near", "far", "ungrouped", "apart")
    }
    sets = "; ".join(
        f"{'OOD' if group == 'ungrouped' else group}: {', '.join(names)}" for group, names in groups.items() if names
    )
    text = f"In distribution: {evaluation.id_name} ({evaluation.id.samples:,} samples)."
    if not sets:
        return text
    return f"{text} Out of distribution, {sets}. Score: {evaluation.score}; convention: {evaluation.convention}."


def _sizes(evaluation: Evaluation) -> str:
    return ", ".join(f"{name}: {count}" for name, count in evaluation.samples.items())
