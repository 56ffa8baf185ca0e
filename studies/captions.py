"""Image-text pairs for training a dual encoder: human captions, and sentences made from class names.

The image tower is locked, so its features are computed once; texts are drawn again for every batch. Each set supplies a
fixed share of each batch: many names with few images teach more than few names with many.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles import DualEncoder, Recipe, tune_text
from hydra_ensembles.model.dual_encoder import LABEL
from hydra_ensembles.training.text import image_features

from .samples import ImageSamples, normalised, resized
from .sets import DataFolder, at_most, label_names
from .suites import SetRef, read_yaml

FEATURE_BATCH = 512
MIDDLE = 0.85  # side of the central crop, relative to the image
VIEWS = ((False, False), (True, True), (False, True), (True, False))  # (central crop, mirrored) of each view


@dataclass(frozen=True, eq=False)
class TrainImages:
    """Images of one set with their class names, in label order, or with captions of each image."""

    samples: ImageSamples
    names: tuple[str, ...] = ()
    captions: Sequence[Sequence[str]] = ()
    share: float = 1.0  # of a batch, relative to the total of all sets

    def texts(self, rows: Tensor) -> list[str]:
        """Draw a text for every row: a caption, or a sentence with a name of the class; uses torch's CPU generator."""
        choices = torch.rand(2, len(rows)).tolist()
        if self.captions:
            return [_any(self.captions[row], choice) for row, choice in zip(rows.tolist(), choices[0], strict=True)]
        sentences = caption_templates()
        further = read_yaml("captions")["other_names"]
        texts = []
        for label, first, second in zip(self.samples.labels[rows].tolist(), *choices, strict=True):
            name = self.names[label]
            texts.append(_any(sentences, first).replace(LABEL, _any((name, *further.get(name, ())), second)))
        return texts


def _any(options: Sequence[str], choice: float) -> str:
    return options[int(choice * len(options))]


def caption_templates() -> tuple[str, ...]:
    """Sentences for training; the study prompts with the first one."""
    return tuple(read_yaml("captions")["templates"])


def read_train_images(
    source: DataFolder,
    sets: Sequence[Mapping[str, Any]],
    input_size: int,
    device: torch.device,
    limit: int | None = None,
) -> tuple[TrainImages, ...]:
    """Read the images of the given sets; `limit` bounds their total number."""
    train_images = []
    for pairs in sets:
        source_name, described = pairs["source"], pairs.get("captions", False)
        name = source_name.rpartition("/")[2]
        reference = SetRef(name, source_name, "train", labels="optional" if described else "required")
        images = at_most(source.images(reference), None if limit is None else max(2, limit // len(sets)))
        samples = ImageSamples.read(images, input_size, device)
        if described:
            captions = source.captions(source_name, "train")
            texts: dict[str, Any] = {"captions": [captions[row] for row in images.rows]}
        else:
            texts = {"names": label_names(name, images.class_names)}
        train_images.append(TrainImages(samples, share=pairs["share"], **texts))
    return tuple(train_images)


def pair_labels(images: Sequence[TrainImages]) -> list[Tensor]:
    """Labels shared by all sets: equal names are one class, and every image with captions is a class of its own."""
    names = list(dict.fromkeys(name for part in images for name in part.names))
    numbers = {name: number for number, name in enumerate(names)}
    starts = accumulate((len(part.captions) for part in images), initial=len(names))
    return [
        torch.arange(len(part.samples)) + start
        if part.captions
        else torch.tensor([numbers[name] for name in part.names])[part.samples.labels]
        for part, start in zip(images, starts, strict=False)
    ]


class Pairs:
    """Batches of image features with newly drawn texts, using torch's CPU generator.

    Takes features `[views, N, d]` of every set. A batch has its share of every set and no image twice; it is smaller
    where a set has too few images.
    """

    def __init__(self, images: Sequence[TrainImages], features: Sequence[Tensor], batch_size: int) -> None:
        self.images = images
        self.features = features
        self.labels = pair_labels(images)
        self.batch_size = batch_size
        total = sum(part.share for part in images)
        self.counts = [max(1, round(batch_size * part.share / total)) for part in images]

    def __len__(self) -> int:
        return max(sum(len(part.samples) for part in self.images) // self.batch_size, 1)

    def __iter__(self) -> Iterator[tuple[Tensor, list[str], Tensor]]:
        """Features `[B, d]` of one view of each image, texts, and labels `[B]`."""
        for _ in range(len(self)):
            drawn = [self._drawn(index) for index in range(len(self.images))]
            features, texts, labels = zip(*drawn, strict=True)
            yield torch.cat(features), [text for some in texts for text in some], torch.cat(labels)

    def _drawn(self, index: int) -> tuple[Tensor, list[str], Tensor]:
        images, features = self.images[index], self.features[index]
        rows = torch.randperm(len(images.samples))[: self.counts[index]]
        views = torch.randint(len(features), rows.shape)
        device = features.device
        return features[views.to(device), rows.to(device)], images.texts(rows), self.labels[index][rows]


# --- training --------------------------------------------------------------------------------------------------------


def view_features(dual: DualEncoder, samples: ImageSamples, views: int) -> Tensor:
    """Features `[views, N, d]` of images: unchanged, mirrored central crop, mirrored, central crop."""

    def inputs(middle: bool, mirrored: bool) -> Iterator[Tensor]:
        for pixels in samples.pixels.split(FEATURE_BATCH):
            images = _middle(pixels) if middle else pixels
            yield normalised(resized((images.flip(-1) if mirrored else images).float() / 255, samples.size))

    return torch.stack([image_features(dual, inputs(*view)) for view in VIEWS[:views]])


def _middle(images: Tensor) -> Tensor:
    """The central crop of images `[B, 3, h, w]`."""
    height, width = images.shape[-2:]
    tall, wide = round(height * MIDDLE), round(width * MIDDLE)
    top = (height - tall) // 2
    left = (width - wide) // 2
    return images[..., top : top + tall, left : left + wide]


def train_dual(dual: DualEncoder, recipe: Recipe, pairs: Pairs, **options: Any) -> DualEncoder:
    """Tune the text side of a dual encoder on pairs, image tower locked; `options` are those of `tune_text`."""
    if dual.device.type != "cuda":
        recipe = replace(recipe, precision="float32")
    return tune_text(dual, pairs, recipe, progress=False, **options)
