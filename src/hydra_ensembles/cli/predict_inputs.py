"""What `predict` reads: image files and folders, strings, files of lines, and tables."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..data.dataset import IMAGE_SUFFIXES, read_image
from ..data.loading import DELIMITERS, JSON_LINES, Columns, load
from ..errors import DataError
from ..schema import from_plain
from .nearest import did_you_mean

TABLES = (".parquet", *DELIMITERS, *JSON_LINES)
STANDARD_INPUT = "-"


@dataclass(frozen=True)
class Item:
    """One input: what the result calls it, and how its content is read."""

    name: str
    read: Callable[[], Any]


def find_inputs(kind: str, inputs: Sequence[str], texts: Sequence[str], columns: Mapping[str, str]) -> list[Item]:
    """The inputs that arguments name, in their order; `texts` come last.

    Args:
        kind: `"image"` or `"text"`: what the model reads.
        inputs: Files and folders; for text also `-` (standard input) and strings with a space in them.
        texts: Strings, as they are.
        columns: Column names, for tables.

    Raises:
        DataError: Something does not exist, or is nothing the model can read.
    """
    if kind == "image" and texts:
        raise DataError("--text was given, but the model reads images; give image files or folders")
    items: list[Item] = []
    for argument in inputs:
        path = Path(argument).expanduser()
        if path.is_file() and path.suffix.lower() in TABLES:
            items += _table(path, kind, columns)
        elif kind == "image":
            items += _images(path)
        else:
            items += _texts(argument, path)
    items += [Item(text, lambda text=text: text) for text in texts]  # type: ignore[misc]
    if not items:
        wanted = "image files or folders" if kind == "image" else 'texts: --text "...", a file, or - for standard input'
        raise DataError(f"got nothing to predict; give {wanted}")
    return items


def _images(path: Path) -> list[Item]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
        if not files:
            raise DataError(f"{path} has no images in it (suffixes read: {', '.join(IMAGE_SUFFIXES)})")
    else:
        files = [path]
    for file in files:
        if not file.is_file():
            raise _missing(file)
    return [Item(str(file), lambda file=file: read_image(file)) for file in files]  # type: ignore[misc]


def _texts(argument: str, path: Path) -> list[Item]:
    if argument == STANDARD_INPUT:
        return _lines(sys.stdin, "standard input")
    if path.is_dir():
        raise DataError(f"{path} is a folder, but the model reads text; give a file with one text a line")
    if path.is_file():
        try:
            return _lines(path.read_text(encoding="utf-8").split("\n"), str(path))
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not text in UTF-8 ({error})") from error
    if " " not in argument.strip():
        raise DataError(f"{_missing(path)}; for a text of one word write --text {argument!r}")
    return [Item(argument, lambda: argument)]


def _lines(lines: Any, where: str) -> list[Item]:
    found = [line.strip() for line in lines]
    items = [Item(line, lambda line=line: line) for line in found if line]  # type: ignore[misc]
    if not items:
        raise DataError(f"{where} has no text; give one text a line")
    return items


def _table(path: Path, kind: str, columns: Mapping[str, str]) -> list[Item]:
    data = load(path, columns=from_plain(Columns, columns, "--column"), labels="optional")
    if data.kind != kind:
        raise DataError(f"{path} holds {data.kind}s, but the model reads {kind}s")
    return [Item(f"{path}:{row}", lambda row=row: data[row][0]) for row in range(len(data))]  # type: ignore[misc]


def _missing(path: Path) -> DataError:
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    return DataError(f"{path} does not exist{did_you_mean(path.name, beside)}")


def read_batches(
    items: Sequence[Item], size: int, unreadable: Literal["fail", "skip"]
) -> Iterator[tuple[list[str], list[Any]]]:
    """Names and contents, so many at a time.

    An input that cannot be read ends everything, or is named on the standard error and left out.
    """
    names: list[str] = []
    contents: list[Any] = []
    for item in items:
        try:
            content = item.read()
        except DataError as error:
            if unreadable == "fail":
                raise
            print(f"warning: skipped: {error}", file=sys.stderr)
            continue
        names.append(item.name)
        contents.append(content)
        if len(names) == size:
            yield names, contents
            names, contents = [], []
    if names:
        yield names, contents
