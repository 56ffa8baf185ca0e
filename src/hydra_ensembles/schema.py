"""Frozen dataclasses to plain JSON data and back, checked field by field; and JSON text, read strictly.

What comes from a file is not trusted: every value is held against the annotation of the field it is meant for, and
whatever does not fit is refused with the path that leads to it.
"""

import dataclasses
import json
import math
import numbers
import types
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import CheckpointError, ConfigError

T = TypeVar("T")

ADDED_LATER: Mapping[str, bool] = types.MappingProxyType({"added_later": True})
"""Metadata of a dataclass field that files of earlier releases do not have; its default says what they meant."""

MAX_BYTES = 64 << 20  # of a JSON file
MAX_DEPTH = 32
LINE = 100  # longest list or object that is written on one line


def short(value: object) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --- dataclasses -----------------------------------------------------------------------------------------------------


def to_plain(value: Any) -> Any:
    """Turn a (nested) dataclass into dictionaries, lists, strings and numbers.

    A dataclass with a `kind` class variable writes it down, so that a union of dataclasses can be read back. A field
    that is `ADDED_LATER` is written where it differs from its default. Numbers of other libraries become Python's.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = getattr(type(value), "kind", None)
        plain = {"kind": kind} if isinstance(kind, str) else {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if not field.metadata.get("added_later") or item != field.default:
                plain[field.name] = to_plain(item)
        return plain
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def from_plain(cls: type[T], data: Any, path: str = "config", *, complete: bool = False) -> T:
    """Build the dataclass `cls` from plain data, or raise a `ConfigError` that names the offending path.

    Args:
        cls: The dataclass; its annotations say what is accepted.
        data: Plain data, as JSON gives it.
        path: Name of `data` in error messages.
        complete: Accept no default in place of a field that is not given, here and in nested dataclasses, except
            for fields that are `ADDED_LATER`.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} must be an object with named fields, got {short(data)}")
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given = dict(data)
    kind = getattr(cls, "kind", None)
    if isinstance(kind, str) and given.pop("kind", kind) != kind:
        raise ConfigError(f"{path}.kind is {short(data['kind'])}, expected {kind!r}")
    unknown = sorted(str(key) for key in given.keys() - fields.keys())
    if unknown:
        raise ConfigError(
            f"{path} has unknown fields {unknown}; known are {sorted(fields)}. "
            "A file written by a newer version needs a newer hydra_ensembles"
        )
    missing = [name for name, field in fields.items() if name not in given and _is_needed(field, complete)]
    if missing:
        raise ConfigError(f"{path} lacks the fields {missing}; the file is incomplete")
    return cls(**{name: _read(hints[name], item, f"{path}.{name}", complete) for name, item in given.items()})


def _is_needed(field: "dataclasses.Field[Any]", complete: bool) -> bool:
    has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    return not has_default or (complete and not field.metadata.get("added_later"))


def require_types(settings: Any) -> None:
    """Give every field of a dataclass its annotated type, or refuse it: for settings made in code, not read."""
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        plain = value if dataclasses.is_dataclass(value) else to_plain(value)
        read = _read(hints[field.name], plain, f"{type(settings).__name__}.{field.name}", complete=False)
        object.__setattr__(settings, field.name, read)  # the classes are frozen


def _read(hint: Any, value: Any, path: str, complete: bool) -> Any:
    """Check `value` against a type annotation and give it the annotated Python type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        if isinstance(value, str | int | type(None)) and value in args:
            return value
        raise ConfigError(f"{path} must be one of {list(args)}, got {short(value)}")
    if origin in (Union, types.UnionType):
        return _read_union(args, value, path, complete)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path} must be a list, got {short(value)}")
        inner = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(value) != len(inner):
            raise ConfigError(f"{path} must have {len(inner)} entries, got {len(value)}")
        pairs = enumerate(zip(inner, value, strict=True))
        return tuple(_read(one, item, f"{path}[{i}]", complete) for i, (one, item) in pairs)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be an object, got {short(value)}")
        return {str(key): _read(args[1], item, f"{path}.{key}", complete) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_plain(hint, value, path, complete=complete)  # type: ignore[arg-type]
    return _read_scalar(hint, value, path)


def _read_union(options: tuple[Any, ...], value: Any, path: str, complete: bool) -> Any:
    """Read `value` as the member of the union it names by its `kind`, or as the first one that fits."""
    if value is None:
        if type(None) in options:
            return None
        raise ConfigError(f"{path} must not be null")
    choices = [option for option in options if option is not type(None)]
    tagged = {option.kind: option for option in choices if isinstance(getattr(option, "kind", None), str)}
    if tagged:
        kind = value.get("kind") if isinstance(value, Mapping) else None
        if not isinstance(kind, str) or kind not in tagged:
            raise ConfigError(f"{path}.kind must be one of {sorted(tagged)}, got {short(kind)}")
        return _read(tagged[kind], value, path, complete)
    problems = []
    for choice in choices:
        try:
            return _read(choice, value, path, complete)
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError("; or ".join(problems))


def _read_scalar(hint: Any, value: Any, path: str) -> Any:
    """Read a bool, int, float or str; a whole number is a valid float, a bool is never a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and is_number:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ConfigError(f"{path} must be a finite number, got {short(value)}")
        return number
    fits = isinstance(value, int) and is_number if hint is int else hint in (bool, str) and isinstance(value, hint)
    if not fits and hint is not Any:
        raise ConfigError(f"{path} must be of type {getattr(hint, '__name__', hint)}, got {short(value)}")
    return value


# --- JSON text -------------------------------------------------------------------------------------------------------


def parse_json(content: bytes, name: str, *, foreign: bool = False) -> Any:
    """Read the JSON of the file `name`: UTF-8, no key twice, no NaN, nothing nested deeply, no half characters.

    Args:
        content: What the file holds.
        name: How an error calls it.
        foreign: Another library's file: only what `json` itself may stumble over is checked.

    Raises:
        CheckpointError: It says what is wrong.
    """
    if len(content) > MAX_BYTES:
        raise CheckpointError(f"{name} has {len(content)} bytes; at most {MAX_BYTES} are accepted")
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
        if not foreign:
            _check(value, 0)
    except RecursionError as error:
        raise CheckpointError(f"{name} is nested too deeply; at most {MAX_DEPTH} levels are accepted") from error
    except ValueError as error:  # those of Unicode too
        raise CheckpointError(f"{name} is not valid JSON: {error}") from error
    return value


def json_bytes(value: Any, name: str) -> bytes:
    """JSON text of plain data, with short lists on one line; refuses what `parse_json` would refuse."""
    try:
        content = (_text(value, 0) + "\n").encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} cannot be written as JSON: {error}") from error
    parse_json(content, name)
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} is given twice")
        result[key] = value
    return result


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, str):
        value.encode("utf-8")  # half of a surrogate pair is not text
    for inner in (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check(inner, depth + 1)


def _text(value: Any, indent: int) -> str:
    if not isinstance(value, dict | list) or not value:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {_text(item, indent + 2)}" for key, item in value.items()]
    else:
        parts = [_text(item, indent + 2) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    line = ", ".join(parts)
    if len(line) <= LINE and "\n" not in line and indent > 0:
        return opening + line + closing
    space = "\n" + " " * indent
    return opening + ",".join(f"{space}  {part}" for part in parts) + space + closing
