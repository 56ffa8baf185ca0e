"""Several processes train as one with larger batches."""

import dataclasses
from pathlib import Path

import pytest
import torch
from parallel_training import RECIPE, TEXT
from safetensors.torch import load_file
from training_cases import batches, own_batches, pairs, shuffled, tiny, tiny_dual

from hydra_ensembles._distributed import Ranks
from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.loop import EveryNth, Runtime
from hydra_ensembles.training.text import tune_text
from processes import launch

SCRIPT = Path(__file__).with_name("parallel_training.py")


def test_every_nth_batch_is_shared_out_evenly():
    shares = [EveryNth(list(range(7)), rank, 3) for rank in range(3)]
    assert [list(share) for share in shares] == [[0, 3], [1, 4], [2, 5]]
    assert [len(share) for share in shares] == [2, 2, 2]


def test_ranks_load_only_their_own_batches_of_a_loader():
    whole = [labels for _, labels in batches(28, 4)]
    loader = torch.utils.data.DataLoader(shuffled(28, 4).dataset, batch_size=4, num_workers=0)
    for rank in range(3):
        shared = Runtime(torch.device("cpu"), Ranks(rank, 3)).share(loader)
        assert [labels.tolist() for _, labels in shared] == [labels.tolist() for labels in whole[rank:6:3]]
        assert len(shared) == 2

    class Own(torch.utils.data.DistributedSampler):
        pass

    class Endless(torch.utils.data.Sampler):  # has no length
        def __iter__(self):
            return iter(range(28))

    split = torch.utils.data.DataLoader(loader.dataset, batch_size=4, sampler=Own(loader.dataset, 3, 0))
    assert Runtime(torch.device("cpu"), Ranks(0, 3)).share(split) is split
    endless = torch.utils.data.DataLoader(loader.dataset, batch_size=4, sampler=Endless())
    shared = Runtime(torch.device("cpu"), Ranks(1, 3)).share(endless)
    assert [labels.tolist() for _, labels in shared] == [labels.tolist() for labels in whole[1:6:3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes left, each with the same tensors and the same measures."""
    folder = tmp_path_factory.mktemp("parallel")
    for status, output in launch(SCRIPT, folder):
        assert status == 0, output
    return folder


@pytest.mark.parametrize("name", ["list", "loader", "own"])
def test_two_processes_train_as_one_with_twice_the_batch(folder, name):
    images, labels = (torch.cat(part) for part in zip(*batches(64, 4), strict=True))
    double = {  # batches 0 and 1 together, and so on, in the same order
        "list": list(zip(images.split(8), labels.split(8), strict=True)),
        "loader": shuffled(64, 8),
        "own": own_batches(64, 8),
    }[name]
    expected = finetune(tiny(), double, RECIPE, batches(40, 7), progress=False)
    first, second = (load_file(folder / f"{name}-{rank}.safetensors") for rank in range(2))
    for key, tensor in expected.state_dict().items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], tensor, rtol=1e-4, atol=1e-6)
    measured = [(folder / f"{name}-{rank}.txt").read_text() for rank in range(2)]
    assert measured[0] == measured[1]
    assert f"'validation/accuracy': {expected.metadata.metrics['validation/accuracy']!r}" in measured[0]
    assert any(not torch.equal(tensor, first[key]) for key, tensor in tiny().state_dict().items())


def test_two_processes_tune_texts_as_one_with_the_whole_batch(folder):
    """Two processes, two batches each: one update over all 24 pairs, as one process makes it."""
    first, second = (load_file(folder / f"text-{rank}.safetensors") for rank in range(2))
    start = tiny_dual(dtype=torch.float64)
    recipe = dataclasses.replace(TEXT, gradient_accumulation=1)
    whole = pairs(24, 24, dtype=torch.float64)
    expected = tune_text(start, whole, recipe, train_image_projection=True, progress=False).state_dict()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert max((tensor - expected[name]).abs().max().item() for name, tensor in first.items()) < 1e-12
    assert max((tensor - start.state_dict()[name]).abs().max().item() for name, tensor in first.items()) > 1e-3


def test_processes_that_disagree_about_labels_say_so(folder):
    """Two of the four batches of an update have labels; nobody waits for the other process's labels."""
    assert all("2 of 4" in (folder / f"refused-{rank}.txt").read_text() for rank in range(2))
