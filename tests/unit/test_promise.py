"""The pure rule behind a promise: kept as often as it says, whatever the confidences look like, and honest errors."""

import math

import numpy as np
import pytest
from scipy.stats import binom

import hydra_ensembles as he
from hydra_ensembles.errors import ConfigError, DataError, TooFewSamplesError
from hydra_ensembles.promise import Curve, first_counts, rows_needed

DRAWS = 400
STEPS = 200_000


def population(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Confidences, and the probability that an answer is wrong."""
    rng = np.random.default_rng(0)
    sure = 1 / (1 + np.exp(-np.abs(rng.normal(3.2, 2.2, STEPS))))
    if kind == "tied":  # a few values, and the surest are not the best
        sure = np.round(sure, 1)
        return sure, np.select([sure > 0.95, sure > 0.85], [0.045, 0.08], 0.3)
    if kind == "non-monotone":
        return sure, np.where((sure > 0.99) & (sure < 0.995), 0.4, 0.03)
    return sure, 1 - sure + 0.002


@pytest.mark.parametrize("kind", ["calibrated", "tied", "non-monotone"])
@pytest.mark.parametrize(("risk", "rows"), [(0.05, 600), (0.1, 300)])
def test_a_promise_is_broken_no_more_often_than_it_says(kind: str, risk: float, rows: int) -> None:
    sure, bad = population(kind)
    rng = np.random.default_rng(1)
    broken = 0
    for _ in range(DRAWS):
        some = rng.integers(0, STEPS, rows)
        curve = Curve.of(sure[some], rng.random(rows) < bad[some])  # as `certify` does, without its messages
        if count := curve.certified(risk, 0.05):
            broken += bad[sure >= curve.threshold(count)].mean() > risk
    assert broken <= binom.ppf(0.999, DRAWS, 0.05)


def test_it_accepts_more_than_four_starts_that_share() -> None:
    sure, bad = population("calibrated")
    rng = np.random.default_rng(2)
    shares = []
    for _ in range(100):
        some = rng.integers(0, STEPS, 1000)
        curve = Curve.of(sure[some], rng.random(1000) < bad[some])
        shares.append(curve.certified(0.05, 0.05) / 1000)
    assert np.mean(shares) >= 0.72  # the four starts of docs/promise.md


def test_the_threshold_accepts_the_rows_that_were_counted_in_their_dtype() -> None:
    rng = np.random.default_rng(3)
    sure = rng.random(2000).astype(np.float32).round(2)  # ties
    right = rng.random(2000) < 0.9 + 0.1 * sure
    promise = he.certify(sure, right, risk=0.06)
    accepted = sure >= np.float32(promise.threshold)
    assert (accepted.sum(), (~right[accepted]).sum()) == (promise.accepted_rows, promise.errors)
    assert promise.errors / promise.accepted_rows < promise.bound <= 0.06
    assert promise.accepted < promise.most
    assert "6 %" in str(promise)
    assert promise.tighter[0] == 0.05
    everything = he.certify(sure, np.ones(2000, bool), risk=0.01)
    assert (everything.threshold, everything.accepted) == (0, 1)


def test_first_counts_are_those_of_the_binomial_tail() -> None:
    counts = first_counts(2000, 0.02, 0.05)
    errors = np.arange(len(counts))
    assert (binom.cdf(errors, counts, 0.02) <= 0.05).all()
    assert (binom.cdf(errors, counts - 1, 0.02) > 0.05).all()


def test_a_single_search_is_mapies_fixed_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    control = pytest.importorskip("mapie.risk_control.fwer_control")
    monkeypatch.setattr("hydra_ensembles.promise.SEARCHES", ((0.1, 1.0),))
    sure, wrong = population("calibrated")
    draws, found = np.random.default_rng(5), []
    for risk in (0.02, 0.05, 0.1) * 10:
        rows = draws.choice(len(sure), 800, replace=False)
        curve = Curve.of(sure[rows], draws.random(800) < wrong[rows])
        counts = first_counts(800, risk, 0.05)
        counts = np.append(counts[counts >= 80], 800)
        p_values = binom.cdf(curve.errors[counts - 1], counts, risk)
        rejected = control.FWERFixedSequenceTesting().run(p_values, 0.05)
        found.append(counts[rejected].max(initial=0))
        assert curve.certified(risk, 0.05) == found[-1]
    assert len(set(found)) > 5


@pytest.mark.filterwarnings("ignore:Fixed sequence testing", "ignore:No predict parameters")
def test_a_single_search_is_mapies_controller_of_classifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors among the answers that are given are a risk with a condition; its thresholds must be listed beforehand."""
    control = pytest.importorskip("mapie.risk_control")
    monkeypatch.setattr("hydra_ensembles.promise.SEARCHES", ((0.1, 1.0),))
    selective = control.BinaryRisk(
        risk_occurrence=lambda truth, answer: answer != truth,
        risk_condition=lambda truth, answer: ~np.isnan(answer),
        higher_is_better=False,
    )
    sure, wrong = population("calibrated")
    draws, found = np.random.default_rng(6), []
    for risk in (0.02, 0.05, 0.1) * 10:
        rows = draws.choice(len(sure), 800, replace=False)
        probs = np.stack([sure[rows], 1 - sure[rows]], axis=1)  # class 0 is always the answer
        truth = (draws.random(800) < wrong[rows]).astype(int)
        curve = Curve.of(sure[rows], truth == 1)
        counts = first_counts(800, risk, 0.05)
        counts = np.append(counts[counts >= 80], 800)
        controller = control.MultiClassificationLTTController(
            lambda given: given,
            [selective],
            [risk],
            confidence_level=0.95,
            best_predict_param_choice=control.abstention_rate,
            list_predict_params=np.array([curve.threshold(count) for count in counts]),
            classes=[0, 1],
            fwer_method=control.FWERFixedSequenceTesting(),
        ).calibrate(probs, truth)
        count = curve.certified(risk, 0.05)
        found.append(count)
        assert controller.best_predict_param == (curve.threshold(count) if count else None)
        if count:
            assert (~np.isnan(controller.predict(probs))).sum() == count
    assert len(set(found)) > 5


def test_one_row_of_each_group_certifies() -> None:
    groups = [f"page {row // 4}" for row in range(4000)]
    promise = he.certify(np.linspace(0, 1, 4000), np.ones(4000, bool), 0.01, groups=groups)
    assert promise.rows == 1000 == promise.accepted_rows


def test_on_average_keeps_the_mean_and_says_so() -> None:
    sure, bad = population("calibrated")
    rng = np.random.default_rng(4)
    risks = []
    for _ in range(200):
        some = rng.integers(0, STEPS, 500)
        promise = he.certify(sure[some], rng.random(500) >= bad[some], 0.05, level=None)
        risks.append(bad[sure >= promise.threshold].mean())
    assert abs(np.mean(risks) - 0.05) < 0.002
    assert "on average" in str(promise)


def test_too_few_rows_name_the_ways_out() -> None:
    right = np.arange(212) >= 3
    with pytest.raises(TooFewSamplesError, match=r"at least 309.*212 were given, 3.*3.7 % can be promised"):
        he.certify(np.ones(212), right)
    assert he.certify(np.ones(212), right, risk=0.037).errors == 3  # what the message offers
    least = rows_needed(0.01, 0.95)
    assert he.certify(np.arange(least), np.ones(least, bool)).accepted == 1
    with pytest.raises(TooFewSamplesError):
        he.certify(np.arange(least - 1), np.ones(least - 1, bool))
    assert least == math.ceil(math.log(0.9 * 0.05) / math.log(0.99))


def test_bad_input() -> None:
    with pytest.raises(DataError, match="NaN"):
        he.certify([0.5, math.nan], [True, True])
    with pytest.raises(DataError, match="one each"):
        he.certify([0.5, 0.6], [True])
    with pytest.raises(ConfigError, match="risk"):
        he.certify([0.5], [True], risk=1)
    with pytest.raises(DataError, match="groups"):
        he.certify([0.5], [True], groups=["a", "b"])
