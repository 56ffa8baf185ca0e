"""Bootstrap intervals: the numbers of a plain loop, correct coverage, and pairing."""

from typing import Any

import numpy as np
import pytest
import torch
from cases import random_scores

from hydra_ensembles import metrics
from hydra_ensembles.errors import DataError
from hydra_ensembles.metrics import (
    adaptive_ece_of_confidence,
    aurc,
    bootstrap_metric,
    bootstrap_ood,
    ece_of_confidence,
    ood,
)
from hydra_ensembles.metrics.bootstrap import bootstrap_calibration, bootstrap_mean, ood_replicates, paired
from hydra_ensembles.metrics.ood import weighted_aurc
from hydra_ensembles.metrics.probabilities import weighted_adaptive_ece, weighted_ece, weighted_mean

T = torch.tensor
POINT_METRICS = {"auroc": metrics.auroc, "aupr": metrics.aupr, "fpr95": metrics.fpr95}


def mean(values):
    return values.double().mean().item()


def gaussian_scores(seed, n=300, m=200, shift=1.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=g), torch.randn(m, generator=g) + shift


def drawn(scores, rng):
    return scores[rng.integers(len(scores), size=len(scores))]


@pytest.mark.parametrize("convention", ["torch-uncertainty", "openood"])
@pytest.mark.parametrize("metric", POINT_METRICS)
def test_value_and_replicates_equal_the_metric_on_each_resample(metric, convention):
    point = POINT_METRICS[metric]
    for seed in range(5):  # includes ties, constants and half precision
        id_scores, ood_scores = random_scores(seed)
        value, replicates = ood_replicates(metric, id_scores, ood_scores, convention, 20, seed)
        assert value == pytest.approx(point(id_scores, ood_scores, convention), abs=1e-12)
        id_rng, ood_rng = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
        expected = [point(drawn(id_scores, id_rng), drawn(ood_scores, ood_rng), convention) for _ in range(20)]
        np.testing.assert_allclose(replicates, expected, atol=1e-12)


def test_pieces_do_not_change_the_result_and_seeds_do(monkeypatch):
    id_scores, ood_scores = gaussian_scores(0)
    whole = bootstrap_ood("auroc", id_scores, ood_scores, resamples=50)
    assert whole.low != bootstrap_ood("auroc", id_scores, ood_scores, resamples=50, seed=2).low
    monkeypatch.setattr("hydra_ensembles.metrics.bootstrap._DRAWS_AT_ONCE", 1500)
    assert bootstrap_ood("auroc", id_scores, ood_scores, resamples=50) == whole


def test_mean_interval_has_the_width_of_the_standard_error_and_a_basic_one_is_mirrored():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0))
    interval = bootstrap_metric(mean, [values])
    assert interval.value == pytest.approx(mean(values))
    assert (interval.high - interval.low) / 2 == pytest.approx(1.96 * values.std().item() / 20, rel=0.1)
    narrower = bootstrap_metric(mean, [values], level=0.5)
    assert interval.low < narrower.low < narrower.value < narrower.high < interval.high
    wrong = torch.rand(400, generator=torch.Generator().manual_seed(1)) < 0.5  # wrong half the time, yet confident
    error = (lambda sure, right: mean(sure) - mean(right)), torch.ones(400), ~wrong
    plain, basic = bootstrap_metric(error[0], error[1:], resamples=100), bootstrap_calibration(*error, 100)
    mirrored = (plain.value, 2 * plain.value - plain.high, 2 * plain.value - plain.low)
    assert (basic.value, basic.low, basic.high) == pytest.approx(mirrored)
    together = bootstrap_metric(lambda one, other: mean(one == other), [values, values], resamples=20)
    assert together.low == 1  # several arrays are resampled together


@pytest.mark.parametrize(("count", "draws_at_once"), [(1, 7), (31, 310)])
def test_mean_of_paired_differences_is_the_difference_of_means(monkeypatch, count, draws_at_once):
    """With the same draws, however many at once: for correctness values, also where the result is due to chance."""
    monkeypatch.setattr("hydra_ensembles.metrics.bootstrap._DRAWS_AT_ONCE", draws_at_once)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        ours, theirs = (torch.rand(2, count, generator=generator) < 0.6).double()
        one = bootstrap_metric(lambda right: float(right.mean()), [ours], minus=[theirs], resamples=200, seed=seed)
        other = bootstrap_mean(ours - theirs, resamples=200, seed=seed)
        assert (other.level, other.resamples, other.high >= 0) == (one.level, one.resamples, one.high >= 0)
        assert (other.value, other.low, other.high) == pytest.approx((one.value, one.low, one.high), abs=1e-15)


def test_a_rare_loss_that_no_sample_has_is_allowed_for():
    """One in a hundred loses more than the others gain: a sample of fifty without one has a positive mean."""
    gains, held = torch.full((50,), 1.0), []
    assert bootstrap_mean(gains).low == 1
    assert bootstrap_mean(gains, unseen=-150.0).low < -0.5  # the true mean: 0.99 - 1.5
    assert bootstrap_mean(gains, unseen=-150.0).high == 1
    for seed in range(40):
        lost = torch.rand(50, generator=torch.Generator().manual_seed(seed)) < 0.01
        held.append(-0.51 in bootstrap_mean(torch.where(lost, -150.0, 1.0), unseen=-150.0, resamples=200))
    assert np.mean(held) > 0.9


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    truth = 0.5 * (1 + torch.erf(T(0.5)).item())  # AUROC of unit Gaussians one apart: P(N(1, 2) > 0)
    hits = [truth in bootstrap_ood("auroc", *gaussian_scores(seed), resamples=150, level=0.8) for seed in range(100)]
    assert 0.72 <= np.mean(hits) <= 0.88


def test_ood_interval_over_several_sets_shares_the_id_draws():
    id_scores, near = gaussian_scores(0)
    far = near + 2
    both = bootstrap_ood("auroc", id_scores, [near, far], resamples=100)
    alone = [bootstrap_ood("auroc", id_scores, scores, resamples=100) for scores in (near, far)]
    assert both.value == pytest.approx((alone[0].value + alone[1].value) / 2)
    # an OOD set far away is always detected: the mean's interval is half of the other set's
    certain = bootstrap_ood("auroc", id_scores, [near, near + 1000], resamples=100)
    assert certain.high - certain.low == pytest.approx((alone[0].high - alone[0].low) / 2)


def test_paired_difference_is_sharper_than_two_intervals():
    id_scores, ood_scores = gaussian_scores(0)
    g = torch.Generator().manual_seed(1)
    worse = (id_scores + 0.1 * torch.randn(300, generator=g), ood_scores - 0.1)
    difference = bootstrap_ood("auroc", id_scores, ood_scores, minus=worse)
    assert difference.value == pytest.approx(metrics.auroc(id_scores, ood_scores) - metrics.auroc(*worse))
    assert 0 not in difference
    single = bootstrap_ood("auroc", id_scores, ood_scores)
    assert difference.high - difference.low < (single.high - single.low) / 2
    same = bootstrap_ood("fpr95", id_scores, ood_scores, minus=(id_scores, ood_scores))
    assert (same.value, same.low, same.high) == (0, 0, 0)


ONES = torch.ones(3)


def test_pairs_of_different_numbers_are_refused():
    with pytest.raises(DataError, match=r"\[3, 2\]"):
        bootstrap_ood("auroc", ONES, ONES, minus=(ONES, ONES[:2]))
    with pytest.raises(DataError, match="2 rows in array 1"):
        bootstrap_metric(mean, [ONES, ONES[:2]])


def resampled(samples: int, count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows drawn with replacement `[R, B]`, and how often each was drawn `[R, B]`."""
    rows = torch.randint(samples, (count, samples), generator=torch.Generator().manual_seed(0))
    return rows, torch.stack([row.bincount(minlength=samples) for row in rows]).double()


@pytest.mark.parametrize("samples", [1, 7, 60])
@pytest.mark.parametrize(
    ("weighted", "plain"),
    [
        (weighted_ece, ece_of_confidence),
        (weighted_adaptive_ece, adaptive_ece_of_confidence),
        (weighted_aurc, aurc),
        (weighted_mean, lambda values, _: values.double().mean().item()),
    ],
)
def test_weights_count_samples_as_often_as_they_were_drawn(samples: int, weighted: Any, plain: Any) -> None:
    values = torch.linspace(0, 1, samples).mul(20).round() / 20  # with ties
    right = values > 0.4
    columns = (values,) if weighted is weighted_mean else (values, right)
    rows, weights = resampled(samples)
    expected = torch.tensor([plain(values[row], right[row]) for row in rows])
    torch.testing.assert_close(weighted(weights, *columns).float(), expected)


@pytest.mark.parametrize("metric", ["auroc", "aupr", "fpr95"])
def test_detection_counts_samples_as_often_as_they_were_drawn(metric: Any) -> None:
    scores, sets = torch.arange(40.0).mul(7).remainder(11), torch.arange(40) % 3  # with ties
    rows, weights = resampled(40)
    parts = [[scores[row[sets[row] == number]] for number in range(3)] for row in rows]
    expected = [sum(getattr(ood, metric)(inside, outside) for outside in others) / 2 for inside, *others in parts]
    torch.testing.assert_close(ood.detection(metric)(weights, scores, sets).tolist(), expected)


def test_intervals_agree_with_theory_and_pairs_cancel_common_noise() -> None:
    values = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    found = paired(weighted_mean, [values], resamples=2000)
    assert found.high - found.low == pytest.approx(2 * 1.96 / 2000**0.5, rel=0.1)
    difference = paired(weighted_mean, [values + 0.1], [values], resamples=50)
    assert (difference.low, difference.high) == pytest.approx((0.1, 0.1))


def test_groups_keep_their_sizes() -> None:
    groups = torch.tensor([0] * 5 + [1] * 2)
    sizes = paired(lambda weights, group: (weights * group).sum(1), [groups], strata=groups, resamples=20)
    assert (sizes.low, sizes.high) == (2.0, 2.0)


def test_a_calibrated_model_may_have_no_calibration_error() -> None:
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(500, generator=generator)
    right = torch.rand(500, generator=generator) < confidence
    assert paired(weighted_ece, [confidence, right], mirrored=True).low == 0.0
    assert paired(weighted_ece, [confidence, right.roll(250)], mirrored=True).low > 0.0
