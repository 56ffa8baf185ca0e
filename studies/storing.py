"""The stored form of a study of any kind: columns of every row, one file a seed, and all else in `study.json`.

Runs that share no models have a Single each. A run with all rows of a stored seed takes its place; of another, rows
that are not stored yet are added, and `again-N-….parquet` has the Single that they are held against. Sets that a suite
got since are shown when all rows were asked about them. `forget` takes rows out that are to be stored anew, `convert`
makes files of before what they are now.
"""

import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hydra_ensembles.errors import DataError
from hydra_ensembles.files import read_json, read_object, write_json

from .columns import BEFORE, read_columns, same_column, write_columns
from .measures import SHIFT, Array
from .seed_folder import CHOICES, REPORT, slug

FORMAT = "hydra_ensembles.study 4"
CONVERTED = "hydra_ensembles.study 3"  # the one before, whose columns were NumPy archives
STUDY = "study.json"
SINGLE = "Single"  # the row with the model a user has


def read_if_there(place: Path) -> Any:
    """What a JSON file holds; None where there is none."""
    return read_json(place) if place.exists() else None


def facts_of(place: Path) -> dict[str, Any] | None:
    """What `study.json` of a stored study says; None where there is none, and refused in another format."""
    if not (place / STUDY).exists():
        return None
    found = read_object(place / STUDY)
    if found.get("format") != FORMAT:
        remedy = f"; make it that with `python -m studies convert {place}`" if found.get("format") == CONVERTED else ""
        raise DataError(f"{place} has the format {found.get('format')!r}; this version reads {FORMAT!r}{remedy}")
    return found


def by_row(folder: Path, rows: Collection[str]) -> dict[str, Any]:
    """What a folder of a seed has of the rows, in their order."""
    places = {name: folder / f"{slug(name)}.json" for name in rows}
    return {name: read_json(place) for name, place in places.items() if place.exists()}


def choices_in(folder: Path) -> dict[str, Any]:
    """What held-out data chose, by row."""
    return {one["row"]: one for one in map(read_json, sorted((folder / CHOICES).glob("*.json")))}


def newest_costs(study: str, before: Any, found: Any, rows: Collection[str]) -> Any:
    """Costs that were found, or those of before, where some of their rows, of `rows` that there are, are not found.

    Only what was measured side by side can be compared, so no table has rows of both.
    """
    if before is None or found is None:
        return before if found is None else found
    left = [name for name in before["rows"] if name in rows and name not in found["rows"]]
    if left:
        print(
            f"{study}: costs stay as they were measured before, side by side with {', '.join(left)}; name all rows to "
            "measure them again",
            flush=True,
        )
    return before if left else found


def store(
    study: Path,
    results: Path,
    facts: Mapping[str, Any],
    of_seed: Callable[[int], Mapping[str, Any]],
) -> None:
    """Store every row and seed that is finished, beside what is stored.

    Args:
        study: Folder of the run.
        results: Folder of the results of all studies.
        facts: About the study as a whole; `trainings` has its rows, in the order of the tables.
        of_seed: What is known of a seed beside its columns, tables of what is finished, by its number.
    """
    place = results / study.name
    rows = facts["trainings"]
    known: dict[str, Any] = facts_of(place) or {"runs": {}}
    runs = dict(known["runs"])
    replaced = set[str]()
    for number in sorted(int(folder.name.removeprefix("seed-")) for folder in study.glob("seed-*")):
        folder = study / f"seed-{number}" / REPORT
        before = runs.get(str(number), {REPORT: {}})
        reports = by_row(folder, rows)
        if reports and SINGLE not in reports:
            print(f"{study.name}: rows of seed {number} wait for the Single that they are held against", flush=True)
        elif reports:
            whole = set(before[REPORT]) <= set(reports)
            if whole and known["runs"].pop(str(number), None) is not None:
                write_json(place / STUDY, known)  # half replaced, rows would be held against another run's Single
            taken = _store_columns(folder, place, number, list(reports), () if whole else before[REPORT])
            found = {**of_seed(number), REPORT: {name: reports[name] for name in taken}}
            runs[str(number)] = found if whole else _beside(before, found)
            replaced |= {str(number)} if whole else set()
    if not runs:
        raise DataError(f"{study} has no finished rows; run the stage `report`")
    stays: dict[str, Any] = {key: known[key] for key in ("choice",) if key in known and facts.get(key) is None}
    if "costs" in facts:
        stays["costs"] = newest_costs(study.name, known.get("costs"), facts["costs"], rows)
    if known["runs"].keys() - replaced:  # rows of before stay, which were asked about these sets and no others
        stays |= {key: known[key] for key in ("tasks", "groups") if key in known}
    choices = {"choices": {**known.get("choices", {}), **facts["choices"]}} if "choices" in facts else {}
    ordered = {number: runs[number] for number in sorted(runs, key=int)}
    write_json(place / STUDY, {"format": FORMAT, "study": study.name, **facts, **stays, **choices, "runs": ordered})


def forget(place: Path, rows: Collection[str]) -> None:
    """Take rows out of a stored study, so that another run can store them anew: their settings were wrong, say."""
    known = facts_of(place)
    if known is None:
        raise DataError(f"{place} has no stored study")
    there = {name for run in known["runs"].values() for name in run[REPORT]} - {SINGLE}
    if not rows or not there.issuperset(rows):
        raise DataError(f"{place} has the rows {sorted(there)}, each held against {SINGLE}; got {list(rows)}")
    tables = [known.get("choices", {}), *(one for run in known["runs"].values() for one in run.values())]
    for table, name in itertools.product(tables, rows):
        if isinstance(table, dict):
            table.pop(name, None)
    for file in sorted(place.glob("*.parquet")):
        kept = {key: one for key, one in read_columns(file).items() if key.partition("|")[0] not in rows}
        if "rows" in kept:  # those that a Single of a later run is for
            kept["rows"] = np.array([name for name in kept["rows"].tolist() if name not in rows])
        if len(kept.get("rows", kept)):
            write_columns(file, kept)
        else:
            file.unlink()
    write_json(place / STUDY, known)


def store_shift(folder: Path, place: Path, rows: Collection[str]) -> None:
    """Store what rows of a seed say about corrupted images, `shift-N.parquet`; a row has what was stored last."""
    file = place / f"{folder.name}-{folder.parent.name.removeprefix('seed-')}.parquet"
    found = {name: read_columns(folder / f"{slug(name)}.parquet") for name in rows}
    own = {key: one for name, columns in found.items() for key, one in named(name, columns).items()}
    write_columns(file, {**read_columns(file), **own})


def _store_columns(folder: Path, place: Path, number: int, found: list[str], before: Collection[str]) -> list[str]:
    """Write the columns of a seed beside those of rows of before, or in their place; which are stored now."""
    file = place / f"seed-{number}.parquet"
    own = {name: read_columns(folder / f"{slug(name)}.parquet") for name in found}
    kept = read_columns(file) if before else {}
    if not before:
        for older in _parts(place, number):
            older.unlink()
    else:
        single = own[SINGLE]
        own = {name: one for name, one in own.items() if name not in before or same_columns(named(name, one), kept)}
        if own and SINGLE not in own:
            told = hashlib.sha256(b"".join(single[key].tobytes() for key in sorted(single))).hexdigest()[:8]
            again = {"rows": np.array(list(own)), **named(SINGLE, single)}
            write_columns(place / f"again-{number}-{told}.parquet", again)
    for name, one in own.items():
        kept |= named(name, one)
    write_columns(file, kept)
    return list(own)


def _beside(before: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a seed after a second run: what was stored stays, what it did not have is added."""
    both = {key: {**one, **before.get(key, {})} if isinstance(one, dict) else one for key, one in found.items()}
    return {**both, **{key: one for key, one in before.items() if not isinstance(one, dict)}}


def single_of(folder: Path, number: int) -> dict[str, dict[str, Array]]:
    """Rows of a stored seed that came with a Single of their own, and its columns."""
    found: dict[str, dict[str, Array]] = {}
    for file in _parts(folder, number):
        columns = read_columns(file)
        found |= dict.fromkeys(columns["rows"].tolist(), of_row(SINGLE, columns))
    return found


def named(row: str, columns: Mapping[str, Array]) -> dict[str, Array]:
    """Columns of a row, among those of others."""
    return {f"{row}|{key}": one for key, one in columns.items()}


def of_row(row: str, columns: Mapping[str, Array]) -> dict[str, Array]:
    """The columns of a row by itself."""
    prefix = f"{row}|"
    return {key.removeprefix(prefix): columns[key] for key in columns if key.startswith(prefix)}


def _parts(folder: Path, number: int) -> list[Path]:
    return sorted((*folder.glob(f"again-{number}.parquet"), *folder.glob(f"again-{number}-*.parquet")))


def same_columns(columns: Mapping[str, Array], stored: Mapping[str, Array]) -> bool:
    """Whether all of these columns are stored, with the same values."""
    return all(key in stored and np.array_equal(one, stored[key]) for key, one in columns.items())


def convert(folder: Path) -> list[tuple[Path, int]]:
    """Make columns that were written before, as NumPy archives, what they are now: in results, or in a run folder.

    Each new file is read back and held against the old one, bit by bit, before that goes; what is left after a kill is
    converted the next time.

    Returns:
        The new files, each with the bytes that the old one had.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    made = []
    for old in sorted(one for one in folder.rglob(f"*{BEFORE}") if _has_columns(one)):
        new = old.with_suffix(".parquet")
        with np.load(old, allow_pickle=False) as file:
            columns = dict(file)
        if not new.exists():
            write_columns(new, columns)
        found = read_columns(new)
        if found.keys() != columns.keys() or not all(same_column(one, found[name]) for name, one in columns.items()):
            raise DataError(f"{new} has other columns than {old}; remove the one that is wrong")
        made.append((new, old.stat().st_size))
        old.unlink()
    for place in sorted(folder.rglob(STUDY)):
        known = read_json(place)
        if known.get("format") == CONVERTED:
            write_json(place, {**known, "format": FORMAT})
    return made


def _has_columns(file: Path) -> bool:
    """Whether an archive is of a row, in the folder of a seed, or a stored one; corrupted images stay what they are."""
    return file.parent.name in (REPORT, SHIFT) or file.name.startswith(("seed-", "again-", f"{SHIFT}-"))
