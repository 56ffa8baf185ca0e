"""What the package carries: the right files, small enough, licensed, disjoint, and loadable with torch alone."""

import hashlib
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import hydra_ensembles as he
from hydra_ensembles.demo import load_backbone, load_deep_logits, load_sample
from hydra_ensembles.demo.embedded import BACKBONE, DEEP_LOGITS, SAMPLE

ROOT = Path(__file__).resolve().parents[3]
SIZES = {
    **dict.fromkeys(("circuit_id", "circuit_ood", "calibration"), 256),
    "test": 455,
    **dict.fromkeys(("AnnualCrop", "River", "FashionMNIST"), 300),
}
CHECKSUMS = {
    SAMPLE: "67001fde798a96e0baea622dcdeb3558a04d832c3bc5231a49fb4b3f666a819a",
    DEEP_LOGITS: "09e33cb779c043fc07b40c81f868ca216fe27d67696fb7484e801de079660753",
    BACKBONE / "model.safetensors": "aa8ef1b6f1b4f6fae78f596c2b4961d6bd1a66a4972ce0bf01ad4979f8bb7605",
}


def test_files_are_those_that_were_made_and_small() -> None:
    assert {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in CHECKSUMS} == CHECKSUMS
    assert SAMPLE.stat().st_size <= 6_000_000
    assert sum(path.stat().st_size for path in BACKBONE.iterdir()) <= 6_000_000
    assert DEEP_LOGITS.stat().st_size <= 200_000


def test_files_are_packaged_and_licensed() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = Path(he.__file__).parent
    packaged = {path for pattern in patterns["hydra_ensembles"] for path in package.glob(pattern)}
    assert {SAMPLE, DEEP_LOGITS, *BACKBONE.iterdir(), *SAMPLE.parent.glob("*.md")} <= packaged
    assert {path.name for path in SAMPLE.parent.glob("*.md")} == {"DATA_CARD.md", "LICENSE-DATA.md"}


def test_the_sets_have_the_sizes_and_classes_of_the_card() -> None:
    sample = load_sample()
    assert {name: len(images) for name, images in sample.sets.items()} == SIZES
    assert set(Counter(sample.test.labels.tolist()).values()) == {65}
    assert all(set(one.labels.tolist()) == set(range(7)) for one in (sample.circuit_id, sample.calibration))
    assert all(set(one.labels.tolist()) == {-1} for one in (sample.circuit_ood, *sample.near.values()))
    assert len(sample.test.class_names) == 7
    assert sample.test[0][0].size == (64, 64)
    assert sample.far["FashionMNIST"][0][0].size == (28, 28)


def test_no_image_is_in_two_sets_or_was_trained_on() -> None:
    with np.load(SAMPLE) as stored:
        origins = [
            (name, split, row)
            for name in SIZES
            for split, row in zip(stored[f"{name}/splits"].tolist(), stored[f"{name}/rows"].tolist(), strict=True)
        ]
    assert len({origin[1:] for origin in origins}) == len(origins) == sum(SIZES.values())
    # training used the seven classes of eurosat/train; only the foreign PermanentCrop comes from there
    assert {name for name, split, _ in origins if split == "eurosat/train"} == {"circuit_ood"}
    assert {split for name, split, _ in origins if name == "test"} == {"eurosat/test"}


def test_the_first_of_the_stored_logits_are_those_of_the_backbone() -> None:
    logits, sample, backbone = load_deep_logits(), load_sample(), load_backbone()
    assert (backbone.num_members, backbone.num_layers, backbone.num_heads, backbone.dtype) == (1, 6, 6, torch.float32)
    assert backbone.metadata.labels == sample.test.class_names
    assert {name: one.shape for name, one in logits.items()} == {name: (3, count, 7) for name, count in SIZES.items()}
    for name, images in sample.sets.items():
        inputs = backbone.prepare([images[index][0] for index in range(8)])
        with torch.no_grad():
            torch.testing.assert_close(backbone(inputs)[0], logits[name][0, :8], atol=0.05, rtol=0.02)
    assert not torch.allclose(logits["test"][0], logits["test"][1], atol=0.5)
