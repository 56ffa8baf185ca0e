"""Training the dual encoder of the shared folder: pairs of image features and captions written from class names."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles import DualEncoder, Recipe, tune_text
from hydra_ensembles.data.suites import SetRef
from hydra_ensembles.errors import DataError
from hydra_ensembles.model.clip import LABEL, checked_templates
from hydra_ensembles.training.text import image_features

from .recipe import derived_seed
from .samples import ImageSamples, augmented, normalised, resized
from .sets import FIRST_BATCH, NPM, DataFolder, at_most, given, label_names, read_yaml, suite

CIFAR_IMAGES = 10_000  # of the training set; its last 5,000 are a validation set, its test set is never trained on
CIFAR_TRAIN = SetRef("cifar10-train", NPM, FIRST_BATCH, rows=(0, CIFAR_IMAGES))
FEATURE_BATCH = 512
MIRRORED_SIDE = 0.85  # of the crop that is mirrored


def caption_templates() -> tuple[str, ...]:
    """Sentences for training; the first one is what the study asks by."""
    return tuple(read_yaml("captions")["templates"])


class Captions:
    """Captions of every class; which sentence and which name is drawn from torch's CPU generator."""

    def __init__(self, names: Sequence[str]) -> None:
        """Take class names in the order of the labels.

        Raises:
            DataError: A class without a name.
        """
        if not names or not all(name.strip() for name in names):
            raise DataError(f"every class needs a name, got {[name for name in names if not name.strip()] or 'none'}")
        self.templates, further = checked_templates(caption_templates()), read_yaml("captions")["other_names"]
        self.names = tuple((name, *further.get(name, ())) for name in names)

    def draw(self, labels: Tensor) -> list[str]:
        """A caption for every label `[B]`."""
        sentences = torch.randint(len(self.templates), labels.shape).tolist()
        choices = torch.rand(labels.shape).tolist()
        drawn = []
        for label, sentence, choice in zip(labels.tolist(), sentences, choices, strict=True):
            names = self.names[label]
            drawn.append(self.templates[sentence].replace(LABEL, names[int(choice * len(names))]))
        return drawn


@dataclass(frozen=True, eq=False)
class TrainImages:
    """Images of one data set and the names of its classes, in the order of the labels."""

    samples: ImageSamples
    names: tuple[str, ...]


def read_train_images(
    source: DataFolder, input_size: int, device: torch.device, limit: int | None = None
) -> tuple[TrainImages, ...]:
    """TinyImageNet-200 (training split) and part of the CIFAR-10 training set; with `limit`, so many of both in all."""
    tiny = given(suite("tinyimagenet"), "train")
    found = []
    for name, reference in (("tinyimagenet", tiny), ("cifar10", CIFAR_TRAIN)):
        images = at_most(source.images(reference), None if limit is None else limit // 2)
        samples = ImageSamples.read(images, input_size, device)
        found.append(TrainImages(samples, label_names(name, images.class_names)))
    return tuple(found)


class FeaturePairs:
    """Batches of image features with fresh captions, in random order, drawn from torch's CPU generator."""

    def __init__(self, views: Tensor, labels: Tensor, captions: Captions, batch_size: int) -> None:
        """Take features `[views, N, d]` and labels `[N]`; the last batch is left out where it is not full."""
        self.views, self.labels = views, labels
        self.captions, self.batch_size = captions, batch_size

    def __len__(self) -> int:
        return max(len(self.labels) // self.batch_size, 1)

    def __iter__(self) -> Iterator[tuple[Tensor, list[str], Tensor]]:
        """Features `[B, d]` of one view of each image, captions, and labels `[B]`."""
        order = torch.randperm(len(self.labels))
        device = self.views.device
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            rows = order[start : start + self.batch_size]
            views = torch.randint(len(self.views), rows.shape)
            labels = self.labels[rows]
            yield self.views[views.to(device), rows.to(device)], self.captions.draw(labels), labels


def joined_classes(images: Sequence[TrainImages]) -> tuple[tuple[str, ...], Tensor]:
    """One list of class names for several data sets, and all labels in it: the same name is the same class."""
    names = tuple(dict.fromkeys(name for one in images for name in one.names))
    numbers = {name: number for number, name in enumerate(names)}
    labels = [torch.tensor([numbers[name] for name in one.names])[one.samples.labels] for one in images]
    return names, torch.cat(labels)


def view_features(dual: DualEncoder, samples: ImageSamples, views: int, seed: int) -> Tensor:
    """Features `[views, N, d]`: of the whole image, of a mirrored crop, and then of random crops."""
    return torch.stack([image_features(dual, _View(samples, view, seed)) for view in range(views)])


def train_pairs(
    dual: DualEncoder, images: Sequence[TrainImages], batch_size: int, views: int = 2, seed: int = 0
) -> FeaturePairs:
    """Batches to tune the text side of a dual encoder with, made of the features of its image tower."""
    names, labels = joined_classes(images)
    features = torch.cat([view_features(dual, one.samples, views, seed) for one in images], dim=1)  # [views, N, d]
    return FeaturePairs(features, labels, Captions(names), batch_size)


def train_dual(
    dual: DualEncoder,
    recipe: Recipe,
    images: Sequence[TrainImages],
    *,
    views: int = 2,
    train_image_projection: bool = True,
    **options: Any,
) -> DualEncoder:
    """Tune the text side of a dual encoder, and its image projection where that is new, on images and captions.

    Args:
        dual: One member, on the device to train on.
        recipe: How to train; its `batch_size` is that of the pairs, its seed that of order, views and captions.
        images: What `read_train_images` gives.
        views: Views of each image whose features are computed, once.
        train_image_projection: False for a dual encoder that is trained already: locked-image tuning.
        **options: Further ones of `tune_text`: `projection_rate`, `output`.
    """
    if dual.device.type != "cuda":
        recipe = replace(recipe, precision="float32")
    pairs = train_pairs(dual, images, recipe.batch_size or FEATURE_BATCH, views, recipe.seed)
    return tune_text(dual, pairs, recipe, train_image_projection=train_image_projection, progress=False, **options)


class _View:
    """Batches of one view of all images, in order."""

    def __init__(self, samples: ImageSamples, view: int, seed: int) -> None:
        self.samples, self.view, self.seed = samples, view, seed

    def __iter__(self) -> Iterator[Tensor]:
        """Inputs `[B, 3, size, size]`."""
        size = self.samples.size
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derived_seed(self.seed, "view", self.view, bits=63))
            for pixels in self.samples.pixels.split(FEATURE_BATCH):
                images = pixels.float() / 255
                if self.view > 1:
                    sized = augmented(images, size)
                else:
                    sized = resized(images if self.view == 0 else _mirrored_centre(images), size)
                yield normalised(sized)


def _mirrored_centre(images: Tensor) -> Tensor:
    """The middle of images `[B, 3, h, w]`, left and right exchanged."""
    height, width = images.shape[-2:]
    tall, wide = round(height * MIRRORED_SIDE), round(width * MIRRORED_SIDE)
    top, left = (height - tall) // 2, (width - wide) // 2
    return images[..., top : top + tall, left : left + wide].flip(-1)
