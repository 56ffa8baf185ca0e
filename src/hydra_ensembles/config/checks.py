"""What all configurations check about their numbers and choices."""

from numbers import Integral, Real
from typing import get_args

from ..errors import ConfigError

MAX_SIZE = 1 << 24  # no width, vocabulary or count of a real model is larger; guards against absurd files


def require_sizes(where: object, **sizes: int) -> None:
    """Refuse sizes below one or absurdly large."""
    for name, size in sizes.items():
        if not 1 <= size <= MAX_SIZE:
            raise ConfigError(f"{type(where).__name__}.{name} must be between 1 and {MAX_SIZE}, got {size}")


def require_rates(where: object, **rates: object) -> None:
    """Refuse rates outside of [0, 1)."""
    for name, rate in rates.items():
        if not isinstance(rate, Real) or not 0.0 <= float(rate) < 1.0:
            raise ConfigError(f"{type(where).__name__}.{name} must be a number in [0, 1), got {rate!r}")


def require_whole(name: str, value: object, least: int) -> int:
    """The value as Python's own integer; refused where it is no whole number, or too small."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def require_positive(where: object, **numbers: float) -> None:
    """Refuse numbers that are not positive."""
    for name, number in numbers.items():
        if not number > 0.0:
            raise ConfigError(f"{type(where).__name__}.{name} must be positive, got {number}")


def require_choice(where: object, name: str, value: object, options: object) -> None:
    """Refuse what is not one of the options of a `Literal`."""
    accepted = get_args(options)
    if value not in accepted:
        raise ConfigError(f"{type(where).__name__}.{name} must be one of {list(accepted)}, got {value!r}")
