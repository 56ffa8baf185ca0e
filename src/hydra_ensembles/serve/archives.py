"""Items of an archive (folders, tables and tar shards of any size), always in the same order.

Only the current item is held in memory. Unreadable content is also an item, with the reason, so that one broken file
does not end a long run. A failing disk raises instead: what it yields next time would shift all later positions.
"""

import base64
import codecs
import csv
import errno
import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from .._utils import require
from ..data.dataset import IMAGE_SUFFIXES, Text
from ..data.loading import (
    DELIMITERS,
    JSON_LINES,
    TABLE_SUFFIXES,
    Columns,
    files_below,
    nested,
    path_of,
    stored_image,
)
from ..errors import DataError, StorageError
from ..files import digest_of, expanded, unique

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
LINES = ".txt"  # one text per line; in a tar shard, one text per file
_ROWS = 256  # rows of a Parquet file read at a time
_FIELD = 1 << 27  # maximum number of characters in a CSV field
_NOT_UTF_8 = re.compile("[\udc80-\udcff]")  # what `surrogateescape` makes of other bytes
_BROKEN = (OSError, EOFError, ValueError, OverflowError, csv.Error, tarfile.TarError, zlib.error, LZMAError)


@dataclass(frozen=True)
class Item:
    """One image or text of an archive.

    Attributes:
        name: Its path in the archive; with the row for a table, with the path inside for a tar shard.
        content: A text or a pair, the bytes of an image file, or the path of one; None if it cannot be read.
        kept: Other columns of its row, as text.
        error: Why it cannot be read.
    """

    name: str
    content: Text | bytes | Path | None
    kept: Mapping[str, str | None] = field(default_factory=dict)
    error: str = ""


class Archive:
    """The images or texts of a file or a folder.

    A folder is all files in it, at any depth, sorted by path: images, Parquet, CSV, TSV, JSON lines, tar shards, for
    texts also `.txt` with one text per line. Hidden files and other kinds are skipped. Links to folders are followed,
    and each folder is read once.

    Args:
        path: File or folder.
        kind: What to look for.
        columns: Which columns of tables hold it; a pair with another name than `text_pair` must exist.
        keep: Columns of tables to copy.
        without: A folder inside it to skip.

    Raises:
        DataError: There is nothing of this kind, or the first table has no such column.
    """

    def __init__(
        self,
        path: str | Path,
        kind: Literal["image", "text"],
        columns: Columns | None = None,
        keep: Sequence[str] = (),
        without: Path | None = None,
    ) -> None:
        self.path = expanded(path)
        self.kind = kind
        self.columns = columns or Columns()
        self.keep, self._needed = tuple(keep), self.columns.needed(kind)
        if not self.path.exists():
            raise DataError(f"{self.path} does not exist; check the path")
        self._root = self.path if self.path.is_dir() else self.path.parent
        by_suffix: dict[str, Callable[[Path], Iterator[Item]]] = {
            **(dict.fromkeys(IMAGE_SUFFIXES, self._image) if kind == "image" else {LINES: self._lines}),
            ".parquet": self._parquet,
            **dict.fromkeys(DELIMITERS, self._delimited),
            **dict.fromkeys(JSON_LINES, self._json_lines),
            **dict.fromkeys(TAR_SUFFIXES, self._tar),
        }
        excluded = None if without is None else without.resolve()
        present = files_below(self.path, excluded) if self.path.is_dir() else [self.path]
        self._readers = {file: by_suffix[_suffix(file)] for file in present if _suffix(file) in by_suffix}
        self.files = list(self._readers)
        self.ignored = len(present) - len(self.files)
        if not self.files:
            raise DataError(f"{self.path} has no {kind}s ({self.ignored} other files); give {', '.join(by_suffix)}")
        self._require_column()

    def identity(self) -> dict[str, Any]:
        """Identifies the archive when a run resumes: paths, sizes and modification times of its files."""
        facts = [[self._name(file), file.stat().st_size, file.stat().st_mtime_ns] for file in self.files]
        return {"files": len(facts), "digest": digest_of(facts)}

    def count(self) -> int | None:
        """Number of items; None if counting requires reading everything."""
        total = 0
        for file in self.files:
            if file.suffix.lower() in IMAGE_SUFFIXES:
                total += 1
            elif file.suffix.lower() == ".parquet":
                try:
                    total += require("pyarrow.parquet", extra="data").read_metadata(file).num_rows
                except (OSError, require("pyarrow", extra="data").ArrowException):
                    total += 1  # a broken file is reported as one item
            else:
                return None
        return total

    def __iter__(self) -> Iterator[Item]:
        """The items, in the same order every time; `StorageError` if a disk fails, so that items cannot be counted."""
        for file, reader in self._readers.items():
            try:
                yield from map(self._checked, reader(file))
            except _BROKEN as error:
                # decoders raise OSErrors without errno on broken content, and EINVAL when they seek to invalid offsets
                if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                    advice = "check the disk and the permissions and run this again; it resumes here"
                    raise StorageError(f"{file} cannot be read ({error.strerror}); {advice}") from error
                yield self._broken(file, error)

    def _checked(self, item: Item) -> Item:
        """The item; without its text if that is not UTF-8, or one text where a pair is needed."""
        text = item.content if isinstance(item.content, str | tuple) else ""
        error = ""
        if _NOT_UTF_8.search("".join(text)):
            error = "its text is not valid UTF-8; repair it, or save the file as UTF-8"
        elif isinstance(item.content, str) and len(self._needed) > 1:
            error = f"there is no text in column {self._needed[1]!r}"
        return replace(item, content=None, error=error) if error else item

    def _name(self, file: Path) -> str:
        return file.relative_to(self._root).as_posix().encode("utf-8", "replace").decode()

    # --- file types ---------------------------------------------------------------------------------------------

    def _image(self, file: Path) -> Iterator[Item]:
        yield Item(self._name(file), file)

    def _lines(self, file: Path) -> Iterator[Item]:
        with self._opened(file) as lines:
            for number, line in enumerate(lines):
                if line.strip():
                    yield Item(f"{self._name(file)}:{number}", line.strip())

    def _tar(self, file: Path) -> Iterator[Item]:
        suffixes = IMAGE_SUFFIXES if self.kind == "image" else (LINES,)
        with tarfile.open(file) as members:
            for member in members:
                member_path = PurePosixPath(member.name)
                if member.isdir() or member_path.name.startswith(".") or member_path.suffix.lower() not in suffixes:
                    continue
                name = f"{self._name(file)}/{member_path}".encode("utf-8", "replace").decode()
                opened = None
                with suppress(KeyError, RecursionError):  # broken links, or links in a cycle
                    opened = members.extractfile(member)
                if opened is None:
                    yield Item(name, None, error="it cannot be read: neither a file nor a link to one in the archive")
                else:
                    content = opened.read()
                    is_text = self.kind == "text"
                    yield Item(name, content.decode("utf-8-sig", "surrogateescape").strip() if is_text else content)
            _require_end(members)

    def _parquet(self, file: Path) -> Iterator[Item]:
        arrow = require("pyarrow", extra="data")
        try:
            with require("pyarrow.parquet", extra="data").ParquetFile(file) as table:
                columns = list(table.schema_arrow.names)
                self._require_in(columns, file)
                names = {path_of(column, columns)[0] for column in self._column_names()} & set(columns)
                batches = table.iter_batches(_ROWS, columns=sorted(names))
                for row, cells in enumerate(cells for batch in batches for cells in batch.to_pylist()):
                    yield self._item(file, row, cells)
        except arrow.ArrowException as error:
            raise DataError(str(error)) from error

    def _delimited(self, file: Path) -> Iterator[Item]:
        with self._opened(file) as lines:
            rows = _cells(lines, file)
            header = next(rows, [])
            self._require_in(header, file)
            for row, cells in enumerate(rows):
                if len(cells) == len(header):
                    yield self._item(file, row, dict(zip(header, cells, strict=True)))
                else:
                    error = DataError(f"it has {len(cells)} fields, but the header has {len(header)}")
                    yield self._broken(file, error, f":{row}")

    def _json_lines(self, file: Path) -> Iterator[Item]:
        pair = self.columns.text_pair
        paired = self.kind == "text" and any(isinstance(one, dict) and pair in one for one in self._objects(file))
        blank: dict[str, Any] = {pair: None} if paired else {}  # the table has the column, so all lines need it
        for row, cells in enumerate(self._objects(file)):
            if isinstance(cells, Exception):
                yield self._broken(file, cells, f":{row}")
            else:
                yield self._item(file, row, blank | cells)

    def _objects(self, file: Path) -> Iterator[dict[str, Any] | Exception]:
        with self._opened(file) as lines:
            for line in filter(str.strip, lines):
                try:
                    cells = json.loads(line, object_pairs_hook=unique)
                    if not isinstance(cells, dict):
                        raise ValueError(f"it is a {type(cells).__name__}, not an object")
                except (ValueError, RecursionError) as error:
                    yield error
                else:
                    yield cells

    # --- rows of tables -----------------------------------------------------------------------------------------

    def _item(self, file: Path, row: int, cells: Mapping[str, Any]) -> Item:
        main, pair, *others = (nested(cells, path_of(column, cells)) for column in self._column_names())
        name = f"{self._name(file)}:{row}"
        kept = dict(zip(self.keep, map(_as_text, others), strict=True))
        if self.kind == "image":
            content = stored_image(main, file.parent)
            return Item(name, content, kept, "" if content else f"there is no image in column {self._needed[0]!r}")
        columns = self._column_names()[:2] if self.columns.text_pair in cells else self._needed
        text, problem = text_in(columns, (main, pair))
        return Item(name, text, kept, problem)

    def _column_names(self) -> tuple[str, ...]:
        return self._needed[0], self.columns.text_pair, *self.keep

    def _require_in(self, columns: Sequence[str], file: Path) -> None:
        needed = [path_of(column, columns)[0] for column in (*self._needed, *self.keep)]
        missing = [column for column in needed if column not in columns]
        if missing:
            raise DataError(f"{file} has no column {missing[0]!r}, it has {sorted(columns)}; name the right one")
        doubled = [column for column in needed if columns.count(column) > 1]
        if doubled:
            raise DataError(f"{file} has {columns.count(doubled[0])} columns {doubled[0]!r}; rename all but one")

    def _require_column(self) -> None:
        """Raise early if the first table lacks a column; a later table that lacks one is reported as an item."""
        table = next((file for file in self.files if file.suffix.lower() in TABLE_SUFFIXES), None)
        if table is None:
            if self.keep:
                raise DataError(f"{self.path} has no tables, so there are no columns {list(self.keep)} to keep")
            return
        if table.suffix.lower() == ".parquet":
            try:
                columns = require("pyarrow.parquet", extra="data").read_schema(table).names
            except (OSError, require("pyarrow", extra="data").ArrowException) as error:
                raise DataError(f"{table} cannot be read as Parquet: {error}") from error
            self._require_in(columns, table)
        elif table.suffix.lower() in DELIMITERS:  # lines of JSON may have different keys
            with self._opened(table) as lines:
                self._require_in(next(_cells(lines, table), []), table)

    def _opened(self, file: Path) -> Any:
        """Open a text file; bytes that are not UTF-8 become lone surrogates, which the tokenizer checks reject."""
        with file.open("rb") as content:
            if content.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # its lines may happen to decode as UTF-8
                raise DataError(f"{file.name} is in UTF-16; save it as UTF-8")
        return file.open(encoding="utf-8-sig", errors="surrogateescape", newline="")

    def _broken(self, file: Path, error: Exception, where: str = "") -> Item:
        what = "it" if where else "the file, or the rest of it,"
        reason = " ".join(str(error).split()) or type(error).__name__
        return Item(f"{self._name(file)}{where}", None, dict.fromkeys(self.keep), f"{what} cannot be read: {reason}")


def _suffix(file: Path) -> str:
    return next((suffix for suffix in TAR_SUFFIXES if file.name.lower().endswith(suffix)), file.suffix.lower())


def text_in(columns: Sequence[str], cells: Sequence[Any]) -> tuple[Text | None, str]:
    """The text in a row, or the pair if two columns are read; None and the reason if one is missing."""
    for column, cell in zip(columns, cells, strict=False):
        if not isinstance(cell, str):
            return None, f"there is no text in column {column!r}"
    return (cells[0], cells[1]) if len(columns) > 1 else cells[0], ""


def _cells(lines: Iterable[str], file: Path) -> Iterator[list[str]]:
    """Rows of a CSV or TSV file, without empty lines, like `data.load`.

    TSV fields are never quoted, so a lone quotation mark is an ordinary character.
    """
    csv.field_size_limit(max(csv.field_size_limit(), _FIELD))
    suffix = file.suffix.lower()
    quoting: Any = csv.QUOTE_MINIMAL if suffix == ".csv" else csv.QUOTE_NONE
    return filter(None, csv.reader(lines, delimiter=DELIMITERS[suffix], quoting=quoting))


def _require_end(members: tarfile.TarFile) -> None:
    """Raise if a tar file does not end properly: `tarfile` takes a damaged or missing header for the end."""
    file: Any = members.fileobj
    file.seek(members.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("its next header is damaged, or it was cut off; what follows is not read")
    while chunk := file.read(1 << 20):
        if chunk.count(0) != len(chunk):
            raise tarfile.ReadError("it goes on after its end, as concatenated files do; that part is not read")


def _as_text(value: Any) -> str | None:
    """A cell as valid text: numbers and lists as JSON, bytes as base64; invalid characters become question marks."""
    if value is None:
        return None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    as_json = isinstance(value, int | float | list | dict)  # others, such as dates, would get quotation marks
    text = json.dumps(value, ensure_ascii=False, default=_as_text) if as_json else str(value)
    return text.encode("utf-8", "replace").decode()
