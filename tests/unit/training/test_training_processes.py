"""Several processes train as one with larger batches."""

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, DistributedSampler, Sampler
from training_cases import batches, pairs, shuffled, tiny, tiny_dual

from hydra_ensembles._distributed import Ranks
from hydra_ensembles.baselines.lora import LoRA, lora_ensemble
from hydra_ensembles.errors import DataError
from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.loop import EveryNth, Runtime
from hydra_ensembles.training.recipe import Recipe
from hydra_ensembles.training.text import tune_text
from processes import launch

TEXT = Recipe(
    optimizer="sgd", learning_rate=0.05, epochs=2, schedule="constant", gradient_accumulation=2, clip_norm=1.0
)
RECIPE = replace(TEXT, epochs=None, steps=3, evaluate_every=2)
LOW_RANK = LoRA(members=2, rank=2, training="together")


def uneven(labelled: bool = True):
    """Batches of 6, 6, 7 and 5 pairs: what two processes read differs in size, and perhaps in having labels."""
    images, texts, labels = pairs(24, 24, dtype=torch.float64)[0]
    cuts = enumerate(pairwise((0, 6, 12, 19, 24)))
    return [(images[a:b], texts[a:b], labels[a:b] if labelled or not number % 2 else None) for number, (a, b) in cuts]


def tune(labelled: bool = True):
    dual = tiny_dual(dtype=torch.float64)
    return tune_text(dual, uneven(labelled), TEXT, train_image_projection=True, device="cpu", progress=False)


def train_all(folder: Path) -> None:
    """The work of one of the processes."""
    rank = os.environ["RANK"]
    for name, source in (("list", batches(32, 4)), ("loader", shuffled(32, 4))):
        trained = finetune(tiny(), source, RECIPE, batches(20, 7), output=folder / name, device="cpu", progress=False)
        save_file(trained.state_dict(), folder / f"{name}-{rank}.safetensors")
        (folder / f"{name}-{rank}.txt").write_text(repr(dict(trained.metadata.metrics)))
    apart = lora_ensemble(tiny(), batches(32, 4), RECIPE, LOW_RANK, device="cpu", progress=False)
    save_file(apart.state_dict(), folder / f"lora-{rank}.safetensors")
    save_file(tune().state_dict(), folder / f"text-{rank}.safetensors")
    try:
        tune(labelled=False)
    except DataError as error:
        (folder / f"refused-{rank}.txt").write_text(str(error))


def test_every_nth_batch_is_shared_out_evenly():
    shares = [EveryNth(list(range(7)), rank, 3) for rank in range(3)]
    assert [list(share) for share in shares] == [[0, 3], [1, 4], [2, 5]]
    assert [len(share) for share in shares] == [2, 2, 2]


class Endless(Sampler):  # has no length
    def __iter__(self):
        return iter(range(28))


def test_ranks_load_only_their_own_batches_of_a_loader():
    whole, data = [labels.tolist() for _, labels in batches(28, 4)], shuffled(28, 4).dataset
    loader, endless = DataLoader(data, batch_size=4), DataLoader(data, batch_size=4, sampler=Endless())
    for rank in range(3):
        runtime = Runtime(torch.device("cpu"), Ranks(rank, 3))
        assert [labels.tolist() for _, labels in runtime.share(loader)] == whole[rank:6:3]
        assert [labels.tolist() for _, labels in runtime.share(endless)] == whole[rank:6:3]
        assert len(runtime.share(loader)) == 2
        split = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 3, rank))
        assert runtime.share(split) is split


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes left, each with the same tensors and the same measures."""
    folder = tmp_path_factory.mktemp("parallel")
    assert launch(lambda: train_all(folder)) == [0, 0]
    return folder


@pytest.mark.parametrize("name", ["list", "loader"])
def test_two_processes_train_as_one_with_twice_the_batch(folder, name):
    double = {"list": batches(32, 8), "loader": shuffled(32, 8)}[name]  # batches 0 and 1 together, and so on
    expected = finetune(tiny(), double, RECIPE, batches(20, 7), progress=False)
    first, second = (load_file(folder / f"{name}-{rank}.safetensors") for rank in range(2))
    for key, tensor in expected.state_dict().items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], tensor, rtol=1e-4, atol=1e-6)
    measured = [(folder / f"{name}-{rank}.txt").read_text() for rank in range(2)]
    assert measured[0] == measured[1]
    assert f"'validation/accuracy': {expected.metadata.metrics['validation/accuracy']!r}" in measured[0]
    assert any(not torch.equal(tensor, first[key]) for key, tensor in tiny().state_dict().items())


def test_two_processes_train_computed_weights_as_one(folder):
    expected = lora_ensemble(tiny(), batches(32, 8), RECIPE, LOW_RANK, progress=False).state_dict()
    first, second = (load_file(folder / f"lora-{rank}.safetensors") for rank in range(2))
    for key, tensor in expected.items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], tensor, rtol=1e-4, atol=1e-6)


def test_two_processes_tune_texts_as_one_with_the_whole_batch(folder):
    """Two processes, two batches each: one update over all 24 pairs, as one process makes it."""
    first, second = (load_file(folder / f"text-{rank}.safetensors") for rank in range(2))
    start = tiny_dual(dtype=torch.float64)
    whole, recipe = pairs(24, 24, dtype=torch.float64), replace(TEXT, gradient_accumulation=1)
    expected = tune_text(start, whole, recipe, train_image_projection=True, progress=False).state_dict()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert max((tensor - expected[name]).abs().max().item() for name, tensor in first.items()) < 1e-12
    assert max((tensor - start.state_dict()[name]).abs().max().item() for name, tensor in first.items()) > 1e-3


def test_processes_that_disagree_about_labels_say_so(folder):
    """Two of the four batches of an update have labels; nobody waits for the other process's labels."""
    assert all("2 of 4" in (folder / f"refused-{rank}.txt").read_text() for rank in range(2))
