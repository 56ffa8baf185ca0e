"""The command line, `hydra-ensembles`: the list of commands, and how errors end.

Commands are ordinary functions, each in the file of its purpose; they import what they need when they run, so that
`--help` answers at once.
"""

import os
import shlex
import sys
import warnings
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperGroup
except ImportError:
    sys.exit("error: the command line needs further libraries: pip install 'hydra-ensembles[cli]'")

from ..errors import HydraError
from . import answers, making, models


class Commands(TyperGroup):
    """Runs a command; an error ends in one line on standard error and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            code = report_failure(error, debug=bool(ctx.params.get("debug")))
            if code is None:
                raise
            raise typer.Exit(code) from error


os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # of `datasets`: an error is one line
app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from .._utils import __version__

        print(f"hydra-ensembles {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Transformer classifiers that know when not to answer: convert, calibrate, use, fuse and compare them.

    `convert` makes a folder of a model of another library; all other commands take such folders. Exit codes: 0 done,
    2 wrong input (also if some inputs have no answer), 3 `monitor` alarms, 130 interrupted, 1 a mistake of ours.

    \b
    Example:
      hydra-ensembles convert my-vit/ -o base
      hydra-ensembles calibrate base --data val/ -o safe
      hydra-ensembles predict safe photo.jpg
    """


for _command in (
    answers.demo, models.convert, models.info, models.calibrate, answers.predict, answers.serve, answers.score,
    answers.monitor, answers.evaluate, answers.report, models.fuse, making.build, making.search, models.export,
    models.bench,
):  # fmt: skip
    app.command()(_command)


def main() -> None:
    """Run the command line."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        app(prog_name="hydra-ensembles")
    except KeyboardInterrupt:  # while a command loads its libraries
        sys.exit(130)


def report_failure(error: BaseException, debug: bool) -> int | None:
    """Print an error to standard error; return the exit code, or None if typer or Python should handle it."""
    if isinstance(error, BrokenPipeError):  # the reader of our output, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, typer.Exit | typer.Abort) or type(error).__module__.startswith(("click", "typer")):
        return None
    if debug:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        notes = getattr(error, "__notes__", ())  # what was kept, and how to resume
        resume = f": {notes[0]}: {shlex.join(['hydra-ensembles', *sys.argv[1:]])}" if notes else ""
        code, message = 130, f"interrupted{resume}"
    elif isinstance(error, HydraError | OSError):
        code, message = 2, f"error: {error}"
    elif isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        code, message = 2, f"error: not enough memory ({error}); lower the batch size, or change the device"
    else:
        hint = "" if debug else "; --debug shows where"
        code, message = 1, f"internal error, please report it: {type(error).__name__}: {error}{hint}"
    print(" ".join(message.split()), file=sys.stderr)
    return code
