"""Risk-coverage curve, its area, and the risk at a coverage."""

import pytest
import torch
from cases import random_probs, updated

from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.metrics.selective import aurc, risk_at_coverage, risk_coverage

T = torch.tensor


def test_by_hand():
    scores, errors = T([0.3, 0.1, 0.2, 0.4]), T([True, False, False, True])
    curve = risk_coverage(scores, errors)
    assert curve.coverage.tolist() == [0.25, 0.5, 0.75, 1]
    assert curve.risk.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 2])
    assert aurc(scores, errors) == pytest.approx((0 + 1 / 6 + 5 / 12) * 0.25 / 0.75)
    assert risk_at_coverage(scores, errors, 0.5) == 0
    assert risk_at_coverage(scores, errors, 0.51) == pytest.approx(1 / 3)
    assert risk_at_coverage(scores, errors, 1.0) == 0.5
    assert aurc(T([0.5]), T([True])) == risk_at_coverage(T([0.5]), T([True]), 0.1) == 1  # one sample


def test_coverage_is_not_lost_to_rounding():
    errors = torch.zeros(100)
    errors[7] = 1  # the eighth sample
    assert 100 * 0.07 > 7
    assert risk_at_coverage(torch.arange(100.0), errors, 0.07) == 0


def test_random_cases_equal_the_referee(referee, quiet):
    for seed in range(150):
        probs, labels = random_probs(seed)
        confidence, predicted = probs.max(-1)
        if len(labels) < 2 or len(confidence.unique()) < len(labels):
            continue  # with equal confidences the order of the referee's sort is not defined
        errors = predicted != labels
        assert aurc(-confidence, errors) == pytest.approx(updated(referee.AURC(), probs, labels), abs=1e-5), seed
        for coverage in (0.25, 0.5, 0.8, 1.0):
            expected = updated(referee.RiskAtxCov(coverage), probs, labels)
            assert risk_at_coverage(-confidence, errors, coverage) == pytest.approx(expected, abs=1e-6), seed


def test_ties_equal_the_referee_under_a_stable_sort(referee, quiet, monkeypatch):
    unstable = torch.Tensor.argsort
    monkeypatch.setattr(
        torch.Tensor, "argsort", lambda scores, descending: unstable(scores, descending=descending, stable=True)
    )
    for seed in range(80):
        g = torch.Generator().manual_seed(seed)
        first = torch.randint(0, 9, (int(torch.randint(2, 70, (), generator=g)),), generator=g) / 8
        probs = torch.stack([first, 1 - first], dim=1)
        labels = torch.randint(0, 2, (len(first),), generator=g)
        confidence, predicted = probs.max(-1)
        expected = updated(referee.AURC(), probs, labels)
        assert aurc(-confidence, predicted != labels) == pytest.approx(expected, abs=1e-5), seed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores_and_errors(dtype):
    g = torch.Generator().manual_seed(0)
    scores = torch.rand(5000, generator=g).to(dtype)
    errors = torch.rand(5000, generator=g) < 0.5
    assert aurc(scores, errors.to(dtype)) == aurc(scores.float(), errors)


@pytest.mark.parametrize(
    ("scores", "errors", "token"),
    [
        (T([]), T([]), "no scores"),
        (T([0.1, 0.2]), T([True]), "2 scores, 1 errors"),
        (T([0.1, torch.nan]), T([True, False]), "1 of 2 scores are NaN"),
        (T([0.1, 0.2]), T([torch.nan, 0]), "1 of 2 errors are NaN"),
        (T([0.1, 0.2]), T([[1, 0]]), "vector"),
    ],
)
def test_bad_input_is_named(scores, errors, token):
    for metric in (risk_coverage, aurc, risk_at_coverage):
        with pytest.raises(DataError, match=f"set 'val'.*{token}"):
            metric(scores, errors, name="val")
    for coverage in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="coverage="):
            risk_at_coverage(T([0.1]), T([True]), coverage)
