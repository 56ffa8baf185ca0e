"""The watch over weights: where it begins and ends, and hooks; tests of ensembles show what is an edit, and of what."""

import copy
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

import hydra_ensembles as he
from hydra_ensembles.errors import HydraWarning
from random_ensembles import random_batches, random_ensemble


def test_once_it_is_left_unwatched_nothing_is_an_edit() -> None:
    for left in (False, True):
        model = random_ensemble().with_metadata(metrics={"accuracy": 1.0})
        if left:
            model.leave_unwatched()
        with torch.no_grad():
            model.readout.classifier.weight.mul_(2.0)
        with nullcontext() if left else pytest.warns(HydraWarning, match="weights of this ensemble were edited"):
            assert bool(model.metadata.metrics) is left
        model.readout.classifier.weight.data.mul_(2.0)
        assert bool(model.verified_metadata().metrics) is left


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
    uncopied = model.encoder.register_forward_hook(partial(lambda *_: None, threading.Lock()))
    with pytest.warns(HydraWarning, match="optimized does not run it"):
        torch.testing.assert_close(model.optimize().predict(images[0][0]).probs, plain)
    handle.remove()
    uncopied.remove()
    model.optimize()
