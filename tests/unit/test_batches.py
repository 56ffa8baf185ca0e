"""Reading batches: the forms users have them in, labels that are wanted and labels that are not."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from hydra_ensembles.batches import borrowed, iterate, move, read_batch
from hydra_ensembles.errors import DataError

X, Y = torch.randn(4, 3, 2, 2), torch.arange(4)

NO_LABELS = {
    "file names": ("0.png", "1.png", "2.png", "3.png"),
    "floating point": torch.rand(4),
    "masks": torch.zeros(4, 2, 2, dtype=torch.long),
    "another number": torch.zeros(3, dtype=torch.long),
    "mappings": {"boxes": [1, 2], "names": ["a", "b"]},
}


@pytest.mark.parametrize("beside", NO_LABELS.values(), ids=NO_LABELS.keys())
@pytest.mark.parametrize("form", ["pair", "list", "mapping"])
def test_labels_that_are_not_wanted_are_not_read(beside: Any, form: str) -> None:
    batch = {"pair": (X, beside), "list": [X, beside], "mapping": {"pixel_values": X, "label": beside}}[form]
    inputs, labels = read_batch(batch, labelled=False)
    assert labels is None
    assert (inputs["pixel_values"] if isinstance(inputs, dict) else inputs) is X
    assert not isinstance(inputs, dict) or list(inputs) == ["pixel_values"]


@pytest.mark.parametrize("beside", NO_LABELS.values(), ids=NO_LABELS.keys())
def test_the_same_is_an_error_that_names_the_batch_where_labels_are_wanted(beside: Any) -> None:
    with pytest.raises(DataError, match="batch 2 of val"):
        read_batch((X, beside), "val", 2)


def test_a_loader_without_labels_gives_lists_of_one() -> None:
    found = list(iterate(DataLoader(TensorDataset(X), 2), "ood"))
    assert torch.equal(torch.cat([inputs for inputs, _ in found]), X)
    assert [labels for _, labels in found] == [None, None]


@pytest.mark.parametrize("batch", [(X, Y, Y), (), [X] * 4, "text", ([1.0, 2.0], Y), ({}, Y), {"labels": Y}])
@pytest.mark.parametrize("labelled", [True, False])
def test_other_forms_are_refused(batch: Any, labelled: bool) -> None:
    with pytest.raises(DataError, match="batch 1 of some data"):
        read_batch(batch, "some data", 1, labelled)


@pytest.mark.parametrize(("device", "waits"), [("cuda", False), ("cuda:1", False), ("cpu", True), ("mps", True)])
def test_only_copies_towards_the_gpu_are_not_waited_for(device: str, waits: bool) -> None:
    tensor = Mock(spec=Tensor)
    move({"pixel_values": tensor}, torch.device(device))
    assert tensor.to.call_args.kwargs == {"non_blocking": not waits}


def test_what_no_model_reads_is_left_out_of_a_mapping() -> None:
    inputs, labels = read_batch({"pixel_values": torch.zeros(2, 3), "labels": [0, 1], "path": ["a.png", "b.png"]})
    assert isinstance(inputs, dict)
    assert list(inputs) == ["pixel_values"]
    assert labels is not None
    with pytest.raises(DataError, match="without tensors"):
        read_batch({"text": ["one", "two"], "labels": [0, 1]})


def test_a_generator_that_is_not_torchs_is_left_alone():
    class Own(TensorDataset):
        @property
        def generator(self):
            return object()  # another one each time, and no way to set it

    data = Own(X, Y)
    with borrowed(data):
        assert len(data) == 4
    assert "generator" not in vars(data)
