"""Settings in YAML: reading a file, checking its keys, merging it with flags, writing what was resolved."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._utils import require, write_atomically
from ..errors import ConfigError
from .nearest import did_you_mean

_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: The file is missing, not YAML, or holds no mapping.
    """
    yaml = require("yaml", extra="cli")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the config file {path} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}; it must hold settings, a line 'name: value' each")
    return {str(key): _with_numbers(value) for key, value in content.items()}


def merge_settings(config: Path | None, flags: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """The settings of a YAML file with those given as flags put over them; flags that are None were not given.

    A flag that is a mapping is put over the mapping of the file key by key.
    """
    settings = {} if config is None else read_yaml(config)
    if config is not None:
        require_known(settings, known, str(config))
    for name, value in flags.items():
        if value is None:
            continue
        before = settings.get(name)
        settings[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return settings


def require_known(settings: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Refuse settings that do not exist, naming the nearest one that does."""
    known = sorted(known)
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
            raise ConfigError(f"{where} has the unknown setting {name!r}{hint}")


def read_pairs(pairs: Sequence[str] | None, flag: str) -> dict[str, Any] | None:
    """The settings in `name=value` arguments; values are read as YAML, so `64` is a number."""
    if not pairs:
        return None
    yaml = require("yaml", extra="cli")
    found: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise ConfigError(f"{flag} takes name=value, got {pair!r}")
        try:
            found[name] = _with_numbers(yaml.safe_load(value))
        except yaml.YAMLError as error:
            raise ConfigError(f"{flag} {pair!r}: the value is not valid YAML ({error})") from error
    return found


def settings_given(arguments: Mapping[str, Any], pairs: Mapping[str, str], leave_out: Iterable[str]) -> dict[str, Any]:
    """The settings among the arguments of a command, whose parameters are called like them.

    Args:
        arguments: All arguments.
        pairs: Those that hold `name=value` texts, with the setting they make up: `{"column": "columns"}`.
        leave_out: Those that are no settings.
    """
    settings = {name: value for name, value in arguments.items() if name not in {*pairs, *leave_out}}
    for name, setting in pairs.items():
        settings[setting] = read_pairs(arguments[name], f"--{name.replace('_', '-')}")
    return settings


def write_yaml(path: Path, settings: Mapping[str, Any], heading: str) -> None:
    """Write settings as YAML, with a comment above."""
    text = require("yaml", extra="cli").safe_dump(dict(settings), sort_keys=False, allow_unicode=True, width=100)
    write_atomically(path, f"# {heading}\n{text}".encode())


def _with_numbers(value: Any) -> Any:
    """YAML takes `1e-4` for text, because it has no point; whoever writes it means a number."""
    if isinstance(value, dict):
        return {str(key): _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) else value
