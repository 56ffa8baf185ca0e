"""Mutual information, disagreement and variation ratio of member probabilities."""

import math

import pytest
import torch
from cases import random_member_probs, updated

from hydra_ensembles.errors import DataError
from hydra_ensembles.metrics.diversity import (
    disagreement,
    disagreement_per_sample,
    entropy_parts,
    mutual_information,
    variation_ratio,
    variation_ratio_per_sample,
)

T = torch.tensor


def votes(*classes, of=3):
    """Certain members that vote for the given classes, one sample: `[M, 1, C]`."""
    return torch.nn.functional.one_hot(T(classes), of).float().unsqueeze(1)


def test_disagreement_by_hand():
    assert disagreement(votes(0, 0, 1)) == pytest.approx(2 / 3)  # one of three pairs agrees
    assert disagreement(votes(0, 1, 2)) == 1
    assert disagreement(votes(1, 1, 1)) == 0
    assert disagreement(votes(2)) == 0  # one member: nobody to disagree with
    two_samples = torch.cat([votes(0, 0, 1), votes(1, 1, 1)], dim=1)
    assert disagreement_per_sample(two_samples).tolist() == pytest.approx([2 / 3, 0])
    assert disagreement(two_samples) == pytest.approx(1 / 3)


def test_variation_ratio_is_against_the_ensemble():
    assert variation_ratio(votes(0, 0, 1)) == pytest.approx(1 / 3)
    # two members lean to class 0, but the third is sure of class 1 and carries the mean
    probs = T([[[0.6, 0.4]], [[0.6, 0.4]], [[0.0, 1.0]]])
    assert variation_ratio(probs) == pytest.approx(2 / 3)


def test_mutual_information_by_hand():
    assert mutual_information(votes(0, 1, of=2)) == pytest.approx(math.log(2))  # sure, and opposite
    assert mutual_information(votes(1, 1, of=2)) == 0
    assert mutual_information(T([[[0.5, 0.5]], [[0.5, 0.5]]])) == 0  # unsure, but of one mind
    parts = entropy_parts(T([[[0.5, 0.5]], [[1.0, 0.0]]]))
    assert parts.aleatoric.item() == pytest.approx(math.log(2) / 2)
    total = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert parts.total.item() == pytest.approx(total)
    assert parts.epistemic.item() == pytest.approx(total - math.log(2) / 2)


def test_random_cases_equal_the_referee(referee, quiet):
    for seed in range(150):
        probs = random_member_probs(seed)
        if seed % 3 == 0:  # many equal probabilities
            counts = (4 * probs).ceil()
            probs = counts / counts.sum(-1, keepdim=True)
        by_sample = probs.transpose(0, 1)  # the referee wants [B, M, C], except for the variation ratio
        expected = updated(referee.MutualInformation(), by_sample)
        assert mutual_information(probs) == pytest.approx(expected, abs=1e-5), seed
        assert disagreement(probs) == pytest.approx(updated(referee.Disagreement(), by_sample), abs=1e-6), seed
        if seed % 3:
            expected = updated(referee.VariationRatio(probabilistic=False), probs)
            assert variation_ratio(probs) == pytest.approx(expected, abs=1e-6), seed
        assert entropy_parts(probs[:1]).epistemic.max() < 1e-6  # one member
        assert disagreement(probs[:1]) == variation_ratio(probs[:1]) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_in_float32(dtype):
    probs = random_member_probs(5).to(dtype)
    for per_sample in (disagreement_per_sample, variation_ratio_per_sample):
        assert per_sample(probs).dtype == torch.float32
        assert torch.equal(per_sample(probs), per_sample(probs.float()))
    for half, full in zip(entropy_parts(probs), entropy_parts(probs.float()), strict=True):
        assert half.dtype == torch.float32
        assert torch.equal(half, full)


@pytest.mark.parametrize(
    ("probs", "token"),
    [
        (torch.rand(3, 4), r"\[M, B, C\].*\[3, 4\]"),
        (torch.rand(3, 0, 4), "one sample"),
        (torch.rand(0, 3, 4), "one member"),
        (torch.full((2, 1, 2), torch.nan), "4 of 4"),
        (torch.ones(2, 3, 1), "two classes"),
        (5 * torch.ones(2, 3, 4), "sum to one"),
    ],
)
def test_bad_input_is_named(probs, token):
    for metric in (disagreement, mutual_information, variation_ratio):
        with pytest.raises(DataError, match=f"set 'ood'.*{token}"):
            metric(probs, name="ood")
