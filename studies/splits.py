"""The data a study may look at before its settings are fixed: training data and the two halves.

ID validation and circuit OOD data are cut in two once, by a seed that is the same for every run; OOD data by classes
where a recipe says so. Half A ranks heads. Half B chooses settings and calibrates. Test sets are not read here; see
`test_sets`.
"""

from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hydra_ensembles.batches import Batches
from hydra_ensembles.data.dataset import AnyDataset, ImageDataset, TextDataset, split, subset
from hydra_ensembles.data.suites import suite
from hydra_ensembles.errors import DataError
from hydra_ensembles.preprocessing import TextPreprocessing

from .image_samples import ImageSamples
from .recipe import SPLIT_SEED, StudyRecipe
from .store import Store
from .text_samples import TextSamples

LEAST_CLASSES = 20  # of OOD data that are cut in two by class


class Samples(Protocol):
    """Labelled inputs on a device, of either kind."""

    labels: Tensor

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def evaluation(self, batch_size: int) -> Batches:
        """Batches in order."""
        ...

    def training(self, batch_size: int) -> Batches:
        """Shuffled, augmented batches."""
        ...


class Reader:
    """Turns data sets into samples on a device, the way the study's backbone takes them."""

    def __init__(self, recipe: StudyRecipe, store: Store, device: torch.device) -> None:
        self.recipe, self.store, self.device = recipe, store, device

    def samples(self, dataset: AnyDataset, limit: int | None = None) -> Samples:
        """All samples, or so many of them, drawn once."""
        if limit is not None and limit < len(dataset):
            dataset = subset(dataset, limit, SPLIT_SEED, stratified=dataset.labelled)
        if isinstance(dataset, ImageDataset):
            return ImageSamples.read(dataset, self.recipe.input_size, self.device)
        assert isinstance(dataset, TextDataset)
        return TextSamples.read(dataset, self._tokenizer, self.device)

    @cached_property
    def _tokenizer(self) -> TextPreprocessing:
        return self.store.tokenizer(self.recipe.input_size)


class StudyData:
    """Training data and halves of a study; each part is read when it is first asked for."""

    def __init__(self, recipe: StudyRecipe, store: Store, device: torch.device) -> None:
        self.recipe, self.store = recipe, store
        self.reader = Reader(recipe, store, device)
        self._suite = suite(recipe.suite)
        if self._suite.train is None or self._suite.validation is None:
            raise DataError(f"suite {recipe.suite!r} has no training or validation set")

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Class names of the task."""
        return self._train_set.class_names

    @cached_property
    def train(self) -> Samples:
        """Training data of the backbones."""
        return self.reader.samples(self._train_set, self.recipe.counts.train)

    @cached_property
    def member_train(self) -> Samples:
        """Training data of pruned members."""
        if self.recipe.counts.member_train == self.recipe.counts.train:
            return self.train
        return self.reader.samples(self._train_set, self.recipe.counts.member_train)

    @cached_property
    def rank_id(self) -> Samples:
        """ID samples that rank heads (half A)."""
        return self.reader.samples(self._id_halves[0], self.recipe.counts.circuits)

    @cached_property
    def rank_ood(self) -> Samples:
        """OOD samples that rank heads (half A)."""
        return self.reader.samples(self._ood_halves[0], self.recipe.counts.circuits)

    @cached_property
    def choose_id(self) -> Samples:
        """ID samples that choose and calibrate (half B)."""
        return self.reader.samples(self._id_halves[1], self.recipe.counts.choose)

    @cached_property
    def choose_ood(self) -> Samples:
        """OOD samples that choose (half B)."""
        return self.reader.samples(self._ood_halves[1], self.recipe.counts.choose)

    def samples(self) -> dict[str, int]:
        """How many samples each part has."""
        names = ("train", "member_train", "rank_id", "rank_ood", "choose_id", "choose_ood")
        return {name: len(getattr(self, name)) for name in names}

    @cached_property
    def _train_set(self) -> AnyDataset:
        assert self._suite.train is not None
        return self.store.load(self._suite.train)

    @cached_property
    def _id_halves(self) -> tuple[AnyDataset, AnyDataset]:
        assert self._suite.validation is not None
        return halves(self.store.load(self._suite.validation))

    @cached_property
    def _ood_halves(self) -> tuple[AnyDataset, AnyDataset]:
        whole = self.store.load(self._suite.circuit_ood)
        return halves(whole) if self.recipe.ood_halves == "images" else class_halves(whole)


def class_halves(dataset: AnyDataset) -> tuple[AnyDataset, AnyDataset]:
    """Half A and half B of a data set, no class in both; of an odd number, half A has one more.

    Raises:
        DataError: There are so few classes that a half would say little about other data.
    """
    present = np.unique(dataset.labels)
    if len(present) < LEAST_CLASSES:
        raise DataError(
            f"{dataset.name} has images of {len(present)} classes; to be cut in two by classes it needs at least "
            f"{LEAST_CLASSES}: set ood_halves to 'images'"
        )
    order = np.random.default_rng(SPLIT_SEED).permutation(present)
    in_first = np.isin(dataset.labels, order[: (len(order) + 1) // 2])
    return dataset.select(np.flatnonzero(in_first)), dataset.select(np.flatnonzero(~in_first))


def halves(dataset: AnyDataset) -> tuple[AnyDataset, AnyDataset]:
    """Half A and half B of a data set, every class cut in two."""
    first, second = split(dataset, 0.5, SPLIT_SEED, stratified=True)
    return first, second
