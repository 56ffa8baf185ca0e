"""Shared by all commands: options derived from settings, settings files, and exit codes.

A dataclass parameter of a command becomes one option per field, with the field's type and default; the help comes from
`option`, or from the first clause about it in the docstring. `--config FILE` sets the same fields from YAML,
`--set recipe.epochs=3` a single one, also a nested one. Options override the file; `--set` overrides both.

Exit codes: 0, 2 (wrong input), 130 (interrupted), 1 (internal error). An error is printed in one line, with the
library's message; `--debug`, before or after the name of the command, adds the traceback.
"""

import functools
import inspect
import io
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, field, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import torch
import typer
import yaml
from rich.console import Console, RenderableType

from ..errors import CheckpointError, ConfigError, ConversionError, HydraError
from ..files import expanded, parse_json, read_file, write_atomically
from ..schema import nearest
from ..training.recipe import read_recipe

FLAGS: Mapping[str, tuple[str, ...]] = {  # options with a name other than their setting's, or with a short form
    "output": ("--output", "-o"),
    "members": ("--members", "-m"),
    "prune": ("--prune", "-p"),
    "model_options": ("--model-option",),
    "columns": ("--column",),
    "scores": ("--also-score",),
}
HEAD = 8192  # bytes at the start of a file that show whether it is text, as in git
WIDE = 240  # width, in characters, of a terminal table written to a file

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file of settings; options override it.", metavar="FILE")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Any setting, e.g. recipe.epochs=3.", metavar="NAME=VALUE")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]
NamedColumns = Annotated[
    list[str] | None, typer.Option(help="Column of a table, e.g. text=sentence.", metavar="ROLE=NAME")
]


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML in which `1e-4` is a number (YAML 1.1 requires a decimal point).

    Duplicate keys raise, where plain YAML would silently use the last one. `<<` may repeat, and keys that it merges in
    may be overridden.
    """

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Compose a mapping; raise on duplicate keys."""
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.composer.ComposerError(None, None, f"{twice!r} occurs twice", node.start_mark)
        return node


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    """A whole number; raise where plain YAML would silently use base 8 (`010`) or base 60 (`1:30`)."""
    if re.search(r"^[-+]?0[\d_]|:", node.value):
        problem = f"{node.value!r} is no decimal number; write it without leading zeros or colons, or as text in quotes"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return int(loader.construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _whole)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("+-0123456789")
)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command, as described at the top of this file; the command line is built from its `table`."""
    hints = get_type_hints(function, include_extras=True)
    kinds: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    entries = list[dict[str, Any]]()
    for name, parameter in inspect.signature(function).parameters.items():
        entries += _options(kinds[name]) if name in kinds else [_entry(name, hints[name], parameter.default)]
    if kinds:
        entries += [_entry("config", Config), _entry("changes", Changes)]
    entries.append(_entry("debug", Debug, False))

    @functools.wraps(function)
    def guarded(*, context: typer.Context, debug: bool, **options: Any) -> None:
        for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "replace")):  # a locale could garble text
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors=errors)
        try:
            if kinds:
                options = read_settings(kinds, options, options.pop("config"), options.pop("changes") or ())
            function(**options)
        except BaseException as error:
            code = report_failure(error, debug or bool(context.find_root().params.get("debug")))
            if code is None:
                raise
            raise typer.Exit(code) from error

    help = inspect.cleandoc(function.__doc__ or "").replace("Examples:", "\b\nExamples:")  # typer must not wrap them
    guarded.table = {"name": function.__name__, "help": help, "parameters": entries}  # type: ignore[attr-defined]
    return guarded


def _entry(name: str, annotation: Any, default: Any = None) -> dict[str, Any]:
    """A parameter as plain data: everything that help and completion need."""
    hint, info = get_args(annotation)
    kind = _without_none(hint)
    several = get_origin(kind) is list
    kind = get_args(kind)[0] if several else kind
    entry = {"name": name, "help": info.help}
    if isinstance(info, typer.models.OptionInfo):
        entry["flags"] = [flag for flag in (info.default, *(info.param_decls or ())) if isinstance(flag, str)]
    entry |= {"choices": list(get_args(kind))} if get_origin(kind) is Literal else {"type": kind.__name__.lower()}
    entry |= {"several": True} if several else {}
    if default is not inspect.Parameter.empty:
        entry["default"] = str(default) if isinstance(default, Path) else default
    usual = {"metavar": None, "min": None, "show_default": True}
    return entry | {key: getattr(info, key) for key in usual if getattr(info, key) != usual[key]}


def _options(settings: type) -> Iterator[dict[str, Any]]:
    """One parameter per field of a dataclass; None means that the option was not given."""
    hints = get_type_hints(settings)
    help = _help(settings)
    for setting in fields(settings):
        name, metavar = setting.name, None
        kind = _without_none(hints[name])
        if name == "model":
            yield _entry(name, Annotated[str | None, typer.Argument(metavar="MODEL", help=help[name])])
            continue
        flags = FLAGS.get(name, (f"--{name.replace('_', '-')}",))
        origin = get_origin(kind) or kind
        if is_dataclass(kind):  # a recipe, given by preset name
            kind = str
        elif origin in (Mapping, tuple):
            kind = list[str]
        elif _is_count_or_share(kind):  # keep the text: the decimal point marks a share
            kind, metavar = str, "NUMBER"
        elif _is_choice_or_none(hints[name]) and setting.default is not None:
            kind = Literal[*get_args(kind), "none"]
        elif origin is bool and setting.default is not False:
            flags = (f"{flags[0]}/--no-{flags[0][2:]}",)
        shown = setting.default not in (MISSING, None, False, "", ()) and str(setting.default)
        info = typer.Option(*flags, metavar=metavar, show_default=shown, help=help[name])
        yield _entry(name, Annotated[kind | None, info])


def option(default: Any, help: str) -> Any:
    """A settings field with the help text of its option; `...` as default makes it required."""
    if default is ...:
        return field(kw_only=True, metadata={"help": help})
    keywords: Any = {"default_factory": dict} if default == {} else {"default": default}
    return field(**keywords, metadata={"help": help})


def _is_count_or_share(kind: Any) -> bool:
    return set(get_args(kind)) == {int, float}


def _is_choice_or_none(hint: Any) -> bool:
    kind = _without_none(hint)
    return kind != hint and get_origin(kind) is Literal and "none" not in get_args(kind)


def _without_none(hint: Any) -> Any:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return kinds[0] if NoneType in get_args(hint) and len(kinds) == 1 else hint


def _help(settings: type) -> dict[str, str]:
    """Help of each field: from its metadata, else the first clause in the class docstring, which `-OO` removes."""
    _, _, attributes = inspect.cleandoc(settings.__doc__ or "").partition("Attributes:\n")
    sections = re.findall(r"^    ([\w, ]+): (.+(?:\n {8}.*)*)", attributes, re.MULTILINE)
    texts = {name: " ".join(text.split()) for names, text in sections for name in names.split(", ")}
    first = {name: re.split(r"[.;:](?: |$)", text)[0].replace("`", "") for name, text in texts.items()}
    own = {setting.name: setting.metadata.get("help") for setting in fields(settings)}
    return dict.fromkeys(own, "") | first | {name: text.removesuffix(".") for name, text in own.items() if text}


def read_settings(
    kinds: Mapping[str, type], options: Mapping[str, Any], config: Path | None, changes: Iterable[str]
) -> dict[str, Any]:
    """Settings by parameter, from a YAML file, options (None if not given) and `--set`; other options unchanged."""
    settings: dict[str, Field[Any]] = {setting.name: setting for kind in kinds.values() for setting in fields(kind)}
    merged = {} if config is None else read_yaml(config) or {}
    if not isinstance(merged, dict):
        raise ConfigError(f"{config} holds a {type(merged).__name__}; it must hold settings as 'name: value' lines")
    others: dict[str, Any] = {}
    for name, value in options.items():
        if name not in settings:
            others[name] = value
        elif value is not None and settings[name].default_factory is dict:
            changes = [*(f"{name}.{pair}" for pair in value), *changes]
        elif value is not None:
            merged[name] = value
    hints = {name: hint for kind in kinds.values() for name, hint in get_type_hints(kind).items()}
    for change in changes:
        assign(merged, change, hints)
    for name in merged.keys() - settings.keys():
        raise ConfigError(f"there is no setting {name!r}{did_you_mean(str(name), settings)}")
    for name, setting in settings.items():
        if name not in merged and setting.default is MISSING and setting.default_factory is MISSING:
            raise ConfigError(f"{name} was not given, and it has no default")
    if "recipe" in settings:
        merged["recipe"] = read_recipe(merged.get("recipe"))
    for parameter, kind in kinds.items():
        names = [setting.name for setting in fields(kind) if setting.name in merged]
        try:
            others[parameter] = kind(**{name: _listed(hints[name], merged[name]) for name in names})
        except ConfigError as error:  # here settings have no class
            raise ConfigError(str(error).replace(f"{kind.__name__}.", "")) from error
    return others


def _listed(hint: Any, value: Any) -> Any:
    """Normalise a tuple setting: accept a single value, None for empty, and comma-separated numbers.

    A number that may be a count or a share arrives as text from an option, and is parsed here; the choice `none` is
    None where that is allowed.
    """
    if value == "none" and _is_choice_or_none(hint):
        return None
    if _is_count_or_share(hint) and isinstance(value, str):
        return parse_yaml(value, value)
    if get_origin(hint) is not tuple:
        return value
    if value is None:
        return ()
    several = value if isinstance(value, list | tuple) else (value,)
    if get_args(hint)[0] not in (int, float):
        return several
    parts = [part for entry in several for part in (entry.split(",") if isinstance(entry, str) else [entry])]
    return [parse_yaml(part, part) if isinstance(part, str) else part for part in parts]


def parse_yaml(text: str | bytes, where: str) -> Any:
    """Parse YAML; `where` is named in the error."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from error


def read_yaml(path: Path) -> Any:
    """Read a YAML file."""
    return parse_yaml(read_file(path), str(path))


def assign(settings: dict[str, Any], change: str, hints: Mapping[str, Any]) -> None:
    """Set `name.name=value` in nested settings; a preset name becomes settings based on that preset.

    `hints` are the types of the settings: a text is taken literally (`null`, or no text, is None if allowed), all else
    is YAML.
    """
    path, separator, value = change.partition("=")
    *outer, name = path.split(".")
    if not separator or not name:
        given = change.removeprefix("columns.")  # as `--column` has it
        raise ConfigError(f"a setting is written name=value, got {given!r}")
    for part in outer:
        earlier = settings.get(part) or {}
        settings[part] = dict(earlier) if isinstance(earlier, Mapping) else {"preset": earlier}
        settings = settings[part]
    first, *inner = path.split(".")
    hint = functools.reduce(_type_within, inner, hints.get(first))
    literal = _without_none(hint) is str and (hint is str or value not in ("", "null"))
    settings[name] = value if literal else parse_yaml(value, change)


def _type_within(hint: Any, name: str) -> Any:
    """The type of what a dataclass or a mapping has under this name; None if unknown."""
    kind = _without_none(hint)
    return get_type_hints(kind).get(name) if is_dataclass(kind) else (*get_args(kind), None, None)[1]


def write_settings(path: Path, settings: Mapping[str, Any], command: str) -> None:
    """Write the settings of a run, including defaults, as a file for `--config`."""
    text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True, width=100)
    heading = f"# Resolved settings; repeat the run with: hydra-ensembles {command} --config THIS_FILE\n"
    write_atomically(path, (heading + text).encode())


def did_you_mean(name: str | Path, known: Iterable[str] = ()) -> str:
    """`; did you mean a, b?`; empty if no known name, or file next to the path, is similar."""
    if isinstance(name, Path):
        known = [entry.name for entry in name.parent.iterdir()] if name.parent.is_dir() else []
        name = name.name
    similar = nearest(name, known, most=3)
    return f"; did you mean {', '.join(similar)}?" if similar else ""


def emit_json(result: Any) -> None:
    """Print plain data as JSON."""
    emit(json.dumps(result, indent=1, ensure_ascii=False) + "\n", None)


def format_of(file: Path) -> object:
    """The `format` that a JSON file states; None without one."""
    data = parse_json(read_file(file), str(file), foreign=True)
    return data.get("format") if isinstance(data, dict) else None


def require_replaceable(output: Path | None, kind: str | None = None, inputs: Iterable[str | Path] = ()) -> None:
    """Refuse an output that is an input, or a file of another kind: the `format` of JSON, or None for text.

    A text replaces any file that could be one: not settings in YAML, JSON of this library, or a binary file.
    """
    path = None if output is None else expanded(output)
    if path is None or not path.is_file():
        return
    if any(expanded(one).exists() and path.samefile(expanded(one)) for one in inputs):
        raise ConfigError(f"output is {output}, which is also an input; give another --output")
    found: object = None
    with suppress(CheckpointError):  # it is no JSON
        found = format_of(path)
    is_text = path.suffix.lower() not in (".yaml", ".yml") and not _is_binary(path)
    if found != kind or (kind is None and not is_text):
        raise ConfigError(f"{output} exists, and is not what this command writes; remove it, or give another --output")


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(HEAD)


def emit(content: str | RenderableType, output: Path | None) -> None:
    """Print text or a table, or write it to a file; tables in files are `WIDE` characters wide."""
    if not isinstance(content, str):
        console = Console(width=None if output is None else WIDE)
        with console.capture() as captured:
            console.print(content)
        content = captured.get()
    if output is None:
        print(content, end="", flush=True)
    else:
        write_atomically(output, content.encode("utf-8", "replace"))


def report_failure(error: BaseException, debug: bool) -> int | None:
    """Print an error to standard error; return the exit code, or None if typer or Python should handle it."""
    if isinstance(error, BrokenPipeError):  # the reader of our output, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    ours = isinstance(error, Exception | KeyboardInterrupt)
    if not ours or isinstance(error, typer.Exit | typer.Abort | typer.BadParameter):
        return None
    if debug:
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        notes = getattr(error, "__notes__", ())  # what was kept, and how to resume
        resume = f": {notes[0]}: {shlex.join(['hydra-ensembles', *sys.argv[1:]])}" if notes else ""
        code, message = 130, f"interrupted{resume}"
    elif isinstance(error, HydraError | OSError):
        code, message = 2, f"error: {error}"
    elif isinstance(error, torch.OutOfMemoryError | MemoryError):
        code = 2
        message = f"error: not enough memory ({error}); lower the batch size (serve: --max-batch), or change the device"
    else:
        hint = "" if debug else "; --debug shows where"
        code, message = 1, f"internal error, please report it: {type(error).__name__}: {error}{hint}"
    lines = message.splitlines() if isinstance(error, ConversionError) else [message]  # what, why, and a way out
    print("\n".join(" ".join(line.split()) for line in lines), file=sys.stderr)
    return code
