from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hydra_ensembles.data.batching import TrainTransform, batches
from hydra_ensembles.data.dataset import TextDataset
from hydra_ensembles.data.loading import load
from hydra_ensembles.errors import DataError
from hydra_ensembles.preprocessing import ImagePreprocessing


def lengths(texts: Sequence[Any]) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([[len(text)] for text in texts])}


def noisy(texts: Sequence[Any]) -> Tensor:
    return torch.tensor([[float(text)] for text in texts]) + torch.rand(len(texts), 1)


@pytest.fixture
def numbers() -> TextDataset:
    return TextDataset([str(row) for row in range(10)], [row % 3 for row in range(10)])


def test_images_become_tensors_and_labels(image_folder: Path) -> None:
    data = load(image_folder, "train")
    made = batches(data, ImagePreprocessing(size=(16, 12)), batch_size=4)
    assert len(made) == 2
    (first, first_labels), (second, second_labels) = made
    assert first.shape == (4, 3, 16, 12)
    assert second.shape == (2, 3, 16, 12)
    assert first_labels.tolist() + second_labels.tolist() == data.labels.tolist()
    assert first_labels.dtype == torch.int64
    assert torch.equal(first, ImagePreprocessing(size=(16, 12))([data[row][0] for row in range(4)]))


def test_mappings_get_labels() -> None:
    data = TextDataset(["a", "bb", ("c", "d")], [2, 0, 1])
    (batch,) = batches(data, lengths, batch_size=8)
    assert sorted(batch) == ["input_ids", "labels"]
    assert batch["input_ids"].tolist() == [[1], [2], [2]]
    assert batch["labels"].tolist() == [2, 0, 1]


def test_passes_repeat_and_epochs_differ(numbers: TextDataset) -> None:
    made = batches(numbers, noisy, batch_size=3, shuffle=True, seed=5)
    first = [inputs for inputs, _ in made]
    assert all(torch.equal(a, b) for a, (b, _) in zip(first, made, strict=True))
    order = torch.cat(first).floor().flatten().tolist()
    assert sorted(order) == list(range(10))
    assert order != list(range(10))
    made.set_epoch(1)
    other = torch.cat([inputs for inputs, _ in made]).floor().flatten().tolist()
    assert sorted(other) == list(range(10))
    assert other != order
    assert other != torch.cat([i for i, _ in batches(numbers, noisy, 3, True, 6)]).floor().flatten().tolist()


def test_random_augmentations_change_with_the_epoch_alone(numbers: TextDataset) -> None:
    made = batches(numbers, noisy, batch_size=5)
    first = torch.cat([inputs for inputs, _ in made])
    torch.rand(3)  # what else is drawn makes no difference
    assert torch.equal(first, torch.cat([inputs for inputs, _ in made]))
    made.set_epoch(1)
    assert not torch.equal(first, torch.cat([inputs for inputs, _ in made]))


def test_streams_have_orders_and_augmentations_of_their_own(numbers: TextDataset) -> None:
    made = batches(numbers, noisy, batch_size=5, shuffle=True, seed=5)
    alone = torch.cat([inputs for inputs, _ in made])
    streams = []
    for stream in (7, 8, 7):
        made.set_stream(stream)
        streams.append(torch.cat([inputs for inputs, _ in made]))
    assert torch.equal(streams[0], streams[2])
    orders = {tuple(inputs.floor().flatten().tolist()) for inputs in (alone, *streams)}
    assert len(orders) == 3
    assert all(sorted(order) == list(range(10)) for order in orders)
    fractions = [(inputs - inputs.floor()).flatten().tolist() for inputs in (alone, *streams[:2])]
    assert len({tuple(values) for values in fractions}) == 3
    made.set_stream(None)
    assert torch.equal(alone, torch.cat([inputs for inputs, _ in made]))


def test_the_order_of_a_seed_stays_what_it_was(numbers: TextDataset) -> None:
    made = batches(numbers, noisy, batch_size=10, shuffle=True, seed=5)
    made.set_epoch(1)
    assert next(iter(made))[0].floor().flatten().tolist() == [1, 9, 7, 6, 3, 2, 5, 0, 8, 4]


def test_workers_change_nothing(numbers: TextDataset) -> None:
    alone = [inputs for inputs, _ in batches(numbers, noisy, 3, shuffle=True, seed=2)]
    helped = [inputs for inputs, _ in batches(numbers, noisy, 3, shuffle=True, seed=2, num_workers=2)]
    assert all(torch.equal(a, b) for a, b in zip(alone, helped, strict=True))


def test_the_generator_is_left_alone(numbers: TextDataset) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    for _ in batches(numbers, noisy, 5):
        pass
    assert torch.equal(torch.rand(4), expected)


def test_the_last_batch_can_be_dropped(numbers: TextDataset) -> None:
    made = batches(numbers, noisy, 4, drop_last=True)
    assert len(made) == len(list(made)) == 2
    assert len(batches(numbers, noisy, 5, drop_last=True)) == 2
    assert list(batches(numbers.select([]), noisy, 5)) == []


def test_training_transforms_fit(image_folder: Path) -> None:
    data = load(image_folder, "train")
    made = batches(data, TrainTransform(size=(8, 8)), 4, shuffle=True, num_workers=1)
    first = [inputs for inputs, _ in made]
    assert first[0].shape == (4, 3, 8, 8)
    assert all(torch.equal(a, b) for a, (b, _) in zip(first, made, strict=True))


def test_bad_settings_and_bad_preprocessing(numbers: TextDataset) -> None:
    with pytest.raises(DataError, match="batch_size must be at least 1, got 0"):
        batches(numbers, noisy, 0)
    with pytest.raises(DataError, match="num_workers must be 0"):
        batches(numbers, noisy, 1, num_workers=-1)
    with pytest.raises(DataError, match="made 3 rows of 4 items"):
        next(iter(batches(numbers, lambda texts: torch.zeros(3, 2), 4)))
