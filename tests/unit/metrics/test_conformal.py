"""Conformal thresholds, p-values and references of held-out scores: definitions and bad input."""

import math

import pytest
import torch

from hydra_ensembles.metrics import Reference, conformal_threshold
from hydra_ensembles.metrics.conformal import KEPT, rank_for, samples_for


def test_the_threshold_is_the_rank_of_split_conformal() -> None:
    scores = torch.arange(1.0, 20.0)[torch.randperm(19, generator=torch.Generator().manual_seed(0))]
    for share, expected in ((0.95, 19.0), (0.9, 18.0), (0.5, 10.0), (0.001, 1.0), (0.951, math.inf), (1.0, math.inf)):
        assert conformal_threshold(scores, share) == expected
    assert (samples_for(0.95), samples_for(0.9), samples_for(0.5), samples_for(1.0)) == (19, 9, 1, 0)
    assert all(rank_for(share, samples_for(share)) <= samples_for(share) for share in (0.01, 0.5, 0.9, 0.95, 0.99))


def test_p_values_by_hand_and_of_many_samples() -> None:
    by_hand = Reference.of(torch.tensor([3.0, 1.0, 2.0, 2.0]))
    found = by_hand.p_values(torch.tensor([0.0, 1.0, 2.0, 2.5, 4.0]))
    assert found.tolist() == pytest.approx([1, 1, 0.8, 0.4, 0.2])
    many = torch.randn(7 * KEPT + 13, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    reference, fresh = Reference.of(many), torch.linspace(-5, 5, 400, dtype=torch.float64)
    exact, rounded = Reference.of(many, most=None).p_values(fresh), reference.p_values(fresh)
    assert (len(reference.values), reference.samples) == (KEPT, len(many))
    assert (rounded >= exact - 1e-12).all()  # never too small, as promised
    assert (rounded - exact).max() <= 1 / KEPT + 1e-9
