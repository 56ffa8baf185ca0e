"""Columns are read back as they were written."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy.special import entr, softmax

from studies.column_files import read_columns, write_columns
from studies.measures import Array
from studies.storing import thinned, whole

HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)  # all float16 values: both zeros, infinities, all NaNs
COLUMNS: Mapping[str, Array] = {
    "rows": np.array(["Taylor", "Hydra (Circ), 3", "ß|∂"]),
    "Single|own|msp": HALVES,
    "Single|own|correct": np.arange(1001) % 3 == 0,
    "Single|own|mutual_information": np.array([1 / 3]),
    "Hydra|own|msp": HALVES[::-1],  # not contiguous
    "Hydra|own|correct": np.zeros(0, dtype=bool),
    "Hydra|own|entropy": np.zeros(0, dtype=np.float16),
    "Hydra|own|mutual_information": np.zeros(0),
    "": np.array([np.nan, -0.0, np.inf, 5e-324]),
}


def test_columns_come_back_as_they_were_given(tmp_path: Path) -> None:
    place = tmp_path / "a folder" / "seed-0.parquet"
    write_columns(place, COLUMNS)
    found = read_columns(place)
    assert found.keys() == COLUMNS.keys()
    for name, column in found.items():
        assert (column.dtype, column.tobytes()) == (COLUMNS[name].dtype, COLUMNS[name].tobytes())
    assert read_columns(tmp_path / "seed-1.parquet") == {}


@pytest.mark.parametrize("classes", [2, 50])
def test_what_follows_from_doubt_is_not_kept_and_comes_back(classes: int) -> None:
    """NLL of correct answers and entropy of two classes follow from doubt, unless it is too small for float16.

    Brier scores and distances are rounded.
    """
    draws = np.random.default_rng(0)
    probs = softmax(draws.exponential(6, (500, 1)) * draws.normal(size=(500, classes)), axis=1)  # [N, C]
    labels, answers = draws.integers(classes, size=500), probs.argmax(axis=1)
    labels[::2] = answers[::2]
    places = np.arange(500)
    columns = {
        "own|correct": answers == labels,
        "own|msp": 1 - probs[places, answers],
        "own|nll": -np.log(probs[places, labels]),
        "own|brier": ((probs - np.eye(classes)[labels]) ** 2).sum(axis=1),
        "own|entropy": entr(probs).sum(axis=1),
        "own|mahalanobis": draws.uniform(256, 511, 500),
        "ood|nll": np.ones(3),  # has no doubt column
    }
    kept = {name: column.astype(bool if "correct" in name else np.float16) for name, column in columns.items()}
    thin = thinned(kept)
    gone = {name.partition("|")[2]: np.isnan(column) for name, column in thin.items() if name.startswith("own")}
    assert (gone["nll"] == columns["own|correct"]).mean() > 0.99
    assert gone["entropy"].mean() > 0.9 if classes == 2 else not gone["entropy"].any()
    assert not gone["msp"].any()
    back = whole(thin)
    for name, column in back.items():
        assert column.dtype == kept[name].dtype
        step = 2.0**-15 if "brier" in name else 2.0**-23
        np.testing.assert_allclose(column.astype(float), kept[name].astype(float), rtol=2.0**-8, atol=step)
