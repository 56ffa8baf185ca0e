"""Several processes train as one with larger batches."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, DistributedSampler
from training_cases import batches, pairs, shuffled, tiny, tiny_dual

from hydra_ensembles._distributed import Ranks
from hydra_ensembles.errors import ConfigError, HydraError
from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.recipe import Recipe
from hydra_ensembles.training.text import tune_text
from processes import by_two_ranks, launch

MEANS = {"schedule": "constant", "gradient_accumulation": 2, "clip_norm": 1.0, "evaluate_every": 2}
RECIPE = Recipe(optimizer="sgd", learning_rate=0.05, steps=3, **MEANS)
SOURCES = {"list": batches, "loader": shuffled}


def trained(name: str, size: int, **options):
    """Weights and metrics after training with this batch size."""
    options = {"device": "cpu", "progress": False, **options}
    made = finetune(tiny(), SOURCES[name](32, size), RECIPE, batches(20, 7), **options)
    return {**made.state_dict(), "measured": torch.tensor(list(made.metadata.metrics.values()), dtype=torch.float64)}


def train_all(folder: Path) -> None:
    for name in SOURCES:
        made = trained(name, 4, output=folder / name)
        save_file(made, folder / f"{name}-{os.environ['RANK']}.safetensors")
    with pytest.raises(ConfigError, match="one process"):
        tune_text(tiny_dual(), pairs(), RECIPE, device="cpu", progress=False)


def test_ranks_load_only_their_own_batches():
    listed, data = batches(28, 4), shuffled(28, 4).dataset
    whole = [labels.tolist() for _, labels in listed]
    for rank in range(3):
        ranks = Ranks(rank, 3)
        for source in (listed, DataLoader(data, batch_size=4)):
            assert [labels.tolist() for _, labels in ranks.share_batches(source)] == whole[rank:6:3]


@pytest.mark.parametrize("other", ["model", "recipe", "data", "batches"])
def test_processes_that_were_given_different_things_say_so(other):
    """Otherwise they would wait for each other forever, or silently train different weights."""
    model, data, recipe = tiny(), batches(32, 4), RECIPE  # built in one thread: ranks share one generator
    others = {
        "model": (tiny(seed=1), data, recipe),
        "recipe": (model, data, replace(recipe, learning_rate=0.1)),
        "data": (model, [(images + 1, labels) for images, labels in data], recipe),
        "batches": (model, data[:-4], recipe),
    }
    given = (model, data, recipe), others[other]
    for refused in by_two_ranks(lambda rank: finetune(*given[rank], device="cpu", progress=False)):
        what = "model or recipe" if other in ("model", "recipe") else "training or validation data"
        with pytest.raises(HydraError, match=f"rank 1 has other {what}"):
            refused.result()


def test_a_loader_that_is_split_already_is_refused(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    data = shuffled(32, 4).dataset
    with pytest.raises(ConfigError, match="plain DataLoader"):
        finetune(tiny(), DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0)), RECIPE, progress=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The output of two processes: each saves its tensors and metrics."""
    folder = tmp_path_factory.mktemp("parallel")
    assert launch(lambda: train_all(folder)) == [0, 0]
    return folder


@pytest.mark.parametrize("name", SOURCES)
def test_two_processes_train_and_measure_as_one_with_twice_the_batch(folder, name):
    expected = trained(name, 8)
    first, second = (load_file(folder / f"{name}-{rank}.safetensors") for rank in range(2))
    for key, tensor in expected.items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], tensor, rtol=1e-4, atol=1e-6)
    learned = "readout.classifier.weight"
    assert (first[learned] - tiny().state_dict()[learned]).abs().max() > 1e-3
