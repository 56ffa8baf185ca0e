"""Studies that run in seconds: random pictures, random models, every stage of the real code."""

import itertools
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import hydra_ensembles as he
from architectures_clip import transformers_clip
from hydra_ensembles.data.dataset import ImageDataset, TextDataset, without_classes
from hydra_ensembles.model.metadata import Metadata
from random_ensembles import noisy, small
from studies import analyses
from studies.classifiers import ClassifierTask
from studies.sets import DataFolder, read_recipe
from studies.suites import SetRef, overlapping
from studies.zero_shot import ZeroShotTask
from zero_shot_models import WORDS, word_tokenizer

CPU = torch.device("cpu")
CLASSES = ("one", "two", "three")
IMAGES_A_CLASS = 5
UNSEEN = ["cifar100", "caltech101", "pets", "cifar10"]
NAMES = tuple(
    " ".join(pair) for pair in itertools.product(WORDS[6:], WORDS[6:])
)  # names the small tokenizer distinguishes
OVERLAPPING = {
    "cifar10": overlapping("cifar10, tinyimagenet", "cifar10"),
    "cifar100": overlapping("cifar100, tinyimagenet", "cifar100"),
    "caltech101": overlapping("caltech101, tinyimagenet", "caltech101"),
    "scene15": (*overlapping("scene15, cifar100", "scene15"), "Store"),
    "fashion_mnist": overlapping("fashion_mnist, tinyimagenet", "fashion_mnist"),
    "tinyimagenet": overlapping("cifar100, tinyimagenet", "tinyimagenet"),
}


class Pictures:
    """Random pictures whose brightness shows the class."""

    def __init__(self, labels: np.ndarray, seed: int) -> None:
        noise = np.random.default_rng(seed).integers(0, 120, size=(len(labels), 8, 8, 3))
        self.pixels = (noise + 60 * labels[:, None, None, None]).astype(np.uint8)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, row: int) -> Any:
        return Image.fromarray(self.pixels[row])


@dataclass(frozen=True)
class SmallFolder(DataFolder):
    """Generates every set of a suite with three classes each, and records which sets were opened."""

    root: Path = Path("nowhere")
    opened: list[str] = field(default_factory=list)

    def load(self, reference: SetRef) -> ImageDataset:
        self.opened.append(f"{reference.source}/{reference.split}")
        labels = np.arange(60) % 3
        return ImageDataset(Pictures(labels, zlib.crc32(reference.name.encode())), labels, CLASSES, reference.name)


def small_vit(layers: int, heads: int) -> he.Ensemble:
    """A ViT for images of 8 x 8 pixels and three classes; heads have width four."""
    blocks = {"width": 4 * heads, "layers": layers, "heads": heads, "head_dim": 4, "mlp_width": 4 * heads}
    return noisy(small(**blocks), metadata=Metadata(labels=CLASSES))


class SmallTask(ClassifierTask):
    """A task of the recipe with a few pictures, one epoch and a ViT of width 12."""

    def __init__(self, name: str, source: DataFolder | None = None, **changes: Any) -> None:
        settings = analyses.settings() | changes
        plain: dict[str, Any] = settings["tasks"][name]
        plain.pop("train", None)
        plain["training"] = {"learning_rate": 1e-3, "epochs": 1, "warmup": 0.1, "batch_size": 16}
        plain["recovery"] |= {"prune": 2, "steps": 2, "warmup": 1, "batch_size": 16, "last_blocks": 3}
        plain["input_size"], settings["circuits"], settings["shift"]["images"] = 8, 12, 4
        super().__init__(name, settings, source or SmallFolder(), CPU)
        self.kind = "image"

    def start(self) -> he.Ensemble:
        return small_vit(layers=4, heads=3)


class ManyClasses(SmallFolder):
    """Sets have 22 classes (pets: 8), plus those that overlap with another set."""

    def load(self, reference: SetRef) -> ImageDataset:
        self.opened.append(f"{reference.source}/{reference.split}")
        name = reference.source.rpartition("/")[2].removesuffix("_full")
        start = {"tinyimagenet": 0, "cifar100": 22}.get(name, 30 + zlib.crc32(name.encode()) % 10)
        names = (*NAMES[start : start + (8 if name == "pets" else 22)], *OVERLAPPING.get(name, ()))
        labels = np.arange(IMAGES_A_CLASS * len(names)) % len(names)
        pictures = Pictures(labels % 4, zlib.crc32(f"{name} {reference.split} {reference.rows}".encode()))
        data = ImageDataset(pictures, labels, names, reference.name)
        return without_classes(data, reference.without) if reference.without else data

    def captions(self, source: str, split: str) -> list[list[str]]:
        return [[f"a {one}", f"the photo of {one}"] for one in NAMES * 3]


class SmallZeroShot(ZeroShotTask):
    """Uses a random CLIP instead of the pretrained towers, and four of the unseen tasks."""

    def __init__(self, **changes: Any) -> None:
        settings = read_recipe("zero-shot")
        counts = {"pairs": 24, "tuned_pairs": 24, "circuits": 10, "image_circuits": 6, "calibration": 16}
        counts |= {"taylor_batches": 1, "test": 25, "detection": 12, "classes": 22}
        few = {"steps": 2, "batch_size": 8, "warmup": 0}
        small: dict[str, Any] = {"input_size": 32, "seeds": [0], "counts": counts}
        small |= {"prune": 2, "more": 1, "image_prune": 2, "taylor_prune": 2}
        small |= {"dual": settings["dual"] | few, "tune": settings["tune"] | few}
        super().__init__(settings | small | changes, ManyClasses(), CPU)
        main = self.images_of.main
        self.images_of.main = replace(main, tasks=tuple(one for one in main.tasks if one.name in UNSEEN))

    def untrained(self, seed: int) -> he.DualEncoder:
        return he.convert(transformers_clip({}, {}), processor=word_tokenizer(pad=1, mask=True))


def meet(one: SetRef, other: SetRef) -> bool:
    """Whether two parts share rows of one data set, whatever classes are left out."""
    data = TextDataset(range(10_000), np.zeros(10_000))  # type: ignore[arg-type]
    rows = [set(replace(part, without=()).part_of(data).rows.tolist()) for part in (one, other)]
    return (one.source, one.config, one.split) == (other.source, other.config, other.split) and bool(rows[0] & rows[1])
