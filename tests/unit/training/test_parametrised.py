"""Computed weights: what trains in their stead gets their gradients, and what was trained is put in place."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from training_cases import batches, same, samples, tiny

from hydra_ensembles.training.finetune import EnsembleLearner, Parametrised, finetune, train_parametrised
from hydra_ensembles.training.loop import Job, Runtime
from hydra_ensembles.training.recipe import Recipe

NAME = "encoder.layers.1.mlp.up.weight"
RECIPE = Recipe(optimizer="sgd", learning_rate=0.05, steps=3, schedule="constant", weight_decay=0.1)


class Added(Parametrised):
    """A weight plus a parameter that starts at zero: the same training as that of the weight itself."""

    def __init__(self, ensemble):
        super().__init__(ensemble)
        weight = ensemble.get_parameter(NAME).requires_grad_(False)
        self.change, self.mixed = nn.Parameter(torch.zeros_like(weight)), []

    def computed(self):
        self.mixed.append(torch.is_autocast_enabled("cpu"))
        return {NAME: self.ensemble.get_parameter(NAME) + self.change}


class Odd(Added):
    """The same at twice the rate, and without decay."""

    def __init__(self, ensemble):
        super().__init__(ensemble)
        self.rates, self.spared = {"change": 2.0}, frozenset(["change"])


def train(arrange, recipe, start=None):
    job = Job(recipe, batches(), None, progress=False)
    return train_parametrised(arrange, tiny() if start is None else start, job, "added")


def test_a_change_that_is_added_trains_as_the_weight_itself():
    recipe = replace(RECIPE, weight_decay=0.0)
    expected = finetune(tiny(), batches(), recipe, progress=False)
    found = train(Added, recipe)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor)
    assert found.metadata.history[-1].startswith("added: ")
    assert found.metadata.calibration is None


def test_what_was_trained_is_not_lost_in_silence():
    class Renamed(Added):
        """The parameter, under another name each time."""

        made = 0

        def __init__(self, ensemble):
            super().__init__(ensemble)
            Renamed.made += 1
            self.register_parameter(f"again{Renamed.made}", nn.Parameter(torch.zeros(1)))

        def computed(self):
            (again,) = (value for name, value in self.named_parameters() if name.startswith("again"))
            return {NAME: self.ensemble.get_parameter(NAME) + self.change + again}

    with pytest.raises(AssertionError, match="again1"):
        train(Renamed, RECIPE)


def test_rates_and_decay_are_those_of_the_method():
    plain, odd = (EnsembleLearner(tiny(), RECIPE, Runtime(torch.device("cpu")), 0, kind) for kind in (Added, Odd))
    for learner, expected in ((plain, (1.0, 0.1)), (odd, (2.0, 0.0))):
        groups = learner.optimizer.param_groups
        (group,) = [one for one in groups if any(p is learner.trained["change"] for p in one["params"])]
        assert (group["share"], group["weight_decay"]) == expected
    fast = replace(RECIPE, classifier_rate=4.0)
    learner = EnsembleLearner(tiny(), fast, Runtime(torch.device("cpu")), 0, Added)
    shares = {id(p): group["share"] for group in learner.optimizer.param_groups for p in group["params"]}
    own = learner.trained["ensemble.readout.classifier.weight"]
    assert shares[id(own)] == 4.0


def test_weights_are_computed_in_full_precision_whatever_the_pass_runs_in():
    model = Added(tiny())
    with torch.autocast("cpu", torch.bfloat16):
        assert model(samples(4)[0]).dtype == torch.bfloat16
    assert model.mixed == [False]


def test_the_ensemble_inside_is_the_one_that_runs_and_is_left_alone():
    start = tiny()
    model = Added(start)
    nn.init.ones_(model.change)
    images = samples(4)[0]
    before = start(images)
    changed = model(images)
    assert not torch.allclose(changed, before)
    assert torch.equal(start(images), before)
    assert torch.equal(model.whole()[NAME], start.get_parameter(NAME) + 1.0)
    assert model.whole().keys() == start.state_dict().keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_is_trained_comes_back_in_the_type_of_the_start(dtype):
    start = tiny().to(dtype)
    found = train(Added, RECIPE, start)
    assert found.dtype == dtype
    assert not same(found, start)
