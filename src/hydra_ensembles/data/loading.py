"""Data sets from folders, lists, tables, torchvision and the hub."""

import inspect
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
    Rows,
    Text,
    TextDataset,
    decode_image,
    read_image,
)

if TYPE_CHECKING:
    from PIL.Image import Image

LabelPolicy = Literal["required", "optional"]

SPLIT_NAMES = ("dev", "test", "train", "training", "val", "valid", "validation")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".parquet", *DELIMITERS, *JSON_LINES)
_TORCHVISION, _HUB = "torchvision:", "hub:"


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
    - `torchvision:CIFAR10` and its like, `hub:OWNER/NAME`;
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
        return _load_torchvision(name.removeprefix(_TORCHVISION), split, base, download)
    path = base / name
    if name.startswith(_HUB) or (root is None and not path.exists() and _is_hub_name(name_or_path)):
        hub_name = name.removeprefix(_HUB)
        return _from_table(_read_hub(hub_name, config, split), columns, labels, class_names, hub_name)
    if not path.exists():
        raise DataError(
            f"{path} does not exist; check the path, or write 'hub:owner/name' for a data set of the "
            "Hugging Face hub" + _neighbours(path)
        )
    if path.is_dir():
        splits = _table_splits(path)
        if not splits:
            return _load_split_of_images(path, split, labels, class_names)
        files = splits[_choose(split, splits, path)]
        return _from_table(_read_files(files, columns), columns, labels, class_names, path.name)
    if split not in (None, path.stem):
        raise DataError(f"{path} is one file, it has no split {split!r}; leave split out or give the folder")
    if path.suffix.lower() == ".txt":
        return load_image_list(path, path.parent if images is None else base / images, labels, class_names)
    title = path.stem if path.stem not in SPLIT_NAMES else path.parent.name or path.stem
    return _from_table(_read_files([path], columns), columns, labels, class_names, title)


def _is_hub_name(name: str | Path) -> bool:
    if isinstance(name, Path) or name.endswith((*TABLE_SUFFIXES, ".txt")):
        return False
    parts = name.split("/")
    return len(parts) <= 2 and all(part and not part.startswith((".", "~")) for part in parts)


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; nor does the folder {path.parent} exist"
    found = sorted(entry.name for entry in path.parent.iterdir())[:20]
    return f"; in {path.parent} there are: {', '.join(found)}" if found else ""


def _choose(split: str | None, found: Sequence[str] | dict[str, Any], where: Path | str) -> str:
    if split is None and len(found) == 1:
        return next(iter(found))
    if split is None:
        raise DataError(f"{where} has the splits {sorted(found)}; choose one with split=...")
    if split not in found:
        raise DataError(f"{where} has no split {split!r}; found: {sorted(found)}")
    return split


# --- folders and lists of images ---------------------------------------------------------------------------


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
    entries = sorted(folder.iterdir())
    litter = (".", "__MACOSX")
    found = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(litter)]
    names = tuple(found if class_names is None else class_names)
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise DataError(f"{folder} has subfolders {unknown} that are not among the class names {list(names)}")
    images = {class_name: _images_in((folder / class_name).rglob("*")) for class_name in names}
    empty = [class_name for class_name in names if not images[class_name]]
    if class_names is None and labels == "optional":  # classes that nobody reads
        names = tuple(class_name for class_name in names if images[class_name])
    elif class_names is None and 0 < len(empty) < len(names):
        raise DataError(
            f"{folder} has subfolders without images: {empty}. Each subfolder is a class: move these elsewhere, or "
            "pass class_names= if they are classes without an image here"
        )
    listed = [(file, number) for number, class_name in enumerate(names) for file in images[class_name]]
    loose = _images_in(entries)
    if labels == "optional":
        listed += [(file, UNLABELLED) for file in loose]
    if not listed:
        hint = f"; {len(loose)} images lie in it without a class: pass labels='optional'" if loose else ""
        raise DataError(
            f"{folder} has no images in class subfolders (subfolders {found}, "
            f"suffixes read: {', '.join(IMAGE_SUFFIXES)}){hint}"
        )
    return _image_files(listed, names, name or folder.name)


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
    listed: list[tuple[Path, int]] = []
    for line_number, line in enumerate(list_file.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        path, separator, label = line.strip().rpartition(" ")
        if not separator:
            path, label = label, str(UNLABELLED)
        try:
            number = max(int(label), UNLABELLED)
        except ValueError as error:
            raise DataError(f"line {line_number} of {list_file} is {line!r}; each line must be 'path label'") from error
        if number == UNLABELLED and labels == "required":
            raise DataError(
                f"line {line_number} of {list_file} has no label; pass labels='optional' if the labels are "
                "not needed (OOD data)"
            )
        listed.append((images / path, number))
    if not listed:
        raise DataError(f"{list_file} lists no images")
    if not listed[0][0].exists():
        raise DataError(
            f"{listed[0][0]}, the first image of {list_file}, does not exist; images= must name the folder that "
            "the paths in the list are relative to"
        )
    if class_names is None:
        class_names = [str(label) for label in range(max(number for _, number in listed) + 1)]
    return _image_files(listed, class_names, name or list_file.stem)


def _load_split_of_images(
    folder: Path, split: str | None, labels: LabelPolicy, class_names: Sequence[str] | None
) -> ImageDataset:
    below = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    splits = [entry for entry in below if entry in SPLIT_NAMES]
    if split is None and (not splits or splits != below):
        return load_image_folder(folder, labels, class_names)
    if split not in below:
        split = _choose(split, splits or below, folder)
    return load_image_folder(folder / split, labels, class_names, folder.name)


def _images_in(files: Iterable[Path]) -> list[Path]:
    return sorted(file for file in files if file.suffix.lower() in IMAGE_SUFFIXES)


def _image_files(listed: Sequence[tuple[Path, int]], class_names: Sequence[str], name: str) -> ImageDataset:
    files = tuple(file for file, _ in listed)
    place = tuple(str(file.absolute()) for file in files)
    numbers = [number for _, number in listed]
    return ImageDataset(Rows(len(files), partial(_read_file, files), place), numbers, class_names, name)


def _read_file(files: Sequence[Path], row: int) -> "Image":
    return read_image(files[row], f"row {row}, image file {files[row]},")


# --- tables ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """An Arrow table as it is stored (compressed images stay compressed); cells are decoded when they are read."""

    data: Any
    where: str
    folder: Path = Path()

    def __len__(self) -> int:
        return int(self.data.num_rows)

    def has(self, column: str) -> bool:
        return column.partition(".")[0] in self.data.column_names

    def cell(self, column: str, row: int) -> Any:
        top, *inner = column.split(".")
        return _nested(self.data.column(top)[row].as_py(), inner)

    def column(self, column: str) -> list[Any]:
        top, *inner = column.split(".")
        return [_nested(value, inner) for value in self.data.column(top).to_pylist()]

    def class_names(self, column: str) -> tuple[str, ...] | None:
        """Names that the Hugging Face metadata of the schema declares for a column, if it does."""
        metadata = json.loads((self.data.schema.metadata or {}).get(b"huggingface", b"{}"))
        names = _nested(metadata.get("info", {}).get("features", {}), [*column.split("."), "names"])
        return tuple(names) if names else None

    def image(self, column: str, row: int) -> "Image":
        """Decode a cell `{bytes, path}`, or of plain bytes."""
        cell, where = self.cell(column, row), f"row {row} of {self.where}"
        content, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if isinstance(content, bytes):
            return decode_image(content, where)
        if path:
            return read_image(self.folder / path, f"{where} ({path})")
        raise DataError(
            f"{where} has no image in column {column!r} (a {type(cell).__name__}, expected bytes or {{bytes, path}}); "
            "remove the row or fill it, or name the image column with columns=Columns(image=...)"
        )

    def text(self, columns: tuple[str, ...], row: int) -> Text:
        """Read a cell as a string, or two as a pair."""
        cells = [self.cell(column, row) for column in columns]
        for column, cell in zip(columns, cells, strict=True):
            if not isinstance(cell, str):
                raise DataError(
                    f"row {row} of {self.where} has no text in column {column!r} (got {cell!r}); "
                    "remove the row or fill it"
                )
        return cells[0] if len(cells) == 1 else (cells[0], cells[1])


def _nested(value: Any, path: Sequence[str]) -> Any:
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


_SHARD = re.compile(r"^(?P<split>.+?)-\d{5}-of-\d{5}(-[0-9a-f]+)?$")


def _table_splits(folder: Path) -> dict[str, list[Path]]:
    """The tables in a folder by split: Parquet files (shards too, here or in `data/`), else CSV or TSV, else JSON."""
    parquet = (".parquet",)
    for place, suffixes in (
        (folder, parquet),
        (folder / "data", parquet),
        (folder, tuple(DELIMITERS)),
        (folder, JSON_LINES),
    ):
        splits: dict[str, list[Path]] = {}
        for file in sorted(file for file in place.glob("*") if file.suffix.lower() in suffixes):
            shard = _SHARD.match(file.stem)
            splits.setdefault(shard["split"] if shard else file.stem, []).append(file)
        twice = sorted(split for split, files in splits.items() if len({file.suffix for file in files}) > 1)
        if twice:
            raise DataError(f"{folder} holds the splits {twice} in two formats; give the file instead")
        if splits:
            return splits
    return {}


def _read_files(files: Sequence[Path], columns: Columns) -> _Table:
    """Read one split: a file, or its shards in order.

    CSV fields may be quoted and may then hold commas and line breaks. TSV fields are never quoted, so that a lone
    quotation mark in a sentence (as in the GLUE files) is just a character. Texts are taken letter by letter, so that
    `007` stays what it is; in the other columns numbers are recognised.
    """
    arrow = require("pyarrow", extra="data")
    suffix = files[0].suffix.lower()
    where = str(files[0]) if len(files) == 1 else f"{files[0]} (and {len(files) - 1} more shards)"
    if suffix not in TABLE_SUFFIXES:
        raise DataError(f"{files[0]} is not of a known kind; accepted suffixes: {', '.join((*TABLE_SUFFIXES, '.txt'))}")
    # one block for a whole file, so that a long text cannot straddle two
    block = max(1 << 20, max(file.stat().st_size for file in files) + 1)
    texts = {name: arrow.string() for name in (columns.text, columns.text_pair) if "." not in name}

    def read(file: Path) -> Any:
        if suffix == ".parquet":
            return require("pyarrow.parquet", extra="data").read_table(file)
        if suffix in JSON_LINES:
            lines = require("pyarrow.json", extra="data")
            whole = lines.ReadOptions(block_size=block)
            # a first look says which columns there are, and which of their strings would be taken for times
            seen = lines.read_json(file, whole).schema
            kept = {one.name: arrow.string() for one in seen if one.name in texts or arrow.types.is_timestamp(one.type)}
            found = lines.read_json(file, whole, lines.ParseOptions(explicit_schema=arrow.schema(list(kept.items()))))
            found.validate(full=True)  # strings are UTF-8, which the reader takes on trust
            return found
        csv = require("pyarrow.csv", extra="data")
        quoted = suffix == ".csv"
        return csv.read_csv(
            file,
            read_options=csv.ReadOptions(block_size=block),
            parse_options=csv.ParseOptions(
                delimiter=DELIMITERS[suffix], quote_char='"' if quoted else False, newlines_in_values=quoted
            ),
            convert_options=csv.ConvertOptions(strings_can_be_null=False, column_types=texts),
        )

    try:
        return _Table(arrow.concat_tables([read(file) for file in files]), where, files[0].parent)
    except (arrow.ArrowException, OSError) as error:
        kind = {".parquet": "Parquet", **dict.fromkeys(DELIMITERS, "a table with a header line")}
        raise DataError(f"{where} cannot be read as {kind.get(suffix, 'one JSON object a line')}: {error}") from error


def _read_hub(name: str, config: str | None, split: str | None) -> _Table:
    """Fetch one split of a hub data set (or find it in the cache); `datasets` keeps it as an Arrow table."""
    try:
        datasets = require("datasets", extra="hub")
    except MissingExtraError as error:
        raise MissingExtraError(
            f"{name!r} is not a file or folder here, and to read it from the Hugging Face hub {error}"
        ) from error
    where = f"hub data set {name!r}" + (f" ({config})" if config else "")
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except (ValueError, FileNotFoundError, ConnectionError) as error:
        raise DataError(f"{where}, split {split!r}, cannot be loaded: {error}") from error
    if split is None:
        split = _choose(None, loaded, where)
        loaded = loaded[split]
    features = json.dumps({"info": {"features": loaded.features.to_dict()}}).encode()
    table = loaded.with_format("arrow")[:].replace_schema_metadata({b"huggingface": features})
    return _Table(table, f"{where}, split {split!r}")


def _from_table(
    table: _Table, columns: Columns, policy: LabelPolicy, class_names: Sequence[str] | None, name: str
) -> AnyDataset:
    if not len(table):
        raise DataError(f"{table.where} has no rows")
    if not table.has(columns.image) and not table.has(columns.text):
        raise DataError(
            f"{table.where} has no column {columns.image!r} or {columns.text!r}; it has {table.data.column_names}. "
            "Name the right ones with columns=Columns(image=..., text=..., label=...)"
        )
    labels, names = _read_labels(table, columns.label, policy, class_names)
    if table.has(columns.image):
        images = Rows(len(table), partial(table.image, columns.image), (table.where, columns.image))
        return ImageDataset(images, labels, names, name)
    texts = (columns.text, columns.text_pair) if table.has(columns.text_pair) else (columns.text,)
    return TextDataset(Rows(len(table), partial(table.text, texts), (table.where, *texts)), labels, names, name)


def _read_labels(
    table: _Table, column: str, policy: LabelPolicy, class_names: Sequence[str] | None
) -> tuple[Labels, tuple[str, ...]]:
    """Read a label column as integers, with the class names.

    Whole numbers are taken as they are, strings are numbered in the order of the class names (sorted, if none are
    given); an empty cell or NaN is no label. Names come from the argument, else from the table, else they are the
    labels themselves.
    """
    if not table.has(column):
        if policy == "optional":
            return np.full(len(table), UNLABELLED, dtype=np.int64), tuple(class_names or ())
        raise DataError(
            f"{table.where} has no label column {column!r}; it has {table.data.column_names}. Name it with "
            "columns=Columns(label=...), or pass labels='optional' if the labels are not needed (OOD data)"
        )
    values = table.column(column)
    names = tuple(class_names) if class_names is not None else table.class_names(column)
    strings = {value for value in values if isinstance(value, str) and value}
    if strings and names is None:
        names = tuple(sorted(strings))
    known = {class_name: number for number, class_name in enumerate(names or ())}
    numbers = np.array(
        [_label(value, known, f"row {row} of {table.where}") for row, value in enumerate(values)], dtype=np.int64
    )
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


def _label(value: Any, known: dict[str, int], where: str) -> int:
    """A label as a number; one that would have to be rounded is refused."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return UNLABELLED
    if isinstance(value, str) and value in known:
        return known[value]
    if isinstance(value, int | float | Decimal) and math.isfinite(value) and int(value) == value:
        return int(value)
    raise DataError(
        f"{where} has the label {value!r}; labels must be whole numbers or class names"
        f"{f' ({list(known)})' if known else ''}: name the right column with columns=Columns(label=...)"
    )


# --- torchvision -------------------------------------------------------------------------------------------

_LABEL_ATTRIBUTES = ("targets", "labels", "_labels", "y")  # torchvision's own names for the same thing
_NAME_ATTRIBUTES = ("classes", "categories")


def _load_torchvision(name: str, split: str | None, root: Path, download: bool) -> ImageDataset:
    """Load a classification data set of torchvision; `split` goes to its argument of that name, or to `train`."""
    library = require("torchvision.datasets", extra="data")
    factory = getattr(library, name, None)
    if not inspect.isclass(factory) or name.startswith("_"):
        raise DataError(
            f"torchvision has no data set {name!r}; write its class name as in torchvision.datasets, "
            f"such as 'torchvision:CIFAR10'. Known: {', '.join(sorted(library.__all__))}"
        )
    accepted = inspect.signature(factory).parameters
    settings = {key: value for key, value in {"root": root, "download": download}.items() if key in accepted}
    if "split" in accepted and split is not None:
        settings["split"] = split
    elif "train" in accepted:
        settings["train"] = _choose(split, ("test", "train"), f"torchvision:{name}") == "train"
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
    names = next((getattr(data, key) for key in _NAME_ATTRIBUTES if hasattr(data, key)), ())
    class_names = tuple(", ".join(entry) if isinstance(entry, tuple) else str(entry) for entry in names)
    images = Rows(len(data), partial(_torchvision_image, data))
    return ImageDataset(images, [int(label) for label in labels], class_names, f"torchvision:{name}")


def _torchvision_image(data: Any, row: int) -> "Image":
    image, _ = data[row]
    image.load()  # some sets hand out a file that is still open
    return to_rgb(image)
