"""Baselines on every shape of block and readout, and on pruned models: what is trained runs optimized, too."""

from dataclasses import replace

import pytest
import torch
from baseline_cases import QUICK, single, some

import hydra_ensembles as he
from hydra_ensembles import baselines
from hydra_ensembles.errors import ConfigError
from random_ensembles import ALL_SHAPES, SHAPES
from unit.training.training_cases import NAMES, pair_samples, tiny_dual

ONE = replace(QUICK, steps=1)
METHODS = {
    "lora": (baselines.lora_ensemble, baselines.LoRA(members=2, rank=2, training="together")),
    "batch": (baselines.batch_ensemble, baselines.BatchEnsemble(members=2)),
    "deep": (baselines.deep_ensemble, 2),
    "swag": (baselines.swag, baselines.SWAG(2, points=2, rank=2)),
    "mimo": (baselines.mimo, baselines.MIMO(members=2, batch_repeat=1)),
    "oba": (baselines.oba, baselines.OBA(keep=0.9, steps=1, batches=1)),
}


def assert_runs(found, inputs):
    logits = found(inputs)
    assert logits.isfinite().all()
    torch.testing.assert_close(found.optimize(compile=False)(inputs), logits)


@pytest.mark.parametrize(
    "shape", [pytest.param(one, marks=[pytest.mark.slow] * (one not in SHAPES)) for one in ALL_SHAPES]
)
def test_every_shape(shape):
    base = single(shape)
    data = some(base, (4,))
    for name, (make, settings) in METHODS.items():
        if name == "mimo" and base.kind == "text":
            continue
        assert_runs(make(base, data, ONE, settings, progress=False), data[0][0])
    if shape != "image-distilled-registers":  # two classifiers
        assert_runs(baselines.laplace(base, data), data[0][0])


@pytest.mark.parametrize("name", METHODS)
def test_pruned_models_keep_their_heads(name):
    gone = [(0, 1), (0, 3), *((2, head) for head in range(4))]  # one layer has no head left
    make, settings = METHODS[name]
    base = he.prune(single(), gone)
    found = make(base, some(base, (4,)), ONE, settings, progress=False)
    assert set(found.heads) == {base.heads[0]}
    assert_runs(found, some(base, (4,))[0][0])


@pytest.mark.parametrize("name", METHODS)
def test_zero_shot_models_keep_their_text_side(name):
    base, (images, labels) = he.zero_shot(tiny_dual(), NAMES), pair_samples(8)
    make, settings = METHODS[name]
    if name == "mimo":
        with pytest.raises(ConfigError, match="zero-shot"):
            make(base, [(images, labels)], ONE, settings, progress=False)
        return
    found = make(base, [(images, labels)], ONE, settings, progress=False)
    assert he.retarget(found, ("boat", "cat"))(images).shape == (found.num_members, 8, 2)
