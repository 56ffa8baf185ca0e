"""Bootstrap intervals: weights count samples as a loop over resamples would, coverage of the truth, and pairing."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hydra_ensembles.metrics import aurc, auroc, ood
from hydra_ensembles.metrics.bootstrap import Interval, paired
from hydra_ensembles.metrics.ood import detection, weighted_aurc
from hydra_ensembles.metrics.probabilities import of_all, weighted_adaptive_ece, weighted_ece, weighted_mean


def gaussian_scores(seed: int, n: int = 300, m: int = 200) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=g), torch.randn(m, generator=g) + 1


def of_auroc(*parts: Tensor, minus: tuple[Tensor, ...] | None = None, **options: Any) -> Interval:
    """The interval of the mean AUROC of ID scores against each of the OOD sets."""
    sets = torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts)])
    others = None if minus is None else [torch.cat(minus), sets]
    return paired(detection("auroc"), [torch.cat(parts), sets], others, strata=sets, **options)


def resampled(samples: int, count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows drawn with replacement `[R, B]`, and how often each was drawn `[R, B]`."""
    rows = torch.randint(samples, (count, samples), generator=torch.Generator().manual_seed(0))
    return rows, torch.stack([row.bincount(minlength=samples) for row in rows]).double()


@pytest.mark.parametrize("samples", [1, 7, 60])
@pytest.mark.parametrize(
    ("weighted", "plain"),
    [
        (weighted_ece, partial(of_all, weighted_ece)),
        (weighted_adaptive_ece, partial(of_all, weighted_adaptive_ece)),
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


def test_pieces_do_not_change_the_result_and_seeds_do(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = gaussian_scores(0)
    whole = of_auroc(*scores, resamples=50)
    assert whole.low != of_auroc(*scores, resamples=50, seed=2).low
    monkeypatch.setattr("hydra_ensembles.metrics.bootstrap._DRAWS_AT_ONCE", 1500)
    assert of_auroc(*scores, resamples=50) == whole


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    truth = 0.5 * (1 + torch.erf(torch.tensor(0.5)).item())  # AUROC of unit Gaussians one apart: P(N(1, 2) > 0)
    hits = [truth in of_auroc(*gaussian_scores(seed), resamples=150, level=0.8) for seed in range(100)]
    assert 0.72 <= np.mean(hits) <= 0.88


def test_a_paired_difference_is_sharper_than_two_intervals() -> None:
    id_scores, ood_scores = gaussian_scores(0)
    g = torch.Generator().manual_seed(1)
    worse = (id_scores + 0.1 * torch.randn(300, generator=g), ood_scores - 0.1)
    difference, single = of_auroc(id_scores, ood_scores, minus=worse), of_auroc(id_scores, ood_scores)
    assert difference.value == pytest.approx(auroc(id_scores, ood_scores) - auroc(*worse))
    assert 0 not in difference
    assert difference.high - difference.low < (single.high - single.low) / 2
