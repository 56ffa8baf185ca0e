"""Members see orders of their own, whatever the source draws them from, and the source is given back as it came."""

import dataclasses

import pytest
import torch
from finetune_cases import own_batches, same, samples, tiny
from torch.utils.data import DataLoader, TensorDataset

from hydra_ensembles.batches import begin_epoch, borrowed
from hydra_ensembles.data.batching import batches as data_batches
from hydra_ensembles.training.finetune import finetune
from hydra_ensembles.training.recipe import Recipe

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

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_the_epoch_of_a_data_set_inside_a_loader_is_put_back():
    data = Told(*samples())
    train(DataLoader(data, batch_size=8))
    assert data.epoch == 4


class StopError(Exception):
    """Ends a run in the middle."""


def test_a_run_on_the_batches_of_the_library_resumes_with_the_same_bits(tmp_path):
    pairs = list(zip(*samples(), strict=True))
    left = 8 * 11  # samples: the batch of the fingerprint, one epoch of six, and four batches of the next

    def counted(images):
        nonlocal left
        left -= len(images)
        if left < 0:
            raise StopError
        return noisy(images)

    source = data_batches(pairs, counted, 8, shuffle=True)
    with pytest.raises(StopError):
        train(source, output=tmp_path, checkpoint_every=1)
    assert (source.epoch, source.stream) == (0, None)
    left = 10_000
    assert same(train(source), train(source, output=tmp_path, checkpoint_every=1))
