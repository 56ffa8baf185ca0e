"""Load data sets, through Hugging Face `datasets`."""

import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .._utils import library
from ..errors import DataError
from ..files import expanded
from .dataset import (
    IMAGE_SUFFIXES,
    UNLABELLED,
    AnyDataset,
    ImageDataset,
    LabelArray,
    Picture,
    Rows,
    Text,
    TextDataset,
    decode_image,
    images_below,
    is_litter,
    read_image,
)

LabelPolicy = Literal["required", "optional"]
HUB = "hub:"
# How `datasets` reads each kind of table: CSV fields may be quoted, TSV fields never, and no word means "missing".
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}),
    ".csv": ("csv", {"keep_default_na": False, "index_col": False}),
    ".tsv": ("csv", {"keep_default_na": False, "index_col": False, "sep": "\t", "quoting": 3}),
    ".jsonl": ("json", {}),
}
SPLIT_NAMES = ("dev", "test", "train", "training", "val", "valid", "validation")
MOST_CLASSES = 1 << 20  # larger numbers are ids
_SHARD = re.compile(r"-\d{5}-of-(\d{5}).*$")
_OPTIONAL = "labels='optional', on the command line --ood"  # how to give data without labels


@dataclass(frozen=True)
class Columns:
    """Column names of a table; a dot reaches into a nested column (`translation.en`).

    A table with the `image` column holds images, others need `text`; `text_pair` is used if it exists.
    """

    image: str = "image"
    text: str = "text"
    text_pair: str = "text_pair"
    label: str = "label"


def load(
    name_or_path: str | Path,
    split: str | None = None,
    *,
    columns: Columns | None = None,
    labels: LabelPolicy = "required",
    class_names: Sequence[str] | None = None,
    config: str | None = None,
) -> AnyDataset:
    """Load a data set by path or by name.

    Accepted are a Parquet, CSV, TSV or JSON-lines file, or a folder of them (`<split>.parquet`); a folder of images
    with one subfolder per class, with or without a level of splits above; and `hub:OWNER/NAME`. Classes are numbered in
    the order of `class_names`, else as the data say, else sorted by name. Tables are converted once into the cache of
    `datasets` (`HF_DATASETS_CACHE`).

    `split` may be left out if there is only one; `config` is a configuration of a hub data set (`"sst2"` of `"glue"`).
    With `labels="optional"`, for OOD data, labels may be missing, and loose images of a folder are loaded as well.
    """
    name, path = str(name_or_path), expanded(name_or_path)
    if name.startswith(HUB):
        title = name.removeprefix(HUB)
        problem = f"{name}, split {split!r}, cannot be loaded (a data set that needs a script never can)"
        data = _loaded(title, problem, name=config, split=split)
        data = data[_choose(None, data, name)] if split is None else data
        return _dataset(data, name, title, columns or Columns(), labels, class_names)
    if not path.exists():
        raise DataError(f"{path} does not exist; check the path, or write 'hub:owner/name' for a data set on the hub")
    if path.is_file() and split not in (None, path.stem):
        raise DataError(f"{path} is a single file and has no split {split!r}; leave split out or give the folder")
    if path.is_dir() and (tables := _tables_in(path)):
        data = _read_tables(tables[_choose(split, tables, path)])
    elif path.is_dir():
        return _load_folder(path, split, labels, class_names)
    else:
        data = _read_tables([path])
    title = path.parent.name if path.stem in SPLIT_NAMES and path.is_file() else path.stem
    return _dataset(data, str(path), title, columns or Columns(), labels, class_names, path.absolute())


def _choose(split: str | None, splits: Collection[str], where: Path | str) -> str:
    if split is None and len(splits) == 1:
        return next(iter(splits))
    if split is None or split not in splits:
        problem = "has several splits" if split is None else f"has no split {split!r}"
        raise DataError(f"{where} {problem}; choose split= from {sorted(splits)}, in a shell {where}:NAME")
    return split


# --- tables ------------------------------------------------------------------------------------------------


def _tables_in(folder: Path) -> dict[str, list[Path]]:
    """Tables of one format in a folder, or in its `data/`, by split: `test.csv`, `train-00000-of-00002.parquet`."""
    for parent, suffix in product((folder, folder / "data"), READERS):
        files = [file for file in sorted(parent.glob(f"*{suffix}")) if not is_litter(file.name)]
        splits = {_SHARD.sub("", file.stem): list[Path]() for file in files}
        for file in files:
            splits[_SHARD.sub("", file.stem)].append(file)
        for split, shards in splits.items():
            if (number := _SHARD.search(shards[0].stem)) and int(number[1]) != len(shards):
                raise DataError(f"{parent} has {len(shards)} shards of {split}, not all: {shards[0].name}, …")
        if splits:
            return splits
    return {}


def _read_tables(files: Sequence[Path]) -> Any:
    """One split as a `datasets.Dataset`: a file, or its shards in order."""
    if files[0].suffix.lower() not in READERS:
        raise DataError(f"{files[0]} has an unknown suffix; accepted are {', '.join(READERS)}")
    kind, options = READERS[files[0].suffix.lower()]
    return _loaded(kind, f"{files[0]} cannot be read", data_files=[*map(str, files)], split="train", **options)


def _loaded(path: str, problem: str, **options: Any) -> Any:
    """What `datasets.load_dataset` returns."""
    datasets = library("datasets", extra="data")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Length of header")  # pandas would drop a field of every row
            return datasets.load_dataset(path, **options)
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{problem}: {error.__cause__ or error}") from error


def _dataset(
    data: Any,
    where: str,
    title: str,
    columns: Columns,
    policy: LabelPolicy,
    class_names: Sequence[str] | None,
    path: Path = Path(),
) -> AnyDataset:
    """Our data set from one of `datasets`; paths of images are relative to the folder of the table at `path`."""
    if any("." in name and name not in data.column_names for name in vars(columns).values()):
        data = data.flatten()
    if not len(data) or not {columns.image, columns.text} & {*data.column_names}:
        problem = f"{where} has {len(data)} rows and the columns {data.column_names}, not {columns.image!r}"
        raise DataError(f"{problem} or {columns.text!r}; name one: columns=Columns(text=...), in a shell --column")
    numbers, names = _labels(data, columns.label, policy, class_names, where)
    is_text = columns.image not in data.column_names or (columns.text != "text" and columns.text in data.column_names)
    if not is_text:
        features = library("datasets", extra="data").features
        if isinstance(data.features[columns.image], features.Image):
            data = data.cast_column(columns.image, features.Image(decode=False))
        folder = path if path.is_dir() else path.parent
        return ImageDataset(Rows(len(data), partial(_image, data, columns.image, folder, where)), numbers, names, title)
    pair = (columns.text_pair,) if columns.text_pair in data.column_names else ()
    if columns.text_pair != Columns.text_pair and not pair:
        raise DataError(f"{where} has no column {columns.text_pair!r}; it has {data.column_names}")
    return TextDataset(Rows(len(data), partial(_text, data, (columns.text, *pair), where)), numbers, names, title)


def _image(data: Any, column: str, folder: Path, where: str, row: int) -> Picture:
    """Decode an image cell: bytes, a path, or `{bytes, path}`."""
    cell = data[row][column]
    content, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, cell)
    if isinstance(content, bytes):
        return decode_image(content, f"row {row} of {where}")
    if not isinstance(path, str) or not path:
        raise DataError(f"row {row} of {where} has no image (bytes, a path or {{bytes, path}}) in column {column!r}")
    return read_image(folder / path, f"row {row} of {where} ({path})")


def _text(data: Any, columns: tuple[str, ...], where: str, row: int) -> Text:
    """Read a cell as a string, or two as a pair."""
    cells = [data[row][column] for column in columns]
    if not all(isinstance(cell, str) for cell in cells):
        raise DataError(f"row {row} of {where} has no text in {columns}, got {cells}")
    return cells[0] if len(cells) == 1 else (cells[0], cells[1])


def _labels(
    data: Any, column: str, policy: LabelPolicy, class_names: Sequence[str] | None, where: str
) -> tuple[LabelArray, tuple[str, ...]]:
    """A label column as integers, with the class names: those given, else declared, else the labels themselves."""
    if column in data.column_names:
        declared = getattr(data.features[column], "names", None)
        try:
            return numbered(data[column], declared if class_names is None else class_names, policy, where)
        except DataError:
            if policy == "required":
                raise
    elif policy == "required":
        problem = f"{where} has no label column {column!r}; it has {data.column_names}"
        raise DataError(f"{problem}; name it: columns=Columns(label=...). Only OOD data may lack it ({_OPTIONAL})")
    return np.full(len(data), UNLABELLED), tuple(class_names or ())


def numbered(
    values: Collection[Any], names: Sequence[str] | None, policy: LabelPolicy, where: str
) -> tuple[LabelArray, tuple[str, ...]]:
    """Labels as integers, with class names. Text is looked up in the names, or numbered in its sorted order.

    Whole numbers, also written as text (`7`, not `07`), are class numbers. None, NaN and empty text are no label.
    """
    words = sorted({value for value in values if isinstance(value, str) and value})
    if words and names is None and not all(word.isdecimal() and str(int(word)) == word for word in words):
        names = words
    by_name = {name: number for number, name in enumerate(names or ())}
    labels = np.full(len(values), UNLABELLED)
    for row, value in enumerate(values):
        if value in (None, "") or value != value:
            continue
        try:
            labels[row] = by_name[value] if value in by_name else int(value)
            if value not in by_name and not (float(value) == labels[row] < MOST_CLASSES):
                raise ValueError("not the number of a class")
        except (TypeError, ValueError, OverflowError) as error:
            known = f"a class number, or one of {[*by_name][:6]}"
            raise DataError(f"row {row} of {where} has the label {value!r}; a label must be {known}") from error
    if policy == "required" and (labels < 0).any():
        none = f"{(labels < 0).sum()} rows of {where} have no label, the first is row {int((labels < 0).argmax())}"
        raise DataError(f"{none}; only OOD data may lack labels ({_OPTIONAL})")
    return np.maximum(labels, UNLABELLED), tuple(names or map(str, range(labels.max(initial=-1) + 1)))


# --- folders of images -------------------------------------------------------------------------------------


def _load_folder(
    folder: Path, split: str | None, policy: LabelPolicy, class_names: Sequence[str] | None
) -> ImageDataset:
    """The images of a folder, or of a split in it: one subfolder per class, searched to any depth."""
    title, below = folder.name, _subfolders(folder)
    splits = [name for name in below if name in SPLIT_NAMES]
    as_classes = splits != below and (len(splits) < 2 or class_names is not None)  # else train and test would be mixed
    if split is not None or (splits and not as_classes):
        folder = folder / _choose(split, below, folder)
    names = _subfolders(folder) if class_names is None else class_names
    if unknown := sorted({*_subfolders(folder)} - {*names}):
        raise DataError(f"{folder} has subfolders {unknown} that are not among the class names {list(names)}")
    listed = [(file, label) for label, name in enumerate(names) for file in images_below(folder / name)]
    if policy == "optional":
        loose = [file for file in images_below(folder) if file.parent == folder]
        listed += [(file, UNLABELLED) for file in loose]
    if not listed:
        problem = f"{folder} has no images ({', '.join(IMAGE_SUFFIXES)}) in its subfolders {_subfolders(folder)}"
        raise DataError(f"{problem}; images without a class are for OOD data ({_OPTIONAL})")
    files, numbers = zip(*((file.absolute(), label) for file, label in listed), strict=True)
    return ImageDataset(Rows(len(files), partial(_file, files)), numbers, names, title)


def _file(files: Sequence[Path], row: int) -> Picture:
    return read_image(files[row])


def _subfolders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not is_litter(entry.name))
