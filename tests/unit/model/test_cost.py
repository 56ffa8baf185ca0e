"""Costs of models measured side by side."""

import pytest
import torch
from torch import nn

from hydra_ensembles.errors import ConfigError, DataError
from hydra_ensembles.model.config import EncoderConfig, EnsembleConfig, PatchStemConfig, ReadoutConfig, all_heads
from hydra_ensembles.model.cost import measure_costs
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.report.compare import load_costs, save_costs


def idle(inputs: object) -> None:
    """A model that does nothing."""


class Clock:
    """A clock that stands still but for the work of the models."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def model(self, *milliseconds: float):
        """A model whose runs take this long, one after another."""
        runs = iter(milliseconds)

        def work(inputs: object) -> None:
            self.now += next(runs) / 1000

        return work


def test_latency_is_a_ratio_to_the_first_model(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("hydra_ensembles.model.cost.time", clock)
    models = {"fast": clock.model(4, 5, 3), "slow": clock.model(12, 20, 10)}
    costs = measure_costs(models, torch.zeros(2, 3), repeats=3, warmup=0)
    assert [cost.name for cost in costs] == ["fast", "slow"]
    assert (costs[0].latency_ratio, costs[1].latency_ratio) == (1, pytest.approx(3))
    slow = (costs[1].latency_low_ms, costs[1].latency_ms, costs[1].latency_high_ms)
    assert slow == pytest.approx((11, 12, 16))
    assert (costs[0].batch, costs[0].device, costs[0].repeats) == (2, "cpu", 3)
    assert costs[0].peak_memory_bytes is None
    assert costs[0].parameters is None


def test_models_take_turns_and_another_one_goes_first_each_time():
    calls: list[str] = []
    models = {name: lambda inputs, name=name: calls.append(name) for name in "abc"}
    measure_costs(models, torch.zeros(1), repeats=3, warmup=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"


def test_an_ensemble_brings_its_counts_and_keeps_its_mode():
    encoder = EncoderConfig(width=8, layers=1, heads=2, head_dim=4, mlp_width=8)
    stem = PatchStemConfig(patch_size=(4, 4), grid=(2, 2))
    ensemble = Ensemble(EnsembleConfig(stem, encoder, ReadoutConfig(num_classes=3), all_heads(encoder))).train()
    plain = nn.Flatten()
    costs = measure_costs({"ensemble": ensemble, "flat": plain}, torch.zeros(2, 3, 8, 8), repeats=1)
    description = ensemble.describe()
    assert (costs[0].parameters, costs[0].multiply_adds) == (description.parameters, description.multiply_adds)
    assert (costs[1].parameters, costs[1].multiply_adds) == (0, None)
    assert ensemble.training
    assert all(module.training for module in ensemble.modules())


def test_dropout_is_off_and_lower_precision_is_on_during_the_measurement():
    seen = []

    class Watcher(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.append((self.training, torch.is_grad_enabled(), (inputs @ inputs).dtype))
            return inputs

    measure_costs({"watcher": Watcher()}, torch.eye(2), repeats=1, warmup=0, autocast=torch.bfloat16)
    assert set(seen) == {(False, False, torch.bfloat16)}


def test_inputs_may_be_a_mapping():
    costs = measure_costs({"a": lambda inputs: inputs["input_ids"].sum()}, {"input_ids": torch.ones(5, 3)}, repeats=2)
    assert costs[0].batch == 5


def test_what_cannot_be_measured_is_refused():
    far = nn.Linear(2, 2, device="meta")
    for error, token, models, inputs, repeats in [
        (ConfigError, "no models", {}, torch.zeros(1), 1),
        (ConfigError, "repeats=0", {"a": idle}, torch.zeros(1), 0),
        (DataError, "empty", {"a": idle}, torch.zeros(0, 3), 1),
        (DataError, "'a' is on meta", {"a": far}, torch.zeros(1, 2), 1),
    ]:
        with pytest.raises(error, match=token):
            measure_costs(models, inputs, repeats=repeats)


def test_costs_round_trip_through_json(tmp_path):
    costs = measure_costs({"a": idle, "b": idle}, torch.zeros(1), repeats=2)
    save_costs(tmp_path / "costs.json", costs)
    assert load_costs(tmp_path / "costs.json") == costs
    (tmp_path / "other.json").write_text('{"format": "something"}')
    (tmp_path / "bad.json").write_text('{"format": "hydra_ensembles.costs", "costs": [{"name": 3}]}')
    for name, error, token in [
        ("other", DataError, "costs"),
        ("missing", DataError, "cannot be read"),
        ("bad", ConfigError, r"costs\[0\]"),
    ]:
        with pytest.raises(error, match=token):
            load_costs(tmp_path / f"{name}.json")


@pytest.mark.gpu
def test_memory_on_a_gpu_is_weights_and_the_most_beside_them():
    model = nn.Linear(1024, 1024, bias=False).cuda()
    other = nn.Linear(4096, 4096).cuda()
    inputs = torch.zeros(256, 1024, device="cuda")
    costs = measure_costs({"a": model, "b": nn.Sequential(model)}, inputs, repeats=3)
    assert costs[0].peak_memory_bytes == pytest.approx(4 * (1024 * 1024 + 256 * 1024), rel=0.1)
    assert 0.2 < costs[1].latency_ratio < 5
    assert other.weight.is_cuda
