"""Batches: every form users pass them in, required and ignored labels, and recognising a source."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hydra_ensembles.batches import epoch_of, iterate, labelled, read_batch, require_labels, require_rereadable
from hydra_ensembles.errors import DataError

X, Y = torch.randn(4, 3, 2, 2), torch.arange(4)


@pytest.mark.parametrize("beside", [("0.png", "1.png", "2.png", "3.png"), torch.zeros(4, 2, 2).long(), Y[:3]])
def test_labels_that_are_not_wanted_are_not_read(beside: Any) -> None:
    for batch in ((X, beside), [X], {"pixel_values": X, "label": beside}):
        inputs, labels = read_batch(batch, labelled=False)
        assert labels is None
        assert inputs is X or inputs == {"pixel_values": X}
    with pytest.raises(DataError, match="batch 2 of val"):
        read_batch((X, beside), "val", 2)
    for one, way in ((3, "class numbers"), (Y[:, None], "squeeze")):  # items of a data set; a column of a table
        with pytest.raises(DataError, match=way):
            read_batch((X, one))
    for batch, kind in (({"pixel_values": X, "labels": Y}, "dict"), ((X, Y), "tuple"), ([X, Y], "list"), (X, "Tensor")):
        for read in (partial(iterate, labelled=False), require_rereadable):
            with pytest.raises(DataError, match=rf"val must be batches: .*\[batch\].* got one batch, a {kind}"):
                list(read(batch, "val") or ())


def test_batches_without_samples_are_skipped_and_the_others_keep_their_numbers() -> None:
    full, empty = (X, Y), (X[:0], Y[:0])
    assert [(index, len(inputs)) for index, inputs, _ in iterate([full, empty, full])] == [(0, 4), (2, 4)]
    with pytest.raises(DataError, match="batch 2 of val has labels from 0 to 3"):
        list(labelled([empty, empty, full], 3, "val"))
    with pytest.raises(DataError, match="val has no samples"):
        list(iterate([empty], "val"))


def test_what_is_named_like_an_input_is_read_or_refused_and_texts_are_left_out() -> None:
    mask = np.ones((2, 3), np.int64)
    mask.flags.writeable = False
    given = {"input_ids": [[1, 2, 3], [4, 5, 6]], "attention_mask": mask, "image_ids": ["a", "b"], "rows": [1, 2]}
    inputs, labels = read_batch({**given, "labels": [0, 1], "segment_ids": np.array(["x", "y"]), "position_ids": None})
    assert {name: tensor.tolist() for name, tensor in inputs.items()} == {
        "input_ids": [[1, 2, 3], [4, 5, 6]],
        "attention_mask": [[1, 1, 1], [1, 1, 1]],
    }
    assert labels is not None
    with pytest.raises(DataError, match="attention_mask of batch 3 of val"):
        read_batch({**given, "attention_mask": [[1], [1, 2]]}, "val", 3)
    with pytest.raises(DataError, match=r"data\.batches"):
        read_batch((["one", "two"], [0, 1]))
    for of_any_type in (np.arange(4, dtype=np.uint16), [0, 1, 2, 3], Y.to(torch.uint8)):
        assert torch.equal(require_labels(read_batch((X, of_any_type))[1], 4), Y)


class Noisy(Dataset[Tensor]):
    """Samples with noise that depends on the epoch set on the data set."""

    epoch = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([torch.tensor(float(index)), torch.randn(()), torch.tensor(float(self.epoch))])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_an_epoch_is_the_same_whether_workers_of_the_loader_have_read_others_or_none() -> None:
    def read(loader: DataLoader[Tensor], epoch: int) -> Tensor:
        with epoch_of(loader, epoch, 3, torch.device("cpu")):
            return torch.cat(list(loader))

    used, fresh = (DataLoader(Noisy(), 2, shuffle=True, num_workers=1, persistent_workers=True) for _ in range(2))
    read(used, 0)
    assert torch.equal(again := read(used, 1), read(fresh, 1))
    assert again[:, 2].eq(1).all()
