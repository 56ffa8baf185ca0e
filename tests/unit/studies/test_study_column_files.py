"""Columns come back as they were given."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from studies.column_files import read_columns, write_columns
from studies.measures import Array

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


@pytest.mark.parametrize("names", [list(COLUMNS), ["rows"], ["Single|own|correct"], ["Hydra|own|entropy"], []])
def test_columns_come_back_as_they_were_given(tmp_path: Path, names: list[str]) -> None:
    given = {name: COLUMNS[name] for name in names}
    place = tmp_path / "a folder" / "seed-0.parquet"
    write_columns(place, given)
    found = read_columns(place)
    assert found.keys() == given.keys()
    for name, column in found.items():
        assert (column.dtype, column.tobytes()) == (given[name].dtype, given[name].tobytes())
        column[:] = column  # may be written to
    first = place.read_bytes()
    write_columns(place, dict(reversed(given.items())))
    assert place.read_bytes() == first
    assert read_columns(tmp_path / "seed-1.parquet") == {}
