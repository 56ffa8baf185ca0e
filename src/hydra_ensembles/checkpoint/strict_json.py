"""JSON without the parts that make a configuration ambiguous or dangerous.

Refused are duplicate keys, NaN and infinities, text that is not valid Unicode, and nesting no configuration
needs. What remains can be held against a schema without surprises.
"""

import json
from typing import Any

from ..errors import CheckpointError

MAX_BYTES = 64 << 20
MAX_DEPTH = 32
LINE = 100  # longest list or object that is written on one line


def parse(content: bytes, name: str) -> Any:
    """Read the JSON of the file `name`, or raise a `CheckpointError` that says what is wrong with it."""
    value = _load(content, name)
    _check(value, name)
    return value


def parse_foreign(content: bytes, name: str) -> str:
    """The text of a JSON file that another library will read; only checked to be a JSON object."""
    if not isinstance(_load(content, name), dict):
        raise CheckpointError(f"{name} is not a JSON object; save or download it again")
    return content.decode("utf-8")


def _load(content: bytes, name: str) -> Any:
    if len(content) > MAX_BYTES:
        raise CheckpointError(f"{name} has {len(content)} bytes; at most {MAX_BYTES} are accepted")
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name} is not UTF-8 text: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{name} is nested too deeply; at most {MAX_DEPTH} levels are accepted") from error
    except ValueError as error:
        raise CheckpointError(f"{name} is not valid JSON: {error}") from error


def write(value: Any, name: str) -> bytes:
    """JSON text of plain data, with short lists on one line; refuses what `parse` would refuse."""
    try:
        content = (_text(value, 0) + "\n").encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} cannot be written as JSON: {error}") from error
    parse(content, name)
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} is given twice")
        result[key] = value
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check(value: Any, name: str) -> None:
    """Refuse deep nesting and characters that no text can hold (half of a surrogate pair)."""
    pending = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{name} is nested too deeply; at most {MAX_DEPTH} levels are accepted")
        if isinstance(item, dict):
            pending += [(inner, depth + 1) for pair in item.items() for inner in pair]
        elif isinstance(item, list):
            pending += [(inner, depth + 1) for inner in item]
        elif isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError as error:
                raise CheckpointError(f"{name} has text that is not valid Unicode: {error}") from error


def _text(value: Any, indent: int) -> str:
    if not isinstance(value, dict | list) or not value:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {_text(item, indent + 2)}" for key, item in value.items()]
        opening, closing = "{", "}"
    else:
        parts = [_text(item, indent + 2) for item in value]
        opening, closing = "[", "]"
    short = ", ".join(parts)
    if len(short) <= LINE and "\n" not in short and indent > 0:
        return opening + short + closing
    space = " " * (indent + 2)
    return opening + "\n" + space + f",\n{space}".join(parts) + "\n" + " " * indent + closing
