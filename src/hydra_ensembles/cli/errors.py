"""How a command ends: exit code 0, 2 (something given is wrong), 130 (interrupted) or 1 (a mistake of ours).

Whatever goes wrong is said in one line; `--debug`, before or after the command's name, shows the traceback.
"""

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec, TypeVar

import torch
import typer

from ..errors import HydraError
from .wording import in_flags

P = ParamSpec("P")
R = TypeVar("R")

BUG, BAD_INPUT, INTERRUPTED = 1, 2, 130

DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


class InterruptedRunError(KeyboardInterrupt):
    """Ctrl-C in a run that can go on later; the message says how."""


def one_line_errors(command: Callable[P, R]) -> Callable[..., R]:
    """Make a command end as described above, and give it the option `--debug`."""

    @functools.wraps(command)
    def guarded(*args: Any, context: typer.Context, debug: bool = False, **kwargs: Any) -> R:
        root = context.find_root()
        try:
            return command(*args, **kwargs)
        except BaseException as error:
            code = report_failure(error, debug or bool(root.params.get("debug")))
            if code is None:
                raise
            raise typer.Exit(code) from error

    signature = inspect.signature(command)
    added = (
        inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DebugOption),
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
    )
    guarded.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    guarded.__annotations__ = {**command.__annotations__, "debug": DebugOption, "context": typer.Context}
    return guarded


def report_failure(error: BaseException, debug: bool) -> int | None:
    """Say what went wrong on the standard error; the exit code, or None for what is not a failure of a command."""
    if isinstance(error, BrokenPipeError):  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if not isinstance(error, Exception | KeyboardInterrupt) or isinstance(error, typer.Exit | typer.Abort):
        return None
    if _is_usage_error(error):
        return None
    if debug:
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        _say(f"interrupted{': ' if str(error) else ''}{error}")
        return INTERRUPTED
    if isinstance(error, HydraError | OSError):
        _say(f"error: {in_flags(str(error)) if isinstance(error, HydraError) else error}")
        return BAD_INPUT
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        _say(f"error: not enough memory ({error}); lower --batch-size, or use another --device")
        return BAD_INPUT
    hint = "" if debug else "; --debug shows where"
    _say(f"internal error, please report it: {type(error).__name__}: {error}{hint}")
    return BUG


def _is_usage_error(error: BaseException) -> bool:
    """Whether typer itself will say what is wrong with the arguments."""
    return isinstance(error, typer.BadParameter)


def _say(message: str) -> None:
    print(" ".join(message.split()), file=sys.stderr)
