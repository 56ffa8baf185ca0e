"""Opening a checkpoint that is not trusted: nothing is executed, everything is checked, errors say where."""

import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigError
from ..schema import from_plain
from . import strict_json
from .checksum import refuse_pointer, verify
from .contents import CONFIG, FORMAT_VERSION, TOKENIZER, WEIGHTS, Record
from .hub import locate
from .weights import read_weights

T = TypeVar("T")

RESULT_OF_A_BUILD = "ensemble"  # where `build` leaves it in its run folder
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose `config.json` has been read; weights and tokenizer are read when asked for.

    Attributes:
        folder: Where the files lie.
        record: What `config.json` says.
    """

    folder: Path
    record: Record

    def read(self, cls: type[T], data: Any, path: str, *, complete: bool = False) -> T:
        """Build a dataclass from a part of `config.json`; `path` names that part in errors.

        What the logits depend on is read with `complete`: a lost field must not turn into its default.
        """
        try:
            return from_plain(cls, data, path, complete=complete)
        except ConfigError as error:
            raise CheckpointError(f"{self.folder / CONFIG}: {error}") from error

    def tokenizer(self) -> str | None:
        """Content of `tokenizer.json`, or None when the model was saved without."""
        if TOKENIZER not in self.record.files:
            return None
        path = _regular_file(self.folder, TOKENIZER)
        with _readable(path):
            refuse_pointer(path)
            verify(path, self.record.files[TOKENIZER])
            return strict_json.parse_foreign(_read_bytes(path), str(path))

    def tensors(
        self,
        build: Callable[[], nn.Module],
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        at_least: int = 0,
    ) -> dict[str, Tensor]:
        """The parameters of the model that `build` makes; see `read_weights`."""
        path = _regular_file(self.folder, WEIGHTS)
        with _readable(path):
            refuse_pointer(path)
            return read_weights(path, self.record.files[WEIGHTS], build, device, dtype, at_least)


def open_checkpoint(source: str | Path, kind: str, *, revision: str | None = None, token: str | None = None) -> Stored:
    """Open the checkpoint of a model of the given kind.

    Args:
        source: Folder, or hub id of the form `owner/name`.
        kind: The kind of model expected.
        revision: Branch, tag or commit on the hub.
        token: Access token for private models on the hub; None for the one logged in with.
    """
    folder = locate(source, revision, token)
    path = _regular_file(folder, CONFIG)
    with _readable(path):
        data = strict_json.parse(_read_bytes(path), str(path))
    stored = Stored(folder, _read_record(data, path))
    _check_files(stored)
    if stored.record.kind != kind:
        raise CheckpointError(
            f"{path} describes a model of kind {stored.record.kind!r}, expected {kind!r}; "
            "load it with the class that saved it"
        )
    return stored


def _read_record(data: Any, path: Path) -> Record:
    if not isinstance(data, dict) or data.get("format") != "hydra_ensembles":
        raise CheckpointError(
            f'{path} was not written by hydra_ensembles (it has no "format": "hydra_ensembles"); load the model '
            "with the library it comes from and give it to hydra_ensembles.convert"
        )
    version = data.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {_short(version)}, this hydra_ensembles reads version {FORMAT_VERSION}; "
            "for a newer one, update hydra_ensembles"
        )
    try:
        return from_plain(Record, data, "config")
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _check_files(stored: Stored) -> None:
    """Only our own names, each with a checksum, and every one of them there."""
    path = stored.folder / CONFIG
    files = stored.record.files
    unknown = sorted(files.keys() - {WEIGHTS, TOKENIZER})
    if unknown:
        raise CheckpointError(
            f"{path} lists the files {_short(unknown)}; only {WEIGHTS} and {TOKENIZER} are read, from the folder itself"
        )
    if WEIGHTS not in files:
        raise CheckpointError(f"{path} gives no checksum for {WEIGHTS}; the file is incomplete, save the model again")
    for name, checksum in files.items():
        if not re.fullmatch("[0-9a-f]{64}", checksum):
            raise CheckpointError(
                f"{path}: config.files.{name} must be a SHA-256 in hexadecimal, got {_short(checksum)}"
            )
        _regular_file(stored.folder, name)


def _regular_file(folder: Path, name: str) -> Path:
    """The file of this name in `folder`, provided it is a plain file that lies in there.

    In the cache of the hub client, snapshots are links into the `blobs` folders beside them; these count as
    inside.
    """
    path = folder / name
    try:
        real = path.resolve(strict=True)
        root = folder.resolve(strict=True)
        mode = real.stat().st_mode
    except (OSError, RuntimeError) as error:  # missing, or links in a circle
        raise CheckpointError(_missing(folder, name)) from error
    roots = [root]
    if root.parent.name == "snapshots":
        roots += [root.parents[1] / "blobs", *(above / "blobs" for above in root.parents[2:3])]
    if not any(real.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(
            f"{path} is a link to {real}, outside of its folder; copy the file into the folder to load it"
        )
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is not a plain file; a checkpoint has nothing else")
    return path


def _missing(folder: Path, name: str) -> str:
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    pickles = [other for other in found if other.endswith(PICKLES)]
    if name == WEIGHTS and pickles:
        return (
            f"{folder} has no {name}, but {pickles[:5]}: pickles can run code and are never read. Load the model with "
            "the library it comes from, convert it, and save it with save_pretrained"
        )
    if name == CONFIG and (folder / RESULT_OF_A_BUILD / CONFIG).is_file():
        return (
            f"{folder} has no {name}; it is the run folder of a build, whose ensemble lies in "
            f"{folder / RESULT_OF_A_BUILD}: load it from there"
        )
    return (
        f"{folder} has no {name} (it has {found[:8] or 'no files'}); give the folder that save_pretrained wrote, "
        "or save or download the model again"
    )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what the operating system says about an unreadable file into an error of ours."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); check its permissions and the disk") from error


def _read_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(strict_json.MAX_BYTES + 1)  # one more than accepted, so that the limit is noticed


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
