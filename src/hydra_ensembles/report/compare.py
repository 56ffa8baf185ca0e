"""Comparison of evaluations: checks that they are comparable, and the notes a reader needs."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._utils import warn
from ..arguments import checked
from ..classes import a_few
from ..errors import ConfigError, DataError
from ..evaluation.evaluation import UNNAMED, Evaluation, read_saved
from ..files import expanded, write_sealed
from ..fingerprints import compare_traces
from ..model.cost import Cost
from ..overlap import about
from ..schema import from_plain, to_plain
from .columns import Column, columns_for, promise
from .table import Cell, Comparison, tabulated

_BY_TEMPERATURE = ("brier", "nll", "ece", "aece")  # metrics that calibration changes

Runs = Mapping[str, Evaluation | Sequence[Evaluation]] | Iterable[Evaluation]


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
            deviation; or evaluations with names, where equal names are runs of one method: models that differ at most
            in which heads they keep. Evaluations without a name are separate rows, `model 1` and so on.
        costs: Rows of `measure_costs`, found by method name.
        columns: What to show, from left to right; by default `COLUMNS`, what a model with fitted familiarity declines,
            and the AUROC of its fitted scores. Columns without any number are left out.
        allow_mismatch: Compare evaluations of different sets, sizes or labels anyway, and say so in the notes. Inputs
            that differ while labels agree are noted, never refused: models may need different preprocessing.

    Raises:
        DataError: There is nothing to compare, or the evaluations are not of the same data.
        ConfigError: They use different scores or conventions; or evaluations of different models have the same name.

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


def group_runs(evaluations: Runs) -> dict[str, list[Evaluation]]:
    """Evaluations by method name, in the given order; raises `DataError` if there are none.

    In a list, equal names are runs of one method, so their models must match; unnamed evaluations are numbered. A
    mapping is taken as it is: the caller decided what belongs together.
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
        raise DataError(f"nothing to compare: {f'no evaluation of {empty}' if empty else 'no methods given'}")
    return methods


def _require_one_method(name: str, runs: Sequence[Evaluation]) -> None:
    """Raise if evaluations with the same name are not runs of one method."""
    advice = "give them different names (evaluate(name=), --name), or give compare a mapping {name: runs}"
    first, *others = (_make(run) for run in runs)
    for other in others:
        unlike = [f"{key} ({value} and {other[key]})" for key, value in first.items() if other[key] != value]
        if unlike:
            raise ConfigError(f"evaluations called {name!r} are of models that differ in {', '.join(unlike)}; {advice}")


def _make(run: Evaluation) -> dict[str, Any]:
    """What all models of a method share; seeds keep equally many heads, but not always the same."""
    model = run.model
    plain = {key: getattr(model, key) for key in ("kind", "source", "members", "classes", "parameters")}
    return {**plain, "heads": model.heads_label, "calibrated": _is_calibrated(run)}


def _is_calibrated(run: Evaluation) -> bool:
    """Whether a temperature changes the probabilities."""
    return run.model.calibration is not None and any(value != 1.0 for value in run.model.calibration.temperature)


def _cell(column: Column, runs: Sequence[Evaluation], cost: Cost | None) -> Cell:
    if column.key == "heads":
        labels = {run.model.heads_label for run in runs} - {None}
        return Cell(" / ".join(sorted(map(str, labels))) or "–")
    numbers = [run.numbers().get(column.key) for run in runs]
    varies = any(value is not None for value in numbers)  # costs do not vary with the seed
    if not varies:
        numbers = [cost_of(run, cost, column.key) for run in runs]
    values = [float(value) for value in numbers if value is not None]
    if not values:
        return Cell("–")
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) if len(values) > 1 and (varies or len(set(values)) > 1) else None
    return Cell(column.write(mean, spread), mean, spread)


def cost_of(run: Evaluation, cost: Cost | None, key: str) -> float | None:
    """A cost: as measured, otherwise from the model; None if unknown."""
    measured = getattr(cost, key, None)
    value = getattr(run.model, key, None) if measured is None else measured
    return value if isinstance(value, int | float) else None


def _describe(methods: Mapping[str, Sequence[Evaluation]], allow_mismatch: bool) -> tuple[str, ...]:
    """Check that the evaluations are comparable; return notes on the data and the methods."""
    everything = [(name, run) for name, runs in methods.items() for run in runs]
    first_name, first = everything[0]
    notes = [_data_note(first)]
    for name, runs in methods.items():
        if any(one == other for one, other in itertools.combinations(runs, 2)):
            warn(f"an evaluation of {name!r} is given twice, and counts as two runs: give it once, or rename one")
    for name, run in everything[1:]:
        if (run.score, run.convention) != (first.score, first.convention):
            raise ConfigError(
                f"{first_name!r} was evaluated with score {first.score!r} and convention {first.convention!r}, "
                f"{name!r} with {run.score!r} and {run.convention!r}; use the same"
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
    """Notes on methods that saw, or may have seen, other samples than the first in sets of equal name and size."""
    (first_name, first), *others = everything
    notes = []
    unknown: dict[str, None] = {}  # ordered set of names
    for name, run in others:
        same = [key for key, count in run.samples.items() if first.samples.get(key) == count]
        differing = compare_traces(run.traces, first.traces, same)
        if differing.labels:
            other = f"the labels of {a_few(differing.labels)} differ between {name} and {first_name}"
            notes.append(_mismatch(other, allow_mismatch))
        if differing.inputs:
            why = "other samples, or the same prepared differently"
            notes.append(f"{name} was given other inputs than {first_name} in {a_few(differing.inputs)}: {why}.")
        if differing.unknown:
            unknown[name] = None
    if unknown:
        how = "sizes were compared, and labels where both recorded them"
        notes.append(f"Whether {', '.join(unknown)} saw the same samples as {first_name} is not known: {how}.")
    return notes


def _mismatch(what: str, allowed: bool) -> str:
    """Return the note on different data if that is allowed, otherwise raise."""
    if not allowed:
        raise DataError(f"{what}; evaluate both on the same data, or allow it (allow_mismatch=True, --allow-mismatch)")
    return f"Not the same data: {what}."


def _calibration_note(methods: Mapping[str, Sequence[Evaluation]]) -> str:
    """A note on which methods are calibrated, if not all or none are."""
    found = {name: {_is_calibrated(run) for run in runs} for name, runs in methods.items()}
    if len(set().union(*found.values())) == 1:
        return ""
    kinds = {"Calibrated": {True}, "not": {False}, "in part": {True, False}}
    listed = {kind: ", ".join(name for name in found if found[name] == which) for kind, which in kinds.items()}
    text = "; ".join(f"{kind}: {names}" for kind, names in listed.items() if names)
    return f"{text}. Compare Brier, NLL, ECE and aECE only among the calibrated, or only among the others."


def _reuse_note(methods: Mapping[str, Sequence[Evaluation]]) -> str:
    """A note on methods that were measured on samples they were trained or calibrated on."""
    shares = {name: max((run.reused or 0.0 for run in runs), default=0.0) for name, runs in methods.items()}
    listed = ", ".join(f"{name}, {about(share)}" for name, share in shares.items() if share)
    made = "trained the model, or fitted calibration or familiarity"
    return f"Measured on samples that {made} ({listed} of the set): better than on new data." if listed else ""


def _decline_note(methods: Mapping[str, Sequence[Evaluation]]) -> str:
    """A note on declined shares, if a model can abstain for two reasons."""
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
    return text + (" Declined shares are comparable where the same share is promised." if len(promises) > 1 else "")


def _data_note(evaluation: Evaluation) -> str:
    groups: dict[str, list[str]] = {}
    for name, result in evaluation.ood.items():
        groups.setdefault("OOD" if result.group == "ungrouped" else result.group, []).append(name)
    sets = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
    samples, right, common = evaluation.id.samples, evaluation.id.accuracy, evaluation.id.commonest
    share = (samples * right + 2) / (samples + 4)  # Agresti-Coull: not 1 if all are correct
    known = f"accuracy to ±{196 * math.sqrt(share * (1 - share) / (samples + 4)):.2g} points (95 %)"
    text = f"In distribution: {evaluation.id_name} ({samples:,} samples), which give {known}."
    if common is not None and 1 - right >= (1 - common) / 2:  # at least half the errors of a constant answer
        text += f" Always naming the most frequent class is right on {100 * common:.4g} %."
    if not sets:
        return text
    return f"{text} Out of distribution, {sets}. Score: {evaluation.score}; convention: {evaluation.convention}."


FORMAT = "hydra_ensembles.costs"


def save_costs(path: str | Path, costs: Iterable[Cost]) -> None:
    """Write the rows of `measure_costs` as JSON, with its digest."""
    write_sealed(expanded(path), {"format": FORMAT, "costs": to_plain(tuple(costs))})


def load_costs(path: str | Path) -> tuple[Cost, ...]:
    """Read a file that `save_costs` wrote.

    Raises:
        DataError: The file is missing or holds something else.
        ConfigError: A field does not hold what it should.
    """
    data = read_saved(path, "a table of costs")
    rows = data.get("costs") if data.get("format") == FORMAT else None
    if not isinstance(rows, list):
        raise DataError(f'{path} is not a table of costs: it lacks "format": "{FORMAT}", or the list of "costs"')
    return tuple(from_plain(Cost, row, f"{path}.costs[{index}]") for index, row in enumerate(rows))
