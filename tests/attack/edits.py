"""Edits of stored files: bytes, JSON, tensors, and changes to files in their folder.

An edit is plain data: the file, the kind of edit, and its arguments. `edits` draws as many different ones as wanted,
reproducibly by seed, alternating between files and kinds; `apply` performs one.
"""

import copy
import json
import os
import pickle
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, pairwise, product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save

Files = Mapping[str, bytes]  # by path relative to their folder


class Edit(NamedTuple):
    """One change of one file."""

    file: str
    kind: str
    arguments: tuple[Any, ...] = ()


def edits(files: Files, count: int, seed: int, kinds: tuple[str, ...] = ()) -> list[Edit]:
    """Up to `count` different edits of the given kinds (default: all), drawn by the seed."""
    sources = []
    for name, content in sorted(files.items()):
        for kind, draw in KINDS.items():
            if not kinds or kind in kinds:
                source = random.Random(f"{seed} {name} {kind}")
                found = [Edit(name, kind, arguments) for arguments in draw(content, source, count)]
                source.shuffle(found)
                sources.append(found)
    turns = chain.from_iterable(zip_longest(*sources))
    return list(dict.fromkeys(edit for edit in turns if edit is not None))[:count]


def apply(folder: Path, edit: Edit, twin: Files) -> None:
    """Perform an edit in `folder`; `twin` holds the files of another save of the same kind."""
    path = folder / edit.file
    if edit.kind == "folder":
        _move(path, edit.arguments[0], folder.parent / OUTSIDE, twin.get(edit.file))
    elif edit.kind == "beside":
        _put(path.with_name(edit.arguments[0].format(path.name)), edit.arguments[1], folder.parent / OUTSIDE)
    else:
        path.write_bytes(APPLIED[edit.kind](path.read_bytes(), *edit.arguments))


# --- bytes -----------------------------------------------------------------------------------------------------------


class _Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


CONTENTS = {
    "nothing": b"",
    "pickle": pickle.dumps(_Deadly()),
    "git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
    "list": b"[]",
    "surrogate": b'{"a": "\xed\xa0\x80"}',
    "many brackets": b"[" * 200_000,
    "one long line": b'"' + b"x" * (5 << 20) + b'"',
    "a long list": b"[" + b"[]," * (1 << 20) + b"[]]",
}


def _draw_bytes(content: bytes, source: random.Random, count: int) -> Iterator[tuple[Any, ...]]:
    yield from (("whole", name) for name in CONTENTS)
    size = len(content)
    if size < 2:
        return
    for _ in range(count // 2):  # single bits, as in hardware faults
        place = source.randrange(8 * size)
        yield "splice", place // 8, 1, bytes([content[place // 8] ^ 1 << place % 8]).hex()
    for _ in range(count // 8 + 1):
        start = source.randrange(size)
        length = source.randint(1, min(64, size - start))
        yield "splice", start, 1, source.randbytes(1).hex()
        yield "splice", start, size, ""  # removed
        yield "splice", start, 0, source.randbytes(source.randint(1, 8)).hex()
        yield "splice", start, 0, content[start : start + length].hex()  # duplicated
        yield "splice", start, length, bytes(length).hex()
        yield "splice", start, length, ""


def _apply_bytes(content: bytes, what: str, *arguments: Any) -> bytes:
    if what == "whole":
        return CONTENTS[arguments[0]]
    start, length, new = arguments  # replace some bytes by others
    return content[:start] + bytes.fromhex(new) + content[start + length :]


# --- JSON ------------------------------------------------------------------------------------------------------------

_TOKENS = r"""
null true false 0 1 -1 2 0.5 -0.5 -0 1e308 1e-320 9007199254740993 "" "x" "0" [] {} [[]] [""] {"x":1} [1,2]
NaN Infinity -Infinity 1e999 0x10 01 1_000 'x' None 1. +1 "\ud800" "\u0000" "\u202e" "e\u0301" "../../x" "<b>"
"""
TOKENS = {  # JSON text that may replace a value
    **{text: text for text in _TOKENS.split()},
    "2**63": str(2**63),
    "10**30": str(10**30),
    "5000 digits": "9" * 5000,
    "100 brackets": "[" * 100 + "]" * 100,
    "100000 brackets": "[" * 100_000 + "]" * 100_000,
    "100000 zeros": json.dumps([0] * 100_000),
    "a long text": json.dumps("x" * 500_000),
}
KEYS: dict[str, Callable[[str], str]] = {  # changes of a key
    "underscore": lambda key: key + "_",
    "empty": lambda key: "",
    "lookalike": lambda key: key.replace("e", "\u0435").replace("a", "\u0430"),  # Cyrillic
}
TEXTS: dict[str, Callable[[str], bytes]] = {  # changes of the whole text
    "byte order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "utf-16": lambda text: text.encode("utf-16"),
    "comma": lambda text: text.rstrip()[:-1].encode() + b"," + text.rstrip()[-1:].encode(),
    "twice": lambda text: (text + text).encode(),
    "escaped": lambda text: json.dumps(json.loads(text)).encode(),
    "returns": lambda text: text.replace("\n", "\r\n").encode(),
}
HOLE = "@hole@"


def read_document(content: bytes) -> tuple[Any, bool] | None:
    """The content of a JSON file, and whether it is JSON lines; None for other files."""
    try:
        text = content.decode()
        try:
            return json.loads(text), False
        except json.JSONDecodeError:
            return [json.loads(line) for line in text.splitlines()], True
    except (ValueError, RecursionError):
        return None


def write_document(value: Any, lines: bool) -> str:
    """The text of a document, formatted like the library's."""
    if lines:
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in value)
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values: keys and indices from the top."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from _places(item, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _draw_json(content: bytes, source: random.Random, count: int) -> Iterator[tuple[Any, ...]]:
    document = read_document(content)
    if document is None or not isinstance(document[0], dict | list):
        return
    value, lines = document
    if not lines:
        yield from (("text", name) for name in TEXTS)
    places = list(_places(value))
    if len(places) > 400:  # sample the places of a long list
        places = source.sample(places, 400)
    for path in places:
        here, above = _at(value, path), _at(value, path[:-1])
        yield "delete", path
        yield from (("replace", path, name) for name in TOKENS if TOKENS[name] != json.dumps(here))
        if isinstance(here, int | float) and not isinstance(here, bool):
            yield from (("number", path, change) for change in (here + 1, here - 1, here * 2, here / 3, -here))
        if isinstance(here, str):
            yield from (("string", path, change) for change in (here + "x", here[:-1], here.upper(), here[::-1]))
        if isinstance(above, dict):
            yield from (("rename", path, name) for name in KEYS)
            yield from (("again", path, name) for name in ("as it is", "null", "0", '"x"'))
    for one, two in pairwise(places):
        if one[:-1] == two[:-1] and _at(value, one) != _at(value, two):
            yield "exchange", one, two


def _apply_json(content: bytes, what: str, *arguments: Any) -> bytes:
    document = read_document(content)
    assert document is not None
    value, lines = copy.deepcopy(document)
    if what == "text":
        return TEXTS[arguments[0]](content.decode())
    path, rest = arguments[0], arguments[1:]
    above, key = _at(value, path[:-1]), path[-1]
    hole = ""
    match what:
        case "delete":
            del above[key]
        case "replace":
            above[key], hole = HOLE, TOKENS[rest[0]]
        case "number" | "string":
            above[key] = rest[0]
        case "rename":
            items = [(KEYS[rest[0]](name) if name == key else name, item) for name, item in above.items()]
            above.clear()
            above.update(items)
        case "again":
            here = json.dumps(above[key], ensure_ascii=False)
            above[key], hole = HOLE, f"{here}, {json.dumps(key)}: {here if rest[0] == 'as it is' else rest[0]}"
        case "exchange":
            other = arguments[1][-1]
            above[key], above[other] = above[other], above[key]
        case _:
            raise KeyError(what)
    return write_document(value, lines).replace(json.dumps(HOLE), hole).encode(errors="surrogatepass")


# --- tensors ---------------------------------------------------------------------------------------------------------

LENGTHS = (0, 1, 7, 1 << 20, 100_000_001, (1 << 31) - 1, 1 << 62, (1 << 64) - 1)  # header lengths, all false
_DTYPES = "float64 float32 float16 bfloat16 int32 int64 bool"
DTYPES = {name: getattr(torch, name) for name in _DTYPES.split()}
VALUES = (float("nan"), float("inf"), -float("inf"), 0.0, 1e30, 1.0)
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "permute": lambda tensor: tensor.flatten().flip(0).reshape(tensor.shape),
    "nudge": lambda tensor: (tensor + (torch.arange(tensor.numel()) == 0).reshape(tensor.shape)).to(tensor.dtype),
    "turned": lambda tensor: tensor.T if tensor.dim() > 1 else tensor.flatten(),
    "wide": lambda tensor: torch.cat([tensor, tensor], -1) if tensor.dim() else tensor.repeat(2),
    "empty": lambda tensor: tensor.flatten()[:0],
    "negative": lambda tensor: -tensor if tensor.dtype is not torch.bool else ~tensor,
}


def _header(content: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Header and data of a safetensors file; None for other files."""
    try:
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        return (header, content[8 + size :]) if isinstance(header, dict) and header else None
    except (struct.error, ValueError, OverflowError):
        return None


def _draw_tensors(content: bytes, source: random.Random, count: int) -> Iterator[tuple[Any, ...]]:
    found = _header(content)
    if found is None:
        return
    header = found[0]
    yield from (("length", value) for value in LENGTHS)
    yield from (("length", len(content) + change) for change in (-9, -8, -7, 0))
    yield from (("trail", length) for length in (1, 8, 4096))
    yield from (("header", *edit) for edit in _draw_json(json.dumps(header).encode(), source, count))
    tensors = dict(sorted(load(content).items()))  # the library returns them in any order
    yield ("add",)
    for name, tensor in tensors.items():
        yield from ((what, name) for what in ("drop", "rename", "copy", *CHANGES))
        yield from (("cast", name, dtype) for dtype in DTYPES if DTYPES[dtype] != tensor.dtype)
        yield from (("fill", name, value) for value in VALUES)
    for one, two in pairwise(tensors):
        if tensors[one].shape == tensors[two].shape:
            yield "exchange", one, two


def _apply_tensors(content: bytes, what: str, *arguments: Any) -> bytes:
    found = _header(content)
    assert found is not None
    header, data = found
    match what:
        case "length":
            return struct.pack("<Q", arguments[0]) + content[8:]
        case "trail":
            return content + bytes(arguments[0])
        case "header":
            text = _apply_json(json.dumps(header).encode(), *arguments)
            return struct.pack("<Q", len(text)) + text + data
    tensors, about = dict(load(content)), header.get("__metadata__")
    if what == "add":
        tensors["unknown"] = torch.zeros(3)
    elif what == "exchange":
        one, two = arguments
        tensors[one], tensors[two] = tensors[two], tensors[one]
    else:
        name, *rest = arguments
        tensor = tensors[name] if what == "copy" else tensors.pop(name)
        if what == "cast":
            tensors[name] = tensor.to(DTYPES[rest[0]])
        elif what == "fill":
            filler = rest[0] if tensor.is_floating_point() else 0
            tensors[name] = torch.full(tensor.shape, filler, dtype=torch.float64).to(tensor.dtype)
        elif what in CHANGES:
            tensors[name] = CHANGES[what](tensor)
        elif what != "drop":
            tensors[f"{name}.{what}"] = tensor  # copied or renamed
    return save({key: one.clone(memory_format=torch.contiguous_format) for key, one in tensors.items()}, about)


# --- files in their folder -------------------------------------------------------------------------------------------

MOVES = (
    *("missing", "folder", "full folder", "link inside", "link outside", "dangling link", "circle", "pipe"),
    *("twin", "hole", "trailing hole", "declared hole"),
)
OUTSIDE = "outside"  # a file outside the attacked folder: links point to it, and nothing may change it
HUGE = 32 << 30  # size of a sparse file: code that reads all of it is slow or runs out of memory


def _move(path: Path, what: str, outside: Path, twin: bytes | None) -> None:
    content = path.read_bytes()
    path.unlink()
    if what in THINGS:
        _put(path, what, outside, content)
    elif what == "link inside":
        other = path.with_name(path.name + ".moved")
        other.write_bytes(content)
        path.symlink_to(other)
    elif what == "circle":
        path.symlink_to(path)
    elif what == "twin":
        if twin is not None:
            path.write_bytes(twin)
    elif what != "missing":
        begin = {"hole": b"", "trailing hole": content, "declared hole": _declare(content)}[what]
        path.write_bytes(begin)
        os.truncate(path, len(begin) + HUGE)


def _declare(content: bytes) -> bytes:
    """The header of a tensor file whose last tensor has `HUGE` bytes; other files are returned unchanged."""
    found = _header(content)
    if found is None:
        return content
    header, data = found
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    start = header[last]["data_offsets"][0]
    size = len(data) - start + HUGE  # in bytes
    header[last] |= {
        "dtype": "U8",
        "shape": [1] * (len(header[last]["shape"]) - 1) + [size],
        "data_offsets": [start, start + size],
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


THINGS = ("file", "folder", "full folder", "link outside", "link to a folder outside", "dangling link", "pipe")


HIDDEN = (".lock", ".{}.lock", ".{}.00000000.tmp", ".saving-0", ".saved-nothing", f".saved-{'0' * 64}")


def _put(path: Path, what: str, outside: Path, content: bytes | None = None) -> None:
    """Put something other than a plain file in a file's place, or where the library puts locks and temporary files."""
    match what:
        case "file":
            path.write_bytes(b"{}")
        case "folder":
            path.mkdir()
        case "full folder":
            path.mkdir()
            (path / ("config.json" if content is None else path.name)).write_bytes(content or b"{}")
        case "link outside":
            outside.write_bytes(b"precious" if content is None else content)
            path.symlink_to(outside)
        case "link to a folder outside":
            outside.with_name("folder").mkdir()
            outside.with_name("folder").joinpath("config.json").symlink_to(outside)
            outside.write_bytes(b"precious")
            path.symlink_to(outside.with_name("folder"))
        case "dangling link":
            path.symlink_to(path.with_name("nowhere"))
        case "pipe":
            os.mkfifo(path)
        case _:
            raise KeyError(what)


KINDS: dict[str, Callable[[bytes, random.Random, int], Iterator[tuple[Any, ...]]]] = {
    "bytes": _draw_bytes,
    "json": _draw_json,
    "tensors": _draw_tensors,
    "folder": lambda content, source, count: ((move,) for move in MOVES),
    "beside": lambda content, source, count: product(HIDDEN, THINGS),
}
APPLIED: dict[str, Callable[..., bytes]] = {"bytes": _apply_bytes, "json": _apply_json, "tensors": _apply_tensors}
