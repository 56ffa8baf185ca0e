"""Last-layer Laplace: curvature and prior are laplace-torch's."""

from dataclasses import replace

import pytest
import torch
from baseline_cases import KINDS, assert_an_ensemble, single, some, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hydra_ensembles.baselines.building_blocks import append_one
from hydra_ensembles.baselines.posterior import Laplace, Posterior, curvature, laplace

SMALL = Laplace(members=4)


def posterior(seen, logits, mean, prior=None):
    outputs, inputs = curvature(append_one(seen, mean.shape[1] > seen.shape[1]), logits)
    return Posterior.of(mean, outputs, inputs / len(seen), prior)


def precision(found):
    """The whole precision matrix `[C·d, C·d]` of a posterior."""
    axes = torch.kron(*found.axes)
    return axes @ (found.values + found.prior).flatten().diag() @ axes.T


def case(seed=0, samples=40, width=5, classes=3):
    torch.manual_seed(seed)
    layer = nn.Linear(width, classes).double()
    seen = torch.randn(samples, width, dtype=torch.float64)
    mean = torch.cat([layer.weight, layer.bias[:, None]], dim=1).detach()
    labels = torch.randint(classes, (samples,))
    return layer, seen, labels, mean


@pytest.mark.filterwarnings("ignore")  # warnings of laplace-torch and its dependencies
def test_curvature_and_marginal_likelihood_are_those_of_laplace_torch():
    """Without a bias: theirs gives it a separate factor, ours treats it as one more input."""
    library = pytest.importorskip("laplace")
    _, seen, labels, _ = case()
    layer = nn.Linear(5, 3, bias=False).double()
    mean = layer.weight.detach()
    found = posterior(seen, layer(seen).detach(), mean)
    settings = {"subset_of_weights": "last_layer", "hessian_structure": "kron", "prior_precision": found.prior}
    theirs = library.Laplace(nn.Sequential(nn.Identity(), layer), "classification", **settings)
    theirs.fit(DataLoader(TensorDataset(seen, labels), batch_size=8))
    torch.testing.assert_close(precision(found), theirs.posterior_precision.to_matrix(), rtol=1e-12, atol=1e-12)
    nearby = torch.tensor([[1.0], [0.9], [1.1]], dtype=torch.float64) * found.prior
    best, *others = (float(theirs.log_marginal_likelihood(prior)) for prior in nearby)
    assert max(others) < best  # our prior maximises their likelihood


def test_a_kronecker_product_with_a_bias_is_its_definition():
    layer, seen, _, mean = case()
    logits = layer(seen).detach()
    probs, inputs = logits.softmax(-1), torch.cat([seen, torch.ones(40, 1, dtype=torch.float64)], dim=1)
    outputs = sum(p.diag() - p[:, None] * p for p in probs)
    expected = torch.kron(outputs, inputs.T @ inputs / 40) + 2.0 * torch.eye(18)
    torch.testing.assert_close(precision(posterior(seen, logits, mean, prior=2.0)), expected)


def test_draws_have_the_mean_and_the_covariance_of_the_posterior():
    layer, seen, _, mean = case()
    found = posterior(seen, layer(seen).detach(), mean, prior=1.0)
    drawn = found.draw(40_000, seed=1).flatten(1)
    covariance = torch.linalg.inv(precision(found))
    torch.testing.assert_close(drawn.mean(0), mean.flatten(), atol=0.02, rtol=0)
    torch.testing.assert_close(drawn.T.cov(), covariance, atol=0.05 * float(covariance.diag().max()), rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_members_share_all_but_their_classifiers(kind, tmp_path):
    base = single(kind)
    before, data = weights(base), some(base)
    found = laplace(base, data, SMALL)
    for index in range(4):
        state = found.member(index).state_dict()
        moved = {name for name, tensor in state.items() if not torch.equal(tensor, before[name])}
        assert moved == {"readout.classifier.weight", "readout.classifier.bias"}
    assert_an_ensemble(found, base, tmp_path / "saved")
    assert torch.equal(laplace(base, data, SMALL).readout.classifier.weight, found.readout.classifier.weight)
    other = laplace(base, data, replace(SMALL, seed=1)).readout.classifier.weight
    assert not torch.equal(other, found.readout.classifier.weight)


def test_a_sure_prior_is_the_model_and_many_members_average_to_its_uncertainty():
    base = single()
    inputs = some(base)[0][0]
    sure = laplace(base, some(base), Laplace(members=3, prior_precision=1e14))
    torch.testing.assert_close(sure(inputs), base(inputs).expand(3, -1, -1), atol=1e-5, rtol=0)
    open_minded = laplace(base, some(base), Laplace(members=50, prior_precision=1e-2)).predict(inputs)
    assert (open_minded.epistemic > sure.predict(inputs).epistemic).all()
