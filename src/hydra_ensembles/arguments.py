"""Arguments of public functions, checked against their annotations, with plain error messages."""

import functools
import inspect
import math
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

import numpy as np
from torch import Tensor, nn

from .errors import ConfigError, DataError
from .schema import nearest, require_types, short

END = 2**63  # the first integer beyond torch's and numpy's int64 counts and seeds
_FAR = 10**6  # limits from here on appear in a message only if the value exceeds them


@dataclass(frozen=True, repr=False)
class Range:
    """A range of accepted finite numbers: from `least` to `most` (inclusive), or `above` one and `below` another.

    Used in annotations such as `Annotated[int, Range(1, 16)]`, which `checked` and `Checked` enforce and `help` shows.
    """

    least: float = -math.inf
    most: float = math.inf
    _: KW_ONLY
    above: float | None = None
    below: float | None = None

    def __contains__(self, value: Any) -> bool:
        low = self.least <= value if self.above is None else self.above < value
        high = value <= self.most if self.below is None else value < self.below
        return bool(low and high and abs(value) < math.inf)

    def __repr__(self) -> str:
        return self._limits()

    def require(self, name: str, value: Any) -> None:
        """Raise a `ConfigError` unless `value` is a number in this range."""
        if not _fits(float, value) or value not in self:
            raise ConfigError(f"{name} must be {self.in_words(_WORDS[float], value)}, got {short(value)}")

    def in_words(self, noun: str, value: Any = None) -> str:
        """Describe this range for an error message; `noun` is the kind of number, such as "a whole number"."""
        limits = self._limits(value)
        finite = "a finite " if isinstance(value, float) and math.isinf(value) else "a "
        return f"{finite}{noun.removeprefix('a ')} {'of ' if limits.startswith('at ') else ''}{limits}"

    def _limits(self, value: Any = None) -> str:
        end = self.most if self.below is None else self.below
        low = f"at least {_written(self.least)}" if self.above is None else f"above {_written(self.above)}"
        if end >= _FAR and not (isinstance(value, int | float | np.number) and end <= value < math.inf):
            return low
        if self.above is None and self.below is None:
            return f"from {_written(self.least)} to {_written(end)}"
        return f"{low} and {'at most' if self.below is None else 'below'} {_written(end)}"


def _written(number: float) -> str:
    return f"{number}".removesuffix(".0")


# Numbers with the ranges that `checked` and `Checked` enforce.
Whole = Annotated[int, Range(1, END - 1)]
Count = Annotated[int, Range(0, END - 1)]
Seed = Annotated[int, Range(0, END - 1)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(0)]
Rate = Annotated[float, Range(0, below=1)]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(above=0, most=1)]
InnerShare = Annotated[float, Range(above=0, below=1)]

P = ParamSpec("P")
R = TypeVar("R")

_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    type(None): "None",
    Tensor: "a tensor",
    Iterable: "an iterable, such as a DataLoader or a list",
    Sequence: "a list",
    Collection: "a list",
    Mapping: 'a mapping ({"name": ...})',
    Callable: "something that can be called",
}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check arguments of a function against its annotations and raise a `DataError` or a `ConfigError` if one is wrong.

    Only types, including those of items in memory, and annotated ranges (`Whole`, `Share`) are checked; whether heads
    exist and models match is up to the function. Models always pass: the function has better advice about those of
    other libraries. NumPy numbers become Python numbers, because seeds are derived from them and files store them.
    """
    signature = inspect.signature(function)
    title = function.__name__ if function.__name__ != "__init__" else function.__qualname__.split(".")[-2]
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())

    @functools.cache
    def hints() -> dict[str, Any]:
        found = get_type_hints(function, include_extras=True)
        for hint in [hint for hint in found.values() if get_origin(hint) is Unpack]:  # **options: Unpack[Options]
            found |= get_type_hints(get_args(hint)[0], include_extras=True)
        return found

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:  # its message does not name the function
            unknown = [] if open_ended else [name for name in kwargs if name not in signature.parameters]
            advice = _advice(unknown[0], kwargs[unknown[0]], hints()) if unknown else ""
            raise TypeError(f"{title}() {error}{advice}") from None
        expected = hints()
        for name, value in (bound.arguments | kwargs).items():
            if name in expected and not _fits(expected[name], value):
                choices = _choices(expected[name])
                accepted = " or ".join(dict.fromkeys(_in_words(kind, value) for kind in sorted(choices, key=_listed)))
                kinds = {get_origin(kind) or kind for kind in choices if not _listed(kind)}
                problem = DataError if kinds & {Iterable, Mapping, Tensor} else ConfigError
                raise problem(f"{name} of {title} must be {accepted}, got {_shown(value)}")
            if name not in expected and any(get_origin(hint) is Unpack for hint in expected.values()):
                advice = _advice(name, value, expected)
                raise TypeError(f"{title}() got an unexpected keyword argument {name!r}{advice}")
            if isinstance(value, np.integer | np.floating) and name in bound.arguments:
                bound.arguments[name] = value.item()
        return function(*bound.args, **bound.kwargs)

    return call


class Checked:
    """Settings dataclass that converts its fields to the annotated types and enforces their annotated ranges."""

    def __post_init__(self) -> None:
        require_types(self)


def _advice(name: str, value: Any, hints: Mapping[str, Any]) -> str:
    """Suggest what an unknown argument may have meant; empty if there is no good guess."""
    parameters = {argument: hint for argument, hint in hints.items() if argument != "return"}
    for parameter, hint in parameters.items():
        for kind in _choices(hint):
            if isinstance(kind, type) and is_dataclass(kind) and name in (f.name for f in fields(kind) if f.init):
                written = f"{name}={short(value) if _is_plain(value) else '...'}"
                return f"; {name!r} is a setting of {kind.__name__}: {parameter}={kind.__name__}({written})"
    near = nearest(name, parameters)
    return f"; did you mean {near[0]!r}?" if near else ""


def _is_plain(value: Any) -> bool:
    """Whether the `repr` of a value is short and readable: no tensors, nothing long."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(isinstance(item, str | int | float | None) for item in value)
    return isinstance(value, str | bytes | int | float | complex | None)


def _shown(value: Any) -> str:
    """Describe a refused value: its `repr` if it is plain, else its type."""
    kind = type(value).__name__
    if _is_plain(value):
        return f"{short(value)}{'' if isinstance(value, str | int | float) else f' ({kind})'}"
    if isinstance(value, list | tuple):
        return f"a {kind} of {len(value)}, the first a {type(value[0]).__name__}"
    return f"a {kind} {list(value.shape)}" if isinstance(value, Tensor | np.ndarray) else f"{short(value)} ({kind})"


def _choices(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; `str` is dropped where a path is accepted, since a path may be a string."""
    if get_origin(hint) not in (Union, types.UnionType):
        return (hint,)
    inner = tuple(choice for arm in get_args(hint) for choice in _choices(arm))
    return tuple(choice for choice in inner if choice is not str) if Path in inner else inner


def _in_words(hint: Any, value: Any) -> str:
    """Describe what an annotation accepts, for an error message."""
    if get_origin(hint) is Literal:
        return f"one of {list(get_args(hint))}"
    if get_origin(hint) is Annotated:
        kind, accepted = get_args(hint)
        return str(accepted.in_words(_WORDS[kind], value))
    kind = get_origin(hint) or hint
    if _listed(hint):
        return f"a list in which each item is {_in_words(get_args(hint)[0], None)}"
    title = str(getattr(kind, "__name__", kind))
    title = f"{title} ({title}.preset(name) makes one)" if hasattr(kind, "preset") else title
    return _WORDS.get(kind, f"a{'n' if title[0] in 'AEIOU' else ''} {title}")


def _listed(hint: Any) -> bool:
    """Whether the annotation is a list of items of one simple type, such as names or numbers."""
    return get_origin(hint) in (Iterable, Sequence, Collection) and _is_simple(get_args(hint)[0])


def _is_simple(hint: Any) -> bool:
    """Whether items are annotated with a single type that can be checked."""
    return (isinstance(hint, type) and hint is not Any) or get_origin(hint) in (Literal, Annotated)


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value matches an annotation; annotations not known here match anything."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(choice, value) for choice in _choices(hint))
    if origin is Literal:
        return isinstance(value, str | int | type(None)) and value in get_args(hint)
    if origin is Annotated:
        kind, accepted = get_args(hint)
        return _fits(kind, value) and value in accepted
    kind = origin or hint
    if kind is bool:
        return isinstance(value, bool | np.bool_) or (isinstance(value, int) and value in (0, 1))
    if kind in (int, float):
        number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool | np.bool_)
        return number and bool(value == value)  # excludes NaN; integers may be too large for a float
    if kind is str:
        return isinstance(value, str) and _can_be_written(value)
    if kind is Path:
        path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
        return isinstance(path, str) and "\0" not in path and _can_be_written(path)
    if kind in (Iterable, Sequence, Collection):
        item = next(iter(get_args(hint)), Any)
        simple = _is_simple(item)
        if not simple and item is not Any:  # heads, members: the function that takes them has better messages
            return True
        listed = isinstance(value, Iterable) and (kind is Iterable or hasattr(type(value), "__len__"))
        listed = listed or hasattr(type(value), "__getitem__")  # torch datasets are indexed
        unordered = kind is Sequence and isinstance(value, Mapping | set | frozenset)
        scalar = getattr(value, "ndim", 1) == 0
        if not listed or unordered or scalar or isinstance(value, str | bytes):
            return False
        in_memory = isinstance(value, Collection)
        return not (simple and in_memory) or all(_fits(item, element) for element in value)
    if kind is Mapping:
        return isinstance(value, Mapping) and all(_fits(get_args(hint)[1], element) for element in value.values())
    if kind is tuple:
        parts = get_args(hint)
        fixed = Ellipsis not in parts
        listed = isinstance(value, list | tuple)
        return listed and (not fixed or (len(value) == len(parts) and all(map(_fits, parts, value))))
    if kind is Callable:
        return callable(value)
    if isinstance(kind, TypeVar):
        return kind.__bound__ is None or _fits(kind.__bound__, value)
    if not isinstance(kind, type) or kind is Any or issubclass(kind, nn.Module) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)


def _can_be_written(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True
