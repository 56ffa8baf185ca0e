"""The stored form of a study of any kind: the columns of every row, one file per seed, and all else in `study.json`.

Runs that share no models have a Single each. A run with all rows of a stored seed replaces it; from another run, rows
that are not stored yet are added, and `again-N-….parquet` has the Single that they are compared with. Sets added to a
suite later are shown once all rows have results on them. `forget` removes rows that are to be stored again.

To save space, numbers that follow from doubt are NaN in the files and are recomputed on reading: `nll`, `brier` and
`entropy` if they equal those of two classes of which the likelier is right (always true of `nll` of right answers).
Brier scores, which are only averaged, are multiples of 2^-14, and distances, which are only ranked, have nine bits.
"""

import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import entr

from hydra_ensembles.errors import DataError
from hydra_ensembles.files import read_json, read_object, write_json

from .column_files import read_columns, write_columns
from .measures import CALIBRATED, DOUBT, Array, Floats
from .seed_folder import CHOICES, REPORT, slug

FORMAT = "hydra_ensembles.study 5"
STUDY = "study.json"
SINGLE = "Single"  # the row with the model a user has
FOLLOW: Mapping[str, Callable[[Floats], Floats]] = {  # from doubt, for two classes
    "nll": lambda doubt: -np.log1p(-doubt),
    "brier": lambda doubt: 2 * doubt**2,
    "entropy": lambda doubt: entr(doubt) + entr(1 - doubt),
}
ROUNDING, SMALLEST = 2.0**-9, 2.0**-24  # relative rounding, in float16, of doubt and what follows; smallest step there
COARSE: Mapping[str, Callable[[Floats], Floats]] = {  # columns stored with fewer bits than float16 has
    "brier": lambda values: np.round(values * 2.0**14) / 2.0**14,
    "mahalanobis": lambda values: _significant(values, 9),
}
FEW = 0.1  # share of a column below which storing NaNs saves no space


def read_if_there(path: Path) -> Any:
    """The content of a JSON file; None if it does not exist."""
    return read_json(path) if path.exists() else None


def facts_of(folder: Path) -> dict[str, Any] | None:
    """The content of a stored study's `study.json`; None if it does not exist, and an error if its format differs."""
    if not (folder / STUDY).exists():
        return None
    facts = read_object(folder / STUDY)
    if facts.get("format") != FORMAT:
        raise DataError(f"{folder} has the format {facts.get('format')!r}; this version reads {FORMAT!r}")
    return facts


def by_row(folder: Path, rows: Collection[str]) -> dict[str, Any]:
    """The JSON files of the given rows in a seed's folder, in their order."""
    paths = {name: folder / f"{slug(name)}.json" for name in rows}
    return {name: read_json(path) for name, path in paths.items() if path.exists()}


def choices_in(folder: Path) -> dict[str, Any]:
    """The settings that held-out data chose, by row."""
    return {choice["row"]: choice for choice in map(read_json, sorted((folder / CHOICES).glob("*.json")))}


def newest_costs(study: str, before: Any, measured: Any, rows: Collection[str]) -> Any:
    """The costs measured now; the old ones if these have rows, among `rows`, that were not measured now.

    Only models measured together can be compared, so no table mixes both.
    """
    if before is None or measured is None:
        return before if measured is None else measured
    gone = [name for name in before["rows"] if name in rows and name not in measured["rows"]]
    if gone:
        print(
            f"{study}: costs stay as they were measured before, side by side with {', '.join(gone)}; name all rows to "
            "measure them again",
            flush=True,
        )
    return before if gone else measured


def store(study: Path, results: Path, facts: Mapping[str, Any], of_seed: Callable[[int], Mapping[str, Any]]) -> None:
    """Store every finished row and seed, beside what is already stored.

    Args:
        study: Folder of the run.
        results: Folder of the results of all studies.
        facts: About the study as a whole; `trainings` has its rows, in the order of the tables.
        of_seed: By seed number, facts besides the columns, as tables by row.
    """
    target = results / study.name
    rows = facts["trainings"]
    stored: dict[str, Any] = facts_of(target) or {"runs": {}}
    runs = dict(stored["runs"])
    replaced = set[str]()
    for number in sorted(int(folder.name.removeprefix("seed-")) for folder in study.glob("seed-*")):
        folder = study / f"seed-{number}" / REPORT
        before = runs.get(str(number), {REPORT: {}})
        reports = by_row(folder, rows)
        if reports and SINGLE not in reports:
            print(f"{study.name}: rows of seed {number} wait for the Single that they are compared with", flush=True)
        elif reports:
            whole = set(before[REPORT]) <= set(reports)
            if whole and stored["runs"].pop(str(number), None) is not None:
                write_json(target / STUDY, stored)  # first: half replaced, rows would be compared with another Single
            added = _store_columns(folder, target, number, list(reports), () if whole else before[REPORT])
            run = {**of_seed(number), REPORT: {name: reports[name] for name in added}}
            runs[str(number)] = run if whole else _beside(before, run)
            replaced |= {str(number)} if whole else set()
    if not runs:
        raise DataError(f"{study} has no finished rows; run the stage `report`")
    stays: dict[str, Any] = {key: stored[key] for key in ("choice",) if key in stored and facts.get(key) is None}
    if "costs" in facts:
        stays["costs"] = newest_costs(study.name, stored.get("costs"), facts["costs"], rows)
    if stored["runs"].keys() - replaced:  # earlier rows stay, which have results only on these sets
        stays |= {key: stored[key] for key in ("tasks", "groups") if key in stored}
    choices = {"choices": {**stored.get("choices", {}), **facts["choices"]}} if "choices" in facts else {}
    ordered = {number: runs[number] for number in sorted(runs, key=int)}
    write_json(target / STUDY, {"format": FORMAT, "study": study.name, **facts, **stays, **choices, "runs": ordered})


def forget(folder: Path, rows: Collection[str]) -> None:
    """Remove rows from a stored study, so that another run can store them again, for example after wrong settings."""
    facts = facts_of(folder)
    if facts is None:
        raise DataError(f"{folder} has no stored study")
    present = {name for run in facts["runs"].values() for name in run[REPORT]} - {SINGLE}
    if not rows or not present.issuperset(rows):
        raise DataError(f"{folder} has the rows {sorted(present)}, each compared with {SINGLE}; got {list(rows)}")
    tables = [facts.get("choices", {}), *(table for run in facts["runs"].values() for table in run.values())]
    for table, name in itertools.product(tables, rows):
        if isinstance(table, dict):
            table.pop(name, None)
    for file in sorted(folder.glob("*.parquet")):
        columns = {key: column for key, column in read_columns(file).items() if key.partition("|")[0] not in rows}
        if "rows" in columns:  # the rows that a later run's Single belongs to
            columns["rows"] = np.array([name for name in columns["rows"].tolist() if name not in rows])
        if len(columns.get("rows", columns)):
            write_columns(file, columns)
        else:
            file.unlink()
    write_json(folder / STUDY, facts)


def store_shift(folder: Path, target: Path, rows: Collection[str]) -> None:
    """Store a seed's results on corrupted images in `shift-N.parquet`; a row's latest results win."""
    file = target / f"{folder.name}-{folder.parent.name.removeprefix('seed-')}.parquet"
    read = {name: read_columns(folder / f"{slug(name)}.parquet") for name in rows}
    added = {key: column for name, columns in read.items() for key, column in named(name, columns).items()}
    write_columns(file, {**read_columns(file), **added})


def _store_columns(folder: Path, target: Path, number: int, rows: list[str], before: Collection[str]) -> list[str]:
    """Write a seed's columns beside the rows stored before, or in their place; return the rows that are stored now."""
    file = target / f"seed-{number}.parquet"
    new = {name: thinned(read_columns(folder / f"{slug(name)}.parquet")) for name in rows}
    stored = read_columns(file) if before else {}
    if not before:
        for older in _again_files(target, number):
            older.unlink()
    else:
        single = new[SINGLE]
        other = list[str]()  # rows of another training; calibration may differ by version
        for name, one in new.items():
            answers = {key: column for key, column in named(name, one).items() if CALIBRATED not in key}
            other += [] if same_columns(answers, stored) else [name]
        left = ", ".join(name for name in other if name in before and name != SINGLE)
        if left:
            lacking = ", ".join(name for name in before if name not in new)
            told = f"stay as stored before: this run lacks {lacking}; make these too, or `forget` the stored rows"
            print(f"{target.name}: of seed {number}, {left} {told}", flush=True)
        new = {name: one for name, one in new.items() if name not in before}
        if new and SINGLE in other:
            digest = hashlib.sha256(b"".join(single[key].tobytes() for key in sorted(single))).hexdigest()[:8]
            again = {"rows": np.array(list(new)), **named(SINGLE, single)}
            write_columns(target / f"again-{number}-{digest}.parquet", again)
    for name, columns in new.items():
        stored |= named(name, columns)
    write_columns(file, stored)
    return list(new)


def _beside(before: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a seed after a second run: stored entries are kept, new ones are added."""
    joined = {key: {**value, **before.get(key, {})} if isinstance(value, dict) else value for key, value in run.items()}
    return {**joined, **{key: value for key, value in before.items() if not isinstance(value, dict)}}


def single_of(folder: Path, number: int) -> dict[str, dict[str, Array]]:
    """By row, the columns of the row's own Single; only rows of a stored seed that came with one."""
    singles: dict[str, dict[str, Array]] = {}
    for file in _again_files(folder, number):
        columns = whole(read_columns(file))
        singles |= dict.fromkeys(columns["rows"].tolist(), in_rows(columns)[SINGLE])
    return singles


def named(row: str, columns: Mapping[str, Array]) -> dict[str, Array]:
    """Prefix the columns of a row or a set with its name."""
    return {f"{row}|{key}": column for key, column in columns.items()}


def in_rows(columns: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """Columns grouped by row or set, without its name."""
    rows: dict[str, dict[str, Array]] = {}
    for key, column in columns.items():
        row, _, name = key.partition("|")
        rows.setdefault(row, {})[name] = column
    return rows


def thinned(columns: Mapping[str, Array]) -> dict[str, Array]:
    """Columns as stored in files: what follows from doubt is NaN, and some are rounded."""

    def kept(name: str, column: Array) -> Array:
        coarsen = COARSE.get(name.rpartition("|")[2].removeprefix(CALIBRATED))
        coarse = column if coarsen is None else coarsen(column.astype(np.float64)).astype(column.dtype)
        if (follows := _following(columns, name)) is None:
            return coarse
        same = np.abs(column - follows) <= ROUNDING * follows + SMALLEST
        return coarse if same.mean() < FEW else np.where(same, np.array(np.nan, column.dtype), coarse)

    return {name: kept(name, column) for name, column in columns.items()}


def _significant(values: Floats, bits: int) -> Floats:
    """Values rounded to so many significant bits."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits)


def whole(columns: Mapping[str, Array]) -> dict[str, Array]:
    """Columns of a file with what follows from doubt filled in."""

    def filled(name: str, column: Array) -> Array:
        follows = _following(columns, name)
        return column if follows is None else np.where(np.isnan(column), follows, column).astype(column.dtype)

    return {name: filled(name, column) for name, column in columns.items()}


def _following(columns: Mapping[str, Array], name: str) -> Floats | None:
    """The values of a column computed from its doubt; None if it does not follow from doubt."""
    place, _, column = name.rpartition("|")
    prefix = CALIBRATED if column.startswith(CALIBRATED) else ""
    follow, doubt = FOLLOW.get(column.removeprefix(prefix)), columns.get(f"{place}|{DOUBT[prefix]}")
    return None if follow is None or doubt is None else follow(doubt.astype(np.float64))


def _again_files(folder: Path, number: int) -> list[Path]:
    return sorted(folder.glob(f"again-{number}-*.parquet"))


def same_columns(columns: Mapping[str, Array], stored: Mapping[str, Array]) -> bool:
    """Whether all of these columns are stored, with the same values."""
    return all(key in stored and column.tobytes() == stored[key].tobytes() for key, column in columns.items())
