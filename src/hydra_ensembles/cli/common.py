"""Shared by all commands: options, settings from files, models and data by name, and what is printed."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, DataError

if TYPE_CHECKING:
    from ..data.dataset import AnyDataset
    from ..model.ensemble import Answering

HUB = "hub:"
LIMIT_SEED = 0  # `--limit` always keeps the same samples
BATCH = 64

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a converted, built or calibrated model.")]
Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Folders of trainings of one model.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="New folder for the model.")]
File = Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1; auto takes a GPU if there is one.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples per batch.")]
Limit = Annotated[int | None, typer.Option(min=2, help="At most so many samples of each set, always the same.")]
Column = Annotated[list[str] | None, typer.Option(help="Column of a table, as text=review.", metavar="ROLE=NAME")]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file of settings; options override it.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Any setting, as recipe.epochs=3.", metavar="NAME=VALUE")
]
Recipe = Annotated[str | None, typer.Option(help="How to train: name of a recipe; see --set for its settings.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]


# --- settings --------------------------------------------------------------------------------------------------------


def settings_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a command that are settings, by name."""
    others = ("column", "config", "changes", "quiet", "dry_run", "models")
    return {name: value for name, value in arguments.items() if name not in others}


def read_settings(
    kinds: Sequence[type], config: Path | None, given: Mapping[str, Any], changes: Iterable[str] | None
) -> list[Any]:
    """Settings of several classes from one YAML file, options (None if not given) and `--set`: the last one wins."""
    from ..settings import from_plain, nearest, to_plain
    from ..training.recipe import read_recipe

    plain: dict[str, Any] = {} if config is None else read_yaml(config) or {}
    if not isinstance(plain, dict):
        raise ConfigError(f"{config} holds a {type(plain).__name__}; it must hold settings as 'name: value' lines")
    plain |= {name: to_plain(value) for name, value in given.items() if value not in (None, [], (), {})}
    for change in changes or ():
        path, separator, value = change.partition("=")
        if not separator:
            raise ConfigError(f"a setting is written name=value, got {change!r}")
        *outer, last = path.split(".")
        place = plain
        for part in outer:  # a recipe that is named so far becomes settings based on that preset
            earlier = place.get(part) or {}
            place[part] = dict(earlier) if isinstance(earlier, Mapping) else {"preset": earlier}
            place = place[part]
        place[last] = parse_yaml(value, change)
    if "recipe" in plain:
        plain["recipe"] = read_recipe(plain["recipe"])
    known = {kind: {field.name for field in fields(kind)} for kind in kinds}
    names = set[str]().union(*known.values())
    for name in plain.keys() - names:
        raise ConfigError(f"there is no setting {name!r}; did you mean {' or '.join(nearest(name, names) or names)}?")
    return [from_plain(kind, {name: plain[name] for name in known[kind] & plain.keys()}, "settings") for kind in kinds]


def read_yaml(path: Path) -> Any:
    """Read a YAML file in which `1e-4` is a number; YAML 1.1 requires a decimal point."""
    from ..files import expanded, read_file

    return parse_yaml(read_file(expanded(path)).decode(), str(path))


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML; `where` is named in the error."""
    import re

    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    number = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("+-0123456789"))
    try:
        return yaml.load(text, loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from error


def named_values(pairs: Iterable[str] | None) -> dict[str, Any]:
    """Values by name, from `NAME=VALUE`."""
    return {name: parse_yaml(value, name) for name, _, value in (pair.partition("=") for pair in pairs or ())}


def named_columns(pairs: Iterable[str] | None) -> dict[str, str]:
    """The columns of a table by their role, from `ROLE=NAME`."""
    return {role: name for role, _, name in (pair.partition("=") for pair in pairs or ())}


# --- models ----------------------------------------------------------------------------------------------------------


def load_model(name: str, device: str = "auto", classifies: bool = True) -> Any:
    """Load a folder (or hub id) of ours onto a device; with `classifies` it must be a classifier."""
    from ..model.dual_encoder import load, require_classifier

    model = load(name, device=place_of(device))
    return require_classifier(model, f"{name}: this command") if classifies else model


def place_of(device: str) -> Any:
    """The device of an option; `auto` is a GPU if there is one."""
    import torch

    from .._utils import require_device

    return require_device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)


def new_folder(output: Path) -> Path:
    """The output folder, which must be new or empty."""
    from ..files import expanded

    folder = expanded(output)
    if folder.exists() and (not folder.is_dir() or any(not entry.name.startswith(".") for entry in folder.iterdir())):
        raise ConfigError(f"output is {folder}, where something is already; name a new folder")
    return folder


def next_commands(folder: Path, *commands: str) -> str:
    """Suggested commands for a model in this folder; each says by --help what else it needs."""
    place = shlex.quote(str(folder))
    return "Next:\n" + "\n".join(f"  hydra-ensembles {name} {place}" for name in commands)


# --- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """How the data of a command are read."""

    model: "Answering"
    columns: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None
    batch_size: int = BATCH

    def data(self, spec: str, labelled: bool = True) -> "AnyDataset":
        """A data set by its name, checked against the model."""
        from ..data.dataset import subset
        from ..data.loading import Columns, load
        from ..settings import from_plain

        path, split = split_path(spec)
        name, config = str(path), None
        if path is None:
            kind, *parts = spec.split(":")
            if f"{kind}:" != HUB or not 1 <= len(parts) <= 3:
                raise DataError(f"no data {spec!r}; give a path, or hub:NAME[:CONFIG][:SPLIT]")
            name, config = HUB + parts[0], parts[1] if len(parts) == 3 else None
            split = parts[-1] if len(parts) > 1 else None
        options: dict[str, Any] = {"labels": "required" if labelled else "optional", "config": config}
        data = load(name, split, columns=from_plain(Columns, self.columns, "columns"), **options)
        if data.kind != self.model.kind:
            raise DataError(f"{data.name} holds {data.kind}s, but the model reads {self.model.kind}s")
        if self.limit is None or len(data) <= self.limit:
            return data
        return subset(data, self.limit, LIMIT_SEED, stratified=labelled)

    def batches(self, spec: str, labelled: bool = True) -> Any:
        """The batches of a data set, prepared as the model knows them."""
        from ..data.dataset import batches

        return batches(self.data(spec, labelled), preprocessing_of(self.model), self.batch_size)

    def sources(self, specs: Iterable[str]) -> Any:
        """Batches of OOD data given as `[NAME=]DATA`: of one source, or by name."""
        named = {name: self.batches(spec, labelled=False) for name, spec in map(split_name, specs)}
        return named if len(named) > 1 else next(iter(named.values()), None)


def split_path(spec: str) -> tuple[Path | None, str | None]:
    """The existing file or folder of a data spec, and the split after it; None for both if there is none."""
    from ..files import expanded

    before, _, last = spec.rpartition(":")
    for name, split in ((spec, None), (before, last)):
        if name and not spec.startswith(HUB) and expanded(name).exists():
            return expanded(name), split
    return None, None


def split_name(spec: str) -> tuple[str, str]:
    """Name and data of `[NAME=]DATA`; without a name it is the data spec. A path may contain `=`."""
    name, separator, data = spec.partition("=")
    return (name, data) if separator and split_path(spec)[0] is None else (spec, spec)


def preprocessing_of(model: "Answering") -> Any:
    """The preprocessing of raw inputs; raises if the model has none."""
    if model.metadata.preprocessing is None:
        missing = "tokenizer" if model.kind == "text" else "image processor"
        raise DataError(f"the model has no preprocessing, so it reads no files; convert it with its {missing}")
    return model.preprocess
