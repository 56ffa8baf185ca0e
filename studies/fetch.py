"""Public data sets for the studies: convert checkouts of repositories to Parquet files with small images, or texts.

`python -m studies prepare NAME SOURCE DATA` reads a checkout of the repository named in `SETS` and writes
`DATA/images/NAME/SPLIT.parquet`, or `DATA/text/…`: labels and class names, or captions. Photographs become JPEGs with a
short side of at most 128 pixels; CIFAR-100 and TinyImageNet are unchanged. Sets used only for testing, and those that
need only a few images per class, keep equally many images of each class. The originals' terms apply.
"""

import csv
import hashlib
import html
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from hydra_ensembles.data.dataset import IMAGE_SUFFIXES
from hydra_ensembles.errors import ConfigError, DataError

from .sets import IMAGENET_CLASSES, imagenet_names

SHORT_SIDE, QUALITY = 128, 80
CIFAR100_SPLITS = ("train-3", "train-4")
CIFAR100_EACH = 100  # images per class and split, after train-0 to train-2
CIFAR100_OTHERS = ("train-0", "train-1", "train-2", "test")
TINY = "tiny-imagenet-200"  # folder in the checkout
TINY_EACH = 100
TINY_OTHERS = ("validation", "test")
CAPTIONS = 5

TWEETS = {"train": slice(0, 16000), "validation": slice(16000, 19000), "test": slice(19000, None)}

Row = tuple[bytes | str, int | list[str]]  # an image or a text, and its label or captions
Splits = Mapping[str, Iterable[Row]]


@dataclass(frozen=True)
class PublicSet:
    """A set in a public repository: how to read its splits from a checkout, and its class names."""

    repository: str
    splits: Callable[[Path, Path], Splits]  # of the checkout and the output folder
    names: Callable[[Path], Sequence[str]] | None  # in label order; None: images have captions
    below: str = "images"  # folder of its kind


def prepare(name: str, source: Path, data: Path) -> list[Path]:
    """Write every split of a set, and return the files."""
    if name not in SETS:
        raise ConfigError(f"there is no public set {name!r}; choose one of {', '.join(SETS)}")
    public_set = SETS[name]
    folder = data / public_set.below / name
    if not source.is_dir():
        raise DataError(f"{source} is not a folder; check out github:{public_set.repository} there")
    names = None if public_set.names is None else public_set.names(source)
    paths = []
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in public_set.splits(source, folder).items():
        paths.append(folder / f"{split}.parquet")
        pq.write_table(as_table(rows, names, f"{name} in {source}"), paths[-1], compression="zstd")
    return paths


def as_table(rows: Iterable[Row], names: Sequence[str] | None, origin: str) -> pa.Table:
    """A split in the layout of Hugging Face data sets, with images in bytes."""
    items, targets = zip(*rows, strict=True) if (rows := list(rows)) else ((), ())
    if not items:
        raise DataError(f"there is nothing of {origin}; is it a whole checkout of the right repository?")
    column = "captions" if names is None else "label"
    text = isinstance(items[0], str)
    features: dict[str, Any] = (
        {"text": {"dtype": "string", "_type": "Value"}} if text else {"image": {"_type": "Image"}}
    )
    features[column] = (
        {"feature": {"dtype": "string", "_type": "Value"}, "_type": "Sequence"}
        if names is None
        else {"names": list(names), "_type": "ClassLabel"}
    )
    images = [] if text else [{"bytes": image, "path": None} for image in items]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    columns = {
        **({"text": pa.array(items, pa.string())} if text else {"image": pa.array(images, kind)}),
        column: pa.array(targets, pa.list_(pa.string()) if names is None else pa.int64()),
    }
    return pa.table(columns).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def small(path: Path) -> bytes:
    """A photograph as a JPEG with a short side of at most 128 pixels."""
    with Image.open(path) as opened:
        opened.draft("RGB", (2 * SHORT_SIDE, 2 * SHORT_SIDE))
        image = opened.convert("RGB")
    scale = SHORT_SIDE / min(image.size)
    if scale < 1:
        width, height = (max(round(scale * side), 1) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
    content = io.BytesIO()
    image.save(content, "JPEG", quality=QUALITY)
    return content.getvalue()


# --- sets with one folder per class ----------------------------------------------------------------------------------


def of_folders(split: str, count: int, *folders: str) -> Callable[[Path, Path], Splits]:
    """Up to `count` images of every class, evenly spaced over its folders; labels in the order of `class_folders`."""

    def read(source: Path, _: Path) -> Splits:
        return {split: list(rows(source))}

    def rows(source: Path) -> Iterator[Row]:
        for label, name in enumerate(class_folders(source / folders[0])):
            listed = [path for folder in folders for path in sorted((source / folder / name).iterdir())]
            images = [path for path in listed if path.suffix.lower() in IMAGE_SUFFIXES]
            for index in np.linspace(0, len(images) - 1, min(count, len(images))).round().astype(int):
                yield small(images[index]), label

    return read


def class_folders(folder: Path) -> list[str]:
    """Relative paths of class folders, those without subfolders; sorted, numbers by value."""
    paths = [path for path in folder.rglob("*") if path.is_dir() and not any(sub.is_dir() for sub in path.iterdir())]
    names = [path.relative_to(folder).as_posix() for path in paths]
    return sorted(names, key=lambda name: (int(name) if name.isdigit() else 0, name))


def folder_names(folder: str, readable: Callable[[str], str] = str) -> Callable[[Path], list[str]]:
    """Class names from folder names, optionally made readable."""
    return lambda source: [readable(name) for name in class_folders(source / folder)]


def flower_names(source: Path) -> list[str]:
    """Class names from the repository's list, because its folders have numbers."""
    listed = json.loads((source / "cat_to_name.json").read_text(encoding="utf-8"))
    return [listed[name] for name in class_folders(source / "flowers" / "test")]


# --- other sets ------------------------------------------------------------------------------------------------------


def flickr8k(source: Path, _: Path) -> Splits:
    """The official splits, with five captions per image."""
    texts = source / "Flicker8k_text"
    captions = dict[str, list[str]]()
    for line in (texts / "Flickr8k.token.txt").read_text(encoding="utf-8").splitlines():
        file, caption = line.split("\t", 1)
        captions.setdefault(file.partition("#")[0], []).append(caption.removesuffix(" .").strip())
    splits = {}
    for split, official in {"train": "train", "validation": "dev", "test": "test"}.items():
        names = (texts / f"Flickr_8k.{official}Images.txt").read_text(encoding="utf-8").split()
        short = [name for name in names if len(captions.get(name, ())) != CAPTIONS]
        if short:
            raise DataError(f"{source}: {short[:3]} do not have five captions; check the repository out again")
        splits[split] = [(small(source / "Flicker8k_Dataset" / name), captions[name]) for name in names]
    return splits


def imagenet_samples(source: Path, _: Path) -> Splits:
    """One image per class of ImageNet-1K, ordered by WordNet ID, with which file names begin."""
    files = sorted(source.glob("n*_*.JPEG"))
    if len(files) != IMAGENET_CLASSES:
        raise DataError(f"{source} has {len(files)} images; there must be one of each of {IMAGENET_CLASSES} classes")
    return {"train": [(small(path), label) for label, path in enumerate(files)]}


def nips2017(source: Path, _: Path) -> Splits:
    """Photographs with labels of ImageNet-1K, counted from one."""
    with (source / "dataset" / "images.csv").open(encoding="utf-8", newline="") as file:
        listed = [(row["ImageId"], int(row["TrueLabel"]) - 1) for row in csv.DictReader(file)]
    return {"train": [(small(source / "dataset" / "images" / f"{name}.png"), label) for name, label in listed]}


def cifar100(source: Path, folder: Path) -> Splits:
    """Training images that are not in the folder's splits, at most a hundred per class in each of two new splits.

    CIFAR-100 contains duplicates, some of them in its test set: a class has slightly fewer than five hundred images.
    """
    digests = {_digest_of(content, decoded=True) for content in _images_of(folder, CIFAR100_OTHERS)}
    names = cifar100_names(source)
    limit = len(CIFAR100_SPLITS) * CIFAR100_EACH
    splits: dict[str, list[Row]] = {split: [] for split in CIFAR100_SPLITS}
    for label, name in enumerate(names):
        content = (source / "cifar-100-binary" / "split train bins" / f"{name}-{label}-train.bin").read_bytes()
        images = np.frombuffer(content, np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # [500, 32, 32, 3]
        new = [image for image in images if hashlib.sha256(image.tobytes()).digest() not in digests]
        for index, image in enumerate(new[:limit]):
            encoded = io.BytesIO()
            Image.fromarray(image).save(encoded, "WEBP", lossless=True)
            splits[CIFAR100_SPLITS[index // CIFAR100_EACH]].append((encoded.getvalue(), label))
    return splits


def cifar100_names(source: Path) -> list[str]:
    """Names of the fine classes."""
    return (source / "cifar-100-binary" / "fine_label_names.txt").read_text(encoding="utf-8").split()


def tinyimagenet(source: Path, folder: Path) -> Splits:
    """All training images unchanged, a hundred per class in each split.

    Duplicates are kept once, and images in the folder's validation and test splits are skipped.
    """
    digests = {_digest_of(content) for content in _images_of(folder, TINY_OTHERS)}
    splits: dict[str, list[Row]] = {}
    for label, name in enumerate(tiny_classes(source)):
        contents = [path.read_bytes() for path in sorted((source / TINY / "train" / name / "images").glob("*.JPEG"))]
        for index, content in enumerate(contents):
            if (digest := _digest_of(content)) not in digests:
                splits.setdefault(f"train-{index // TINY_EACH}", []).append((content, label))
                digests.add(digest)
    return splits


def tiny_classes(source: Path) -> list[str]:
    """WordNet IDs in label order."""
    return sorted((source / TINY / "wnids.txt").read_text(encoding="utf-8").split())


def tiny_names(source: Path) -> list[str]:
    """The first word of every class."""
    lines = (source / TINY / "words.txt").read_text(encoding="utf-8").splitlines()
    words = dict(line.split("\t", 1) for line in lines)
    return [words[name].partition(",")[0] for name in tiny_classes(source)]


# --- texts -----------------------------------------------------------------------------------------------------------


def intents(parts: Mapping[str, Sequence[str]]) -> Callable[[Path, Path], Splits]:
    """Splits of CLINC150 from these parts of it."""

    def read(source: Path, _: Path) -> Splits:
        told = json.loads((source / "data" / "data_full.json").read_text(encoding="utf-8"))
        numbers = {name: number for number, name in enumerate(intent_names(source))} | {"oos": 0}
        return {
            split: [(text, numbers[label]) for name in names for text, label in told[name]]
            for split, names in parts.items()
        }

    return read


def intent_names(source: Path) -> list[str]:
    """The 150 intents of CLINC150."""
    told = json.loads((source / "data" / "data_full.json").read_text(encoding="utf-8"))
    return sorted({label for _, label in told["train"]})


def tweets(source: Path, _: Path) -> Splits:
    """Tweets in a fixed random order; of those that differ in case, spaces or punctuation alone, the first."""
    with (source / "data" / "labeled_data.csv").open(encoding="utf-8", newline="") as file:
        listed = [(html.unescape(row["tweet"]).strip(), int(row["class"])) for row in csv.DictReader(file)]
    first = {re.sub(r"\W+", " ", text.lower()).strip(): (text, label) for text, label in reversed(listed)}
    rows = sorted(first.values(), key=lambda row: hashlib.sha256(row[0].encode()).digest())
    return {split: rows[part] for split, part in TWEETS.items()}


def _images_of(folder: Path, splits: Sequence[str]) -> Iterator[bytes]:
    """The images of existing splits."""
    for split in splits:
        path = folder / f"{split}.parquet"
        if not path.is_file():
            raise DataError(f"{path} is missing; the new splits hold what {', '.join(splits)} do not")
        for cell in pq.read_table(path, columns=["image"]).column("image").to_pylist():
            yield cell["bytes"]


def _digest_of(content: bytes, decoded: bool = False) -> bytes:
    """A hash that identifies an image, by its file or by its pixels."""
    identity = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).tobytes() if decoded else content
    return hashlib.sha256(identity).digest()


SETS: Mapping[str, PublicSet] = {
    "flickr8k": PublicSet("tnagire1/flickr8k_dataset", flickr8k, None),
    "imagenet_samples": PublicSet("EliSchwartz/imagenet-sample-images", imagenet_samples, lambda _: imagenet_names()),
    "nips2017": PublicSet("ZhengyuZhao/Targeted-Tansfer", nips2017, lambda _: imagenet_names()),
    "miniplaces": PublicSet(  # in folders such as a/apartment_building/outdoor
        "retocali/6.819-Miniplaces_Challenge",
        of_folders("train", 60, "data/images/train"),
        folder_names("data/images/train", lambda name: name[2:].replace("/", " ").replace("_", " ")),
    ),
    "cars": PublicSet("cyizhuo/Stanford_Cars_dataset", of_folders("test", 10, "test"), folder_names("test")),
    "cub200": PublicSet(  # in folders such as 001.Black_footed_Albatross
        "cyizhuo/CUB-200-2011-dataset",
        of_folders("test", 10, "test"),
        folder_names("test", lambda name: name.partition(".")[2].replace("_", " ")),
    ),
    "flowers102": PublicSet(
        "josedab/udacity-ai-flower-image-classification",
        of_folders("test", 20, "flowers/test", "flowers/valid"),
        flower_names,
    ),
    "tinyimagenet": PublicSet("seshuad/IMagenet", tinyimagenet, tiny_names),
    "clinc150": PublicSet(
        "clinc/oos-eval",
        intents({"train": ["train"], "validation": ["val"], "test": ["test"]}),
        intent_names,
        "text",
    ),
    "clinc150_oos": PublicSet(  # none of the 150 intents
        "clinc/oos-eval", intents({"train": ["oos_train", "oos_val"], "test": ["oos_test"]}), lambda _: ["oos"], "text"
    ),
    "tweets": PublicSet(
        "t-davidson/hate-speech-and-offensive-language", tweets, lambda _: ["hate", "offensive", "neither"], "text"
    ),
    "cifar100_full": PublicSet("Taragon123/Taragon123.github.io", cifar100, cifar100_names),
}
