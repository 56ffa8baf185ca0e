"""Frozen dataclasses to plain JSON data and back, checked field by field.

A configuration that comes from a file is not trusted: every value is held against the annotation of the
field it is meant for, and whatever does not fit is refused with the path that leads to it.
"""

import dataclasses
import json
import math
import numbers
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import CheckpointError, ConfigError

T = TypeVar("T")

ADDED_LATER: Mapping[str, bool] = types.MappingProxyType({"added_later": True})
"""Metadata of a dataclass field that files of earlier releases do not have; its default says what they meant."""


def to_plain(value: Any) -> Any:
    """Turn a (nested) dataclass into dictionaries, lists, strings and numbers.

    A dataclass with a `kind` class variable writes it down, so that a union of dataclasses can be read back. A
    field that is `ADDED_LATER` is written where it differs from its default.
    Numbers of other libraries (NumPy's) become Python's.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        plain = {
            field.name: to_plain(item)
            for field, item in items
            if not field.metadata.get("added_later") or item != field.default
        }
        kind = getattr(type(value), "kind", None)
        return {"kind": kind, **plain} if isinstance(kind, str) else plain
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
        raise ConfigError(f"{path} must be an object with named fields, got {_short(data)}")
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given = dict(data)
    kind = getattr(cls, "kind", None)
    if isinstance(kind, str) and given.pop("kind", kind) != kind:
        raise ConfigError(f"{path}.kind is {_short(data['kind'])}, expected {kind!r}")
    unknown = sorted(str(key) for key in given.keys() - fields.keys())
    if unknown:
        raise ConfigError(
            f"{path} has unknown fields {unknown}; known are {sorted(fields)}. "
            "A file written by a newer version needs a newer hydra_ensembles"
        )
    missing = [
        name
        for name, field in fields.items()
        if name not in given
        and (
            (complete and not field.metadata.get("added_later"))
            or (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)
        )
    ]
    if missing:
        raise ConfigError(f"{path} lacks the fields {missing}; the file is incomplete")
    return cls(**{name: _read(hints[name], item, f"{path}.{name}", complete) for name, item in given.items()})


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
        raise ConfigError(f"{path} must be one of {list(args)}, got {_short(value)}")
    if origin in (Union, types.UnionType):
        return _read_union(args, value, path, complete)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path} must be a list, got {_short(value)}")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_read(args[0], item, f"{path}[{i}]", complete) for i, item in enumerate(value))
        if len(value) != len(args):
            raise ConfigError(f"{path} must have {len(args)} entries, got {len(value)}")
        pairs = enumerate(zip(args, value, strict=True))
        return tuple(_read(arg, item, f"{path}[{i}]", complete) for i, (arg, item) in pairs)
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be an object, got {_short(value)}")
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
            raise ConfigError(f"{path}.kind must be one of {sorted(tagged)}, got {_short(kind)}")
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
    if hint is Any:
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and number:
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        if not math.isfinite(result):
            raise ConfigError(f"{path} must be a finite number, got {_short(value)}")
        return result
    if hint is int and number and isinstance(value, int):
        return value
    if hint in (bool, str) and isinstance(value, hint):
        return value
    name = getattr(hint, "__name__", str(hint))
    raise ConfigError(f"{path} must be of type {name}, got {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


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
