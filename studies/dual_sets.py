"""The images of a zero-shot study: those of the shared folder, or the paper's own sets for a user who has them.

Of the shared folder, TinyImageNet's validation set is cut in two as in the other studies: half A ranks heads, half B
fits temperatures. Of CIFAR-10's test set, images 0 to 4,999 are OOD data of circuits and the others are reported.
CIFAR-100 has only five images of a class there; two of them serve circuits of the image tower alone, three are
reported, by every method.

The paper's sets (C.3, Tables 24 to 26) lie in one folder: an OpenOOD 1.5 data folder (`benchmark_imglist/`,
`images_classic/`, `images_largescale/`), and beside its folders what torchvision makes of the other sets. SUN397 comes
from the Hugging Face hub.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hydra_ensembles.data.dataset import ImageDataset, only_classes, split, without_classes
from hydra_ensembles.data.suites import SetRef, Suite
from hydra_ensembles.errors import DataError

from .recipe import DualCounts
from .sets import (
    SPLIT_SEED,
    DataFolder,
    as_images,
    at_most,
    given,
    halves,
    joined_images,
    label_names,
    overlapping,
    suite,
)

IMAGENET, CIFAR100 = "imagenet", "cifar100"
SHARED_CIFAR100 = "images/cifar100"
RANKING_SHARE = 0.4  # of the shared CIFAR-100: two of the five images of each class
SEEN = ("tinyimagenet", "cifar10")  # the sets whose classes the dual encoder of the shared folder was trained on
IMAGENET_CLASSES = 1000
_TOLD_APART = {744: "projectile", 837: "dark sunglasses"}  # else "missile" and "sunglasses" again
OVERLAP = "cifar100, tinyimagenet"


@dataclass(frozen=True, eq=False)
class NamedImages:
    """Labelled images, and what prompts call their classes, in the order of the labels.

    Labels may leave out classes (an OOD set without those that overlap); names never do.
    """

    images: ImageDataset
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check that every label has a name, and every name is there once."""
        if len(set(self.names)) < len(self.names):
            twice = sorted({name for name in self.names if self.names.count(name) > 1})
            raise DataError(f"{self.images.name}: classes {twice} have the same name; give each its own")
        highest = int(self.images.labels.max()) if len(self.images) else -1
        if highest >= len(self.names) or not self.images.labelled:
            raise DataError(f"{self.images.name} needs a label for every image and a name for every label")


CircuitImages = tuple[NamedImages, ImageDataset]
"""What circuits are extracted on: ID images with names, and OOD images, whose labels nobody reads."""


class DualSets(ABC):
    """All images of a zero-shot study."""

    name: str

    def __init__(self, suites: Mapping[str, Suite], counts: DualCounts) -> None:
        self.suites, self.counts = suites, counts  # by ID task
        self.main = next(iter(suites.values()))

    @abstractmethod
    def load(self, reference: SetRef) -> ImageDataset:
        """A set of a suite; of a set that circuits read, the images that they do not."""

    @abstractmethod
    def names(self, task: str, images: ImageDataset) -> tuple[str, ...]:
        """What prompts call the classes of a task."""

    @abstractmethod
    def circuits(self) -> CircuitImages:
        """What circuits of both towers are extracted on."""

    @abstractmethod
    def second(self) -> tuple[ImageDataset, ImageDataset | None]:
        """What circuits of the image tower alone read as well: images of CIFAR-100, and OOD images or none.

        Classes of CIFAR-100 that the first task has too are left out.
        """

    @abstractmethod
    def calibration(self) -> NamedImages:
        """ID images that temperatures are fitted on; none of them ranked heads or is reported."""

    def image_circuits(self) -> CircuitImages:
        """What circuits of the image tower alone are extracted on: both tasks as one (E.3.2), so many of each."""
        (inside, outside), counts = self.circuits(), self.counts
        part, others = self.second()
        further = only_classes(part, sorted(set(part.labels.tolist()))[: counts.classes], relabel=True)
        names = (*inside.names, *self.names(CIFAR100, further))
        first, second = at_most(inside.images, counts.circuits), at_most(further, counts.image_circuits)
        images = joined_images(first, second, names, "both tasks of circuits")
        outside = at_most(outside, counts.circuits)
        if others is not None:
            outside = joined_images(outside, at_most(others, counts.image_circuits), (), "their OOD sets")
        return NamedImages(images, names), outside

    def fewer(self, images: ImageDataset, task: str, limit: int | None = None) -> NamedImages:
        """Images with the names of their classes: not more images, and not more classes, than the recipe says."""
        names = self.names(task, images)
        if self.counts.classes is not None and self.counts.classes < len(names):
            kept = sorted(set(images.labels.tolist()))[: self.counts.classes]
            images, names = only_classes(images, kept, relabel=True), tuple(names[number] for number in kept)
        return NamedImages(at_most(images, limit), names)


class SharedSets(DualSets):
    """The sets of the suites `zero-shot` and `zero-shot-cifar100`."""

    name = "shared"

    def __init__(self, source: DataFolder, counts: DualCounts) -> None:
        super().__init__({one.id.name: one for one in (suite("zero-shot"), suite("zero-shot-cifar100"))}, counts)
        self.source = source

    def load(self, reference: SetRef) -> ImageDataset:
        if reference.source != SHARED_CIFAR100:
            return self.source.images(reference)
        images = self._cifar100[1]
        return without_classes(images, reference.without) if reference.without else images

    def names(self, task: str, images: ImageDataset) -> tuple[str, ...]:
        return label_names(task, images.class_names)

    def circuits(self) -> CircuitImages:
        """Half A of TinyImageNet's validation set, and CIFAR-10 without the classes that overlap."""
        return self.fewer(self._halves[0], "tinyimagenet"), self.source.images(self.main.circuit_ood)

    def second(self) -> tuple[ImageDataset, None]:
        """Two images of each class of CIFAR-100 that TinyImageNet does not have, 124."""
        return without_classes(self._cifar100[0], overlapping(OVERLAP, CIFAR100)), None

    def calibration(self) -> NamedImages:
        """Half B of TinyImageNet's validation set."""
        return self.fewer(self._halves[1], "tinyimagenet", self.counts.calibration)

    @cached_property
    def _cifar100(self) -> tuple[ImageDataset, ImageDataset]:
        """What circuits of the image tower may read, and what is reported."""
        whole = self.source.images(self.suites[CIFAR100].id)
        ranking, reported = split(whole, RANKING_SHARE, SPLIT_SEED, stratified=True)
        return ranking, reported

    @cached_property
    def _halves(self) -> tuple[ImageDataset, ImageDataset]:
        return halves(self.source.images(given(self.main, "validation")))


class PaperSets(DualSets):
    """The sets of the library's suites `paper-zero-shot-imagenet` and `paper-zero-shot-cifar100`."""

    name = "paper"

    def __init__(self, root: Path, counts: DualCounts) -> None:
        self.root = root
        super().__init__({name: suite(f"paper-zero-shot-{name}") for name in (IMAGENET, CIFAR100)}, counts)

    def load(self, reference: SetRef) -> ImageDataset:
        return as_images(reference.load(self.root))

    def names(self, task: str, images: ImageDataset) -> tuple[str, ...]:
        """Names made readable; ImageNet's are those of CLIP's authors."""
        names = images.class_names
        if task == IMAGENET:
            if len(names) != IMAGENET_CLASSES:
                raise DataError(
                    f"{images.name} has {len(names)} classes; names are given to the {IMAGENET_CLASSES} of ImageNet-1K "
                    "by their position, so all of their folders must be there"
                )
            return imagenet_names()
        if task == "pets":  # torchvision has put spaces where the set has underscores
            names = tuple(name.replace(" ", "_") for name in names)
        if task == "sun397":  # some copies name classes by their folders, such as /a/abbey
            names = tuple((name[3:] if name[:1] == "/" else name).replace("/", " ") for name in names)
        return label_names(task, names)

    def circuits(self) -> CircuitImages:
        """The validation hundredth of ImageNet-1K, and the validation part of OpenImage-O."""
        return self.fewer(self.load(given(self.main, "validation")), IMAGENET), self.load(self.main.circuit_ood)

    def second(self) -> tuple[ImageDataset, ImageDataset]:
        """CIFAR-100 without what ImageNet-1K has (TinyImageNet, whose overlaps are listed, is a part of it)."""
        supervised = suite("paper-cifar100")
        images = self.load(given(supervised, "validation"))
        class_names = suite("paper-zero-shot-cifar100").id.class_names
        part = images.relabel({label: label for label in set(images.labels.tolist())}, class_names)
        named = zip(part.class_names, self.names(CIFAR100, part), strict=True)
        same = {name for name, label in named if label in imagenet_names()}
        part = without_classes(part, sorted({*same, *overlapping(OVERLAP, CIFAR100)}))
        return part, self.load(supervised.circuit_ood)

    def calibration(self) -> NamedImages:
        """Training images of ImageNet-1K."""
        images = self.load(given(self.main, "train"))
        return self.fewer(images, IMAGENET, self.counts.calibration)


def imagenet_names() -> tuple[str, ...]:
    """The names under which CLIP is usually asked about ImageNet-1K; those it has twice are told apart."""
    import open_clip

    return tuple(_TOLD_APART.get(position, name) for position, name in enumerate(open_clip.IMAGENET_CLASSNAMES))
