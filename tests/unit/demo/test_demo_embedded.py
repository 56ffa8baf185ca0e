"""Files in the package: complete, licensed, disjoint, and loadable with torch alone."""

import tomllib
from pathlib import Path

import numpy as np
import torch

import hydra_ensembles as he
from hydra_ensembles.demo import load_backbone, load_sample
from hydra_ensembles.demo.run import BACKBONE, SAMPLE

ROOT = Path(__file__).resolve().parents[3]
SIZES = {"train": 280, "circuit_id": 192, "circuit_ood": 128, "calibration": 256, "test": 420}
SIZES |= {"AnnualCrop": 75, "River": 75, "FashionMNIST": 100}


def test_files_are_packaged_and_licensed() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = Path(he.__file__).parent
    packaged = {path for pattern in patterns["hydra_ensembles"] for path in package.glob(pattern)}
    assert {SAMPLE, *BACKBONE.iterdir(), *SAMPLE.parent.glob("*.md")} <= packaged
    assert {path.name for path in SAMPLE.parent.glob("*.md")} == {"DATA_CARD.md", "LICENSE-DATA.md"}


def test_no_image_is_in_two_sets_and_none_but_those_to_train_on_was_trained_on() -> None:
    with np.load(SAMPLE) as stored:
        origins = [
            (name, split, row)
            for name in SIZES
            for split, row in zip(stored[f"{name}/splits"].tolist(), stored[f"{name}/rows"].tolist(), strict=True)
        ]
    assert len({origin[1:] for origin in origins}) == len(origins) == sum(SIZES.values())
    # training used the seven classes of eurosat/train; of the other sets, only PermanentCrop is from there
    assert {name for name, split, _ in origins if split == "eurosat/train"} == {"train", "circuit_ood"}
    assert {split for name, split, _ in origins if name == "test"} == {"eurosat/test"}


def test_the_backbone_knows_its_classes() -> None:
    sample, backbone = load_sample(), load_backbone()
    assert (backbone.num_members, backbone.num_layers, backbone.num_heads, backbone.head_dim) == (1, 6, 6, 24)
    assert (backbone.dtype, backbone.metadata.labels) == (torch.float32, sample["test"].class_names)
    said = backbone.predict([sample["test"][row][0] for row in range(70)])
    assert (said.label.numpy() == sample["test"].labels[:70]).mean() > 0.9
