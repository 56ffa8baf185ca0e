"""The images of the zero-shot study: our own sets, and the paper's.

In the shared folder, a study splits TinyImageNet's validation set like the other studies: half A ranks heads, half B
fits temperatures. Of CIFAR-10's test set, images 0 to 4,999 are the circuits' OOD data and the others are reported.
Circuits of the image tower alone also read training images of CIFAR-100, whose test set is reported.

The paper's sets (C.3, Tables 24 to 26) are in one folder: an OpenOOD 1.5 data folder (`benchmark_imglist/`,
`images_classic/`, `images_largescale/`), with the other sets beside its folders, as pictures in folders by class or as
Parquet files. SUN397 comes from the Hugging Face hub.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from hydra_ensembles.data import ImageDataset, only_classes, without_classes
from hydra_ensembles.data.dataset import Rows, SomeDataset
from hydra_ensembles.errors import DataError

from .sets import (
    IMAGENET_CLASSES,
    DataFolder,
    as_images,
    at_most,
    halves,
    imagenet_names,
    label_names,
)
from .suites import SetRef, Suite, given, overlapping, suite

IMAGENET, CIFAR100 = "imagenet", "cifar100"
TRAINED = (IMAGENET, CIFAR100, "cifar10", "food101", "sun397", "pets", "dtd")  # tasks of the paper with training images
SEEN = ("tinyimagenet",)  # the task whose training images trained the dual encoder of the shared folder


def joined_images(first: ImageDataset, second: ImageDataset, names: Sequence[str], name: str) -> ImageDataset:
    """Two labelled sets as one, with the second's classes after the first's; `names` are those of all classes."""
    labels = np.concatenate([first.labels, second.labels + len(first.class_names)])
    both: ConcatDataset[tuple[Any, int]] = ConcatDataset([first, second])
    return ImageDataset(Rows(len(both), lambda row: both[row][0]), labels, names, name)


def others(dataset: SomeDataset, drawn: SomeDataset) -> SomeDataset:
    """The samples of a data set that were not drawn."""
    return dataset.select(np.flatnonzero(~np.isin(dataset.rows, drawn.rows)))


@dataclass(frozen=True, eq=False)
class NamedImages:
    """Labelled images, and their class names for prompts, in label order.

    Labels may omit classes (an OOD set without overlapping ones); names never do.
    """

    images: ImageDataset
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names):
            twice = sorted({name for name in self.names if self.names.count(name) > 1})
            raise DataError(f"{self.images.name}: classes {twice} have the same name; give each its own")
        highest = int(self.images.labels.max()) if len(self.images) else -1
        if highest >= len(self.names) or not self.images.labelled:
            raise DataError(f"{self.images.name} needs a label for every image and a name for every label")


CircuitImages = tuple[NamedImages, ImageDataset]
"""Images for extracting circuits: ID images with names, and OOD images, whose labels are not used."""


class DualSets(ABC):
    """All images of a zero-shot study: its suites by ID task, and the number of images of each part."""

    name: str

    def __init__(self, suites: Mapping[str, Suite], counts: Any) -> None:
        self.suites, self.counts = suites, counts
        self.main = next(iter(suites.values()))

    @abstractmethod
    def load(self, reference: SetRef) -> ImageDataset:
        """A set of a suite."""

    @abstractmethod
    def names(self, task: str, images: ImageDataset) -> tuple[str, ...]:
        """Names of a task's classes for prompts."""

    @abstractmethod
    def circuits(self) -> CircuitImages:
        """Images for extracting circuits of both towers."""

    @abstractmethod
    def second(self) -> tuple[ImageDataset, ImageDataset | None]:
        """Further images for circuits of the image tower alone: CIFAR-100, and OOD images or None.

        Without the classes of CIFAR-100 that the first task also has.
        """

    @abstractmethod
    def calibration(self) -> NamedImages:
        """ID images for fitting temperatures; not used to rank heads, and not reported."""

    @abstractmethod
    def training(self) -> NamedImages:
        """Labelled training images of the main task; not used to fit temperatures."""

    def taught(self, task: str) -> str:
        """The task whose training images teach a method about a task."""
        return self.main.id.name

    def lessons(self, task: str) -> NamedImages:
        """Labelled training images of a task that has them."""
        return self.training()

    def image_circuits(self) -> CircuitImages:
        """Images for circuits of the image tower alone: both tasks as one (E.3.2), a fixed number of each."""
        (inside, outside), counts = self.circuits(), self.counts
        cifar, cifar_ood = self.second()
        further = only_classes(cifar, sorted(set(cifar.labels.tolist()))[: counts.classes], relabel=True)
        names = (*inside.names, *self.names(CIFAR100, further))
        first, second = at_most(inside.images, counts.circuits), at_most(further, counts.image_circuits)
        images = joined_images(first, second, names, "both tasks of circuits")
        outside = at_most(outside, counts.circuits)
        if cifar_ood is not None:
            outside = joined_images(outside, at_most(cifar_ood, counts.image_circuits), (), "their OOD sets")
        return NamedImages(images, names), outside

    def fewer(self, images: ImageDataset, task: str, limit: int | None = None) -> NamedImages:
        """Images with their class names, with at most `limit` images and the recipe's number of classes."""
        names = self.names(task, images)
        if self.counts.classes is not None and self.counts.classes < len(names):
            labels = sorted(set(images.labels.tolist()))[: self.counts.classes]
            images = only_classes(images, labels, relabel=True)
            names = tuple(names[number] for number in labels)
        return NamedImages(at_most(images, limit), names)


class SharedSets(DualSets):
    """The sets of the suites `zero-shot` and `zero-shot-cifar100`."""

    name = "shared"

    def __init__(self, source: DataFolder, counts: Any) -> None:
        super().__init__({one.id.name: one for one in (suite("zero-shot"), suite("zero-shot-cifar100"))}, counts)
        self.source = source

    def load(self, reference: SetRef) -> ImageDataset:
        return self.source.images(reference)

    def names(self, task: str, images: ImageDataset) -> tuple[str, ...]:
        return label_names(task, images.class_names)

    def circuits(self) -> CircuitImages:
        """Half A of TinyImageNet's validation set, and CIFAR-10 without overlapping classes."""
        return self.fewer(self._halves[0], "tinyimagenet"), self.source.images(self.main.circuit_ood)

    def second(self) -> tuple[ImageDataset, None]:
        """Training images of the classes of CIFAR-100 that TinyImageNet does not have."""
        return without_classes(self.load(given(suite(CIFAR100), "validation")), _shared_classes()), None

    def calibration(self) -> NamedImages:
        """Half B of TinyImageNet's validation set."""
        return self.fewer(self._halves[1], "tinyimagenet", self.counts.calibration)

    def training(self) -> NamedImages:
        """TinyImageNet's training images, which also trained the study's dual encoder."""
        return self.fewer(self.load(given(self.main, "train")), "tinyimagenet", self.counts.pairs)

    @cached_property
    def _halves(self) -> tuple[ImageDataset, ImageDataset]:
        return halves(self.source.images(given(self.main, "validation")))


class PaperSets(DualSets):
    """The sets of the suites `paper-zero-shot-imagenet` and `paper-zero-shot-cifar100`."""

    name = "paper"

    def __init__(self, root: Path, counts: Any) -> None:
        self.root = root
        super().__init__({name: suite(f"paper-zero-shot-{name}") for name in (IMAGENET, CIFAR100)}, counts)

    def load(self, reference: SetRef) -> ImageDataset:
        return as_images(reference.load(self.root))

    def names(self, task: str, images: ImageDataset) -> tuple[str, ...]:
        """The labels as they are, with spaces (C.3); those of ImageNet are from CLIP's authors, by position."""
        names = images.class_names
        if task == IMAGENET:
            if len(names) != IMAGENET_CLASSES:
                raise DataError(f"{images.name} has {len(names)} classes; all {IMAGENET_CLASSES} folders must be there")
            return imagenet_names()
        if task == "sun397":  # some copies name classes by folder, such as /a/abbey
            names = tuple((name[3:] if name[:1] == "/" else name).replace("/", " ") for name in names)
        return tuple(name.replace("_", " ") for name in names)

    def circuits(self) -> CircuitImages:
        """The validation hundredth of ImageNet-1K, and the validation part of OpenImage-O."""
        return self.fewer(self.load(given(self.main, "validation")), IMAGENET), self.load(self.main.circuit_ood)

    def second(self) -> tuple[ImageDataset, ImageDataset]:
        """CIFAR-100 without classes of ImageNet-1K (which contains TinyImageNet, whose overlaps are listed)."""
        supervised = suite("paper-cifar100")
        images = self.load(given(supervised, "validation"))
        class_names = self.suites[CIFAR100].id.class_names
        part = images.relabel({label: label for label in set(images.labels.tolist())}, class_names)
        pairs = zip(part.class_names, self.names(CIFAR100, part), strict=True)
        shared = {name for name, label in pairs if label in imagenet_names()}
        return without_classes(part, sorted({*shared, *_shared_classes()})), self.load(supervised.circuit_ood)

    def calibration(self) -> NamedImages:
        """Training images of ImageNet-1K."""
        return NamedImages(at_most(self._train.images, self.counts.calibration), self._train.names)

    def training(self) -> NamedImages:
        """The other training images of ImageNet-1K."""
        rest = others(self._train.images, self.calibration().images)
        return NamedImages(at_most(rest, self.counts.pairs), self._train.names)

    def taught(self, task: str) -> str:
        """EuroSAT and Caltech101 have no training images apart from those that are reported: ImageNet-1K's serve."""
        return task if task in TRAINED else IMAGENET

    def lessons(self, task: str) -> NamedImages:
        if task == IMAGENET:
            return self.training()
        (reference,) = (one for one in self.main.tasks if one.name == task)
        own = given(suite("paper-cifar100"), "train") if task == CIFAR100 else replace(reference, split="train")
        images = self.load(replace(own, class_names=reference.class_names))
        return NamedImages(images, self.names(task, images))

    @cached_property
    def _train(self) -> NamedImages:
        return self.fewer(self.load(given(self.main, "train")), IMAGENET)


def _shared_classes() -> tuple[str, ...]:
    """Classes of CIFAR-100 that TinyImageNet also has."""
    return overlapping("cifar100, tinyimagenet", CIFAR100)
