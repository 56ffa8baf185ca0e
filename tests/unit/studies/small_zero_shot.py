"""A zero-shot study small enough for seconds: random pictures, a random CLIP of two layers, every stage."""

import itertools
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from small_study import CPU, Pictures

import hydra_ensembles as he
from architectures_clip import transformers_clip
from hydra_ensembles.data import suites as overlaps
from hydra_ensembles.data.dataset import ImageDataset, without_classes
from hydra_ensembles.data.suites import SetRef
from studies.store import Store
from studies.zero_shot.recipe import ZeroShotRecipe, load_zero_shot_recipe
from studies.zero_shot.run import run_zero_shot
from studies.zero_shot.shared_sets import SharedSets
from studies.zero_shot.trained_dual import TrainedDual
from zero_shot_models import WORDS, word_tokenizer

SIZE = 32
IMAGES_A_CLASS = 5
_NOUNS = ("cat", "dog", "bus", "tree", "house", "boat")
_NAMES = [f"{first} {second}" for first, second in itertools.product(WORDS[9:], _NOUNS)]
OVERLAPPING = {
    "cifar10": overlaps.left(overlaps.CIFAR10_TINYIMAGENET),
    "cifar100": (*overlaps.left(overlaps.CIFAR100_TINYIMAGENET),),
    "caltech101": overlaps.left(overlaps.CALTECH101_TINYIMAGENET),
    "scene15": (*overlaps.left(overlaps.SCENE15_CIFAR100), "Store"),
    "fashion_mnist": overlaps.left(overlaps.FASHION_MNIST_TINYIMAGENET),
    "tinyimagenet": overlaps.right(overlaps.CIFAR100_TINYIMAGENET),
}


@dataclass(frozen=True)
class SmallStore(Store):
    """Every set of the suites out of thin air: eight classes and those that overlap; notes what was asked for."""

    opened: list[tuple[str, str | None]] = None  # type: ignore[assignment]

    def load(self, reference: SetRef) -> ImageDataset:
        self.opened.append((reference.source, reference.split))
        name = reference.source.rpartition("/")[2]
        start = zlib.crc32(name.encode()) % 20
        names = (*_NAMES[start : start + 8], *OVERLAPPING.get(name, ()))
        labels = np.arange(IMAGES_A_CLASS * len(names)) % len(names)
        pictures = Pictures(labels % 4, zlib.crc32(f"{name} {reference.split} {reference.rows}".encode()))
        data = ImageDataset(pictures, labels, names, reference.name)
        return without_classes(data, reference.without) if reference.without else data


class SmallDual(TrainedDual):
    """A random CLIP where the pretrained towers would be."""

    def untrained(self, seed: int) -> he.DualEncoder:
        dual = he.convert(transformers_clip({}, {}), processor=word_tokenizer(pad=1, mask=True))
        assert isinstance(dual, he.DualEncoder)
        return dual


def small_recipe(**changes: Any) -> ZeroShotRecipe:
    recipe = load_zero_shot_recipe(tiny=True)
    counts = replace(recipe.counts, circuits=20, image_circuits=10, calibration=16, test=25, detection=12)
    return replace(recipe, **{"input_size": SIZE, "taylor_prune": 2, "seeds": (0,), "counts": counts, **changes})


def small_store() -> SmallStore:
    return SmallStore(root=None, cifar=None, opened=[])  # type: ignore[arg-type]


def run_small(recipe: ZeroShotRecipe, store: SmallStore, output: Path, **settings: Any) -> None:
    run_zero_shot(recipe, SmallDual(store, recipe, CPU), SharedSets(store, recipe.counts), output, CPU, **settings)
