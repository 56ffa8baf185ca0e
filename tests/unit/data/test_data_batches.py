from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hydra_ensembles.data.dataset import BatchLoader, ImageDataset, TextDataset, TrainTransform, batches
from hydra_ensembles.preprocessing import ImagePreprocessing
from pictures import picture


def lengths(texts: Sequence[Any]) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([[len(text)] for text in texts])}


def noisy(texts: Sequence[Any]) -> Tensor:
    return torch.tensor([[float(text)] for text in texts]) + torch.rand(len(texts), 1)


def joined(made: BatchLoader) -> Tensor:
    return torch.cat([batch[0] for batch in made]).flatten()


def order_of(made: BatchLoader) -> list[float]:
    return joined(made).floor().tolist()


@pytest.fixture
def numbers() -> TextDataset:
    return TextDataset([str(row) for row in range(10)], [row % 3 for row in range(10)])


def test_mappings_get_labels_and_a_last_batch_can_be_dropped() -> None:
    data = TextDataset(["a", "bb", ("c", "d")], [2, 0, 1])
    (batch,) = batches(data, lengths, batch_size=8)
    found = {name: tensor.tolist() for name, tensor in batch.items()}
    assert found == {"input_ids": [[1], [2], [2]], "labels": [2, 0, 1]}
    made = batches(data, lengths, 2, drop_last=True)
    assert len(made) == len(list(made)) == 1
    assert list(batches(data.select([]), lengths, 5)) == []


def test_passes_repeat_epochs_differ_and_the_generator_is_left_alone(numbers: TextDataset) -> None:
    made = batches(numbers, noisy, batch_size=3, shuffle=True, seed=5)
    state = torch.get_rng_state()
    first = joined(made)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)  # other random draws have no effect
    assert torch.equal(first, joined(made))
    made.set_epoch(1)
    assert not torch.equal(first.sort().values % 1, joined(made).sort().values % 1)  # augmentations differ too
    orders = [first.floor().tolist(), order_of(made), order_of(batches(numbers, noisy, 3, True, 6)), list(range(10))]
    assert all(sorted(order) == orders[3] for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    made.set_stream(7)
    assert order_of(made) not in orders


def test_the_order_of_a_seed_stays_what_it_was_and_workers_change_nothing(numbers: TextDataset) -> None:
    made = batches(numbers, noisy, batch_size=10, shuffle=True, seed=5)
    made.set_epoch(1)
    assert order_of(made) == [1, 9, 7, 6, 3, 2, 5, 0, 8, 4]
    alone, helped = (joined(batches(numbers, noisy, 3, True, 2, workers)) for workers in (0, 2))
    assert torch.equal(alone, helped)


def test_training_transforms_repeat_in_batches_and_draw_for_each_image() -> None:
    transform = TrainTransform(ImagePreprocessing(size=(12, 10)), crop_scale=(0.1, 0.5))
    data = ImageDataset([picture(3, size=32, mode="L")] * 6, [0] * 6)
    first, second = ([inputs for inputs, _ in batches(data, transform, 6, num_workers=count)] for count in (0, 1))
    assert first[0].shape == (6, 3, 12, 10)
    assert torch.equal(first[0], second[0])
    assert len({tuple(row.flatten().tolist()) for row in first[0]}) == 6


@pytest.mark.parametrize(("interpolation", "channels"), [("nearest", 3), ("bicubic", 3), ("bicubic", 1)])
def test_without_randomness_images_are_those_of_the_models_preprocessing(interpolation: Any, channels: int) -> None:
    normalize = {"mean": (0.5,) * channels, "std": (0.25, 0.5, 1.0)[:channels]}
    preprocessing = ImagePreprocessing(size=(20, 20), interpolation=interpolation, **normalize)
    transform = TrainTransform(preprocessing, crop_scale=(1.0, 1.0), flip_probability=0.0, rand_augment=None)
    image = picture(2, size=32)
    torch.testing.assert_close(transform([image]), preprocessing(image))
    assert TrainTransform(preprocessing)([image] * 30).shape == (30, channels, 20, 20)
    mirrored = replace(transform, flip_probability=1.0)([image] * 2)[1]
    torch.testing.assert_close(mirrored, preprocessing(image)[0].flip(-1))
