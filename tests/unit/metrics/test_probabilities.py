"""Accuracy, Brier, NLL, calibration errors and diversity: hand-computed conventions, references, and bad input."""

import math

import pytest
import torch
from cases import random_member_probs, random_probs, updated

from hydra_ensembles import metrics
from hydra_ensembles.errors import DataError
from hydra_ensembles.metrics.probabilities import (
    differing_pairs,
    log_mean_probs,
    of_all,
    split_entropy,
    squared_errors,
    weighted_adaptive_ece,
    weighted_ece,
)

T = torch.tensor


def binary(*confidences):
    """Two-class rows whose first class has the given probability."""
    first = T(confidences)
    return torch.stack([first, 1 - first], dim=1)


def test_accuracy_brier_and_nll():
    assert metrics.accuracy(binary(*[0.9] * 9, 0.2), torch.zeros(10, dtype=torch.long)) == 0.9  # exact
    probs = T([[0.7, 0.2, 0.1], [0.0, 0.0, 1.0]])
    assert squared_errors(probs, T([0, 0])).tolist() == pytest.approx([0.14, 2.0])
    assert metrics.brier(probs, T([0, 0])) == pytest.approx(1.07)
    assert metrics.nll(binary(0.5, 0.2), T([1, 1])) == pytest.approx(math.log(2.5) / 2)
    assert metrics.nll(binary(1.0), T([1], dtype=torch.uint8)) == math.inf
    logits = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(log_mean_probs(logits), logits.softmax(-1).mean(0).log())
    assert log_mean_probs(T([[[0.0, 2000.0]], [[0.0, 1000.0]]]))[0, 0].isfinite()  # probabilities underflow to zero


def test_ece_has_a_bin_of_its_own_for_certainty():
    # 1.0 (wrong) and 0.95 (right) would cancel to |1 - 1.95| if they shared the last bin
    probs, labels = binary(1.0, 0.95), T([1, 0])
    assert metrics.ece(probs, labels) == pytest.approx((1.0 + 0.05) / 2)
    rounded = T([[1.0000001, 0.0], [0.0, 1.0000001], [0.75, 0.25]])  # still probabilities, not logits
    assert metrics.ece(rounded, T([0, 1, 0])) == pytest.approx(0.25 / 3, abs=1e-6)


def test_random_cases_equal_the_referees(referee, quiet):
    from torchmetrics.functional.classification import multiclass_accuracy

    for seed in range(30):
        probs, labels = random_probs(seed)
        classes = probs.shape[1]
        expected = float(multiclass_accuracy(probs, labels, classes, average="micro"))
        assert metrics.accuracy(probs, labels) == pytest.approx(expected, abs=1e-6)
        expected = updated(referee.BrierScore(num_classes=classes), probs, labels)
        assert metrics.brier(probs, labels) == pytest.approx(expected, abs=1e-5), seed
        expected = updated(referee.CategoricalNLL(), probs, labels)
        assert metrics.nll(probs, labels) == pytest.approx(expected, rel=1e-4, abs=1e-5), seed
        expected = updated(referee.CalibrationError(task="multiclass", num_bins=15, num_classes=classes), probs, labels)
        assert metrics.ece(probs, labels) == pytest.approx(expected, abs=1e-5), seed
        adaptive = referee.AdaptiveCalibrationError(task="multiclass", num_bins=15, num_classes=classes)
        expected = updated(adaptive, probs, labels)
        if len(labels) >= 15 and len(probs.amax(-1).unique()) == len(labels):
            assert metrics.adaptive_ece(probs, labels) == pytest.approx(expected, abs=1e-5), seed
        elif len(labels) < 15:
            assert math.isnan(expected)  # why the empty bins are dropped here
            confidence, correct = metrics.top_label(probs, labels)
            gaps = (confidence - correct.float()).abs()
            assert metrics.adaptive_ece(probs, labels) == pytest.approx(gaps.mean().item(), abs=1e-6)


def test_the_order_of_the_data_changes_no_calibration_error():
    """Also not with equal confidences that span several bins."""
    right = torch.arange(300) < 240  # sorted, as by class
    assert of_all(weighted_adaptive_ece, torch.full((300,), 0.8), right) == pytest.approx(0.0, abs=1e-7)
    generator = torch.Generator().manual_seed(0)
    confidence = torch.randint(1, 9, (300,), generator=generator) / 8
    found = of_all(weighted_adaptive_ece, confidence, right)
    for _ in range(5):
        rows = torch.randperm(300, generator=generator)
        assert of_all(weighted_adaptive_ece, confidence[rows], right[rows]) == pytest.approx(found, abs=1e-12)


def test_diversity_equals_the_referee(referee, quiet):
    for seed in range(30):
        probs = random_member_probs(seed)
        if seed % 3 == 0:  # many equal probabilities
            counts = (4 * probs).ceil()
            probs = counts / counts.sum(-1, keepdim=True)
        by_sample = probs.transpose(0, 1)  # the reference expects [B, M, C]
        expected = updated(referee.MutualInformation(), by_sample)
        assert split_entropy(probs).epistemic.mean().item() == pytest.approx(expected, abs=1e-5), seed
        assert differing_pairs(probs).mean().item() == pytest.approx(
            updated(referee.Disagreement(), by_sample), abs=1e-6
        ), seed
        assert split_entropy(probs[:1]).epistemic.max() < 1e-6  # one member


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("classes", [2, 1000])
def test_half_precision_equals_the_same_values_in_float32(dtype, classes):
    g = torch.Generator().manual_seed(1)
    probs = (3 * torch.randn(1000, classes, generator=g)).softmax(-1).to(dtype)
    labels = torch.randint(0, classes, (1000,), generator=g)
    # widened rows sum to one only within half precision, so compare what `top_label` returns
    confidence, correct = metrics.top_label(probs, labels)
    assert confidence.dtype == torch.float32
    assert metrics.ece(probs, labels) == pytest.approx(of_all(weighted_ece, confidence, correct), abs=1e-5)
    widened = of_all(weighted_ece, confidence.to(dtype), correct)  # exact: values came from this dtype
    assert widened == of_all(weighted_ece, confidence, correct)
    assert metrics.adaptive_ece(probs, labels) == of_all(weighted_adaptive_ece, confidence, correct)
    per_sample = (probs.float() - torch.nn.functional.one_hot(labels, classes)).square().sum(-1)
    assert metrics.brier(probs, labels) == pytest.approx(per_sample.mean().item(), abs=1e-5)


PROBS, LABELS = binary(0.5, 0.75), T([0, 1])


@pytest.mark.parametrize(
    ("given", "token"),
    [
        ((PROBS, T([0])), "class numbers"),  # it would be broadcast
        ((PROBS, T([0, 2])), "from 0 to 2"),
        ((T([[0.5, torch.nan], [1, 0]]), LABELS), r"1 of 4.*\(0, 1\)"),
        ((T([[3.0, -2.0], [1, 0]]), LABELS), "softmax"),
    ],
)
def test_what_no_number_can_be_made_of_is_refused(given, token):
    for function in (metrics.top_label, metrics.brier, metrics.nll):
        with pytest.raises(DataError, match=token):
            function(*given)
