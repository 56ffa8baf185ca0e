"""The images of the study: those of the shared folder, cut so that nothing reported was looked at before.

TinyImageNet's validation set is cut in two as in the other studies: half A ranks heads, half B fits temperatures. Of
CIFAR-10's test set, images 0 to 4,999 are OOD data of circuits and the others are reported. CIFAR-100 has only five
images of a class here; two of them serve circuits of the image tower alone, three are reported, by every method.
"""

from collections.abc import Sequence
from functools import cached_property

from hydra_ensembles.data.dataset import ImageDataset, only_classes, split, without_classes
from hydra_ensembles.data.suites import CIFAR100_TINYIMAGENET, SetRef, left, suite
from hydra_ensembles.errors import DataError

from ..recipe import SPLIT_SEED
from ..splits import halves
from ..store import Store
from .joined_images import at_most, joined_images
from .label_names import label_names
from .recipe import Counts
from .sources import CircuitData, Detection, Domain, NamedImages, Task

CIFAR100 = "images/cifar100"
RANKING_SHARE = 0.4  # of CIFAR-100: two of the five images of each class
SEEN = ("tinyimagenet", "cifar10")  # the sets whose classes the dual encoder was trained on


class SharedSets:
    """The sets of the suites `zero-shot` and `zero-shot-cifar100`."""

    name = "shared"

    def __init__(self, store: Store, counts: Counts) -> None:
        self.store, self.counts = store, counts
        self._suites = {one.id.name: one for one in (suite("zero-shot"), suite("zero-shot-cifar100"))}
        self._main = self._suites["tinyimagenet"]

    def circuits(self) -> CircuitData:
        """Half A of TinyImageNet's validation set, and CIFAR-10 without the classes that overlap."""
        return CircuitData(self._fewer(self._halves[0]), self._images(self._main.circuit_ood))

    def image_circuits(self) -> CircuitData:
        """The images of circuits of both towers and some of CIFAR-100 as one task: all classes, overlapping ones once.

        Of CIFAR-100 there are two images of each class that TinyImageNet does not have, 124.
        """
        both, counts = self.circuits(), self.counts
        part = without_classes(self._cifar100[0], left(CIFAR100_TINYIMAGENET))
        kept = sorted(set(part.labels.tolist()))[: counts.classes]
        further = only_classes(part, kept, relabel=True)
        names = (*both.inside.names, *label_names("cifar100", further.class_names))
        first, second = at_most(both.inside.images, counts.circuits), at_most(further, counts.image_circuits)
        images = joined_images(first, second, names, "tinyimagenet and cifar100")
        return CircuitData(NamedImages(images, names), at_most(both.outside, counts.circuits))

    def calibration(self) -> NamedImages:
        """Half B of TinyImageNet's validation set."""
        return self._fewer(self._halves[1])

    def tasks(self) -> Sequence[Task]:
        """CIFAR-100, Caltech101, Pets, DTD10, Scene15, EuroSAT, and as seen domains CIFAR-10 and TinyImageNet."""
        found = []
        for reference in (*self._main.tasks, self._main.id):
            images = self._images(reference)
            domain: Domain = "seen" if reference.name in SEEN else "unseen"
            test = NamedImages(images, label_names(reference.name, images.class_names))
            found.append(Task(reference.name, domain, test))
        return found

    def detections(self) -> Sequence[Detection]:
        """TinyImageNet and CIFAR-100 as ID data."""
        return [
            Detection(
                task,
                {reference.name: self._images(reference) for reference in one.near},
                {reference.name: self._images(reference) for reference in one.far},
            )
            for task, one in self._suites.items()
        ]

    def _images(self, reference: SetRef) -> ImageDataset:
        """A set of the suite; of CIFAR-100, the images that no circuit read."""
        if reference.source == CIFAR100:
            images = self._cifar100[1]
            return without_classes(images, reference.without) if reference.without else images
        return self._load(reference)

    def _load(self, reference: SetRef) -> ImageDataset:
        loaded = self.store.load(reference)
        if not isinstance(loaded, ImageDataset):
            raise DataError(f"{reference.name} holds texts, a zero-shot study reads images")
        return loaded

    @cached_property
    def _cifar100(self) -> tuple[ImageDataset, ImageDataset]:
        """What circuits of the image tower may read, and what is reported."""
        whole = self._load(self._suites["cifar100"].id.whole())
        ranking, reported = split(whole, RANKING_SHARE, SPLIT_SEED, stratified=True)
        return ranking, reported

    @cached_property
    def _halves(self) -> tuple[ImageDataset, ImageDataset]:
        if self._main.validation is None:
            raise DataError("the suite 'zero-shot' has no validation set")
        first, second = halves(self._load(self._main.validation))
        assert isinstance(first, ImageDataset)
        assert isinstance(second, ImageDataset)
        return first, second

    def _fewer(self, images: ImageDataset) -> NamedImages:
        """With the names of its classes; only the first of them where the recipe says so."""
        if self.counts.classes is not None:
            images = only_classes(images, images.class_names[: self.counts.classes], relabel=True)
        return NamedImages(images, label_names("tinyimagenet", images.class_names))
