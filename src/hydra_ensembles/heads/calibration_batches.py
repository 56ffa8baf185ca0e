"""The batches a gradient score is computed on, drawn by a seed and the same on every pass."""

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..batches import Batches, Inputs, begin_epoch, borrowed, read_batch, require_labels
from ..errors import DataError
from ..model.config import require_whole
from .fingerprint import DataFingerprint

NAME = "the calibration data"


class CalibrationBatches:
    """Labelled batches out of a source, checked, counted and fingerprinted as they are read.

    Every batch of the source gets a random key from `seed`, and those with the smallest keys are taken, in
    the order of the source; so a list, a loader and a generator of the same batches give the same draw. While
    the source is read, PyTorch's global random numbers and those of the source also start from `seed`, and are
    put back afterwards (see `reading_order`): a shuffling loader gives other samples for another seed and the
    same ones for the same seed.

    Args:
        source: Batches with labels.
        count: How many to draw; None takes all of them, whatever the seed.
        seed: Decides which.
        classes: Number of classes the labels must fit.
        keep: Hold the batches in memory, so that they can be iterated over more than once.

    Attributes:
        indices: Positions in the source of the batches read.
        samples: Number of samples read.
    """

    def __init__(self, source: Batches, count: int | None, seed: int, classes: int, keep: bool) -> None:
        count = None if count is None else require_whole("calibration_batches", count, 1)
        seed = require_whole("seed", seed, 0)
        self.indices: list[int] = []
        self._source, self._count, self._seed, self._classes = source, count, seed, classes
        self._fingerprint = DataFingerprint()
        self._kept = list(self._read()) if keep else None

    def __iter__(self) -> Iterator[tuple[int, Inputs, Tensor]]:
        """Position in the source, inputs and labels of each batch."""
        return self._read() if self._kept is None else iter(self._kept)

    @property
    def samples(self) -> int:
        """Number of samples read so far."""
        return self._fingerprint.samples

    def fingerprint(self) -> str:
        """Fingerprint of the samples read so far."""
        return self._fingerprint.hexdigest()

    def _read(self) -> Iterator[tuple[int, Inputs, Tensor]]:
        with borrowed(self._source):
            begin_epoch(self._source, 0, self._seed)
            for index, batch in self._draw():
                inputs, labels = read_batch(batch, NAME, index)
                labels = require_labels(labels, self._classes, NAME, index)
                self.indices.append(index)
                self._fingerprint.update(inputs, labels)
                yield index, inputs, labels
        if not self.samples:
            raise DataError(f"{NAME} has no samples; check the loader, or that it was not consumed before")

    def _draw(self) -> Iterator[tuple[int, Any]]:
        """Position and content of the chosen batches, in the order of the source."""
        if self._count is None:
            yield from enumerate(_seeded(self._source, self._seed))
            return
        source = self._source
        sampler = _batch_sampler(source)
        if isinstance(source, Sequence):
            yield from ((index, source[index]) for index in self._choose(len(source)))
        elif sampler is not None:
            samples = list(_seeded(sampler, self._seed))  # which samples make up each batch
            chosen = self._choose(len(samples))
            loader = _loader_of(cast(DataLoader[Any], source), [samples[index] for index in chosen])
            yield from zip(chosen, _seeded(loader, self._seed), strict=True)
        else:
            yield from self._choose_while_reading(_seeded(source, self._seed))

    def _choose(self, total: int) -> list[int]:
        """Positions of the batches with the smallest keys, ascending."""
        self._require_enough(total)
        order = np.argsort(self._keys().random(total), kind="stable")[: self._count]
        return [int(index) for index in np.sort(order)]

    def _choose_while_reading(self, batches: Iterator[Any]) -> list[tuple[int, Any]]:
        """The same choice where the number of batches is not known; holds no more batches than are drawn."""
        keys, total = self._keys(), 0
        smallest: list[tuple[float, int, Any]] = []  # a heap of (-key, -position, batch)
        for index, batch in enumerate(batches):
            total += 1
            heapq.heappush(smallest, (-keys.random(), -index, batch))
            if len(smallest) > (self._count or 0):
                heapq.heappop(smallest)
        self._require_enough(total)
        return sorted(((-index, batch) for _, index, batch in smallest), key=lambda drawn: drawn[0])

    def _keys(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self._seed))

    def _require_enough(self, total: int) -> None:
        if total and self._count is not None and total < self._count:
            raise DataError(
                f"calibration_batches is {self._count}, but {NAME} has {total} batches; "
                "ask for fewer, or make the batches smaller"
            )


def _batch_sampler(source: Batches) -> Batches | None:
    """What tells a plain loader which samples make up each batch; None where batches can only be read in turn."""
    if type(source) is not DataLoader or isinstance(source.dataset, IterableDataset):
        return None
    return source.batch_sampler


def _loader_of(loader: DataLoader[Any], batches: list[Any]) -> DataLoader[Any]:
    """A loader for some batches of another one, so that the samples of the others need not be read."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=min(loader.num_workers, len(batches)),
        collate_fn=loader.collate_fn,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _seeded(source: Batches, seed: int) -> Iterator[Any]:
    """Iterate over a source as if PyTorch's global CPU generator had been seeded before and used by it alone."""
    own = torch.Generator().manual_seed(seed).get_state()
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(own)
        iterator = iter(source)
        own = torch.get_rng_state()
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(own)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            own = torch.get_rng_state()
        yield batch
