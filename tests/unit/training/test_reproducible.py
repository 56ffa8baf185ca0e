"""Data are known again, members see orders of their own, and a source is given back as it came."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from training_cases import CLASSES, Stopping, own_batches, same, samples, shuffled, tiny

from hydra_ensembles.batches import begin_epoch, borrowed
from hydra_ensembles.data.batching import batches as data_batches
from hydra_ensembles.errors import CheckpointError, DataError
from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.recipe import Recipe
from hydra_ensembles.training.reproducible import fingerprint
from hydra_ensembles.training.text import pair_content

IMAGES, LABELS = samples(48)


def late_labels() -> Tensor:
    """Labels that differ outside the first batch."""
    labels = LABELS.clone()
    labels[20] = (labels[20] + 1) % CLASSES
    return labels


class Pictures(Dataset[Any]):
    """A data set with its labels at hand, under the name that torchvision uses or under ours."""

    def __init__(self, labels: Tensor, name: str) -> None:
        self.read = 0
        setattr(self, name, labels.tolist())
        self.given = labels

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read += 1
        return IMAGES[index], int(self.given[index])


def split(images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(images.split(4), labels.split(4), strict=True))


SOURCES: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda labels: split(IMAGES, labels),
    "mappings": lambda labels: [{"pixel_values": x, "labels": y} for x, y in split(IMAGES, labels)],
    "tensors": lambda labels: DataLoader(TensorDataset(IMAGES, labels), 4),
    "targets": lambda labels: DataLoader(Pictures(labels, "targets"), 4),
    "labels": lambda labels: data_batches(Pictures(labels, "labels"), torch.stack, 4),
    "subset": lambda labels: DataLoader(Subset(Pictures(labels, "labels"), range(48)), 4),
    "joined": lambda labels: DataLoader(ConcatDataset([Pictures(labels, "targets"), Pictures(labels, "targets")]), 4),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_labels_at_hand_count_and_nothing_else_is_read(kind):
    first, again, other = (SOURCES[kind](labels) for labels in (LABELS, LABELS, late_labels()))
    assert fingerprint(first, "train", 0) == fingerprint(again, "train", 0) == fingerprint(first, "train", 0)
    assert fingerprint(first, "train", 0) != fingerprint(other, "train", 0)
    data = getattr(other, "dataset", None)
    assert not isinstance(data, Pictures) or data.read == 4


def test_some_inputs_in_memory_count():
    changed = IMAGES.clone()
    changed[40:] = 0
    for make in (split, lambda x, y: DataLoader(TensorDataset(x, y), 4)):
        assert fingerprint(make(IMAGES, LABELS), "train", 0) != fingerprint(make(changed, LABELS), "train", 0)


def test_rows_of_a_subset_count():
    data = TensorDataset(torch.zeros(9, 3, 8, 8), torch.zeros(9, dtype=torch.long))
    names = {fingerprint(DataLoader(Subset(data, rows), 2), "train", 0) for rows in ([0, 1, 2], [0, 1, 3])}
    assert len(names) == 2


def test_what_a_source_happens_to_hold_does_no_harm():
    class Odd(list):
        labels = ("cat", "dog")
        targets = (object(), object())
        rows = ([1], [2, 3])
        indices = "none"
        generator = 5

    assert fingerprint(Odd(split(IMAGES, LABELS)), "train", 0) == fingerprint(Odd(split(IMAGES, LABELS)), "train", 0)


def test_a_bad_batch_of_a_list_is_named_by_its_position():
    with pytest.raises(DataError, match="batch 2 of train"):
        fingerprint([*split(IMAGES, LABELS)[:2], "no batch"], "train", 0)


def test_a_finished_run_is_not_given_out_for_other_labels(tmp_path):
    recipe = Recipe(optimizer="sgd", learning_rate=0.05, epochs=1)
    finetune(tiny(), SOURCES["tensors"](LABELS), recipe, output=tmp_path, progress=False)
    with pytest.raises(CheckpointError, match="train"):
        finetune(tiny(), SOURCES["tensors"](late_labels()), recipe, output=tmp_path, progress=False)


def test_the_content_of_pictures_counts():
    image = pytest.importorskip("PIL.Image")
    red, blue = (pair_content(([image.new("RGB", (4, 4), colour)], ["a"]), "train") for colour in ("red", "blue"))
    again = pair_content(([image.new("RGB", (4, 4), "red")], ["a"]), "train")
    assert torch.equal(red["images"], again["images"])
    assert not torch.equal(red["images"], blue["images"])


RECIPE = Recipe(optimizer="sgd", learning_rate=0.05, epochs=2, schedule="constant")


def train(source, recipe: Recipe = RECIPE, member=None, **settings):
    return finetune(tiny() if member is None else member, source, recipe, progress=False, **settings)


def noisy(images):
    return torch.stack(images) + torch.rand(len(images), 1, 1, 1)


@pytest.mark.parametrize("kind", ["shuffled", "augmented"])
def test_members_and_seeds_differ_on_the_batches_of_the_library(kind):
    pairs = list(zip(*samples(), strict=True))
    source = (
        own_batches() if kind == "shuffled" else data_batches(pairs, noisy, 8)  # the same order, other augmentation
    )
    first, second = train(source, member=[tiny(), tiny()])
    assert not same(first, second)
    assert not same(first, train(source, dataclasses.replace(RECIPE, seed=7)))
    assert same(first, train(source))
    assert same(second, train(source, index=1))


def test_what_was_set_before_makes_no_difference_and_is_put_back():
    source = own_batches()
    expected = train(source)
    source.set_epoch(5)
    source.set_stream(11)
    assert same(expected, train(source, validation=source))
    assert (source.epoch, source.stream) == (5, 11)
    with borrowed(source):
        begin_epoch(source, 3, 4)
        assert (source.epoch, source.stream) == (3, 4)
    assert (source.epoch, source.stream) == (5, 11)


class Told(TensorDataset):
    """A data set that is told the epoch."""

    epoch = 4
    told: tuple[int, ...] = ()

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.told = epoch, (*self.told, epoch)


def test_the_epoch_of_a_data_set_inside_a_loader_is_put_back():
    data = Told(*samples())
    train(DataLoader(data, batch_size=8))
    assert data.told == (0, 1, 4)
    assert data.epoch == 4


def test_a_run_on_the_batches_of_the_library_resumes_with_the_same_bits(tmp_path):
    pairs = list(zip(*samples(), strict=True))
    left = 8 * 11  # samples: the batch of the fingerprint, one epoch of six, and four batches of the next

    def counted(images):
        nonlocal left
        left -= len(images)
        if left < 0:
            raise KeyboardInterrupt
        return noisy(images)

    source = data_batches(pairs, counted, 8, shuffle=True)
    with pytest.raises(KeyboardInterrupt):
        train(source, output=tmp_path, checkpoint_every=1)
    assert (source.epoch, source.stream) == (0, None)
    left = 10_000
    assert same(train(source), train(source, output=tmp_path, checkpoint_every=1))


def test_a_generator_of_the_loader_is_seeded_also_behind_a_wrapper():
    def loader(seed):
        source = Stopping(shuffled())
        source.batches.generator = source.batches.sampler.generator = torch.Generator().manual_seed(seed)
        return source

    assert same(train(loader(10)), train(loader(15)))
