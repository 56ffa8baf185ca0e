"""Inputs made on the device: images and texts."""

import numpy as np
import pytest
import torch
from small_study import CLASSES, CPU, Pictures
from torch.nn import functional as F

from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.errors import DataError
from studies.image_samples import MEAN, STD, ImageSamples, augmented
from studies.splits import class_halves, halves
from studies.text_samples import TextSamples


@pytest.fixture
def pictures() -> ImageDataset:
    labels = np.arange(30) % 3
    return ImageDataset(Pictures(labels, 0), labels, CLASSES, "pictures")


def test_evaluation_batches_are_resized_and_normalised(pictures: ImageDataset) -> None:
    samples = ImageSamples.read(pictures, 20, CPU)
    batches = list(samples.evaluation(8))
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert [len(one) for one, _ in batches] == [8, 8, 8, 6]
    assert inputs.shape == (30, 3, 20, 20)
    assert torch.equal(labels, torch.arange(30) % 3)
    pixels = torch.from_numpy(np.array(pictures[4][0])).permute(2, 0, 1)[None] / 255
    wanted = F.interpolate(pixels, (20, 20), mode="bicubic", antialias=True).clamp(0, 1)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    torch.testing.assert_close(inputs[4:5], (wanted - mean) / std)


def test_training_batches_are_shuffled_whole_and_repeatable(pictures: ImageDataset) -> None:
    batches = ImageSamples.read(pictures, 16, CPU).training(8)
    assert len(batches) == 3  # the last, smaller one is left out
    passes = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        passes.append(torch.cat([inputs for inputs, _ in batches]))
    assert torch.equal(passes[0], passes[1])
    assert not torch.equal(passes[0], passes[2])


def test_fewer_images_than_a_batch_still_train(pictures: ImageDataset) -> None:
    batches = ImageSamples.read(pictures, 16, CPU).select([0, 1]).training(8)
    assert [len(labels) for _, labels in batches] == [2]


def test_a_crop_stays_inside_the_image() -> None:
    torch.manual_seed(0)
    ramp = torch.linspace(0, 1, 32).expand(64, 3, 32, 32)
    crops = augmented(ramp, 24)
    assert crops.shape == (64, 3, 24, 24)
    assert crops.min() > -0.02
    assert crops.max() < 1.02
    slope = crops[:, 0, 12, -1] - crops[:, 0, 12, 0]
    assert (slope > 0).any()  # as it was
    assert (slope < 0).any()  # mirrored


def make_texts(count: int = 50) -> TextSamples:
    lengths = torch.arange(count) % 7 + 2
    ids = torch.arange(count)[:, None].expand(count, 9).int() + 100
    return TextSamples(ids, torch.zeros_like(ids), lengths, torch.arange(count) % 2)


def test_text_batches_are_as_long_as_their_longest_text() -> None:
    samples = make_texts()
    for batch in samples.evaluation(4):
        rows = batch["input_ids"][:, 0] - 100
        assert batch["input_ids"].shape[1] == int(samples.lengths[rows].max())
        assert torch.equal(batch["attention_mask"].sum(1), samples.lengths[rows])
        assert torch.equal(batch["labels"], rows % 2)


def test_training_texts_come_once_each_with_their_like() -> None:
    samples = make_texts()
    torch.manual_seed(0)
    batches = list(samples.training(8))
    rows = torch.cat([batch["input_ids"][:, 0] - 100 for batch in batches])
    assert sorted(rows.tolist()) == list(range(50))
    assert rows.tolist() != list(range(50))
    spread = [int(batch["attention_mask"].sum(1).max() - batch["attention_mask"].sum(1).min()) for batch in batches]
    assert max(spread) <= 2


def test_halves_share_nothing_and_have_every_class(pictures: ImageDataset) -> None:
    first, second = halves(pictures)
    assert not set(first.rows) & set(second.rows)
    assert len(first) + len(second) == len(pictures)
    for half in (first, second):
        assert np.bincount(half.labels).tolist() == [5, 5, 5]
    again, _ = halves(pictures)
    assert again.rows.tolist() == first.rows.tolist()


def test_halves_by_class_share_no_class_and_hold_everything(pictures: ImageDataset) -> None:
    labels = np.arange(63) % 21
    many = ImageDataset(Pictures(labels, 0), labels, tuple(map(str, range(21))), "many")
    first, second = class_halves(many)
    assert (len(set(first.labels)), len(set(second.labels))) == (11, 10)
    assert set(first.labels).isdisjoint(second.labels)
    assert sorted([*first.rows, *second.rows]) == list(range(63))
    assert np.array_equal(class_halves(many)[0].rows, first.rows)
    with pytest.raises(DataError, match="3 classes"):
        class_halves(pictures)
