"""The one path from a raw row to a model's input, or to the reason why it has none: for `predict`, `score` and servers.

`sources` lists what a file or a folder holds, `Reader` turns a path, an image, a text or a table's cells into a `Row`.
A row that cannot be read does not end the work: it carries its error, and the others get answers.
"""

import csv
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property, partial
from itertools import accumulate, count, groupby, islice
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from fsspec import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.nn import functional as F

from .._utils import collect_warnings, library
from ..batches import READ
from ..data.dataset import IMAGE_SUFFIXES, is_litter
from ..data.loading import Columns
from ..digest import digest
from ..errors import DataError, HydraError, RequestError
from ..files import expanded
from ..model.config import PatchStemConfig
from ..model.ensemble import Answering
from ..model.inputs import read_inputs
from ..preprocessing import ImagePreprocessing, TextPreprocessing
from ..settings import from_plain

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # not EPS and its like: decoding them starts programs
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # quota and period of the control group
SHORTEST, USUAL = 16, 512  # minimum number of tokens that texts are padded to; that a server prepares for
_CHANGES = ("mtime", "ETag", "etag", "LastModified", "created")  # what a file system says of a file's last change
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


def cores() -> int:
    """Cores this process may use: fewer than the machine has in a container, or under an affinity."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_MAX.read_text().split()
        return min(usable, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no control group, or "max": no limit
        return usable


def doubling(first: int, last: int) -> list[int]:
    """Numbers that double, up to and with the last."""
    numbers = [first << power for power in range(last.bit_length())]
    return [*(number for number in numbers if number < last), last]


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """One named input or output of an ensemble: the same in exported files, servers and tables.

    Attributes:
        name: The same in files, servers and tables.
        shape: Of one sample; -1 stands for the number of tokens, the same in all inputs.
        dtype: NumPy name.
        meaning: One sentence.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    meaning: str


def input_fields(ensemble: Answering) -> tuple[Field, ...]:
    """Preprocessed inputs of the ensemble; the main input first."""
    stem, preprocessing = ensemble.front.config.stem, ensemble.metadata.preprocessing
    main, *extra = READ[ensemble.kind]
    if isinstance(stem, PatchStemConfig):
        dtype = str(ensemble.front.dtype).removeprefix("torch.")
        return (Field(main, (stem.channels, *stem.image_size), dtype, "Images, resized, cropped and normalised."),)
    mask, segments = extra
    is_read = {main: True, mask: getattr(preprocessing, mask, True)}
    is_read[segments] = stem.segments > 0 and getattr(preprocessing, "segments", True)
    meanings = ("Token ids.", "1 at tokens and 0 at padding.", "The segment of each token.")
    described = zip(is_read, meanings, strict=True)
    return tuple(Field(name, (-1,), "int64", meaning) for name, meaning in described if is_read[name])


@dataclass(frozen=True, eq=False)
class Row:
    """One sample for the model, or why there is none.

    Attributes:
        inputs: Preprocessed inputs by name, without the batch axis, on the CPU.
        error: Why it cannot be read; None if it can.
        notes: Why it is probably not what was meant: a text that was cut, a photograph stored sideways.
        raw: The image or text itself, for a model that reads raw items.
    """

    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    error: HydraError | None = None
    notes: Sequence[str] = ()
    raw: Any = None

    @cached_property
    def shape(self) -> Hashable:
        """Rows of equal shape may share a batch."""
        return tuple((name, tuple(tensor.shape)) for name, tensor in self.inputs.items())


class Reader:
    """Raw rows as inputs of one model, whose weights are not read.

    Texts are padded to a few lengths, so that plans are measured and compiled for few shapes; those of a model without
    a padding mask are not padded.
    """

    def __init__(self, model: Answering) -> None:
        self.kind, self.dtype, self.preprocessing = model.kind, model.front.dtype, model.metadata.preprocessing
        self.inputs, self._raw = input_fields(model), model.raw
        self._main = READ[self.kind][0]
        self._masked = any(field.name == "attention_mask" for field in self.inputs)
        self._config = model.front.config
        size = getattr(self.preprocessing, "size", None) or self.inputs[0].shape[1:]
        self.image_size = tuple(map(int, size)) if self.kind == "image" else None

    def read(self, raw: Any) -> Row:
        """The row of an image (path, content of a file, PIL) or of a text or a pair; raises if it reads no raw rows."""
        self.require_preprocessing()
        with collect_warnings() as notes:
            try:
                raw = self._opened(raw)
                inputs = self._image(raw) if self.kind == "image" else self._text(raw)
            except RequestError as error:
                return Row(error=error)
            except HydraError as error:
                return Row(error=DataError(re.sub("^(image 0|the text)", "it", str(error))))
            except Exception as error:  # broken data can raise anything in a decoder
                cause = " ".join(str(error).split()) or type(error).__name__
                return Row(error=DataError(f"it cannot be read: {cause}"))
        return Row(inputs, None, tuple(notes), raw if self._raw else None)

    def tensors(self, inputs: Mapping[str, Tensor]) -> list[Row]:
        """Rows of preprocessed inputs, `[B, …]` each; raises if they do not fit the model."""
        if self._raw:
            raise DataError(f"the stages of this model read {self.kind}s differently: give them raw, not as tensors")
        with collect_warnings() as notes:
            main, mask, segments = read_inputs(self._config, inputs, {})
        size = self.image_size
        if size is not None and tuple(main.shape[2:]) != size:
            raise DataError(f"images are {list(main.shape[2:])}; {list(size)}, height and width, are accepted here")
        if main.is_floating_point() and not bool(main.isfinite().all()):
            raise DataError(f"{self._main} has values that are NaN or infinite")
        if self.kind == "image":
            return [Row({self._main: image}, notes=notes) for image in main.to(self.dtype)]
        if self._masked:
            mask = torch.ones_like(main) if mask is None else mask
            segments = torch.zeros_like(main) if segments is None and len(self.inputs) > 2 else segments
        given = {name: x for name, x in zip(READ["text"], (main, mask, segments), strict=True) if x is not None}
        return [Row(self._padded({name: x[row] for name, x in given.items()}), notes=notes) for row in range(len(main))]

    def examples(self) -> list[Row]:
        """A blank row of every shape that is known in advance; of texts, up to a usual length."""
        if self._raw:
            blank = library("PIL.Image", extra="data").new("RGB", self.image_size[::-1]) if self.image_size else "a"
            return [self.read(blank)]
        if self.image_size is not None:
            return [Row({self._main: torch.zeros(self.inputs[0].shape[0], *self.image_size, dtype=self.dtype)})]
        lengths = self.lengths()
        usual = [length for length in lengths if length <= max(USUAL, lengths[0])]  # windows of decoders are far longer
        return [self.tensors({self._main: torch.zeros(1, length, dtype=torch.long)})[0] for length in usual]

    def lengths(self) -> list[int]:
        """Lengths that texts are padded to; none for models without a padding mask."""
        most: int = self._config.stem.max_tokens
        most = min(most, getattr(self.preprocessing, "max_length", most))
        if getattr(self.preprocessing, "pad_to_max", False):
            return [most]
        return doubling(SHORTEST, most) if self._masked else []

    def require_preprocessing(self) -> None:
        """Refuse raw rows for a model that was saved without its preprocessing."""
        if self.preprocessing is None:
            missing = "image processor" if self.kind == "image" else "tokenizer"
            raise DataError(f"this model was saved without its {missing}: give {self._main}, or convert it with one")

    def _opened(self, raw: Any) -> Any:
        """An image of a path or of the content of a file, not yet decoded; anything else as it is."""
        if self.kind == "image" and isinstance(raw, str | Path | Remote):
            try:
                raw = raw.read_bytes() if isinstance(raw, Remote) else Path(raw).read_bytes()
            except OSError as error:
                raise DataError(f"{getattr(raw, 'path', raw)} cannot be read: {error.strerror or error}") from error
        if not isinstance(raw, bytes):
            return raw
        pillow = library("PIL.Image", extra="data")
        try:
            return pillow.open(io.BytesIO(raw), formats=FORMATS)
        except pillow.DecompressionBombError as error:  # a header that announces gigabytes of pixels
            raise RequestError(f"it is too large: {error}", 413) from error
        except Exception as error:  # a broken header can raise anything in Pillow
            raise RequestError(f"it ({len(raw)} bytes) is none of {', '.join(FORMATS)}, or is broken", 415) from error

    def _image(self, image: Any) -> dict[str, Tensor]:
        assert isinstance(self.preprocessing, ImagePreprocessing)
        return {self._main: self.preprocessing([image])[0].to(self.dtype)}

    def _text(self, raw: Any) -> dict[str, Tensor]:
        assert isinstance(self.preprocessing, TextPreprocessing)
        pair = isinstance(raw, list | tuple) and len(raw) == 2
        encoded = self.preprocessing([tuple(raw) if pair else raw])
        return self._padded({name: ids[0] for name, ids in encoded.items()})

    def _padded(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inputs of one text, `[T]` each, padded to one of `lengths`."""
        tokens = len(inputs[self._main])
        length = next((length for length in self.lengths() if length >= tokens), tokens)
        fill = {self._main: getattr(self.preprocessing, "pad_id", 0)}
        return {name: F.pad(x.long(), (0, length - tokens), value=fill.get(name, 0)) for name, x in inputs.items()}


# --- files, folders and URLs of rows ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """One raw row: its place, such as `reviews.csv:3`, what `Reader.read` takes, kept columns, or why it is broken."""

    name: str
    content: Any = None
    kept: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Remote:
    """A file that is not on a disk of this machine."""

    files: Any  # of fsspec
    path: str

    def read_bytes(self) -> bytes:
        """Its content."""
        content: bytes = self.files.cat_file(self.path)
        return content


def file_system(url: str | Path) -> tuple[Any, str]:
    """The file system of fsspec behind a path or a URL, and the path in it."""
    try:
        found: tuple[Any, str] = url_to_fs(str(url) if is_url(url) else str(expanded(url).absolute()))
    except (ImportError, ValueError) as error:
        raise DataError(f"{url} cannot be opened: {error}") from error
    return found


def is_url(path: str | Path) -> bool:
    """Whether it is a URL, such as `s3://bucket/photos`, and no path."""
    return "://" in str(path)


def is_local(files: Any) -> bool:
    """Whether a file system of fsspec is that of this machine."""
    return isinstance(files, LocalFileSystem)


@dataclass(frozen=True)
class Source:
    """A table, a tar file, lines of text, or some images of one folder: its items are always in the same order.

    Attributes:
        name: Path of the file or of the folder, relative to what was given.
        part: Number of this part of a folder's images; 0 for a file.
        state: Changes with its files.
        size: Bytes of its files.
        seeks: Whether items from any row on are read without those before.
    """

    name: str
    part: int
    state: str
    size: int
    _read: Callable[[int], Iterator[Item]] = field(repr=False)
    _count: Callable[[], int] = field(repr=False)
    seeks: bool = False

    def __iter__(self) -> Iterator[Item]:
        """The items, the current one in memory; broken content is an item with its error."""
        return self.items()

    def items(self, first: int = 0) -> Iterator[Item]:
        """The items from a row on."""
        try:
            yield from self._read(first) if self.seeks else islice(self._read(0), first, None)
        except Exception as error:  # broken data can raise anything in a decoder
            yield Item(self.name, error=f"the file, or the rest of it, cannot be read: {_cause(error)}")

    def count(self) -> int:
        """About how many items there are, exactly if it seeks; 0 if only reading all of them would tell."""
        try:
            return self._count()
        except Exception:  # broken, as `items` will say
            return 0

    def require_columns(self) -> None:
        """Refuse a table that has not the columns that were named."""
        try:
            next(self._read(0), None)
        except ColumnError:
            raise
        except Exception:  # broken: an item with its error
            return


def _cause(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def sources(
    path: str | Path,
    kind: str,
    columns: Mapping[str, str] | None = None,
    keep: Sequence[str] = (),
    *,
    images: int = 4096,
    without: str | Path | None = None,
) -> list[Source]:
    """What a file or a folder holds for a model of this kind, in the order of the paths.

    Args:
        path: A file, a folder that is searched to any depth (hidden files and other kinds are skipped), a pattern such
            as `photos/*.tar`, or the URL of one of these that fsspec knows.
        kind: `"image"` or `"text"`.
        columns: Names of the columns `image`, `text` and `text_pair` of tables, if they are others. A pair with
            another name must exist.
        keep: Columns of tables to keep.
        images: Maximum number of images of one folder that form a source.
        without: A folder inside it to skip.
    """
    known = from_plain(Columns, columns or {}, "columns")
    place, root, files = _listed(path, without)
    readers: dict[str, _Table] = {
        ".parquet": _parquet,
        ".arrow": _arrow,
        ".csv": _csv,
        ".jsonl": _json_lines,
        **dict.fromkeys(_TARS, _tar),
        **({".txt": _lines} if kind == "text" else {}),
    }
    found, tables = list[Source](), list[Source]()
    suffixes = IMAGE_SUFFIXES if kind == "image" else ()
    for folder, beside in groupby(files, key=lambda file: file.rpartition("/")[0]):
        names = {file: file.removeprefix(root).lstrip("/") for file in beside}
        pictures = [file for file in names if file.lower().endswith(suffixes)] if suffixes else []
        for start in range(0, len(pictures), images):
            part = {names[file]: file for file in pictures[start : start + images]}
            facts = [[file.rpartition("/")[2], *files[file]] for file in part.values()]
            state, size = digest([start // images, facts])[:8], sum(files[file][0] for file in part.values())
            name, read = folder.removeprefix(root).lstrip("/") or ".", partial(_pictures, place, part)
            found.append(Source(name, start // images, state, size, read, partial(len, part)))
        cells = Cells(kind, vars(known), tuple(keep), place, folder)
        for file, name in names.items():
            tar = next((suffix for suffix in _TARS if file.lower().endswith(suffix)), None)
            if table := readers.get(tar or PurePosixPath(file).suffix.lower()):
                size, _ = files[file]
                state = digest([0, [name.rpartition("/")[2], *files[file]]])[:8]
                rows, counted = partial(table, place, file, name, cells), partial(_counted, table, place, file, size)
                found.append(Source(name, 0, state, size, rows, counted, table is _parquet))
                tables += found[-1:] if table in (_parquet, _arrow, _csv) else []
    if not found:
        kinds = ", ".join((*suffixes, *readers))
        raise DataError(f"{path} has no {kind}s, but {len(files)} other files; accepted are {kinds}")
    for first in tables[:1]:
        first.require_columns()
    return found


def _listed(path: str | Path, without: str | Path | None) -> tuple[Any, str, dict[str, tuple[int, str]]]:
    """The file system of a path, pattern or URL, the folder that names are relative to, and the files, sorted by path.

    Each has its size and when or how it was last changed. Hidden ones, and those below `without`, are left out.
    """
    place, root = file_system(path)
    pattern, alone = bool(re.search(r"[*?[]", root)) and not place.exists(root), False
    try:
        if pattern:
            found = place.glob(root, detail=True)
            root = re.split(r"[*?[]", root)[0].rpartition("/")[0]
        elif (about := place.info(root))["type"] == "directory":
            found = place.find(root, detail=True)
        else:
            found, root, alone = {about["name"]: about}, about["name"].rpartition("/")[0], True
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist, or cannot be reached; check it") from error
    except Exception as error:  # of any library behind a URL
        raise DataError(f"{path} cannot be reached: {_cause(error)}; check it, and the network") from error
    if pattern and not found:
        raise DataError(f"nothing is like {path}; check the pattern")
    output = f"{file_system(without)[1]}/" if without is not None else None
    files = dict[str, tuple[int, str]]()
    for name, about in found.items():
        litter = not alone and any(map(is_litter, name.removeprefix(root).split("/")))
        if about["type"] != "directory" and not litter and not (output and name.startswith(output)):
            change = next((about[key] for key in _CHANGES if about.get(key) is not None), "")
            files[name] = int(about.get("size") or 0), str(change)
    return place, root, dict(sorted(files.items(), key=lambda file: (file[0].split("/")[:-1], file[0])))


class ColumnError(DataError):
    """A table has no column of a name that was asked for."""


@dataclass(frozen=True)
class Cells:
    """Items of the rows of tables, by the names of their columns."""

    kind: str
    columns: Mapping[str, str]
    keep: tuple[str, ...]
    files: Any  # of fsspec
    folder: str  # of the table: images given by a path are relative to it

    @property
    def needed(self) -> list[str]:
        """Columns that a table must have; a pair of texts only if its column was renamed."""
        pair = self.kind == "text" and self.columns["text_pair"] != Columns.text_pair
        return [self.columns[self.kind], *([self.columns["text_pair"]] if pair else []), *self.keep]

    def require(self, known: Sequence[str]) -> None:
        """Refuse a table without a needed column."""
        for column in self.needed:
            if column not in known:
                near = get_close_matches(column, known, 3, 0.5) or sorted(known)[:20]
                role = next((role for role, name in self.columns.items() if name == column), None)
                way = f"name it: columns={{{role!r}: …}}, in a shell --column {role}=…" if role else "correct keep"
                raise ColumnError(f"there is no column {column!r}; there is {', '.join(near)}: {way}")

    def item(self, name: str, row: Mapping[str, Any]) -> Item:
        """The item of one row."""
        kept = {column: row.get(column) for column in self.keep}
        main = row.get(self.columns[self.kind])
        if self.kind == "image":
            if isinstance(main, Mapping):
                main = main.get("path") if main.get("bytes") is None else main["bytes"]
            if main is None or (isinstance(main, str) and not main):
                return Item(name, None, kept, f"there is no image in column {self.columns['image']!r}")
            if isinstance(main, str):
                main = _located(self.files, main if is_url(main) else str(PurePosixPath(self.folder) / main))
            return Item(name, main, kept)
        second = self.columns["text_pair"]
        parts = {self.columns["text"]: main, **({second: row.get(second)} if second in {*row, *self.needed} else {})}
        for column, text in parts.items():
            if not isinstance(text, str):
                return Item(name, None, kept, f"there is no text in column {column!r}")
        return Item(name, tuple(parts.values()) if len(parts) == 2 else main, kept)


_Table = Callable[[Any, str, str, Cells, int], Iterator[Item]]


def _located(files: Any, path: str) -> Path | Remote:
    """A file as `Reader` takes it."""
    if is_url(path):
        return Remote(*file_system(path))
    return Path(path) if is_local(files) else Remote(files, path)


def _pictures(files: Any, names: Mapping[str, str], first: int) -> Iterator[Item]:
    return (Item(name, _located(files, path)) for name, path in islice(names.items(), first, None))


def _counted(read: _Table, files: Any, file: str, size: int) -> int:
    """About how many rows a file has: as its footer says, or by the lines of its beginning."""
    if read is _parquet:
        with library("pyarrow.parquet", extra="data").ParquetFile(file, filesystem=files) as table:
            return int(table.metadata.num_rows)
    if read in (_arrow, _tar):
        return 0
    beginning = files.cat_file(file, 0, 1 << 20)
    return int(beginning.count(b"\n") * size / max(len(beginning), 1))


def _text(files: Any, file: str) -> Any:
    return files.open(file, "r", encoding="utf-8-sig", newline="")


def _lines(files: Any, file: str, name: str, cells: Cells, _: int) -> Iterator[Item]:
    with _text(files, file) as lines:
        for number, line in enumerate(lines):
            if line.strip():
                yield Item(f"{name}:{number}", line.strip())


def _parquet(files: Any, file: str, name: str, cells: Cells, first: int) -> Iterator[Item]:
    with library("pyarrow.parquet", extra="data").ParquetFile(file, filesystem=files) as table:
        known = table.schema_arrow.names
        cells.require(known)
        names = [one for one in known if one in {*cells.needed, *cells.columns.values()}]
        ends = list(accumulate(table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)))
        groups = [group for group, end in enumerate(ends) if end > first]
        number = ends[groups[0] - 1] if groups and groups[0] else 0
        for batch in table.iter_batches(256, row_groups=groups, columns=names):
            for row in batch.slice(max(first - number, 0)).to_pylist() if number + len(batch) > first else ():
                yield cells.item(f"{name}:{max(number, first)}", row)
                first += 1
            number += len(batch)


def _arrow(files: Any, file: str, name: str, cells: Cells, _: int) -> Iterator[Item]:
    """A stream of record batches, as `save_to_disk` of Hugging Face `datasets` writes it."""
    with files.open(file, "rb") as stream, library("pyarrow", extra="data").ipc.open_stream(stream) as batches:
        cells.require(batches.schema.names)
        names = [one for one in batches.schema.names if one in {*cells.needed, *cells.columns.values()}]
        number = count()
        for batch in batches:
            for start in range(0, len(batch), 256):
                for row in batch.select(names).slice(start, 256).to_pylist():
                    yield cells.item(f"{name}:{next(number)}", row)


def _csv(files: Any, file: str, name: str, cells: Cells, _: int) -> Iterator[Item]:
    """CSV with a header line, without empty lines."""
    csv.field_size_limit(1 << 27)  # characters; the usual limit is shorter than some texts
    with _text(files, file) as lines:
        rows = csv.DictReader(lines)
        cells.require(rows.fieldnames or [])
        for number, row in enumerate(rows):
            if None in row or None in row.values():
                yield Item(f"{name}:{number}", error=f"it has not {len(rows.fieldnames or [])} fields, as the header")
            else:
                yield cells.item(f"{name}:{number}", row)


def _json_lines(files: Any, file: str, name: str, cells: Cells, _: int) -> Iterator[Item]:
    with _text(files, file) as lines:
        for number, line in enumerate(filter(str.strip, lines)):
            try:
                item = cells.item(f"{name}:{number}", json.loads(line))
            except (ValueError, AttributeError, RecursionError) as error:  # no JSON, or no object
                item = Item(f"{name}:{number}", error=f"it cannot be read: {error}")
            yield item


def _tar(files: Any, file: str, name: str, cells: Cells, _: int) -> Iterator[Item]:
    suffixes = IMAGE_SUFFIXES if cells.kind == "image" else (".txt",)
    with files.open(file, "rb") as stream, tarfile.open(fileobj=stream) as members:
        for member in members:
            path = PurePosixPath(member.name)
            if is_litter(path.name) or path.suffix.lower() not in suffixes:
                continue
            if (opened := members.extractfile(member)) is None:  # a folder or a link
                continue
            content: Any = opened.read()
            if cells.kind == "text":
                content = content.decode("utf-8-sig").strip()
            yield Item(f"{name}/{path}", content)
