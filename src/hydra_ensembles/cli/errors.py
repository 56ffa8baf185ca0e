"""How the command line fails: one line that says what is wrong, exit code 2, no traceback."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from ..errors import HydraError

P = ParamSpec("P")
R = TypeVar("R")


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn the library's errors, and files that cannot be read or written, into one line and exit code 2."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (HydraError, OSError) as error:
            message = " ".join(str(error).split())
            print(f"error: {message}", file=sys.stderr)
            raise typer.Exit(2) from error

    return guarded
