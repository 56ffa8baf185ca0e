"""The one reader of annotated values: settings from code, YAML, JSON and the command line, and single arguments.

A settings class is a frozen dataclass that inherits from `Checked`: its annotations say what is accepted, and its
fields are converted and checked when it is made. `from_plain` reads one from parsed JSON or YAML, with errors that
name the path of the value, and `to_plain` writes it. `require` checks one number at a public edge.
"""

import dataclasses
import functools
import math
import numbers
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import ConfigError

T = TypeVar("T")
END = 2**63  # the first integer beyond torch's and numpy's int64 counts and seeds
_hints: Callable[..., dict[str, Any]] = functools.cache(get_type_hints)


@dataclass(frozen=True, repr=False)
class Range:
    """A range of accepted finite numbers: from `least` to `most` (inclusive), or `above` one and `below` another.

    Used in annotations, such as `Annotated[int, Range(1, 16)]`; written out, it says what is accepted.
    """

    least: float = -math.inf
    most: float = math.inf
    _: KW_ONLY
    above: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        low = self.least <= value if self.above is None else self.above < value
        high = value <= self.most if self.below is None else value < self.below
        return bool(low and high and abs(value) < math.inf)

    def __repr__(self) -> str:
        low = self.least if self.above is None else self.above
        high = self.most if self.below is None else self.below
        parts = [f"{'at least' if self.above is None else 'above'} {low:.15g}"] if low > -math.inf else []
        parts += [f"{'at most' if self.below is None else 'below'} {high:.15g}"] if high < END - 1 else []
        return " and ".join(parts)

    def require(self, name: str, value: float) -> None:
        """Raise a `ConfigError` unless `value` is in this range."""
        if value not in self:
            raise ConfigError(f"{name} must be a finite number, {self}, got {short(value)}")


# The numbers that most settings and arguments are.
Whole = Annotated[int, Range(1, END - 1)]
Count = Annotated[int, Range(0, END - 1)]
Seed = Annotated[int, Range(0, END - 1)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(0)]
Rate = Annotated[float, Range(0, below=1)]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(above=0, most=1)]
InnerShare = Annotated[float, Range(above=0, below=1)]


class Checked:
    """Settings dataclass that converts its fields to the annotated types and enforces their annotated ranges."""

    def __post_init__(self) -> None:
        hints = _hints(type(self), include_extras=True)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            path = f"{type(self).__name__}.{field.name}"
            value = _read(hints[field.name], getattr(self, field.name), path)
            object.__setattr__(self, field.name, value)  # the classes are frozen


def require(name: str, value: Any, kind: Any) -> Any:
    """Check one argument against an annotation such as `Share`, and return it as a Python value.

    For public functions that would otherwise silently give a wrong answer; NumPy numbers become Python's.
    """
    return _read(kind, value, name)


def nearest(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """The known names most similar to this one, for suggestions; empty if none is similar enough."""
    return get_close_matches(name, list(known), most, cutoff=0.55)  # `size` is near `image_size`


def short(value: object) -> str:
    """`repr` of a value, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def to_plain(value: Any) -> Any:
    """Turn a (nested) dataclass into dictionaries, lists, strings and numbers, also those in arrays and tensors.

    A dataclass with a `kind` class variable stores it, so that a union of dataclasses can be read back.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = getattr(type(value), "kind", None)
        plain = {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind": kind, **plain} if isinstance(kind, str) else plain
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return _of_python(value)


def from_plain(cls: type[T], data: Any, path: str = "config") -> T:
    """Build the dataclass `cls` from plain data, as parsed from JSON or YAML; an error names the path of a value."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} must have named fields, got {short(data)}")
    values = dict(data)
    kind = getattr(cls, "kind", None)
    if isinstance(kind, str) and values.pop("kind", kind) != kind:
        raise ConfigError(f"{path}.kind is {short(data['kind'])}, expected {kind!r}")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for name in map(str, values.keys() - fields.keys()):
        near = nearest(name, fields) or sorted(fields)
        raise ConfigError(f"{path} has no field {name!r}; did you mean {' or '.join(near)}?")
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{path} lacks the fields {missing}")
    hints = _hints(cls, include_extras=True)
    return cls(**{name: _read(hints[name], item, f"{path}.{name}") for name, item in values.items()})


def _of_python(value: Any) -> Any:
    """Numbers of other libraries, and arrays of them, as Python's; anything else unchanged."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _read(hint: Any, value: Any, path: str) -> Any:
    """Check a value against a type annotation and convert it to the annotated Python type."""
    value = _of_python(value)
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or (value is None and type(None) in args):
        return value
    if origin is Annotated:
        read = _read(args[0], value, path)
        args[1].require(path, read)
        return read
    if origin is Literal:
        if not (isinstance(value, str | int | None) and value in args):
            raise ConfigError(f"{path} must be one of {list(args)}, got {short(value)}")
        return value
    if origin in (Union, types.UnionType):
        return _read_union([arm for arm in args if arm is not type(None)], value, path)
    if origin is tuple:
        if not isinstance(value, list | tuple) or (args[-1] is not Ellipsis and len(value) != len(args)):
            count = "" if args[-1] is Ellipsis else f" of {len(args)}"
            raise ConfigError(f"{path} must be a list{count}, got {short(value)}")
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        items = enumerate(zip(kinds, value, strict=True))
        return tuple(_read(kind, item, f"{path}[{i}]") for i, (kind, item) in items)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must have named fields, got {short(value)}")
        return {str(key): _read(args[1], item, f"{path}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_plain(hint, value, path)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, tuple):  # a named tuple
        fields = types.GenericAlias(tuple, tuple(_hints(hint, include_extras=True).values()))
        return hint(*_read(fields, value, path))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:
            raise ConfigError(f"{path} must be a finite number, got {short(value)}")
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, origin or hint) or (isinstance(value, bool) and hint is not bool):
        kind = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(hint, str(hint))
        raise ConfigError(f"{path} must be {kind}, got {short(value)}")
    return value


def _read_union(kinds: list[Any], value: Any, path: str) -> Any:
    """Read a value as the dataclass named by its `kind`, or as the first member of the union that fits."""
    if dataclasses.is_dataclass(value) and type(value) in kinds:
        return value
    tagged = {kind.kind: kind for kind in kinds if isinstance(getattr(kind, "kind", None), str)}
    if tagged:
        tag = value.get("kind") if isinstance(value, Mapping) else None
        if tag not in tagged:
            raise ConfigError(f"{path}.kind must be one of {sorted(tagged)}, got {short(tag)}")
        return _read(tagged[tag], value, path)
    problems = []
    for kind in kinds:
        try:
            return _read(kind, value, path)
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError("; or ".join(problems))
