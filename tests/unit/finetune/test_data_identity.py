"""A run is not continued on other data, as far as that shows without reading them all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from finetune_cases import CLASSES, samples, tiny
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from hydra_ensembles.data.batching import batches as data_batches
from hydra_ensembles.errors import CheckpointError, DataError
from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.loop import fingerprint
from hydra_ensembles.training.recipe import Recipe

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
    with pytest.raises(DataError, match="batch 2 of train is a str"):
        fingerprint([*split(IMAGES, LABELS)[:2], "no batch"], "train", 0)


def test_a_finished_run_is_not_given_out_for_other_labels(tmp_path):
    recipe = Recipe(optimizer="sgd", learning_rate=0.05, epochs=1)
    finetune(tiny(), SOURCES["tensors"](LABELS), recipe, output=tmp_path, progress=False)
    with pytest.raises(CheckpointError, match="train was"):
        finetune(tiny(), SOURCES["tensors"](late_labels()), recipe, output=tmp_path, progress=False)
