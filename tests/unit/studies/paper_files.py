"""Stand-ins for the paper's zero-shot data sets: files as OpenOOD and torchvision lay them out, with a few pictures."""

import json
import pickle
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from hydra_ensembles.data.suites import SetRef, suite
from pictures import encoded, picture

JPEG = encoded(picture(0), "JPEG")
IMAGENET = "images_largescale/imagenet_1k"
LISTS = ("paper-zero-shot-imagenet", "paper-zero-shot-cifar100", "paper-cifar100")
SUN397_NAMES = ["abbey", "airplane cabin", "/b/bakery/shop"]
CIFAR10_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def save(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_imagenet(root: Path) -> None:
    """All thousand folders, since names are matched by position; one picture each, for validation and training."""
    wnids = [f"n{number:08d}" for number in range(1000)]
    for split in ("val", "train"):
        for wnid in wnids:
            save(root / IMAGENET / split / wnid / "0.JPEG", JPEG)
    names = {wnid: (f"first {number}", f"second {number}") for number, wnid in enumerate(wnids)}
    torch.save((names, wnids), root / IMAGENET / "meta.bin")


def write_lists(root: Path, images: int = 3) -> None:
    """Every list of the suites; those of CIFAR-100 have the classes 0, 1 and 99, the others no labels."""
    suites = [suite(name) for name in LISTS]
    for one in suites:
        for ref in (one.id, one.validation, one.circuit_ood, *one.near, *one.far, *one.tasks):
            if ref is not None and ref.source.endswith(".txt") and not (root / ref.source).exists():
                _write_list(root, ref, images)


def _write_list(root: Path, ref: SetRef, images: int) -> None:
    labels = (0, 1, 99) if ref.labels == "required" else (-1,)
    lines = []
    for number in range(images):
        name = f"{Path(ref.source).stem}/{number}.png"
        save(root / ref.folder / name, encoded(picture(number)))
        lines.append(f"{name} {labels[number % len(labels)]}")
    save(root / ref.source, ("\n".join(lines) + "\n").encode())


def write_cifar10(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickles as torchvision reads them; checksums differ from the real ones."""
    from torchvision.datasets import CIFAR10

    folder = root / CIFAR10.base_folder
    pixels = np.stack([np.asarray(picture(number).resize((32, 32))).transpose(2, 0, 1) for number in range(3)])
    batch = pickle.dumps({"data": pixels.reshape(3, -1), "labels": [3, 0, 9]})
    for attribute in ("train_list", "test_list"):
        files = [[name, None] for name, _ in getattr(CIFAR10, attribute)]
        monkeypatch.setattr(CIFAR10, attribute, files)
        for name, _ in files:
            save(folder / name, batch)
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": None})
    save(folder / CIFAR10.meta["filename"], pickle.dumps({"label_names": CIFAR10_NAMES}))


FOOD = {name: [f"{name}/{number}" for number in range(2)] for name in ("apple_pie", "waffles")}
PETS = ("Abyssinian_1 1 1 1", "american_bulldog_7 2 2 1", "British_Shorthair_3 3 1 2")
TEXTURES = ("banded/0.jpg", "polka-dotted/0.jpg")
LISTED = {  # the metadata from which libraries list images
    "food-101/meta/test.json": json.dumps(FOOD).encode(),
    "oxford-iiit-pet/annotations/test.txt": "\n".join(PETS).encode(),
    "dtd/dtd/labels/test1.txt": "\n".join(TEXTURES).encode(),
}
IMAGES = [
    *(f"food-101/images/{name}.jpg" for names in FOOD.values() for name in names),
    *(f"oxford-iiit-pet/images/{line.split()[0]}.jpg" for line in PETS),
    *(f"dtd/dtd/images/{name}" for name in TEXTURES),
    *(f"eurosat/2750/{name}/{name}_1.jpg" for name in ("AnnualCrop", "Forest", "SeaLake")),
    *(
        f"caltech101/101_ObjectCategories/{name}/image_0001.jpg"
        for name in ("BACKGROUND_Google", "Faces", "Faces_easy", "water_lilly")
    ),
]


def write_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything `PaperSets` reads."""
    write_imagenet(root)
    write_lists(root)
    write_cifar10(root, monkeypatch)
    for name, content in (*LISTED.items(), *((name, JPEG) for name in IMAGES)):
        save(root / name, content)
    images = [{"bytes": encoded(picture(number)), "path": None} for number in range(3)]
    sun397 = datasets.Dataset.from_dict({"image": images, "label": [2, 0, 1]})
    sun397 = sun397.cast_column("label", datasets.ClassLabel(names=SUN397_NAMES))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **_: {"tanganke/sun397": sun397}[name])
