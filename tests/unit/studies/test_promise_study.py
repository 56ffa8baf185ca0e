"""The study of the promise: it is kept in small simulations, and its table of shares follows from stored rows."""

from pathlib import Path

import numpy as np
import pytest

from hydra_ensembles.errors import TooFewSamplesError
from hydra_ensembles.promise import certify
from studies import promise
from studies.rows import Rows, write_rows

SOME = ("Single", "Soup")


@pytest.mark.parametrize(("kind", "rule"), [("not monotone", "confidence"), ("tied", "familiarity")])
def test_promises_are_kept(kind: str, rule: str) -> None:
    *_, broken, accepted, _, _ = promise.cell(kind, rule, 500, 0.05, 60)
    assert broken <= 0.15  # 5 % are allowed
    assert 0 <= accepted < 1


def test_promises_by_label_are_kept_together() -> None:
    *_, broken, accepted, _, _ = promise.cell("calibrated, by label", "label", 1000, 0.05, 60)
    assert broken <= 0.15
    assert accepted > 0.3


def test_the_threshold_is_that_of_certify() -> None:
    draws = np.random.default_rng(0)
    sure = draws.random(900).round(2)
    wrong = draws.random(900) > 0.85 + 0.15 * sure
    assert promise.threshold_of(sure, wrong, 0.05, 0.95) == certify(sure, ~wrong, 0.05).threshold
    with pytest.raises(TooFewSamplesError):
        certify(sure, ~wrong, 0.001)
    assert promise.threshold_of(sure, wrong, 0.001, 0.95) == np.inf


def test_shares_come_from_stored_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promise, "CALIBRATIONS", 1)
    results = Path(promise.__file__).parents[1] / "results"
    found = promise.lines(results, "text-sst2")
    compared = {promise.METHODS[method] for method in Rows.read(results / "rows" / "text-sst2.parquet").runs}
    assert {line[2] for line in found} == {promise.TODAY, *compared, *promise.CHAINS}
    assert all(0 <= float(line[7]) <= 1 for line in found)


def test_foreign_traffic_and_held_out_rows_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out rows that a study stored certify too; of mixed traffic every foreign answer is wrong."""
    monkeypatch.setattr(promise, "CALIBRATIONS", 2)
    draws = np.random.default_rng(0)

    def said(rows: int, place: str) -> dict[str, np.ndarray]:
        doubt = draws.random(rows) / 2
        inside = {"correct": draws.random(rows) > doubt**3, "calibrated_doubt": doubt, "calibrated_nll": doubt}
        common = {"doubt": doubt, "mahalanobis": draws.random(rows) + (place == "cars")}
        return {f"known|{place}|{key}": one for key, one in {**common, **({} if place == "cars" else inside)}.items()}

    sets = {"known": 1500, "held-out": 900, "cars": 300}
    by_run = {(name, 0): {k: v for place, rows in sets.items() for k, v in said(rows, place).items()} for name in SOME}
    about = {"tasks": {"known": {"near": [], "far": ["cars"]}}, "backbone": "small"}
    (tmp_path / "rows").mkdir()
    write_rows(tmp_path / "rows" / "new.parquet", about, by_run)
    assert promise.compared(tmp_path) == ["new"]
    found = {(line[2], line[4], line[6]): line for line in promise.lines(tmp_path, "new")}
    line = found["soup", 0.05, "confidence"]
    accepted, errors, foreign, _, _, far, far_errors = (float(one or "nan") for one in line[7:14])
    assert line[1] == "small"
    assert line[-2] == 1200  # half of the test and held-out rows
    assert far == pytest.approx(0.8 * accepted + 0.2 * foreign, abs=2e-4)
    assert far_errors == pytest.approx((0.8 * accepted * errors + 0.2 * foreign) / far, abs=0.01)
    assert foreign > 0.1  # by confidence alone they look like known ones
    assert float(found["soup", 0.05, "confidence and familiarity"][9]) < 0.01


def test_traffic_of_a_cascade_comes_from_stored_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promise, "CALIBRATIONS", 1)
    results = Path(promise.__file__).parents[1] / "results"
    found = list(promise.traffic_lines(results, "text-sst2"))
    assert len(found) == 5 * 2 * 2 * 2 * 2  # seeds, cascades, traffic, rules, limits
    assert all(float(line[7]) <= 0.25 for line in found if line[6])
