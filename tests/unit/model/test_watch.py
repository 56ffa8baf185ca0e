"""The watch over weights: where it begins and ends, and hooks; tests of ensembles show what is an edit, and of what."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from hydra_ensembles.errors import HydraWarning
from hydra_ensembles.model.watch import WeightWatch
from random_ensembles import random_batches, random_ensemble


def test_before_it_begins_and_after_it_stops_nothing_is_an_edit() -> None:
    model, watch = nn.Linear(2, 3), WeightWatch()
    watch.take(model, measured=True)
    with torch.no_grad():
        model.weight.mul_(2.0)
    assert (watch.on, watch.edited(), watch.values_differ(model)) == (True, True, True)
    watch.stop()
    for one in (watch, WeightWatch()):
        assert (one.on, one.edited(), one.values_differ(model)) == (False, False, False)


def test_what_is_made_without_forward_hooks_says_so(tmp_path: Path) -> None:
    model = random_ensemble()
    images = random_batches(model)
    plain = model.predict(images[0][0]).probs
    handle = model.encoder.layers[1].register_forward_hook(lambda module, given, found: found * 2)
    assert not torch.equal(model.predict(images[0][0]).probs, plain)
    for deed, call in (
        ("saved", lambda: model.save_pretrained(tmp_path)),
        ("optimized", model.optimize),
        ("calibrated", lambda: he.calibrate(model, images, share=0.5, familiarity=None)),
        ("fitted", lambda: he.fit_familiarity(model, images, "knn")),
    ):
        with pytest.warns(HydraWarning, match=rf"encoder\.layers\.1 has the forward hook .*lambda.* {deed} does not"):
            call()
    assert not torch.equal(copy.deepcopy(model).predict(images[0][0]).probs, plain)  # a copy has the hook, too
    handle.remove()
    model.optimize()
