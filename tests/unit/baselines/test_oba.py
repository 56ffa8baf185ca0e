"""OBA: curvature by double backward equals finite differences, counts are exact, zeros stay zero."""

from dataclasses import replace

import pytest
import torch
from baseline_cases import KINDS, QUICK, assert_an_ensemble, single, some, weights
from torch.nn import functional as F

import hydra_ensembles as he
from hydra_ensembles.baselines.oba import OBA, curvature, importances, oba, removable_weights
from random_ensembles import ALL_SHAPES

SMALL = OBA(keep=0.8, steps=3, batches=2)


def train(model, settings=SMALL, recipe=QUICK, **options):
    return oba(model, some(model), recipe, settings, progress=False, **options)


def zeros(model):
    return {name: one == 0 for name, one in removable_weights(model).items()}


@pytest.mark.parametrize("kind", [*KINDS, "image-qknorm-gated"])
def test_the_hessian_product_is_that_of_finite_differences(kind):
    model = single(kind)
    data = some(model, (4, 3))
    names = list(removable_weights(model))
    found = curvature(model, [(0, *batch) for batch in data], names)

    def gradient(step):
        """Gradient of the summed losses at θ + step·θ, for the removable parameters."""
        moved = {name: one.detach().clone() for name, one in model.named_parameters()}
        moved |= {name: (1 + step) * moved[name] for name in names}
        point = he.Ensemble.from_state(model.config, moved)
        loss = sum(F.cross_entropy(point(inputs)[0], labels) for inputs, labels in data)
        return torch.autograd.grad(loss, [point.get_parameter(name) for name in names])

    for name, ahead, behind in zip(names, gradient(1e-5), gradient(-1e-5), strict=True):
        expected = model.get_parameter(name) * (ahead - behind) / 2e-5
        torch.testing.assert_close(found[name], expected.detach(), rtol=1e-5, atol=1e-8)


def test_the_rule_as_published():
    curved = {"a": torch.tensor([-4.0, 1.0]), "b": torch.tensor([0.5, 0.25])}
    given = {"a": torch.tensor([0.1, -0.2]), "b": torch.tensor([2.0, 0.0])}
    added = importances(curved, given)
    assert torch.allclose(torch.cat(list(added.values())), torch.tensor([1.1, 0.45, 3.0, 0.5]), atol=1e-5)


TWICE = replace(SMALL, steps=2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_share_left_is_exact_and_zeros_survive_training(kind, tmp_path):
    model = single(kind)
    before = weights(model)
    pruned = train(model, recipe=None)
    total = sum(one.numel() for one in model.parameters())
    gone = zeros(pruned)
    assert sum(int(mask.sum()) for mask in gone.values()) == total - round(0.8 * total)
    for name, tensor in pruned.state_dict().items():
        stays = torch.ones_like(tensor, dtype=torch.bool) if name not in gone else ~gone[name]
        assert torch.equal(tensor[stays], before[name][stays])
    recipe = replace(QUICK, weight_decay=0.01, momentum=0.9)
    trained = train(model, recipe=recipe)
    for name, mask in zeros(trained).items():
        assert torch.equal(mask, gone[name])
    assert not torch.equal(trained.encoder.layers[0].mlp.up.weight, pruned.encoder.layers[0].mlp.up.weight)
    assert_an_ensemble(trained, model, tmp_path / "saved")


def test_norms_tokens_embeddings_and_classifier_are_never_removed():
    names = {name for kind in ALL_SHAPES for name in removable_weights(single(kind))}
    assert not [name for name in names if any(part in name for part in ("norm", "classifier", "position", "words"))]
    assert not [name for name in names if name.endswith((".scale", "token", "tokens", "segments"))]
    assert "stem.patch" in names
