"""BayesVLM: factors equal the Gauss-Newton curvature, and the closed form agrees with many drawn projections."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hydra_ensembles as he
from hydra_ensembles.baselines.bayes_vlm import (
    BayesVLM,
    bayes_vlm,
    kronecker_factors,
    likeliest_precision,
    published_bayes_vlm,
)
from hydra_ensembles.errors import CheckpointError
from hydra_ensembles.model.dual_encoder import DualEncoder, Projections
from unit.training.training_cases import NAMES, pair_samples, pairs, tiny_dual

IMAGES = pair_samples(5, seed=7)[0].double()
SURE = BayesVLM(prior_precision=1e12)


def dual(bias=False):
    """A dual encoder in float64 with moderate logits; optionally with biases of the projections."""
    found = tiny_dual(dtype=torch.float64)
    maps = found.projections
    if bias:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            maps = Projections.fresh(24, 16, 16, bias=True).double()
            for one in (maps.image, maps.text):
                nn.init.normal_(one.bias, std=0.3)
    return DualEncoder(found.image, found.text, maps, logit_scale=1.0).eval()


def draw(side, count, seed):
    """Projections `[count, e, d]` from a posterior, by its whole covariance."""
    covariance = torch.kron(torch.linalg.inv(side.outputs), torch.linalg.inv(side.inputs))
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, len(covariance), dtype=torch.float64, generator=generator)
    return side.mean + (noise @ torch.linalg.cholesky(covariance).T).unflatten(1, side.mean.shape)


def double_pairs():
    return pairs(dtype=torch.float64)


def case(count=6, inside=4, width=3, seed=0):
    torch.manual_seed(seed)
    seen, other = torch.randn(count, inside).double(), torch.randn(count, width).double()
    return seen, torch.randn(width, inside).double(), other


def test_the_factors_are_the_curvature_of_the_contrastive_loss():
    seen, projection, other = case()
    own, targets, scale = seen @ projection.T, F.normalize(other, dim=-1), 3.0
    inputs, outputs = kronecker_factors(seen, own, other, scale, 100)
    torch.testing.assert_close(inputs, seen.T @ seen / math.sqrt(6))

    def logits(h):
        return scale * F.normalize(h, dim=-1) @ targets.T

    expected = torch.zeros(3, 3, dtype=torch.float64)
    for h in own:  # Jᵀ Λ J of every sample, J by automatic differentiation
        jacobian = torch.func.jacrev(logits)(h)
        probs = logits(h).softmax(-1)
        spread = probs.diag() - probs[:, None] * probs
        expected += jacobian.T @ spread @ jacobian
    torch.testing.assert_close(outputs, expected / math.sqrt(6))


def test_the_prior_is_where_the_evidence_of_the_whole_precision_is_largest():
    seen, projection, other = case()
    inputs, outputs = kronecker_factors(seen, seen @ projection.T, other, 3.0, 100)
    found = likeliest_precision(projection, inputs, outputs)

    def evidence(prior):
        root = math.sqrt(prior)
        whole = torch.kron(outputs + root * torch.eye(3), inputs + root * torch.eye(4))
        return float(12 * math.log(prior) - prior * projection.square().sum() - torch.logdet(whole)) / 2

    assert evidence(found) > max(evidence(1.01 * found), evidence(found / 1.01))


@pytest.mark.parametrize("bias", [False, True])
def test_the_closed_form_is_that_of_ten_thousand_projections(bias):
    model = dual(bias)
    found = bayes_vlm(model, double_pairs(), BayesVLM(prior_precision=4.0))
    probit = found.probit(NAMES)
    mean, variance = probit.similarities(IMAGES)
    drawn = [draw(side, 10_000, number) for number, side in enumerate((found.image, found.text))]
    features = model.image(IMAGES)[0]
    features = torch.cat([features, torch.ones(5, 1)], dim=1) if bias else features
    texts = found._texts([f"A photo of a {name}." for name in NAMES])
    images, classes = features.double() @ drawn[0].mT, texts @ drawn[1].mT  # [S, B, e], [S, C, e]
    lengths = images.square().sum(-1).mean(0)[:, None] * classes.square().sum(-1).mean(0)  # E|h|² E|g|²
    similar = math.e * images @ classes.mT / lengths.sqrt()  # [S, B, C]
    error = similar.std(0) / 100
    assert ((similar.mean(0) - mean).abs() < 5 * error + 0.02 * mean.abs()).all()
    torch.testing.assert_close(similar.var(0), variance, rtol=0.1, atol=1e-3)
    cosines = math.e * F.normalize(images, dim=-1) @ F.normalize(classes, dim=-1).mT  # of the drawn models
    expected = cosines.softmax(-1).mean(0)
    single = he.zero_shot(model, NAMES)(IMAGES)[0].softmax(-1)
    off, away = ((one - expected).abs().max() for one in (probit(IMAGES)[0].softmax(-1).double(), single))
    assert off < 0.008
    assert away > 3 * off  # so Single would not pass this test


@pytest.mark.parametrize("bias", [False, True])
def test_a_sure_prior_is_the_zero_shot_model(bias):
    model = dual(bias)
    expected = he.zero_shot(model, NAMES)(IMAGES)[0]
    found = bayes_vlm(model, double_pairs(), SURE)
    torch.testing.assert_close(found.probit(NAMES)(IMAGES)[0].double(), expected, atol=1e-4, rtol=0)


def test_published_factors_are_read(tmp_path):
    model, data = dual(), double_pairs()
    settings = BayesVLM(pseudo_count=2.0, prior_precision=3.0)
    expected = bayes_vlm(model, data, settings)
    for tag, side in (("img", expected.image), ("txt", expected.text)):
        for letter, factor in (("A", side.inputs), ("B", side.outputs)):
            plain = (factor - math.sqrt(3.0) * torch.eye(len(factor))) / math.sqrt(2.0)
            torch.save(plain.float(), tmp_path / f"{letter}_{tag}_analytic.pt")
    found = published_bayes_vlm(model, tmp_path, settings)
    torch.testing.assert_close(found.probit(NAMES)(IMAGES), expected.probit(NAMES)(IMAGES), atol=1e-4, rtol=0)
    torch.save(torch.eye(3), tmp_path / "B_txt_analytic.pt")
    with pytest.raises(CheckpointError, match="16x"):
        published_bayes_vlm(model, tmp_path)
