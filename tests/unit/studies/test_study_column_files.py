"""Columns come back as they were given, files of before are converted, and what is neither is refused."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from hydra_ensembles.errors import DataError
from hydra_ensembles.files import read_json, write_json
from studies.__main__ import app
from studies.column_files import read_columns, same_column, write_columns
from studies.measures import Array
from studies.stored import Study
from studies.storing import CONVERTED, FORMAT, STUDY, convert, forget, store

HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)  # every one there is: both zeros, infinities, all NaNs
COLUMNS: Mapping[str, Array] = {
    "rows": np.array(["Taylor", "Hydra (Circ), 3", "ß|∂"]),
    "Single|own|msp": HALVES,
    "Single|own|correct": np.arange(1001) % 3 == 0,
    "Single|own|mutual_information": np.array([1 / 3]),
    "Hydra|own|msp": HALVES[::-1],  # not in one piece
    "Hydra|own|correct": np.zeros(0, dtype=bool),
    "Hydra|own|entropy": np.zeros(0, dtype=np.float16),
    "Hydra|own|mutual_information": np.zeros(0),
    "": np.array([np.nan, -0.0, np.inf, 5e-324]),
}


def same(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    return one.keys() == other.keys() and all(same_column(column, other[name]) for name, column in one.items())


@pytest.mark.parametrize("names", [list(COLUMNS), ["rows"], ["Single|own|correct"], ["Hydra|own|entropy"], []])
def test_columns_come_back_as_they_were_given(tmp_path: Path, names: list[str]) -> None:
    given = {name: COLUMNS[name] for name in names}
    place = tmp_path / "a folder" / "seed-0.parquet"
    write_columns(place, given)
    found = read_columns(place)
    assert same(given, found)
    for column in found.values():
        column[:] = column  # may be written to
    first = place.read_bytes()
    write_columns(place, dict(reversed(given.items())))
    assert place.read_bytes() == first
    assert read_columns(tmp_path / "seed-1.parquet") == {}


def test_a_change_in_one_column_stays_there(tmp_path: Path) -> None:
    write_columns(tmp_path / "seed-0.parquet", COLUMNS)
    found = read_columns(tmp_path / "seed-0.parquet")
    found["Single|own|msp"][:] = 0
    assert same({**COLUMNS, "Single|own|msp": np.zeros_like(HALVES)}, found)


def test_equal_columns_are_equal_in_type_and_every_bit() -> None:
    one = np.array([0.0, np.nan])
    assert same_column(one, one.copy())
    for other in (one.astype(np.float16), one[:1], -one, np.array([0.0, 1.0])):
        assert not same_column(one, other)


def test_any_reader_opens_a_file(tmp_path: Path) -> None:
    """A line has its values in the list of their type; all of them lie in one row group."""
    write_columns(tmp_path / "seed-0.parquet", COLUMNS)
    table = pq.read_table(tmp_path / "seed-0.parquet")
    assert [str(one.type) for one in table.schema] == [
        "string",
        *(f"list<element: {kind}>" for kind in ("halffloat", "bool", "double", "string")),
    ]
    lines = {line.pop("name"): line for line in table.to_pylist()}
    assert lines["Single|own|mutual_information"] == {"float64": [1 / 3], "float16": None, "bool": None, "string": None}
    assert pq.read_metadata(tmp_path / "seed-0.parquet").num_row_groups == 1


@pytest.mark.parametrize(
    "wrong", [np.zeros(3, np.float32), np.zeros(3, int), np.zeros((2, 2)), np.array(0.5), np.array([None])]
)
def test_what_is_no_column_is_refused(tmp_path: Path, wrong: Array) -> None:
    with pytest.raises(DataError, match=f"'x' .* is {wrong.dtype.name}"):
        write_columns(tmp_path / "seed-0.parquet", {"x": wrong})
    assert not list(tmp_path.iterdir())


def test_files_that_are_damaged_or_something_else_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "seed-0.parquet"
    write_columns(place, COLUMNS)
    names = pq.read_table(place, columns=["name"])
    content = place.read_bytes()
    flipped = [bytearray(content) for _ in range(3)]
    for part, one in enumerate(flipped, start=1):
        one[len(content) * part // 5] ^= 1  # one bit, among the values
    for wrong in (b"", content[:-100], content[: len(content) // 2], *flipped):
        place.write_bytes(wrong)
        with pytest.raises(DataError, match="damaged"):
            read_columns(place)
    pq.write_table(names, place)
    with pytest.raises(DataError, match="a file of columns has"):
        read_columns(place)


def test_files_of_before_are_converted(tmp_path: Path) -> None:
    """Those of results and of run folders; until then nothing is read from them, stored beside them, or lost."""
    results, run = tmp_path / "results" / "task", tmp_path / "runs" / "task"
    old = [results / "seed-0.npz", results / "again-0-1a.npz", results / "shift-0.npz"]
    old += [run / "seed-0" / folder / "single.npz" for folder in ("report", "shift")]
    for place in [*old, run / "shifted.npz"]:
        place.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(place, allow_pickle=False, **{name: one for name, one in COLUMNS.items() if name})
    facts = {"format": CONVERTED, "runs": {"0": {"report": {"Single": {}, "Hydra": {}}}}, "trainings": {"Single": 1}}
    write_json(results / STUDY, facts)
    write_json(run / "seed-0" / "report" / "single.json", {})
    for refused in (
        lambda: Study("task", results.parent),
        lambda: forget(results, ["Hydra"]),
        lambda: store(run, results.parent, facts, lambda _: {}),
        lambda: store(run, tmp_path / "elsewhere", facts, lambda _: {}),
        lambda: read_columns(results / "seed-0.parquet"),
    ):
        with pytest.raises(DataError, match="python -m studies convert"):
            refused()
    told = CliRunner().invoke(app, ["convert", str(tmp_path)])
    assert "converted 5 files" in told.stdout
    for place in old:
        assert not place.exists()
        assert same(read_columns(place.with_suffix(".parquet")), {name: one for name, one in COLUMNS.items() if name})
    assert (run / "shifted.npz").exists()
    assert read_json(results / STUDY) == {**facts, "format": FORMAT}
    assert Study("task", results.parent).seeds("Hydra") == [0]
    assert convert(tmp_path) == []
    (results / "seed-0.parquet").unlink()
    with pytest.raises(DataError, match="lacks seed-0"):
        Study("task", results.parent).columns("Hydra", 0)


def test_a_file_of_before_goes_when_the_new_one_has_all_of_it(tmp_path: Path) -> None:
    old, new = tmp_path / "seed-0.npz", tmp_path / "seed-0.parquet"
    np.savez(old, x=np.zeros(3), y=np.ones(3))
    for other in ({"x": np.zeros(3)}, {"x": np.zeros(3), "y": np.zeros(3)}, {"x": np.zeros(3), "y": np.ones(3) > 0}):
        write_columns(new, other)
        with pytest.raises(DataError, match="other columns"):
            convert(tmp_path)
        assert old.exists()
    write_columns(new, {"x": np.zeros(3), "y": np.ones(3)})  # a conversion was killed here
    assert [path for path, _ in convert(tmp_path)] == [new]
    assert not old.exists()
    with pytest.raises(DataError, match="not a folder"):
        convert(tmp_path / "nowhere")
