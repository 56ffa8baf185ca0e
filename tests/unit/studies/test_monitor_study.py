"""The study of the monitor: its cells are what they say, and a stopped run goes on where it was."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from studies import monitor, small
from studies.tables import read_csv


def never() -> Any:
    raise AssertionError("a finished cell is computed again")


def test_a_stopped_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {
        "unchanged-0": partial(monitor.unchanged_streams, 5, 320, 0),
        "audit": partial(monitor.doubled_errors, 5, 0.05, 0.2, 500, 0),
    }
    how = {"streams": 5, "rows": 320, "aged": 5}
    monkeypatch.setattr(monitor, "cells_of", lambda *_: cells | {"broken": never})
    with pytest.raises(AssertionError, match="computed again"):
        monitor.simulate(tmp_path / "table.csv", tmp_path / "work", **how)
    assert not (tmp_path / "table.csv").exists()
    monkeypatch.setattr(monitor, "cells_of", lambda *_: dict.fromkeys(cells, never))
    monitor.simulate(tmp_path / "table.csv", tmp_path / "work", **how)
    lines = read_csv(tmp_path / "table.csv")
    assert [line["part"] for line in lines] == ["no change", "interval"] * 2 + ["no change"] * 2 + ["audit"]
    assert lines[-1]["alarms"] == "5"


def test_changes_of_stored_rows_are_found() -> None:
    (same,) = monitor.foreign_rows("", "", 0.0, 1, 0)
    (foreign,) = monitor.foreign_rows("far", "svhn", 0.5, 1, 0)
    (mild,) = monitor.corrupted_rows(1, 0.0, 3, 0)
    (severe,) = monitor.corrupted_rows(5, 1.0, 3, 0)
    assert (same["alarms"], foreign["alarms"], mild["alarms"], severe["alarms"]) == (0, 5, 0, 3)
    assert 0 < foreign["median_delay"] < 100
    assert 0 < severe["median_delay"] < 300


def test_the_linear_classifier_is_one_of_plain_features() -> None:
    draws = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 3
    features = 100 + 5 * torch.eye(3)[labels] + torch.randn(300, 3, generator=draws)
    classifier = small.linear_classifier(features, labels, 3)
    assert (classifier(features).argmax(1) == labels).float().mean() > 0.95
