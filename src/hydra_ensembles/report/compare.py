"""Comparison of evaluations: the columns, checks that the data are the same, and the notes a reader needs."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigError, DataError
from ..evaluation.evaluation import UNNAMED, Evaluation
from ..files import expanded, read_object, write_json
from ..model.cost import Cost
from ..settings import from_plain, to_plain
from .table import Cell, Column, Comparison, Direction, tabulated

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
COLUMNS: tuple[Column, ...] = (HEADS, *CLASSIFICATION, *OOD, SHIFT, *COST)
"""The columns of the paper's tables, accuracy under distribution shift, and the costs."""


def set_columns(names: Sequence[str], fitted: Sequence[str] = ()) -> tuple[Column, ...]:
    """Detection columns of single OOD sets, each with the AUROC of the `fitted` scores, such as `mahalanobis`."""
    columns: list[Column] = []
    for name in names:
        columns += _detection(f"ood.{name}", name)
        columns += (Column(f"{one}:ood.{name}.auroc", f"AUROC by {one}", name, "higher", scale=100) for one in fitted)
    return tuple(columns)


def columns_for(evaluations: Iterable[Evaluation], sets: Sequence[str] = ()) -> tuple[Column, ...]:
    """Default columns: `COLUMNS`, AUROC by fitted feature scores, and what models decline that abstain by them.

    Declined shares are ranked only if all models promise to accept the same share. `sets` are OOD sets to show by
    themselves.
    """
    runs = list(evaluations)
    fitted = list(dict.fromkeys(score for run in runs for score in run.fitted if score != run.score))
    titles = {**_MEANS, **{f"ood.{name}": name for name in sets}}
    added: list[Column] = []
    for score, (key, title) in product(fitted, _MEANS.items()):
        added.append(Column(f"{score}:{key}.auroc", title, f"AUROC by {score}", "higher", scale=100))
    if any(run.model.familiarity is not None for run in runs):
        better: Direction = "higher" if len({promise(run) for run in runs} - {None}) == 1 else "neither"
        added.append(Column("selective.accepted", "ID", "Accepted %", scale=100))
        added += (Column(f"{key}.abstained", title, "Declined %", better, scale=100) for key, title in titles.items())
    return (HEADS, *CLASSIFICATION, *OOD, SHIFT, *added, *COST, *set_columns(sets, fitted))


def promise(run: Evaluation) -> tuple[float, int] | None:
    """The share that each threshold of a model promises to accept, and its number of thresholds; None without any."""
    calibration, by_features = run.model.calibration, run.model.familiarity is not None
    if calibration is None or (calibration.threshold is None and not by_features):
        return None
    return calibration.accepted_share, (calibration.threshold is not None) + by_features


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
        >>> methods = {"whole": base, "pruned": he.prune(base, [(5, 0), (5, 1)])}
        >>> found = {name: he.evaluate(model, batches, progress=False) for name, model in methods.items()}
        >>> table = he.compare(found)
        >>> [row.name for row in table.rows]
        ['whole', 'pruned']
        >>> "| whole |" in str(table)
        True
    """
    methods = group_runs(evaluations)
    notes = _describe(methods, allow_mismatch)
    by_name = {cost.name: cost for cost in costs or ()}
    rows = {name: (runs, by_name.get(name)) for name, runs in methods.items()}
    if columns is None:
        columns = columns_for(run for runs in methods.values() for run in runs)
    if _calibration_note(methods):
        columns = [replace(column, ranked=False) if column.key in _BY_TEMPERATURE else column for column in columns]
    return tabulated(columns, rows, lambda column, row: _cell(column, *row), notes)


def group_runs(evaluations: Runs) -> dict[str, list[Evaluation]]:
    """Evaluations by method name, in the given order.

    In a list, equal names are runs of one method, so their models must match; unnamed evaluations are numbered. A
    mapping is taken as it is: the caller decided what belongs together.
    """
    methods: dict[str, list[Evaluation]] = {}
    if isinstance(evaluations, Mapping):
        methods = {name: [one] if isinstance(one, Evaluation) else list(one) for name, one in evaluations.items()}
    else:
        listed = list(evaluations)
        unnamed = [run for run in listed if run.name == UNNAMED]
        for run in listed:
            number = next(place for place, one in enumerate((*unnamed, run), 1) if one is run)
            name = f"{UNNAMED} {number}" if run.name == UNNAMED and len(unnamed) > 1 else run.name
            methods.setdefault(name, []).append(run)
            first, other = _make(methods[name][0]), _make(run)
            if first != other:
                unlike = ", ".join(
                    f"{key} ({first[key]} and {other[key]})" for key in first if first[key] != other[key]
                )
                advice = "give them different names (evaluate(name=)), or give compare a mapping {name: runs}"
                raise ConfigError(f"evaluations called {name!r} are of models that differ in {unlike}; {advice}")
    if not methods or not all(methods.values()):
        raise DataError("nothing to compare: give at least one evaluation of each method")
    return methods


def _make(run: Evaluation) -> dict[str, object]:
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
    (first_name, first), *others = [(name, run) for name, runs in methods.items() for run in runs]
    notes = [_data_note(first)]
    for name, run in others:
        if (run.score, run.convention) != (first.score, first.convention):
            raise ConfigError(
                f"{first_name!r} was evaluated with score {first.score!r} and convention {first.convention!r}, "
                f"{name!r} with {run.score!r} and {run.convention!r}; use the same"
            )
        problem = ""
        if run.samples != first.samples:
            problem = f"{name} was evaluated on {run.samples}, {first_name} on {first.samples}"
        elif differing := [
            key for key, one in run.sets.items() if not _same_labels(one.columns, first.sets[key].columns)
        ]:
            problem = f"the labels of {', '.join(differing)} differ between {name} and {first_name}"
        elif differing := [key for key, one in run.sets.items() if one.digest != first.sets[key].digest]:
            why = "other samples, or the same prepared differently"
            notes.append(f"{name} was given other inputs than {first_name} in {', '.join(differing)}: {why}.")
        if problem and not allow_mismatch:
            raise DataError(f"{problem}; evaluate both on the same data, or allow it (allow_mismatch=True)")
        notes += [f"Not the same data: {problem}."] if problem else []
    if any(len(runs) > 1 for runs in methods.values()):
        counts = ", ".join(f"{name}: {len(runs)}" for name, runs in methods.items())
        notes.append(f"Mean ± standard deviation over runs ({counts}).")
    notes += [note for note in (_calibration_note(methods), _decline_note(methods)) if note]
    return tuple(dict.fromkeys(notes))


def _same_labels(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether two sets have equally many samples of each class, however the models number the classes."""
    counts = [columns["label"].bincount().sort().values for columns in (ours, theirs) if "label" in columns]
    return len(counts) < 2 or torch.equal(*(one[one > 0] for one in counts))


def _calibration_note(methods: Mapping[str, Sequence[Evaluation]]) -> str:
    """A note on which methods are calibrated, if not all or none are."""
    found = {name: {_is_calibrated(run) for run in runs} for name, runs in methods.items()}
    if len(set().union(*found.values())) == 1:
        return ""
    kinds = {"Calibrated": {True}, "not": {False}, "in part": {True, False}}
    listed = {kind: ", ".join(name for name in found if found[name] == which) for kind, which in kinds.items()}
    text = "; ".join(f"{kind}: {names}" for kind, names in listed.items() if names)
    return f"{text}. Compare Brier, NLL, ECE and aECE only among the calibrated, or only among the others."


def _decline_note(methods: Mapping[str, Sequence[Evaluation]]) -> str:
    """A note on declined shares, if a model can abstain for two reasons."""
    runs = {name: runs[0] for name, runs in methods.items()}
    if not any(run.model.familiarity is not None for run in runs.values()):
        return ""
    promises = {name: found for name, run in runs.items() if (found := promise(run)) is not None}
    told = [f"{name} {100 * share:.4g} % by each of {count}" for name, (share, count) in promises.items()]
    return f"Declined: unsure, or unfamiliar by a fitted score. Thresholds promise to accept: {', '.join(told)}."


def _data_note(evaluation: Evaluation) -> str:
    groups: dict[str, list[str]] = {}
    for name, result in evaluation.ood.items():
        groups.setdefault("OOD" if result.group == "ungrouped" else result.group, []).append(name)
    sets = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
    samples, right, common = evaluation.id.samples, evaluation.id.accuracy, evaluation.id.commonest
    share = (samples * right + 2) / (samples + 4)  # Agresti-Coull: not 1 if all are correct
    known = f"accuracy to ±{196 * math.sqrt(share * (1 - share) / (samples + 4)):.2g} points (95 %)"
    text = f"In distribution: {evaluation.id_name} ({samples:,} samples), which give {known}."
    if 1 - right >= (1 - common) / 2:  # at least half the errors of a constant answer
        text += f" Always naming the most frequent class is right on {100 * common:.4g} %."
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
