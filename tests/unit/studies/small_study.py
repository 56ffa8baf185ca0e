"""A study small enough for seconds: random pictures, a ViT of width 24, every stage of the real code."""

import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image

import hydra_ensembles as he
from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.data.suites import SetRef
from hydra_ensembles.model.config import EncoderConfig, EnsembleConfig, PatchStemConfig, ReadoutConfig, all_heads
from hydra_ensembles.model.metadata import Metadata
from studies.recipe import Backbone, StudyRecipe, load_recipe
from studies.store import Store

CLASSES = ("one", "two", "three")
LAYERS = 4
CPU = torch.device("cpu")


class Pictures:
    """Random pictures whose brightness tells the class."""

    def __init__(self, labels: np.ndarray, seed: int) -> None:
        noise = np.random.default_rng(seed).integers(0, 120, size=(len(labels), 8, 8, 3))
        self.pixels = (noise + 60 * labels[:, None, None, None]).astype(np.uint8)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, row: int) -> Any:
        return Image.fromarray(self.pixels[row])


@dataclass(frozen=True)
class SmallStore(Store):
    """Every set of a suite out of thin air; notes which sets were asked for."""

    opened: list[str] = None  # type: ignore[assignment]

    def load(self, reference: SetRef) -> ImageDataset:
        self.opened.append(f"{reference.source}/{reference.split}")
        labels = np.arange(60) % 3
        return ImageDataset(Pictures(labels, zlib.crc32(reference.name.encode())), labels, CLASSES, reference.name)

    def backbone(self, name: Backbone, input_size: int, classes: tuple[str, ...], seed: int) -> he.Ensemble:
        encoder = EncoderConfig(width=24, layers=LAYERS, heads=6, head_dim=4, mlp_width=24)
        stem = PatchStemConfig(patch_size=(7, 7), grid=(input_size // 7, input_size // 7))
        config = EnsembleConfig(stem, encoder, ReadoutConfig(num_classes=len(classes)), all_heads(encoder))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            ensemble = he.Ensemble(config, Metadata(labels=classes))
            with torch.no_grad():
                for parameter in ensemble.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
        return ensemble.eval()


def small_recipe(**changes: Any) -> StudyRecipe:
    recipe = load_recipe("vision-cifar10", tiny=True)
    counts = replace(recipe.counts, train=24, member_train=20, circuits=12, choose=20, test=18)
    trunk = (replace(recipe.explore_trunk[0], trunk=LAYERS - 1),)
    small = replace(recipe, input_size=14, seeds=(0, 1), counts=counts, explore_trunk=trunk, ood_halves="images")
    return replace(small, **changes)


def small_store() -> SmallStore:
    return SmallStore(root=None, cifar=None, opened=[])  # type: ignore[arg-type]
