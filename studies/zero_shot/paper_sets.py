"""The paper's nine zero-shot data sets and their OOD sets (C.3, Tables 24 to 26), for a user who has them.

They lie in one folder: an OpenOOD 1.5 data folder (`benchmark_imglist/`, `images_classic/`, `images_largescale/`), and
beside its folders what torchvision makes of the other sets. SUN397 comes from the Hugging Face hub.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from hydra_ensembles._utils import require
from hydra_ensembles.data.dataset import ImageDataset, only_classes, without_classes
from hydra_ensembles.data.loading import CIFAR100_CLASSES
from hydra_ensembles.data.suites import CIFAR100_TINYIMAGENET, SetRef, left, suite
from hydra_ensembles.errors import DataError

from .joined_images import at_most, joined_images
from .label_names import label_names
from .recipe import Counts
from .sources import CircuitData, Detection, NamedImages, Task

IMAGENET, CIFAR100 = "imagenet", "cifar100"
IMAGENET_CLASSES = 1000
_TOLD_APART = {744: "projectile", 837: "dark sunglasses"}  # else "missile" and "sunglasses" again


class PaperSets:
    """The sets of the suites `paper-zero-shot-imagenet` and `paper-zero-shot-cifar100`."""

    name = "paper"

    def __init__(self, root: Path, counts: Counts) -> None:
        self.root, self.counts = root, counts
        self._suites = {IMAGENET: suite("paper-zero-shot-imagenet"), CIFAR100: suite("paper-zero-shot-cifar100")}
        self._main = self._suites[IMAGENET]

    def circuits(self) -> CircuitData:
        """The validation hundredth of ImageNet-1K, and the validation part of OpenImage-O."""
        return CircuitData(self._fewer(self._validation), self._load(self._main.circuit_ood))

    def image_circuits(self) -> CircuitData:
        """The same and CIFAR-100 with the OOD set its circuits read (E.3.2), as one task, so many images of each.

        Classes of CIFAR-100 that ImageNet-1K has as well are left out; TinyImageNet, whose overlaps are listed, is a
        part of it.
        """
        both, supervised, counts = self.circuits(), suite("paper-cifar100"), self.counts
        part = self._load(_given(supervised.validation, supervised.name), CIFAR100_CLASSES)
        same = {
            name for name, label in zip(part.class_names, _names(CIFAR100, part), strict=True) if label in _imagenet()
        }
        part = without_classes(part, sorted({*same, *left(CIFAR100_TINYIMAGENET)}))
        further = only_classes(part, sorted(set(part.labels.tolist()))[: counts.classes], relabel=True)
        names = (*both.inside.names, *_names(CIFAR100, further))
        first, second = at_most(both.inside.images, counts.circuits), at_most(further, counts.image_circuits)
        inside = joined_images(first, second, names, "imagenet and cifar100")
        first = at_most(both.outside, counts.circuits)
        second = at_most(self._load(supervised.circuit_ood), counts.image_circuits)
        outside = joined_images(first, second, (), "their OOD sets")
        return CircuitData(NamedImages(inside, names), outside)

    def calibration(self) -> NamedImages:
        """Training images of ImageNet-1K; the recipe says how many of them."""
        return self._fewer(self._load(_given(self._main.train, self._main.name)))

    def tasks(self) -> Sequence[Task]:
        """ImageNet-1K, CIFAR-100, CIFAR-10, Food101, SUN397, Pets, DTD, EuroSAT, Caltech101."""
        found = []
        for reference in (self._main.id, *self._main.tasks):
            images = self._load(reference)
            found.append(Task(reference.name, "unseen", NamedImages(images, _names(reference.name, images))))
        return found

    def detections(self) -> Sequence[Detection]:
        """ImageNet-1K and CIFAR-100 as ID data."""
        return [
            Detection(
                task,
                {reference.name: self._load(reference) for reference in one.near},
                {reference.name: self._load(reference) for reference in one.far},
            )
            for task, one in self._suites.items()
        ]

    @cached_property
    def _validation(self) -> ImageDataset:
        return self._load(_given(self._main.validation, self._main.name))

    def _load(self, reference: SetRef, class_names: Sequence[str] = ()) -> ImageDataset:
        loaded = reference.load(self.root)
        if not isinstance(loaded, ImageDataset):
            raise DataError(f"{reference.name} holds texts, a zero-shot study reads images")
        if not class_names:
            return loaded
        return loaded.relabel({label: label for label in set(loaded.labels.tolist())}, class_names)

    def _fewer(self, images: ImageDataset) -> NamedImages:
        """Images of ImageNet-1K with the names of their classes; the first that there are where the recipe says so."""
        names = _names(IMAGENET, images)
        if self.counts.classes is None:
            return NamedImages(images, names)
        kept = sorted(set(images.labels.tolist()))[: self.counts.classes]
        return NamedImages(only_classes(images, kept, relabel=True), tuple(names[number] for number in kept))


def _names(task: str, images: ImageDataset) -> tuple[str, ...]:
    """What prompts call the classes: the data set's own names made readable; ImageNet's are those of CLIP's authors."""
    names = images.class_names
    if task == IMAGENET:
        if len(names) != IMAGENET_CLASSES:
            raise DataError(
                f"{images.name} has {len(names)} classes; names are given to the {IMAGENET_CLASSES} of ImageNet-1K by "
                "their position, so all of their folders must be there"
            )
        return _imagenet()
    if task == "pets":  # torchvision has put spaces where the set has underscores
        names = tuple(name.replace(" ", "_") for name in names)
    if task == "sun397":  # some copies name classes by their folders, such as /a/abbey
        names = tuple(name[3:] if name[:1] == "/" else name for name in names)
        names = tuple(name.replace("/", " ") for name in names)
    return label_names(task, names)


def _imagenet() -> tuple[str, ...]:
    """The names under which CLIP is usually asked about ImageNet-1K; those it has twice are told apart."""
    usual = require("open_clip", extra="open_clip").IMAGENET_CLASSNAMES
    return tuple(_TOLD_APART.get(position, name) for position, name in enumerate(usual))


def _given(reference: SetRef | None, name: str) -> SetRef:
    if reference is None:
        raise DataError(f"the suite {name!r} lacks a set that the zero-shot study reads")
    return reference
