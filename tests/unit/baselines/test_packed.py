"""Packed-Ensembles: narrow members without shared computation, trained together from scratch."""

from dataclasses import replace

import pytest
import torch
from baseline_cases import KINDS, QUICK, assert_an_ensemble, single, some

from hydra_ensembles.baselines.packed import Packed, packed_ensemble
from hydra_ensembles.errors import ConfigError
from hydra_ensembles.training.finetune import finetune

FITTING = Packed(members=2, alpha=6.0)


def train(model, settings=FITTING, recipe=QUICK, **options):
    return packed_ensemble(model, some(model), recipe, settings, progress=False, **options)


@pytest.mark.parametrize("kind", [*KINDS, "image-map-rms"])
def test_members_are_narrow_and_independent(kind):
    base = single(kind)
    found = train(base, recipe=replace(QUICK, steps=1))
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


def test_training_together_is_training_each_alone():
    base = single()
    recipe = replace(QUICK, dropout=0.0)
    found, start = train(base, recipe=recipe), train(base, recipe=replace(recipe, learning_rate=1e-300))
    for index in range(2):
        alone = finetune(start.member(index), some(base), recipe, progress=False)
        for name, tensor in alone.state_dict().items():
            torch.testing.assert_close(found.member(index).state_dict()[name], tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_one_is_an_ensemble_and_the_seed_draws_it(kind, tmp_path):
    base = single(kind)
    found = train(base)
    assert_an_ensemble(found, base, tmp_path / "saved")
    other = train(base, recipe=replace(QUICK, seed=1))
    assert not torch.equal(found.encoder.layers[0].mlp.up.weight, other.encoder.layers[0].mlp.up.weight)


def test_recipes_that_leave_fresh_weights_as_they_are_are_refused():
    with pytest.raises(ConfigError, match=r"fresh weights.*train_groups"):
        train(single(), recipe=replace(QUICK, last_blocks=1))
