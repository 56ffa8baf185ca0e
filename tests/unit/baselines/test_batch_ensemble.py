"""BatchEnsemble: scales multiplied into weights answer like layers that apply them."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from baseline_cases import KINDS, QUICK, assert_an_ensemble, single, some
from torch.nn import functional as F

import hydra_ensembles as he
from hydra_ensembles.baselines.batch_ensemble import BatchEnsemble, Scaled, batch_ensemble
from hydra_ensembles.baselines.building_blocks import joined
from hydra_ensembles.model.config import Sharing
from hydra_ensembles.model.member_states import member_state
from hydra_ensembles.training.finetune import EnsembleLearner
from hydra_ensembles.training.recipe import Recipe

SMALL = BatchEnsemble(members=2, deviation=0.3)
ALL = Sharing(stem=True, norms=True)
RECIPE = Recipe(learning_rate=1.0, steps=1)


@pytest.mark.parametrize(
    ("kind", "settings", "sharing", "trunk"),
    [
        ("image-cls", SMALL, ALL, 0),
        ("text-post-norm", SMALL, ALL, 0),
        ("image-cls", replace(SMALL, last_layers=1), ALL, 2),
        ("image-mean-layerscale", SMALL, ALL, 0),  # as DINOv2
    ],
    ids=["image", "text", "last", "layerscale"],
)
def test_multiplied_scales_are_those_of_every_input_and_output(kind, settings, sharing, trunk):
    """`y = ((x ∘ r) Wᵀ) ∘ s` of each member, for every linear map above the trunk; all else is the model's own."""
    base, inputs = single(kind), some(single(kind))[0][0]
    scaled = Scaled(joined([base] * 2, sharing, trunk), settings, RECIPE, seed=3)
    whole, state = scaled.whole(), base.state_dict()
    torch.testing.assert_close(scaled(inputs), he.Ensemble.from_state(scaled.ensemble.config, whole)(inputs))
    merged = [member_state(scaled.ensemble.config, whole, member) for member in range(2)]
    maps = {name for name in state if name.endswith(("qkv", "attention.out")) or ("mlp" in name and "weight" in name)}
    assert {key.replace("/", ".") for key in scaled.inputs} >= {name for name in maps if above(name, trunk)}
    for name, weight in state.items():
        key = name.replace(".", "/")
        for member, own in enumerate(merged):
            if key not in scaled.inputs:
                assert torch.equal(own[name], weight)
                continue
            ahead = name.endswith("attention.out")  # [h, d_k, d]: inputs come first
            matrix, found = (one.flatten(0, 1).T if ahead else one.flatten(0, -2) for one in (weight, own[name]))
            r, s = (part[key][member].flatten() for part in (scaled.inputs, scaled.outputs))
            x = torch.randn(5, matrix.shape[1], dtype=torch.float64)
            torch.testing.assert_close(F.linear(x, found), F.linear(x * r, matrix) * s)
            assert not torch.allclose(found, matrix)


def above(name, trunk):
    return not name.startswith("encoder.layers.") or int(name.split(".")[2]) >= trunk


@pytest.mark.parametrize("kind", KINDS)
def test_training_moves_scales_shared_weights_and_own_biases(kind, tmp_path):
    base = single(kind)
    found = batch_ensemble(base, some(base), QUICK, replace(SMALL, last_layers=2), progress=False)
    assert found.config.trunk == base.num_layers - 2
    first, second = (found.member(index).state_dict() for index in range(2))
    name = "encoder.layers.2.mlp.up.weight"
    ratio = (first[name] / second[name])[0]
    assert torch.linalg.matrix_rank(ratio, tol=1e-8) == 1  # members differ only by row and column scales
    assert not torch.equal(first["encoder.layers.2.mlp.up.bias"], second["encoder.layers.2.mlp.up.bias"])
    assert torch.equal(first["encoder.layers.2.norm1.weight"], second["encoder.layers.2.norm1.weight"])
    assert_an_ensemble(found, base, tmp_path / "saved")


def test_scales_never_decay_and_learn_at_their_own_rate_as_classifiers_do():
    recipe, start = replace(RECIPE, weight_decay=0.1, classifier_rate=4.0), joined([single()] * 2, ALL)
    faster = partial(Scaled, settings=replace(SMALL, rate=2.0), recipe=recipe, seed=0)
    learner = EnsembleLearner(start, recipe, torch.device("cpu"), 0, faster)
    groups = learner.optimizer.param_groups
    found = {id(one): (group["weight_decay"], group["share"]) for group in groups for one in group["params"]}
    for name, one in learner.trained.items():
        own = name.startswith(("inputs.", "outputs."))
        decay = 0.0 if own or name.endswith("bias") or "norm" in name else 0.1
        assert found[id(one)] == (decay, 2.0 if own else 4.0 if "classifier" in name else 1.0), name
