"""Files in the package: complete, licensed, disjoint, and loadable with torch alone."""

import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import hydra_ensembles as he
from hydra_ensembles.demo import load_answers, load_backbone, load_sample
from hydra_ensembles.demo.embedded import ANSWERS, BACKBONE, SAMPLE
from hydra_ensembles.demo.run import SEEN

ROOT = Path(__file__).resolve().parents[3]
SIZES = {"train": 700, **dict.fromkeys(("circuit_id", "circuit_ood", "calibration"), 256), "test": 1050}
SIZES |= dict.fromkeys(("AnnualCrop", "River", "FashionMNIST"), 300)


def test_files_are_packaged_and_licensed() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = Path(he.__file__).parent
    packaged = {path for pattern in patterns["hydra_ensembles"] for path in package.glob(pattern)}
    assert {SAMPLE, ANSWERS, *BACKBONE.iterdir(), *SAMPLE.parent.glob("*.md")} <= packaged
    assert {path.name for path in SAMPLE.parent.glob("*.md")} == {"DATA_CARD.md", "LICENSE-DATA.md"}


def test_the_sets_have_the_sizes_and_classes_of_the_card() -> None:
    sample = load_sample()
    assert {name: len(images) for name, images in sample.sets.items()} == SIZES
    assert set(Counter(sample.test.labels.tolist()).values()) == {150}
    for one in (sample.train, sample.circuit_id, sample.calibration):
        assert set(one.labels) == set(range(7))
    for one in (sample.circuit_ood, *sample.near.values()):
        assert set(one.labels) == {-1}
    assert (len(sample.test.class_names), sample.test[0][0].size) == (7, (64, 64))
    assert sample.far["FashionMNIST"][0][0].size == (28, 28)


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


def test_the_backbone_knows_its_classes_and_the_stored_answers_fit_the_sets() -> None:
    answers, sample, backbone = load_answers(), load_sample(), load_backbone()
    assert (backbone.num_members, backbone.num_layers, backbone.num_heads, backbone.head_dim) == (1, 6, 6, 24)
    assert (backbone.dtype, backbone.metadata.labels) == (torch.float32, sample.test.class_names)
    assert {name: len(found) for name, found in answers.items()} == {"Single": 2, "Pruned branches": 2}
    labels = torch.from_numpy(sample.test.labels.copy())
    for sets in answers["Single"]:
        assert {name: one.logits.shape for name, one in sets.items()} == {name: (1, SIZES[name], 7) for name in SEEN}
        assert (sets["test"].logits[0].argmax(1) == labels).double().mean() > 0.95  # in the order of the images
    first, second = (sets["test"].logits for sets in answers["Single"])
    assert not torch.allclose(first, second, atol=0.5)
