"""Convert frozen dataclasses to plain JSON data and back, checked field by field.

Data from files are not trusted: every value is checked against the annotation of its field, and errors name the path
to the value.
"""

import dataclasses
import functools
import numbers
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import ConfigError

T = TypeVar("T")

ADDED_LATER: Mapping[str, bool] = types.MappingProxyType({"added_later": True})
"""Metadata of a dataclass field that is missing in files of earlier releases; its default is what they meant."""


hints_of: Callable[..., dict[str, Any]] = functools.cache(get_type_hints)
"""Cached annotations of a class; with `include_extras`, including the ranges of numbers."""


NEAR = 0.55  # difflib similarity, 1 for equal names; `size` is near `image_size`


def nearest(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """The known names most similar to this one, for suggestions; empty if none is similar enough."""
    return get_close_matches(name, list(known), most, cutoff=NEAR)


def short(value: object) -> str:
    """`repr` of a value, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_LEAVES = frozenset((str, bool, int, float))  # the types of most values, handled first


def to_plain(value: Any) -> Any:
    """Turn a (nested) dataclass into Python dictionaries, lists, strings and numbers, also those in arrays.

    A dataclass with a `kind` class variable stores it, so that a union of dataclasses can be read back. A field that is
    `ADDED_LATER` is only stored if it differs from its default.
    """
    if value is None or type(value) in _LEAVES:
        return value
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
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return float(value)  # also a fraction, and NumPy's longdouble, whose `tolist` is itself
    return to_plain(value.tolist()) if hasattr(value, "tolist") else value  # of NumPy, pandas, torch


def from_plain(cls: type[T], data: Any, path: str = "config", *, complete: bool = False) -> T:
    """Build the dataclass `cls` from plain data, as parsed from JSON, or raise a `ConfigError` that names the path.

    Annotations say what is accepted. With `complete`, no field may be missing, here and in nested dataclasses, unless
    it is `ADDED_LATER`.
    """
    if not isinstance(data, Mapping):
        named = f" (in Python also {cls.__name__}.preset(name))" if hasattr(cls, "preset") else ""
        raise ConfigError(f"{path} must be an object with named fields{named}, got {short(data)}")
    hints = hints_of(cls)
    values = dict(data)
    kind = getattr(cls, "kind", None)
    if isinstance(kind, str) and values.pop("kind", kind) != kind:
        raise ConfigError(f"{path}.kind is {short(data['kind'])}, expected {kind!r}")
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = [field.name for field in fields]
    unknown = sorted(map(str, values.keys() - names))
    missing = []
    for field in fields:
        no_default = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        needed = no_default or (complete and not field.metadata.get("added_later"))
        if needed and field.name not in values:
            missing.append(field.name)
    if unknown:
        raise ConfigError(f"{path} has unknown fields {unknown} (of a newer version?); known are {sorted(names)}")
    if missing:
        raise ConfigError(f"{path} lacks the fields {missing}; the file is incomplete")
    return cls(**{name: _read(hints[name], item, f"{path}.{name}", complete) for name, item in values.items()})


def require_types(settings: Any, prefix: str | None = None) -> None:
    """Convert every field of a dataclass created in code to its annotated type, and check its range."""
    prefix = f"{type(settings).__name__}." if prefix is None else prefix
    hints = hints_of(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        plain = value if dataclasses.is_dataclass(value) else to_plain(value)
        typed = _read(hints[field.name], plain, f"{prefix}{field.name}", complete=False)
        object.__setattr__(settings, field.name, typed)  # the classes are frozen


def _read(hint: Any, value: Any, path: str, complete: bool) -> Any:
    """Check `value` against a type annotation and convert it to the annotated Python type."""
    if type(value) is hint and hint in _LEAVES and hint is not float:
        return value
    origin = get_origin(hint)
    args = get_args(hint)
    if hint is Any or (value is None and type(None) in args):
        return value
    if origin is Annotated:
        typed = _read(args[0], value, path, complete)
        args[1].require(path, typed)
        return typed
    if origin is Literal:
        if not (isinstance(value, str | int | type(None)) and value in args):
            raise ConfigError(f"{path} must be one of {list(args)}, got {short(value)}")
        return value
    if origin in (Union, types.UnionType):
        return _read_union([arm for arm in args if arm is not type(None)], value, path, complete)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path} must be a list, got {short(value)}")
        inner = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(value) != len(inner):
            raise ConfigError(f"{path} must have {len(inner)} entries, got {len(value)}")
        pairs = enumerate(zip(inner, value, strict=True))
        return tuple(_read(kind, item, f"{path}[{i}]", complete) for i, (kind, item) in pairs)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be an object, got {short(value)}")
        return {str(key): _read(args[1], item, f"{path}.{key}", complete) for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, tuple):  # a named tuple
        fields = types.GenericAlias(tuple, tuple(hints_of(hint).values()))
        return hint(*_read(fields, value, path, complete))
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_plain(hint, value, path, complete=complete)  # type: ignore[arg-type]
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):  # integers are valid floats
        if not abs(value) <= sys.float_info.max:
            raise ConfigError(f"{path} must be a finite number, got {short(value)}")
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):  # a bool is never a number
        raise ConfigError(f"{path} must be of type {hint.__name__}, got {short(value)}")
    return value


def _read_union(choices: list[Any], value: Any, path: str, complete: bool) -> Any:
    """Read `value` as the union member named by its `kind`, or as the first one that fits."""
    if dataclasses.is_dataclass(value) and type(value) in choices:
        return value
    tagged = {choice.kind: choice for choice in choices if isinstance(getattr(choice, "kind", None), str)}
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
