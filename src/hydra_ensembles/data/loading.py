"""Load data sets from folders, image lists, tables, torchvision and the hub."""

import inspect
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .._utils import require, warn
from ..arguments import checked
from ..classes import a_few
from ..errors import DataError
from ..files import expanded, unique
from ..preprocessing import to_rgb
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
    called_image,
    decode_image,
    files_below,
    is_image,
    is_litter,
    read_image,
    warn_of_others,
)
from .labels import ONLY_OOD, as_number, naming, numbered

LabelPolicy = Literal["required", "optional"]

SPLIT_NAMES = ("dev", "test", "train", "training", "val", "valid", "validation")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".parquet", *DELIMITERS, *JSON_LINES)
_TORCHVISION, HUB = "torchvision:", "hub:"
_SHARD = re.compile(r"^(?P<split>.+?)-(?P<number>\d{5})-of-(?P<all>\d{5})(-[0-9a-f]+)?$")
_LISTED = re.compile(r"(?P<path>.+?)(?: (?P<label>-?\d+))?")


@dataclass(frozen=True)
class Columns:
    """Column names of a table; a dot reaches into a nested column (`translation.en`) if no column has that whole name.

    A table with the `image` column holds images, unless only `text` is given another name (then it holds texts, also
    with `image="image"`); others need `text`. `text_pair` is used if it exists, and must if renamed; rows need both.
    """

    image: str = "image"
    text: str = "text"
    text_pair: str = "text_pair"
    label: str = "label"

    def needed(self, kind: Literal["image", "text"]) -> tuple[str, ...]:
        """Columns that a table of this kind must have: the main one, and for texts a renamed `text_pair`."""
        main: str = getattr(self, kind)
        return (main, self.text_pair) if kind == "text" and self.text_pair != Columns.text_pair else (main,)


@checked
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
    - a CSV or TSV file with a header line, or a folder with `<split>.csv`; images are given by their paths;
    - a file with one JSON object per line, or a folder with `<split>.jsonl`;
    - a folder of images with one subfolder per class, with or without a level of splits above;
    - a `.txt` file that lists images, one line `path label` each (OpenOOD);
    - `torchvision:CIFAR10` and the like, `hub:OWNER/NAME`.

    Classes are numbered in the order of `class_names`, else as the data say, else sorted by name.

    Args:
        name_or_path: What to load.
        split: Which part, such as `"test"`. May be left out if there is only one.
        root: Folder that relative paths start from; for torchvision, the folder of its data.
        columns: Names of the columns of a table, if they differ from `image`, `text`, `text_pair`, `label`.
        labels: `"required"`, or `"optional"` for OOD data, whose labels are not used; images outside of class
            folders are then loaded as well.
        class_names: Names in label order, if the data do not contain them.
        config: Configuration of a hub data set (`"sst2"` of `"glue"`).
        images: For an image list, the folder its paths are relative to (the list's own, if not given).
        download: Whether torchvision may download what is missing.

    Raises:
        DataError: The path, split, columns or labels are missing; the message lists what was found.

    Examples:
        >>> from pathlib import Path
        >>> from hydra_ensembles import data
        >>> _ = Path("reviews.csv").write_text("text,label\\ngood,yes\\nbad,no\\n")
        >>> reviews = data.load("reviews.csv")  # or a folder of pictures, a sub-folder for each class
        >>> len(reviews), reviews.class_names, reviews[0]
        (2, ('no', 'yes'), ('good', 1))
    """
    name = str(name_or_path)
    base = expanded(root or "")
    columns = columns or Columns()
    if name.startswith(_TORCHVISION):
        return _load_torchvision(name.removeprefix(_TORCHVISION), split, base, download)
    path = base / expanded(name)
    if name.startswith(HUB):
        table = _read_hub(name.removeprefix(HUB), config, split)
    elif not path.exists():
        raise DataError(f"{path} does not exist; check the path, or write 'hub:owner/name' for a data set on the hub")
    elif not path.is_dir() and not path.is_file():  # opening a named pipe would block forever
        raise DataError(f"{path} is neither a plain file nor a folder; give one of them")
    elif path.is_dir() and (splits := _table_splits(path)):
        table = _read_tables(_whole(splits[_choose(split, splits, path)]), path.name, columns)
    elif path.is_dir():
        table = _list_folder(path, split, labels, class_names)
        columns = Columns()
    elif split not in (None, path.stem):
        raise DataError(f"{path} is a single file and has no split {split!r}; leave split out or give the folder")
    elif path.suffix.lower() == ".txt":
        table = _read_list(path, path.parent if images is None else base / expanded(images))
        columns = Columns()
    else:
        title = path.stem if path.stem not in SPLIT_NAMES else path.parent.name or path.stem
        table = _read_tables([path], title, columns)
    return _from_table(table, columns, labels, class_names)


def _choose(split: str | None, splits: Collection[str], where: Path | str) -> str:
    if split is None and len(splits) == 1:
        return next(iter(splits))
    if split is None:
        raise DataError(f"{where} has the splits {sorted(splits)}; choose one: split=..., in a shell {where}:NAME")
    if split not in splits:
        raise DataError(f"{where} has no split {split!r}; found: {sorted(splits)}")
    return split


# --- tables ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """An Arrow table as it is stored (compressed images stay compressed); cells are decoded when they are read."""

    data: Any
    where: str  # name of the table in error messages
    title: str  # name of the data set
    folder: Path = Path()  # folder of images given by path; absolute, because they are read later
    labels_as_written: bool = False  # whether labels are strings that may mean numbers, as in CSV

    def has(self, column: str) -> bool:
        return path_of(column, self.data.column_names)[0] in self.data.column_names

    def cell(self, column: str, row: int) -> Any:
        top, *inner = path_of(column, self.data.column_names)
        return nested(self.data.column(top)[row].as_py(), inner)

    def column(self, column: str) -> list[Any]:
        top, *inner = path_of(column, self.data.column_names)
        return [nested(value, inner) for value in self.data.column(top).to_pylist()]

    def class_names(self, column: str) -> tuple[str, ...] | None:
        """Class names that the schema's Hugging Face metadata declares for a column, or None."""
        metadata = json.loads((self.data.schema.metadata or {}).get(b"huggingface", b"{}"))
        path = path_of(column, self.data.column_names)
        names = nested(metadata.get("info", {}).get("features", {}), [*path, "names"])
        return tuple(names) if names else None

    def image(self, column: str, row: int) -> Picture:
        """Decode an image cell, see `stored_image`."""
        stored, where = self.stored(column, row), f"row {row} of {self.where}"
        if stored is None:
            got = f"{where} has no image (bytes, a path or {{bytes, path}}) in column {column!r}"
            raise DataError(f"{got}; remove or fill it, or name another column: {naming('image')}")
        return decode_image(stored, where) if isinstance(stored, bytes) else read_image(stored, f"{where} ({stored})")

    def stored(self, column: str, row: int) -> bytes | Path | None:
        """Stored bytes or file of an image."""
        return stored_image(self.cell(column, row), self.folder)

    def text(self, columns: tuple[str, ...], row: int) -> Text:
        """Read a cell as a string, or two as a pair."""
        cells = [self.cell(column, row) for column in columns]
        for column, cell in zip(columns, cells, strict=True):
            if not isinstance(cell, str):
                raise DataError(f"row {row} of {self.where} has no text in column {column!r}, got {cell!r}; give one")
        return cells[0] if len(cells) == 1 else (cells[0], cells[1])


def path_of(column: str, names: Collection[str]) -> list[str]:
    """The path of keys that a column name means: itself if it is one of the `names`, else its parts between dots."""
    return [column] if column in names else column.split(".")


def nested(value: Any, path: Sequence[str]) -> Any:
    """Look up a path of keys in nested dicts; None if it does not exist."""
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def stored_image(cell: Any, folder: Path) -> bytes | Path | None:
    """Bytes or file of an image cell: bytes, a path relative to `folder`, or `{bytes, path}`; else None."""
    content, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, cell)
    return content if isinstance(content, bytes) else folder / path if path and isinstance(path, str) else None


def _table_splits(folder: Path) -> dict[str, list[Path]]:
    """Tables in a folder, or in its `data/`, by split, all of one format: Parquet, else CSV, TSV or JSON lines."""
    for parent, suffix in product((folder, folder / "data"), TABLE_SUFFIXES):
        splits: dict[str, list[Path]] = {}
        files = (file for file in parent.glob("*") if file.suffix.lower() == suffix and not is_litter(file.name))
        for file in sorted(file for file in files if file.is_file()):
            shard = _SHARD.match(file.stem)
            splits.setdefault(shard["split"] if shard else file.stem, []).append(file)
        if splits:
            return splits
    return {}


def _whole(files: Sequence[Path]) -> Sequence[Path]:
    """Return the files of a split; raise if shards are missing or the split is there in two versions."""
    shards = [(int(shard["number"]), int(shard["all"])) for file in files if (shard := _SHARD.match(file.stem))]
    expected = [(number, len(files)) for number in range(len(files))]
    if shards != expected and (shards or len(files) > 1):  # a single file need not be a shard
        problem = f"{files[0].parent} has {a_few([file.name for file in files])}, not exactly the shards of one split"
        raise DataError(f"{problem}; fetch what is missing, remove what is too much, or give the file you mean")
    return files


def _read_tables(files: Sequence[Path], title: str, columns: Columns) -> _Table:
    """Read one split: a file, or its shards in order."""
    arrow = require("pyarrow", extra="data")
    where, suffix = files[0], files[0].suffix.lower()
    if suffix == ".parquet":
        read = require("pyarrow.parquet", extra="data").read_table
    elif suffix in JSON_LINES:
        read = partial(_read_json_lines, arrow=arrow)
    elif suffix in DELIMITERS:
        strings = dict.fromkeys((columns.text, columns.text_pair, columns.label), arrow.string())
        read = partial(_read_delimited, strings=strings)
    else:
        raise DataError(f"{where} has an unknown suffix; accepted suffixes: {', '.join((*TABLE_SUFFIXES, '.txt'))}")
    try:
        table = arrow.concat_tables([read(file) for file in files])
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{where} cannot be read as a {suffix} table: {error}") from error
    return _Table(table, str(where), title, where.parent.absolute(), suffix in DELIMITERS)


def _read_json_lines(file: Path, arrow: Any) -> Any:
    """A table with a column for every key that occurs; None in lines without that key."""
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), start=1):
        try:
            row = json.loads(line, object_pairs_hook=unique) if line.strip() else None
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip():
            raise ValueError(f"line {number} is a {type(row).__name__}, not an object")
    names = dict.fromkeys(name for row in rows for name in row)
    return arrow.table({name: _of_one_type(name, [row.get(name) for row in rows], arrow) for name in names})


def _of_one_type(name: str, values: list[Any], arrow: Any) -> Any:
    """Values of JSON as an Arrow column; raise if they are of several types."""
    try:
        return arrow.array(values)
    except (arrow.ArrowException, OverflowError) as error:
        first = dict[str, int]()  # row of each kind
        for row, one in enumerate(values):
            first.setdefault("number" if type(one) in (int, float) else type(one).__name__, row)
        kinds = ", ".join(f"row {row} a {kind}" for kind, row in first.items() if kind != "NoneType")
        raise ValueError(f"in column {name!r}, {kinds}: {error}") from error


def _read_delimited(file: Path, strings: dict[str, Any]) -> Any:
    """Read a table with a header line.

    CSV fields may be quoted, TSV fields never: a lone quotation mark in a sentence (as in the GLUE files) is just a
    character. Texts and labels (`strings`) are read as strings, so that `007` is kept; other columns are parsed.
    """
    csv = require("pyarrow.csv", extra="data")
    delimiter = DELIMITERS[file.suffix.lower()]
    quoted = delimiter == ","
    one_block = csv.ReadOptions(block_size=max(1 << 20, file.stat().st_size + 1))  # no long text straddles two
    quoting = csv.ParseOptions(delimiter=delimiter, quote_char='"' if quoted else False, newlines_in_values=quoted)
    return csv.read_csv(file, one_block, quoting, csv.ConvertOptions(strings_can_be_null=False, column_types=strings))


def _read_hub(name: str, config: str | None, split: str | None) -> _Table:
    """Download one split of a hub data set, or read it from the cache; `datasets` stores it as an Arrow table."""
    datasets = require("datasets", extra="hub")
    where = f"hub data set {name!r}" + (f" ({config})" if config else "")
    try:
        loaded = datasets.load_dataset(name, config, split=split, trust_remote_code=False)
    except (ValueError, FileNotFoundError, ConnectionError, RuntimeError) as error:
        advice = "if it needs a script, which is never run, give a folder of its Parquet files (refs/convert/parquet)"
        raise DataError(f"{where}, split {split!r}, cannot be loaded: {error}; {advice}") from error
    if split is None:
        split = _choose(None, loaded, where)
        loaded = loaded[split]
    features = json.dumps({"info": {"features": loaded.features.to_dict()}}).encode()
    table = loaded.with_format("arrow")[:].replace_schema_metadata({b"huggingface": features})
    return _Table(table, f"{where}, split {split!r}", name)


def _from_table(table: _Table, columns: Columns, policy: LabelPolicy, class_names: Sequence[str] | None) -> AnyDataset:
    count = table.data.num_rows
    if not count:
        raise DataError(f"{table.where} has no rows")
    if not table.has(columns.image) and not table.has(columns.text):
        problem = f"{table.where} has no column {columns.image!r} or {columns.text!r}; it has {table.data.column_names}"
        raise DataError(f"{problem}. Name the right one: {naming('text')}; or image")
    used = {path_of(getattr(columns, column.name), table.data.column_names)[0] for column in fields(columns)}
    twice = sorted(name for name in used if table.data.column_names.count(name) > 1)
    if twice:
        raise DataError(f"{table.where} has several columns called {twice[0]!r}; rename all but the one that is meant")
    labels, names = _read_labels(table, columns.label, policy, class_names)
    texts_are_meant = columns.text != Columns.text and columns.image == Columns.image and table.has(columns.text)
    if table.has(columns.image) and not texts_are_meant:
        images = Rows(count, partial(table.image, columns.image), partial(table.stored, columns.image))
        return ImageDataset(images, labels, names, table.title)
    texts = (columns.text, columns.text_pair) if table.has(columns.text_pair) else (columns.text,)
    if not set(columns.needed("text")) <= set(texts):
        problem = f"{table.where} has no column {columns.text_pair!r}; it has {table.data.column_names}"
        raise DataError(f"{problem}. Leave text_pair out, or name the right one: {naming('text_pair')}")
    return TextDataset(Rows(count, partial(table.text, texts)), labels, names, table.title)


def _read_labels(
    table: _Table, column: str, policy: LabelPolicy, class_names: Sequence[str] | None
) -> tuple[LabelArray, tuple[str, ...]]:
    """Read a label column as integers, with the class names; see `labels.numbered`."""
    unlabelled = np.full(table.data.num_rows, UNLABELLED, dtype=np.int64)
    if not table.has(column):
        if policy == "optional":
            return unlabelled, tuple(class_names or ())
        problem = f"{table.where} has no label column {column!r}; it has {table.data.column_names}"
        raise DataError(f"{problem}; only OOD data may lack it ({ONLY_OOD}). Name it: {naming('label')}")
    values, declared = table.column(column), table.class_names(column)
    try:
        return numbered(values, table.labels_as_written, declared, class_names, policy == "required", table.where)
    except DataError:
        if policy == "required" or class_names is not None:
            raise
        return unlabelled, ()  # ratings, dates: not used


# --- folders and lists of images: tables of paths and labels -----------------------------------------------


def _list_folder(folder: Path, split: str | None, policy: LabelPolicy, class_names: Sequence[str] | None) -> _Table:
    """List the images of a folder, or of a split in it: one subfolder per class, searched to any depth, no litter."""
    title, folder = folder.name, _folder_of_classes(folder, split, class_names)
    subfolders = _subfolders(folder)
    names = subfolders if class_names is None else class_names
    unknown = sorted(set(subfolders) - set(names))
    if unknown:
        raise DataError(f"{folder} has subfolders {unknown} that are not among the class names {list(names)}")
    files = {class_name: files_below(folder / class_name) for class_name in names}
    images = {class_name: list(filter(called_image, files[class_name])) for class_name in names}
    listed: list[tuple[Path, str | None]] = [(file, class_name) for class_name in names for file in images[class_name]]
    empty = [class_name for class_name in names if not images[class_name]]
    if policy == "required" and class_names is None and 0 < len(empty) < len(names):
        raise DataError(f"{folder} has subfolders without images: {empty}; move them, or give class_names with them")
    beside = sorted(file for file in folder.iterdir() if file.is_file() and not is_litter(file.name))
    loose = list(filter(called_image, beside))
    if policy == "optional":
        listed += [(file, None) for file in loose]
    elif listed and loose:
        warn(f"{folder} has {len(loose)} images outside of class folders, which are left out")
    warn_of_others(folder, chain(beside if policy == "optional" else (), *files.values()))
    if not listed:
        hint = f"; images without a class are for OOD data ({ONLY_OOD})" if loose else ""
        if any((part / "state.json").is_file() for part in (folder, *map(folder.joinpath, subfolders))):
            hint = "; what save_to_disk of datasets wrote is read by load_from_disk, and saved for here by to_parquet"
        raise DataError(f"{folder} has no images ({', '.join(IMAGE_SUFFIXES)}) in its subfolders {subfolders}{hint}")
    return _table_of_files([(str(file.relative_to(folder)), label) for file, label in listed], folder, title, folder)


def _folder_of_classes(folder: Path, split: str | None, class_names: Sequence[str] | None) -> Path:
    """The folder of a split, or the given one if it has none.

    Folders named like splits next to others are refused: as classes, they would mix training and test data. A class may
    be called `train` if it is the only such name and directly contains images.
    """
    below = _subfolders(folder)
    splits = [entry for entry in below if entry in SPLIT_NAMES]
    if split is not None or (splits and splits == below):
        return folder / (split if split in below else _choose(split, splits or below, folder))
    alone = folder / splits[0] if len(splits) == 1 else None
    is_class = alone is not None and (any(map(is_image, alone.iterdir())) or not _subfolders(alone))
    if splits and class_names is None and not is_class:
        problem = f"{folder} has {splits}, which look like splits, and also {sorted(set(below).difference(splits))}"
        raise DataError(f"{problem}; choose one (split=..., in a shell {folder}:NAME), or give all as class_names")
    return folder


def _subfolders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not is_litter(entry.name))


def _read_list(list_file: Path, images: Path) -> _Table:
    """Read an image list in OpenOOD's format, lines `path label`; a label of -1, or none, means no class."""
    try:
        lines = [line.strip() for line in list_file.read_text(encoding="utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise DataError(f"{list_file} is not UTF-8 text ({error}); save it as UTF-8") from error
    listed = [(match["path"], match["label"]) for line in lines if (match := _LISTED.fullmatch(line))]
    listed = [(path, label and as_number(int(label), {}, f"{list_file}, {path},")) for path, label in listed]
    if not listed:
        raise DataError(f"{list_file} lists no images")
    if not (images / listed[0][0]).exists():
        first = f"{images / listed[0][0]}, the first image of {list_file},"
        texts = "texts need a table (CSV, JSON lines, Parquet) instead"
        raise DataError(f"{first} does not exist; lines are 'path label', relative to the folder images=; {texts}")
    return _table_of_files(listed, list_file, list_file.stem, images)


def _table_of_files(listed: Sequence[tuple[str, str | int | None]], where: Path, title: str, folder: Path) -> _Table:
    paths = [{"bytes": None, "path": path} for path, _ in listed]
    table = require("pyarrow", extra="data").table({"image": paths, "label": [label for _, label in listed]})
    return _Table(table, str(where), title, folder.absolute())


# --- torchvision -------------------------------------------------------------------------------------------


def _load_torchvision(name: str, split: str | None, root: Path, download: bool) -> ImageDataset:
    """Load a data set of torchvision; `split` is its `split`, its `train`, or both (EMNIST): `letters-test`."""
    library = require("torchvision.datasets", extra="data")
    factory = getattr(library, name, None)
    if not inspect.isclass(factory) or name.startswith("_"):
        raise DataError(f"torchvision has no data set {name!r}; known: {', '.join(sorted(library.__all__))}")
    accepted = _accepted(factory)
    settings = {key: value for key, value in {"root": root, "download": download}.items() if key in accepted}
    if {"split", "train"} <= accepted:
        settings["split"], _, part = (split or "").rpartition("-")
        if part not in ("test", "train"):
            way = "write split='NAME-train' or 'NAME-test', such as 'letters-test' of EMNIST"
            raise DataError(f"torchvision:{name} has no split {split!r}; {way}")
        settings["train"] = part == "train"
    elif "split" in accepted and split is not None:
        settings["split"] = split
    elif "train" in accepted:
        settings["train"] = _choose(split, ("test", "train"), f"torchvision:{name}") == "train"
    elif split is not None:
        raise DataError(f"torchvision:{name} has no splits, got split={split!r}; leave it out")
    try:
        data: Any = factory(**settings)
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        where = f"torchvision:{name} (split {split!r})"
        raise DataError(f"{where} cannot be loaded from {root}: {error}. Check root=, or pass download=True") from error
    attributes = ("targets", "labels", "_labels", "y")  # torchvision's various names for the labels
    labels = next((getattr(data, key) for key in attributes if hasattr(data, key)), None)
    labels = [data[row][1] for row in range(len(data))] if labels is None else labels
    names = next((getattr(data, key) for key in ("classes", "categories") if hasattr(data, key)), ())
    class_names = [", ".join(entry) if isinstance(entry, tuple) else str(entry) for entry in names]
    images = Rows(len(data), partial(_torchvision_image, data))
    return ImageDataset(images, [int(label) for label in labels], class_names, f"torchvision:{name}")


def _accepted(factory: type) -> set[str]:
    """Argument names that a class accepts, including those it passes on to its base classes."""
    accepted = set[str]()
    for base in inspect.getmro(factory)[:-1]:
        parameters = inspect.signature(base).parameters
        accepted |= set(parameters)
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return accepted


def _torchvision_image(data: Any, row: int) -> Picture:
    image, _ = data[row]
    image.load()  # some data sets return a lazily opened file
    return to_rgb(image)
