"""AUROC, AUPR, FPR95 and the risk-coverage curve: hand-computed conventions, reference libraries, and bad input."""

import itertools

import numpy as np
import pytest
import torch
from cases import random_probs, random_scores, updated
from sklearn import metrics as sklearn_metrics

from hydra_ensembles.errors import DataError
from hydra_ensembles.metrics import augrc, aupr, aurc, auroc, fpr95, risk_coverage

T = torch.tensor


def joined(id_scores, ood_scores):
    scores = torch.cat([id_scores, ood_scores])
    return scores, torch.cat([torch.zeros(len(id_scores)), torch.ones(len(ood_scores))]).long()


def openood(id_scores, ood_scores):
    """The definitions of OpenOOD's evaluator, with every distinct score kept as a threshold."""
    scores, is_ood = (t.double().numpy() for t in joined(id_scores, ood_scores))
    fpr, tpr, _ = sklearn_metrics.roc_curve(is_ood, scores, drop_intermediate=False)
    precision, recall, _ = sklearn_metrics.precision_recall_curve(is_ood, scores)
    return {
        "auroc": sklearn_metrics.auc(fpr, tpr),
        "aupr": sklearn_metrics.auc(recall, precision),
        "fpr95": fpr[np.argmax(tpr >= 0.95)],
    }


def test_fpr95_takes_the_nearest_recall_or_the_first_sufficient_one():
    # 18 OOD samples on top, one ID below them, then the last OOD sample: recall is 18/19 = 0.947 or 1
    ood_scores = torch.cat([torch.linspace(0.8, 0.9, 18), T([0.1])])
    id_scores = T([0.5, 0.05])
    assert fpr95(id_scores, ood_scores, "openood") == 0.5  # recall 1, one of two ID samples flagged
    assert fpr95(id_scores, ood_scores, "torch-uncertainty") == 0.5  # recall 0.947, below the ID sample
    assert fpr95(T([0.05, 0.04]), ood_scores) == 0.0
    ood_scores = torch.cat([torch.linspace(0.8, 0.9, 19), T([0.1])])  # recall 0.95 exactly after 19
    id_scores = T([0.5, 0.4, 0.3, 0.05])
    assert fpr95(id_scores, ood_scores, "torch-uncertainty") == 0.75  # includes the following ID samples
    assert fpr95(id_scores, ood_scores, "openood") == 0.0


def test_torch_uncertainty_convention_equals_its_referee(referee, quiet):
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision

    for seed in range(40):
        id_scores, ood_scores = random_scores(seed)
        scores, is_ood = joined(id_scores, ood_scores)
        expected = updated(referee.FPR95(pos_label=1), scores, is_ood)
        assert fpr95(id_scores, ood_scores) == pytest.approx(expected, abs=1e-6), seed
        assert auroc(id_scores, ood_scores) == pytest.approx(float(binary_auroc(scores, is_ood)), abs=1e-5)
        expected = float(binary_average_precision(scores.float(), is_ood))
        assert aupr(id_scores, ood_scores) == pytest.approx(expected, abs=1e-5), seed


def test_openood_convention_equals_its_definition():
    for seed in range(30):
        id_scores, ood_scores = random_scores(seed)
        expected = openood(id_scores, ood_scores)
        assert auroc(id_scores, ood_scores, "openood") == pytest.approx(expected["auroc"], abs=1e-12)
        assert aupr(id_scores, ood_scores, "openood") == pytest.approx(expected["aupr"], abs=1e-12)
        assert fpr95(id_scores, ood_scores, "openood") == expected["fpr95"], seed


def test_auroc_counts_pairs_exactly():
    for seed in range(30):
        id_scores, ood_scores = random_scores(seed)
        difference = ood_scores.double()[:, None] - id_scores.double()[None, :]
        twice = 2 * int((difference > 0).sum()) + int((difference == 0).sum())
        assert auroc(id_scores, ood_scores) == twice / (2 * difference.numel())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8])
def test_every_dtype_keeps_the_order(dtype):
    id_scores, ood_scores = T([0, 3, 3, 200]).to(dtype), T([1, 3, 250]).to(dtype)
    assert auroc(id_scores, ood_scores) == 14 / 24
    for metric in (auroc, aupr, fpr95):
        assert metric(id_scores, ood_scores) == metric(id_scores.double(), ood_scores.double())


def test_mixed_dtypes_infinite_scores_and_half_precision():
    assert auroc(T([0.1]), T([0.1], dtype=torch.float64)) == 0  # 0.1 in float32 is above 0.1 in float64
    assert aupr(T([-torch.inf, 0.0]), T([torch.inf, 1.0]), "openood") == 1
    id_scores, ood_scores = torch.zeros(5000).half(), torch.ones(4000).half()  # more than half precision can count
    id_scores[:1250] = 2
    assert (auroc(id_scores, ood_scores), fpr95(id_scores, ood_scores)) == (0.75, 0.25)
    assert auroc(T([0, 1, 0, 1]), T([0, 2])) == 0.625  # counts are scores


def test_risk_coverage_by_hand():
    scores, errors = T([0.3, 0.1, 0.2, 0.4]), T([True, False, False, True])
    assert risk_coverage(scores, errors).coverage.tolist() == [0.25, 0.5, 0.75, 1]
    assert aurc(scores, errors) == pytest.approx((0 + 1 / 6 + 5 / 12) * 0.25 / 0.75)
    assert augrc(scores, errors) == pytest.approx((0 + 1 / 8 + 3 / 8) * 0.25 / 0.75)
    for coverage, risk in ((0.5, 0), (0.51, 1 / 3), (1.0, 0.5)):
        assert risk_coverage(scores, errors).at(coverage) == pytest.approx(risk)
    assert aurc(T([0.5]), T([True])) == risk_coverage(T([0.5]), T([True])).at(0.1) == 1  # one sample
    errors = torch.zeros(100)
    errors[7] = 1  # the eighth sample
    assert 100 * 0.07 > 7  # coverage is not lost to rounding
    assert risk_coverage(torch.arange(100.0), errors).at(0.07) == 0


def test_ties_count_by_their_mean_error_over_all_orders():
    """One member has zero mutual information everywhere: the result must not depend on the order of the data."""
    assert risk_coverage(torch.zeros(1000), torch.arange(1000) < 130).at(0.5) == pytest.approx(0.13)
    scores, errors = T([0.2, 0.1, 0.2, 0.2, 0.5, 0.5, 0.1]), T([0.0, 1.0, 2.0, 0.5, 0.0, 3.0, 0.0])
    within = (itertools.permutations(torch.where(scores == one)[0].tolist()) for one in scores.unique())
    risks = []
    for order in itertools.product(*within):
        risks.append(errors.double()[list(itertools.chain(*order))].cumsum(0) / torch.arange(1, 8))
    for rows in (torch.arange(7), torch.arange(7).flip(0)):
        torch.testing.assert_close(risk_coverage(scores[rows], errors[rows]).risk, torch.stack(risks).mean(0))


def test_risk_coverage_equals_the_referee(referee, quiet):
    for seed in range(30):
        probs, labels = random_probs(seed)
        confidence, predicted = probs.max(-1)
        if len(labels) < 2 or len(confidence.unique()) < len(labels):
            continue  # with equal confidences the reference's sort order is undefined
        errors = predicted != labels
        assert aurc(-confidence, errors) == pytest.approx(updated(referee.AURC(), probs, labels), abs=1e-5), seed
        assert augrc(-confidence, errors) == pytest.approx(updated(referee.AUGRC(), probs, labels), abs=1e-5), seed
        for coverage in (0.25, 0.8, 1.0):
            expected = updated(referee.RiskAtxCov(coverage), probs, labels)
            assert risk_coverage(-confidence, errors).at(coverage) == pytest.approx(expected, abs=1e-6), seed


DETECTION, RISK = (auroc, aupr, fpr95), (risk_coverage, aurc, augrc)


@pytest.mark.parametrize(
    ("functions", "first", "second", "token"),
    [
        (DETECTION, T([]), T([1.0]), "no ID scores"),
        (DETECTION, T([1.0, 2.0]), T([1.0, torch.nan]), "1 of 2 OOD scores are NaN, the first at index 1"),
        (RISK, T([0.1, 0.2]), T([True]), "2 scores, 1 errors"),
        (RISK, T([0.1, torch.nan]), T([True, False]), "1 of 2 scores are NaN"),
        (RISK, T([0.1, 0.2]), T([torch.nan, 0]), "1 of 2 errors are NaN"),
        (RISK, T([0.1, 0.2]), T([2, 0]), "like labels"),
    ],
)
def test_bad_scores_and_errors_are_refused(functions, first, second, token):
    for function in functions:
        with pytest.raises(DataError, match=token):
            function(first, second)
