"""Conformal thresholds, p-values and label sets: definitions, simulated coverage, a reference library, bad input."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.metrics import LabelSets, Reference, conformal_threshold, fit_sets, p_values
from hydra_ensembles.metrics.conformal import KEPT, label_scores, rank_for, samples_for

KINDS = ["lac", "aps", "raps"]


def answers(count: int, classes: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Calibrated probabilities: labels are drawn from them."""
    generator = torch.Generator().manual_seed(seed)
    probs = (3 * torch.randn(count, classes, generator=generator, dtype=torch.float64)).softmax(-1)
    return probs, torch.multinomial(probs, 1, generator=generator)[:, 0]


def test_the_threshold_is_the_rank_of_split_conformal() -> None:
    scores = torch.arange(1.0, 20.0)[torch.randperm(19, generator=torch.Generator().manual_seed(0))]
    for share, expected in ((0.95, 19.0), (0.9, 18.0), (0.5, 10.0), (0.001, 1.0), (0.951, math.inf), (1.0, math.inf)):
        assert conformal_threshold(scores, share) == expected
    assert (samples_for(0.95), samples_for(0.9), samples_for(0.5), samples_for(1.0)) == (19, 9, 1, 0)
    assert all(rank_for(share, samples_for(share)) <= samples_for(share) for share in (0.01, 0.5, 0.9, 0.95, 0.99))


def test_p_values_by_hand_and_of_many_samples() -> None:
    held_out = torch.tensor([3.0, 1.0, 2.0, 2.0])
    assert p_values(held_out, torch.tensor([0.0, 1.0, 2.0, 2.5, 4.0])).tolist() == pytest.approx([1, 1, 0.8, 0.4, 0.2])
    shifted = held_out - 2.5  # integers are compared as they are, and half precision counts beyond 65,504
    assert p_values(shifted, torch.tensor([-1, 0])).tolist() == pytest.approx([0.8, 0.4])
    assert p_values(torch.tensor([0, 1, 1]), torch.tensor([1])).item() == pytest.approx(0.75)
    assert p_values(shifted.repeat(20_000), torch.zeros(1).half()).item() == pytest.approx(0.25, abs=1e-4)
    many = torch.randn(7 * KEPT + 13, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    reference, fresh = Reference.of(many), torch.linspace(-5, 5, 400, dtype=torch.float64)
    exact, rounded = p_values(many, fresh), reference.p_values(fresh)
    assert (len(reference.values), reference.samples) == (KEPT, len(many))
    assert (rounded >= exact - 1e-12).all()  # never too small, as promised
    assert (rounded - exact).max() <= 1 / KEPT + 1e-9


def test_scores_of_labels_and_sets_agree_with_torch_uncertainty(conformal_referee) -> None:
    probs, labels = answers(300)
    plain = {"alpha": 0.1, "model": nn.Identity(), "enable_ts": False}
    aps = conformal_referee.ConformalClsAPS(**plain, randomized=False)
    raps = conformal_referee.ConformalClsRAPS(**plain, randomized=False, penalty=0.2, regularization_rank=2)
    torch.testing.assert_close(label_scores(probs, "aps", 0.2, 2), aps._calculate_all_labels(probs))
    torch.testing.assert_close(label_scores(probs, "raps", 0.2, 2), raps._calculate_all_labels(probs))
    referee, sets = conformal_referee.ConformalClsTHR(**plain), fit_sets(probs, labels, 0.9)
    # its own ignores the finite-sample correction, and its scores are one minus the probability
    referee.q_hat = 1 - torch.tensor(-sets.thresholds[0]).exp()
    assert torch.equal(sets(probs), referee.conformal(probs.log()) > 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_class", [False, True])
def test_sets_hold_the_right_label(kind: str, by_class: bool) -> None:
    """Mean coverage over 400 draws of held-out and fresh samples; by class, over 100, for each class."""
    covered = []
    for seed in range(100 if by_class else 400):
        probs, labels = answers(360, seed=seed)
        sets = fit_sets(probs[:240], labels[:240], 0.8, kind, by_class=by_class)  # type: ignore[arg-type]
        found, wanted = sets(probs[240:]), labels[240:]
        assert found.any(dim=-1).all()
        inside = found.gather(1, wanted[:, None])[:, 0].double()
        groups = [inside[wanted == one].mean().item() for one in range(6)] if by_class else [inside.mean().item()]
        covered.append(groups)
    means = np.nanmean(covered, axis=0)
    assert (means >= 0.8 - (0.015 if by_class else 0.008)).all(), means
    if kind == "aps":
        assert means.max() < 0.97  # not trivially 1


def test_few_samples_of_a_class_keep_its_label_in() -> None:
    probs, labels = answers(60, classes=3)
    kept = torch.cat([(labels != 2).nonzero()[:, 0], (labels == 2).nonzero()[:2, 0]])
    sets = fit_sets(probs[kept], labels[kept], 0.9, by_class=True)
    assert sets.thresholds[2] == math.inf
    assert sets(probs)[:, 2].all()
    with pytest.raises(DataError, match=r"\[2\]"):
        fit_sets(probs[labels != 2], labels[labels != 2], by_class=True)
    halves = LabelSets((0.7,))(torch.tensor([[0.6, 0.4], [0.5, 0.5]]))  # -log 0.5 is 0.69
    assert halves.tolist() == [[True, False], [True, True]]


def test_sets_of_saturated_answers_are_no_larger_than_needed() -> None:
    probs, labels = answers(200)
    sharp = (40 * probs.log()).softmax(-1).float()  # one minus most of these is 1 in float32
    assert fit_sets(sharp, labels, 0.9)(sharp).sum(1).double().mean() < 3


@pytest.mark.parametrize(
    ("call", "error", "token"),
    [
        (lambda: conformal_threshold(torch.ones(0), 0.9), DataError, "no scores"),
        (lambda: conformal_threshold(torch.tensor([1.0, math.nan]), 0.9), DataError, "NaN"),
        (lambda: fit_sets(torch.ones(1, 2), torch.tensor([0])), DataError, "sum to one"),
        (lambda: LabelSets((0.5,))(torch.tensor([[2.0, -1.0]])), DataError, "softmax"),
        (lambda: LabelSets((0.5, 0.5, 0.5))(torch.ones(1, 2) / 2), DataError, "3 classes"),
        (lambda: Reference((2.0, 1.0), 2), ConfigError, "sorted"),
    ],
)
def test_what_cannot_be_used_is_named(call, error, token) -> None:
    with pytest.raises(error, match=token):
        call()
