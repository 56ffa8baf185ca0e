"""Costs of models measured side by side."""

import pytest
import torch
from torch import nn

from checkpoint_models import ensemble as built
from checkpoint_models import single
from hydra_ensembles.model import cost
from hydra_ensembles.model.cost import measure_costs


class Clock:
    """A clock that advances only when a model runs."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def model(self, *milliseconds: float):
        """A model whose successive runs take these times."""
        runs = iter(milliseconds)

        def work(inputs: object) -> None:
            self.now += next(runs) / 1000

        return work


def test_latency_is_a_ratio_to_the_first_model(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(cost, "time", clock)
    models = {"fast": clock.model(4, 5, 3), "slow": clock.model(12, 20, 10)}
    costs = measure_costs(models, torch.zeros(2, 3), repeats=3, warmup=0)
    assert [one.name for one in costs] == ["fast", "slow"]
    assert (costs[0].latency_ratio, costs[1].latency_ratio) == (1, pytest.approx(3))
    assert costs[1].latency_ms == pytest.approx(12)


def test_an_ensemble_brings_its_counts_and_keeps_its_mode():
    ensemble = built(single()).train()
    plain = nn.Flatten()
    costs = measure_costs({"ensemble": ensemble, "flat": plain}, torch.zeros(2, 3, 8, 8), repeats=1)
    description = ensemble.describe()
    assert (costs[0].parameters, costs[0].multiply_adds) == (description.parameters, description.multiply_adds)
    assert (costs[1].parameters, costs[1].multiply_adds) == (0, None)
    assert all(module.training for module in ensemble.modules())


def test_models_take_turns_and_another_one_goes_first_each_time():
    calls: list[str] = []
    models = {name: lambda inputs, name=name: calls.append(name) for name in "abc"}
    costs = measure_costs(models, {"input_ids": torch.zeros(5, 3)}, repeats=3, warmup=1)
    assert costs[0].batch == 5
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
