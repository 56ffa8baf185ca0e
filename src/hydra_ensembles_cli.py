"""The command `hydra-ensembles`: help, version, completion and wrong options are answered at once, without PyTorch.

The commands and their options are read from `hydra_ensembles/cli/commands.json`, which `make commands` derives from the
commands themselves; a test compares the two. The package is loaded only to run a command, with the options parsed here.
This file is outside the package because importing anything inside it loads all of it; `python -m hydra_ensembles` calls
it first.
"""

import importlib.util
import inspect
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

TYPES: dict[str, Any] = {"bool": bool, "float": float, "int": int, "path": Path, "str": str}

NAME = "hydra-ensembles"  # also shown for `python -m hydra_ensembles`


def main() -> None:
    """Run the command line; if its libraries are missing, the package's error names them."""
    with _no_traceback():
        table = read_table()
        if table is None:
            run("", {})
        make_app(table or {}, run)(prog_name=NAME)


@contextmanager
def _no_traceback() -> Iterator[None]:
    """Exit with a code, not a traceback, on Ctrl-C or if help cannot be written, for example to a full disk."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def run(name: str, options: dict[str, Any]) -> None:
    """Load the package and run a command; missing libraries and Ctrl-C at any time end without a traceback."""
    try:
        _on_interrupt(_end, instead_of=signal.default_int_handler)
        from hydra_ensembles._utils import require
        from hydra_ensembles.errors import MissingExtraError

        warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # hides its retries; we report the failure once
        try:
            for library in ("typer", "rich", "yaml"):
                require(library, extra="cli")
            loaded = require("hydra_ensembles.cli.main", extra="cli")
            _on_interrupt(signal.default_int_handler, instead_of=_end)
            loaded.run_command(name, options)
        except MissingExtraError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        _on_interrupt(signal.default_int_handler, instead_of=_end)


def _on_interrupt(handler: Any, instead_of: Any) -> None:
    """Set the handler of Ctrl-C, unless a shell or a caller has set another than `instead_of`."""
    if signal.getsignal(signal.SIGINT) is instead_of:
        signal.signal(signal.SIGINT, handler)


def _end(*_: object) -> None:
    """End at once, while the package loads: PyTorch may abort if its import is interrupted."""
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(130)


def answer() -> None:
    """Answer and exit if the package is not needed; return if a command is to run."""
    table = read_table()
    asked = list[str]()
    if table is not None:
        try:
            with _no_traceback():
                make_app(table, lambda name, _: asked.append(name))(prog_name=NAME)
        except SystemExit as end:
            if end.code or not asked:  # an error, or only help was requested
                raise
        _on_interrupt(_end, instead_of=signal.default_int_handler)


def read_table() -> dict[str, Any] | None:
    """Read the table of commands; None if libraries of the command line are missing, which the package then names."""
    spec = importlib.util.find_spec("hydra_ensembles")  # does not import it
    if importlib.util.find_spec("typer") is None or spec is None or not spec.submodule_search_locations:
        return None
    table: dict[str, Any] = json.loads(Path(spec.submodule_search_locations[0], "cli", "commands.json").read_bytes())
    return table


def make_app(table: dict[str, Any], run: Callable[[str, dict[str, Any]], None]) -> Any:
    """Build the command line from a table; calls `run` with the name and the options of the requested command."""
    import typer

    def print_version(wanted: bool) -> None:
        if wanted:
            print(f"hydra-ensembles {table['version']}")
            raise typer.Exit

    def root(
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
        version: Annotated[
            bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version.")
        ] = False,
    ) -> None:
        """Transformer classifiers that know when not to answer: make, evaluate, compare and use them.

        `hydra-ensembles demo` shows how it works in minutes; `hydra-ensembles COMMAND --help` has examples.
        """

    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(root)
    for entry in table["commands"]:
        app.command()(_stub(entry, partial(run, entry["name"])))
    return app


def _stub(described: dict[str, Any], run: Callable[[dict[str, Any]], None]) -> Any:
    """A function with the described signature, for typer; it passes its options to `run`."""
    import typer

    def stub(**options: Any) -> None:
        run({name: _plain(value) for name, value in options.items()})

    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [*map(_parameter, described["parameters"]), context]
    stub.__name__, stub.__doc__ = described["name"], described["help"]
    stub.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    stub.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return stub


def _plain(value: Any) -> Any:
    """Convert an enum member, or a list of them, to plain values."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _parameter(spec: dict[str, Any]) -> inspect.Parameter:
    import typer

    kind: Any = Enum("Choice", {name: name for name in spec["choices"]}) if "choices" in spec else TYPES[spec["type"]]
    kind = list[kind] if spec.get("several") else kind
    default = spec.get("default", inspect.Parameter.empty)
    make: Any = typer.Option if "flags" in spec else typer.Argument
    more = {name: spec[name] for name in ("metavar", "min", "show_default") if name in spec}
    info = make(*spec.get("flags", ()), help=spec["help"], **more)
    return inspect.Parameter(
        spec["name"],
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind | None if default is None else kind, info],
    )


if __name__ == "__main__":
    main()
