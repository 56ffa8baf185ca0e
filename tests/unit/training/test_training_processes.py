"""Several processes train as one with larger batches."""

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, DistributedSampler
from training_cases import batches, pairs, shuffled, tiny, tiny_dual

from hydra_ensembles._distributed import Ranks
from hydra_ensembles.errors import DataError, HydraError
from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.recipe import Recipe
from hydra_ensembles.training.text import tune_text
from processes import by_two_ranks, launch

TEXT = Recipe(
    optimizer="sgd", learning_rate=0.05, epochs=2, schedule="constant", gradient_accumulation=2, clip_norm=1.0
)
RECIPE = replace(TEXT, epochs=None, steps=3, evaluate_every=2)
START = {"list": tiny, "loader": tiny, "text": lambda: tiny_dual(dtype=torch.float64)}


def uneven(labelled: bool = True):
    """Batches of 6, 6, 7 and 5 pairs: sizes differ between two processes, and perhaps which have labels."""
    images, texts, labels = pairs(24, 24, dtype=torch.float64)[0]
    cuts = enumerate(pairwise((0, 6, 12, 19, 24)))
    return [(images[a:b], texts[a:b], labels[a:b] if labelled or not number % 2 else None) for number, (a, b) in cuts]


def tune(data, recipe=TEXT):
    return tune_text(START["text"](), data, recipe, train_image_projection=True, device="cpu", progress=False)


def trained(name: str, size: int, **options):
    """Weights and metrics after training with this batch size; the text's data are one batch, or split unevenly."""
    source, options = batches(32, size), {"device": "cpu", "progress": False, **options}
    if name == "text":
        whole = pairs(24, 24, dtype=torch.float64), replace(TEXT, gradient_accumulation=1)
        return tune(uneven()).state_dict() if size == 4 else tune(*whole).state_dict()
    made = finetune(tiny(), shuffled(32, size) if name == "loader" else source, RECIPE, batches(20, 7), **options)
    return {**made.state_dict(), "measured": torch.tensor(list(made.metadata.metrics.values()), dtype=torch.float64)}


def train_all(folder: Path) -> None:
    rank = os.environ["RANK"]
    for name in START:
        save_file(trained(name, 4, output=folder / name), folder / f"{name}-{rank}.safetensors")
    try:
        tune(uneven(labelled=False))
    except DataError as error:
        (folder / f"refused-{rank}.txt").write_text(str(error))


def test_ranks_load_only_their_own_batches():
    listed, data = batches(28, 4), shuffled(28, 4).dataset
    whole = [labels.tolist() for _, labels in listed]
    for rank in range(3):
        ranks = Ranks(rank, 3)
        for source in (listed, DataLoader(data, batch_size=4)):
            assert [labels.tolist() for _, labels in ranks.share_batches(source)] == whole[rank:6:3]
        split = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 3, rank))
        assert ranks.share_batches(split) is split


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


def test_processes_whose_data_are_others_in_every_reading_train_together():
    """Augmentations that no seed controls, as by a user's own generator, do not count as different data."""

    class Changing(list):
        readings = 0

        def __iter__(self):
            self.readings += 1
            changed = self.readings / 1000 + int(os.environ["RANK"])
            return ((images + changed, labels) for images, labels in super().__iter__())

    assert launch(lambda: finetune(tiny(), Changing(batches(32, 4)), RECIPE, device="cpu", progress=False)) == [0, 0]


def test_a_training_on_a_loader_that_is_split_already_goes_on_in_its_folder(tmp_path):
    """Each process has its own part of the data; the folder is identified by the first process's part."""

    def work():
        data = shuffled(32, 4).dataset
        split = DataLoader(data, 4, sampler=DistributedSampler(data, 2, int(os.environ["RANK"])))
        for _ in range(2):
            finetune(tiny(), split, RECIPE, output=tmp_path, device="cpu", progress=False)

    assert launch(work) == [0, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The output of two processes: each saves its tensors and metrics."""
    folder = tmp_path_factory.mktemp("parallel")
    assert launch(lambda: train_all(folder)) == [0, 0]
    return folder


@pytest.mark.parametrize("name", START)
def test_two_processes_train_and_measure_as_one_with_twice_the_batch(folder, name):
    expected, tolerance = trained(name, 8), (0.0, 1e-12) if name == "text" else (1e-4, 1e-6)
    first, second = (load_file(folder / f"{name}-{rank}.safetensors") for rank in range(2))
    for key, tensor in expected.items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], tensor, rtol=tolerance[0], atol=tolerance[1])
    learned = "projections.text.weight" if name == "text" else "readout.classifier.weight"
    assert (first[learned] - START[name]().state_dict()[learned]).abs().max() > 1e-3


def test_processes_that_disagree_about_labels_say_so(folder):
    """Two of the four batches of an update have labels; no process waits for the other's labels."""
    assert all("2 of 4" in (folder / f"refused-{rank}.txt").read_text() for rank in range(2))
