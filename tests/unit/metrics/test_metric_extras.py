"""Which metrics need an extra, and what they say without it."""

import sys

import pytest
import torch

from hydra_ensembles import metrics
from hydra_ensembles.errors import MissingExtraError

SCORES = torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.15])
PROBS, LABELS = torch.tensor([[0.2, 0.8], [0.6, 0.4]]), torch.tensor([1, 1])


@pytest.fixture
def torch_alone(monkeypatch):
    """As if neither scikit-learn nor torchmetrics were installed."""
    for module in list(sys.modules):
        if module.partition(".")[0] in ("sklearn", "torchmetrics"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "torchmetrics", None)


def test_what_torch_alone_can_do(torch_alone):
    assert metrics.discordance(*SCORES) == 2
    assert metrics.auroc(*SCORES) == 0.75
    assert metrics.fpr95(*SCORES) == 0.5
    assert metrics.accuracy(PROBS, LABELS) == 0.5
    assert metrics.ece_of_confidence(*metrics.top_label(PROBS, LABELS)) == pytest.approx(0.4)
    assert metrics.bootstrap_ood("aupr", *SCORES, resamples=5).value == pytest.approx((1 + 2 / 3) / 2)


def test_what_needs_the_extra_says_so(torch_alone):
    for call, library in [
        (lambda: metrics.aupr(*SCORES), "sklearn"),
        (lambda: metrics.fpr95(*SCORES, "openood"), "sklearn"),
        (lambda: metrics.roc_curve(*SCORES), "sklearn"),
        (lambda: metrics.ece(PROBS, LABELS), "torchmetrics"),
    ]:
        with pytest.raises(MissingExtraError, match=rf"'{library}'.*hydra-ensembles\[metrics\]"):
            call()


def test_public_names_are_sorted_and_exist():
    assert metrics.__all__ == sorted(metrics.__all__)
    assert all(hasattr(metrics, name) for name in metrics.__all__)
