"""Parts of sets of images, and two labelled sets as one task, the classes of the second after those of the first."""

from collections.abc import Sequence

import numpy as np

from hydra_ensembles.data.dataset import ImageDataset, Picture, subset

from ..recipe import SPLIT_SEED


class _OneAfterAnother:
    """The images of two sets by position."""

    def __init__(self, first: ImageDataset, second: ImageDataset) -> None:
        self.first, self.second = first, second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def __getitem__(self, row: int) -> Picture:
        """One image."""
        inside = row < len(self.first)
        return self.first[row][0] if inside else self.second[row - len(self.first)][0]


def at_most(images: ImageDataset, limit: int | None) -> ImageDataset:
    """So many of the images, drawn once, the same for all seeds; all of them where there are not more."""
    if limit is None or limit >= len(images):
        return images
    return subset(images, limit, SPLIT_SEED, stratified=images.labelled)


def joined_images(first: ImageDataset, second: ImageDataset, names: Sequence[str], name: str) -> ImageDataset:
    """All images of both; `names` are those of all classes."""
    labels = np.concatenate([first.labels, second.labels + len(first.class_names)])
    return ImageDataset(_OneAfterAnother(first, second), labels, names, name)
