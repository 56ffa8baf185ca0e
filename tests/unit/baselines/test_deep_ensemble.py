"""Deep Ensembles: members are independent fine-tunings, and frozen parameters are stored once."""

from dataclasses import replace

import pytest
import torch
from baseline_cases import QUICK, assert_an_ensemble, single, some

from checkpoint_models import same_state
from hydra_ensembles.baselines.deep_ensemble import deep_ensemble
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


def test_snapshots_go_on_from_each_other():
    base = single()
    recipe = replace(QUICK, reinit_classifier="zeros", last_blocks=1)
    found = train(base, recipe, snapshots=True)
    first = finetune(base, some(base), recipe, progress=False)
    second = finetune(first, some(base), replace(recipe, reinit_classifier=None), progress=False, index=1)
    assert all(same_state(found.member(index), alone) for index, alone in enumerate((first, second)))
    assert found.config.trunk == base.num_layers - 1


def test_snapshots_of_half_precision_go_on_in_float32():
    """Updates smaller than bfloat16's spacing accumulate across snapshots."""
    recipe = replace(QUICK, steps=1, learning_rate=1e-4)
    found = train(single().bfloat16(), recipe, 4, snapshots=True)
    whole = train(single().bfloat16().float(), recipe, 4, snapshots=True)
    assert found.dtype == torch.bfloat16
    assert same_state(found, whole.bfloat16())
