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
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._utils import collect_warnings, library
from ..batches import READ
from ..data.dataset import IMAGE_SUFFIXES, is_litter
from ..data.loading import Columns
from ..errors import DataError, HydraError, RequestError
from ..files import expanded
from ..model.config import PatchStemConfig
from ..model.ensemble import Answering
from ..model.inputs import read_inputs
from ..preprocessing import ImagePreprocessing, TextPreprocessing
from ..settings import from_plain

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # not EPS and its like: decoding them starts programs
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # quota and period of the control group
SHORTEST = 16  # minimum number of tokens that texts are padded to
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
        """A blank row of every shape that is known in advance."""
        if self._raw:
            blank = library("PIL.Image", extra="data").new("RGB", self.image_size[::-1]) if self.image_size else "a"
            return [self.read(blank)]
        if self.image_size is not None:
            return [Row({self._main: torch.zeros(self.inputs[0].shape[0], *self.image_size, dtype=self.dtype)})]
        return [self.tensors({self._main: torch.zeros(1, length, dtype=torch.long)})[0] for length in self.lengths()]

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
        if self.kind == "image" and isinstance(raw, str | Path):
            try:
                raw = Path(raw).read_bytes()
            except OSError as error:
                raise DataError(f"{raw} cannot be read: {error.strerror}") from error
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


# --- files and folders of rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """One raw row: its place, such as `reviews.csv:3`, what `Reader.read` takes, kept columns, or why it is broken."""

    name: str
    content: Any = None
    kept: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Source:
    """A table, a tar file, lines of text, or some images of one folder: its items are always in the same order.

    Attributes:
        name: Path of the file or of the folder, relative to what was given.
        part: Number of this part of a folder's images; 0 for a file.
        files: What it reads.
    """

    name: str
    part: int
    files: Sequence[Path]
    _read: Callable[[], Iterator[Item]] = field(repr=False)

    def __iter__(self) -> Iterator[Item]:
        """The items, the current one in memory; broken content is an item with its error."""
        try:
            yield from self._read()
        except Exception as error:  # broken data can raise anything in a decoder
            reason = " ".join(str(error).split()) or type(error).__name__
            yield Item(self.name, error=f"the file, or the rest of it, cannot be read: {reason}")


def sources(
    path: str | Path,
    kind: str,
    columns: Mapping[str, str] | None = None,
    keep: Sequence[str] = (),
    *,
    images: int = 4096,
    without: Path | None = None,
) -> list[Source]:
    """What a file or a folder holds for a model of this kind, in the order of the paths.

    Args:
        path: A file, or a folder that is searched to any depth; hidden files and other kinds are skipped.
        kind: `"image"` or `"text"`.
        columns: Names of the columns `image`, `text` and `text_pair` of tables, if they are others. A pair with
            another name must exist.
        keep: Columns of tables to keep.
        images: Maximum number of images of one folder that form a source.
        without: A folder inside it to skip.
    """
    path, known = expanded(path), from_plain(Columns, columns or {}, "columns")
    if not path.exists():
        raise DataError(f"{path} does not exist; check the path")
    root, files = (path, _files_below(path, without)) if path.is_dir() else (path.parent, [path])
    readers: dict[str, Callable[[Path, str, Cells], Iterator[Item]]] = {
        ".parquet": _parquet,
        ".csv": _csv,
        ".jsonl": _json_lines,
        **dict.fromkeys(_TARS, _tar),
        **({".txt": _lines} if kind == "text" else {}),
    }
    found = list[Source]()
    suffixes = IMAGE_SUFFIXES if kind == "image" else ()
    for folder, beside in groupby(files, key=lambda file: file.parent):
        names = {file: file.relative_to(root).as_posix() for file in beside}
        pictures = [file for file in names if file.suffix.lower() in suffixes]
        for start in range(0, len(pictures), images):
            part = pictures[start : start + images]
            items = [Item(names[file], file) for file in part]
            found.append(Source(folder.relative_to(root).as_posix(), start // images, part, items.__iter__))
        cells = Cells(kind, vars(known), tuple(keep), folder)
        for file, name in names.items():
            tar = next((suffix for suffix in _TARS if file.name.lower().endswith(suffix)), None)
            if read := readers.get(tar or file.suffix.lower()):
                found.append(Source(name, 0, [file], partial(read, file, name, cells)))
    if not found:
        kinds = ", ".join((*suffixes, *readers))
        raise DataError(f"{path} has no {kind}s, but {len(files)} other files; accepted are {kinds}")
    return found


def _files_below(folder: Path, without: Path | None) -> list[Path]:
    """The files below a folder, sorted by path; hidden ones, and those below `without`, are left out."""
    found = (file for file in folder.rglob("*") if file.is_file() and without not in file.parents)
    shown = (file for file in found if not any(map(is_litter, file.relative_to(folder).parts)))
    return sorted(shown, key=lambda file: (file.parent, file.name))


@dataclass(frozen=True)
class Cells:
    """Items of the rows of tables, by the names of their columns."""

    kind: str
    columns: Mapping[str, str]
    keep: tuple[str, ...]
    folder: Path  # of the table: images given by a path are relative to it

    @property
    def needed(self) -> list[str]:
        """Columns that a table must have; a pair of texts only if its column was renamed."""
        pair = self.kind == "text" and self.columns["text_pair"] != Columns.text_pair
        return [self.columns[self.kind], *([self.columns["text_pair"]] if pair else []), *self.keep]

    def require(self, known: Sequence[str]) -> None:
        """Refuse a table without a needed column."""
        for column in self.needed:
            if column not in known:
                raise DataError(f"there is no column {column!r}, but {sorted(known)}; name the right one")

    def item(self, name: str, row: Mapping[str, Any]) -> Item:
        """The item of one row."""
        kept = {column: row.get(column) for column in self.keep}
        main = row.get(self.columns[self.kind])
        if self.kind == "image":
            if isinstance(main, Mapping):
                main = main.get("path") if main.get("bytes") is None else main["bytes"]
            if main is None or (isinstance(main, str) and not main):
                return Item(name, None, kept, f"there is no image in column {self.columns['image']!r}")
            return Item(name, self.folder / main if isinstance(main, str) else main, kept)
        second = self.columns["text_pair"]
        parts = {self.columns["text"]: main, **({second: row.get(second)} if second in {*row, *self.needed} else {})}
        for column, text in parts.items():
            if not isinstance(text, str):
                return Item(name, None, kept, f"there is no text in column {column!r}")
        return Item(name, tuple(parts.values()) if len(parts) == 2 else main, kept)


def _lines(file: Path, name: str, cells: Cells) -> Iterator[Item]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        for number, line in enumerate(lines):
            if line.strip():
                yield Item(f"{name}:{number}", line.strip())


def _parquet(file: Path, name: str, cells: Cells) -> Iterator[Item]:
    with library("pyarrow.parquet", extra="data").ParquetFile(file) as table:
        known = table.schema_arrow.names
        cells.require(known)
        names = [one for one in known if one in {*cells.needed, *cells.columns.values()}]
        rows = (row for batch in table.iter_batches(256, columns=names) for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield cells.item(f"{name}:{number}", row)


def _csv(file: Path, name: str, cells: Cells) -> Iterator[Item]:
    """CSV with a header line, without empty lines."""
    csv.field_size_limit(1 << 27)  # characters; the usual limit is shorter than some texts
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines)
        cells.require(rows.fieldnames or [])
        for number, row in enumerate(rows):
            if None in row or None in row.values():
                yield Item(f"{name}:{number}", error=f"it has not {len(rows.fieldnames or [])} fields, as the header")
            else:
                yield cells.item(f"{name}:{number}", row)


def _json_lines(file: Path, name: str, cells: Cells) -> Iterator[Item]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        for number, line in enumerate(filter(str.strip, lines)):
            try:
                item = cells.item(f"{name}:{number}", json.loads(line))
            except (ValueError, AttributeError, RecursionError) as error:  # no JSON, or no object
                item = Item(f"{name}:{number}", error=f"it cannot be read: {error}")
            yield item


def _tar(file: Path, name: str, cells: Cells) -> Iterator[Item]:
    suffixes = IMAGE_SUFFIXES if cells.kind == "image" else (".txt",)
    with tarfile.open(file) as members:
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
