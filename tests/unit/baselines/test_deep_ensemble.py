"""Deep Ensembles and Packed-Ensembles: members are trainings of their own, and frozen parameters are stored once."""

from dataclasses import replace

import pytest
import torch
from baseline_cases import KINDS, QUICK, assert_an_ensemble, single, some

from checkpoint_models import same_state
from hydra_ensembles.baselines.deep_ensemble import Packed, deep_ensemble, packed_ensemble
from hydra_ensembles.model.config import Sharing
from hydra_ensembles.training.finetune import finetune


def train(model, recipe=QUICK, members=2, **options):
    return deep_ensemble(model, some(model), recipe, members, progress=False, **options)


@pytest.mark.parametrize(
    ("kind", "changes", "sharing", "trunk"),
    [
        ("image-cls", {}, Sharing(), 0),
        ("text-post-norm", {"last_blocks": 1}, Sharing(stem=True), 2),
        ("image-cls", {"train_groups": ("readout",)}, Sharing(stem=True, attention=True, mlp=True, norms=True), 0),
    ],
    ids=["whole", "last", "classifiers"],
)
def test_members_are_fine_tunings_and_the_rest_is_stored_once(kind, changes, sharing, trunk, tmp_path):
    base, recipe = single(kind), replace(QUICK, steps=2, reinit_classifier="random", **changes)
    found = train(base, recipe)
    assert (found.config.sharing, found.config.trunk) == (sharing, trunk)
    for index in range(2):
        alone = finetune(base, some(base), recipe, progress=False, index=index)
        assert same_state(found.member(index), alone)
    assert not torch.equal(*found(some(base)[0][0]))
    assert_an_ensemble(found, base, tmp_path / "saved")


def train_packed(model, recipe=QUICK, **options):
    return packed_ensemble(model, some(model), recipe, Packed(members=2, alpha=6.0), progress=False, **options)


@pytest.mark.parametrize("kind", [*KINDS, "image-map-rms"])
def test_packed_members_are_narrow_and_independent(kind):
    base = single(kind)
    found = train_packed(base, recipe=replace(QUICK, steps=1))
    inputs = some(base)[0][0]
    alone = [found.member(index) for index in range(2)]
    answers = found(inputs)
    for index, member in enumerate(alone):
        torch.testing.assert_close(answers[index], member(inputs)[0])
    with torch.no_grad():  # perturbing one member does not change the other
        for parameter in found.parameters():
            half = len(parameter) // 2
            parameter[half:] += torch.randn_like(parameter[half:])
    moved = found(inputs)
    assert torch.equal(moved[0], answers[0])
    assert not torch.allclose(moved[1], answers[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_one_is_an_ensemble_and_the_seed_draws_it(kind, tmp_path):
    base = single(kind)
    found = train_packed(base)
    assert_an_ensemble(found, base, tmp_path / "saved")
    other = train_packed(base, recipe=replace(QUICK, seed=1))
    assert not torch.equal(found.encoder.layers[0].mlp.up.weight, other.encoder.layers[0].mlp.up.weight)
