"""The watch over weights: what is an edit, what is none, and what a copy takes along."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hydra_ensembles as he
from hydra_ensembles.errors import HydraWarning
from hydra_ensembles.model.watch import WeightWatch
from random_ensembles import random_batches, random_ensemble


def watched(measured: bool = True) -> tuple[nn.Sequential, WeightWatch]:
    torch.manual_seed(0)
    model, watch = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2))), WeightWatch()
    watch.take(model, measured)
    return model, watch


@torch.no_grad()
def in_place(model: nn.Sequential) -> None:
    model[0].weight.mul_(2.0)


def replaced(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.zeros(3, 2))


def through_data(model: nn.Sequential) -> None:
    model[0].weight.data.mul_(2.0)


def test_before_it_begins_and_after_it_stops_nothing_is_an_edit() -> None:
    model, watch = watched()
    assert watch.on
    in_place(model)
    watch.stop()
    for one in (watch, WeightWatch()):
        assert (one.on, one.edited(), one.values_differ(model)) == (False, False, False)


@pytest.mark.parametrize(
    ("edit", "counted"), [(in_place, True), (replaced, True), (through_data, False), (lambda model: None, None)]
)
def test_counters_show_some_edits_and_values_show_all(
    edit: Callable[[nn.Sequential], None], counted: bool | None
) -> None:
    model, watch = watched()
    edit(model)
    assert watch.edited() is bool(counted)
    assert watch.values_differ(model) is (counted is not None)
    watch.take(model, measured=True)
    assert (watch.edited(), watch.values_differ(model)) == (False, False)


def test_values_are_kept_in_mind_only_where_something_was_measured() -> None:
    for (model, watch), forgotten in ((watched(measured=False), False), (watched(), True)):
        if forgotten:
            watch.forget()
        in_place(model)
        assert (watch.on, watch.edited(), watch.values_differ(model)) == (True, True, False)


def test_counting_anew_overlooks_edits_but_not_values() -> None:
    model, watch = watched()
    in_place(model)
    watch.count(model)
    assert (watch.edited(), watch.values_differ(model)) == (False, True)
    watch.masks.append(0)  # they are meant, and come off again
    assert not watch.values_differ(model)
    watch.masks.remove(0)
    assert watch.values_differ(model)


def test_where_nobody_counts_nothing_is_called_an_edit() -> None:
    with torch.inference_mode():
        model, watch = watched()
        model[0].weight.mul_(2.0)
    assert (watch.edited(), watch.values_differ(model)) == (False, True)


def test_without_values_nothing_differs() -> None:
    model, watch = watched()
    assert not watch.values_differ(model.to("meta"))


@pytest.mark.parametrize(
    ("change", "rounds"),
    [(lambda one: one.bfloat16(), True), (lambda one: one.double(), True), (lambda one: one.clone(), False)],
)
def test_another_dtype_has_other_bits_of_the_same_weights(change: Callable, rounds: bool) -> None:
    model, watch = watched()
    assert watch.rounded_by(change, model) is rounds
    model._apply(change)
    assert watch.values_differ(model) is rounds
    watch.take_rounded(model)
    assert not watch.values_differ(model)
    watch.forget()
    assert not watch.rounded_by(lambda one: one.half(), model)
    watch.take_rounded(model)  # what was forgotten stays so
    through_data(model)
    assert not watch.values_differ(model)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_holds_no_module_and_compares_with_the_same_values(copied: Callable) -> None:
    model, watch = watched()
    taken = copied(watch.for_copy())
    assert taken.on
    assert not taken._parts
    other = copy.deepcopy(model)
    taken.count(other)
    assert (taken.edited(), taken.values_differ(other)) == (False, False)
    through_data(other)
    assert taken.values_differ(other)
    assert not watch.values_differ(model)


def test_a_copy_that_is_made_with_masks_on_has_no_weights_that_were_measured() -> None:
    model, watch = watched()
    in_place(model)
    watch.masks = [1]
    taken = watch.for_copy()
    assert (taken.on, taken.masks, taken.values_differ(model)) == (True, [], False)


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
