"""The study of the promise: it is kept in small simulations, and its table of shares follows from stored rows."""

from pathlib import Path

import numpy as np
import pytest

from hydra_ensembles.errors import TooFewSamplesError
from hydra_ensembles.promise import certify
from studies import promise


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
    found = list(promise.lines(results, "text-sst2"))
    assert {line[2] for line in found} == {*promise.METHODS.values(), *promise.CHAINS}
    assert all(0 <= float(line[7]) <= 1 for line in found)


def test_traffic_of_a_cascade_comes_from_stored_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promise, "CALIBRATIONS", 1)
    results = Path(promise.__file__).parents[1] / "results"
    found = list(promise.traffic_lines(results, "text-sst2"))
    assert len(found) == 5 * 2 * 2 * 2 * 2  # seeds, cascades, traffic, rules, limits
    assert all(float(line[7]) <= 0.25 for line in found if line[6])
