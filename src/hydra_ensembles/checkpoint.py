"""Saved models: `config.json`, `model.safetensors` or parts of it, for text `tokenizer.json`, and a model card.

This module knows no model class: a model gives plain data and tensors (`Contents`) and gets them back, so all kinds of
models share the same files and checks.

`config.json` holds the SHA-256 of the other files and of its own content. A save writes a folder beside them, flushes
it to the disk, and commits by renaming it to `.saved`; then its files move up. A file is read from `.saved` if it is
there, so that a reader gets the earlier model or the new one, complete, also after a kill at any time.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import huggingface_hub
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import files
from ._utils import __version__, require_device
from .digest import digest
from .errors import CheckpointError

CONFIG, WEIGHTS, TOKENIZER, CARD = "config.json", "model.safetensors", "tokenizer.json", "README.md"
SHARDS = "model-*-of-*.safetensors"  # instead of it, if the weights are larger than this number of bytes:
SHARD_SIZE = 5_000_000_000
FORMAT, FORMAT_VERSION = "hydra_ensembles", 3
SAVED = ".saved"  # folder of a save that is complete, until its files have moved up
ABANDONED = 3600  # seconds after which unfinished files are no save that another process still writes
DIGEST = "digest"  # key in config.json of the digest of its other content

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
STAGES = "stages"  # folder of the stages of a cascade
IDENTITY, RESULT = "run.json", "ensemble"  # in a run folder: its identity, and the finished model
HUB = "hub:"  # prefix of a hub id of a model or a data set
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class Contents:
    """A model as data: configuration and metadata for JSON, tensors by name, and the text of its model card.

    The text of a tokenizer, `metadata…["tokenizer"]`, is stored as a file of its own; a model has at most one. `folder`
    is where it was read.
    """

    kind: str
    model: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    card: str = ""
    folder: Path = Path()

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with the prefix, without it."""
        return {name.removeprefix(prefix): one for name, one in self.tensors.items() if name.startswith(prefix)}


def placed(
    tensors: Mapping[str, Tensor], device: str | torch.device | None, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Copies of tensors on a device and of a dtype; None is the CPU, or the stored dtype; "meta" takes only shapes."""
    target = torch.device("meta" if str(device) == "meta" else "cpu")
    target = target if device is None or target.type == "meta" else require_device(device)
    return {name: tensor.to(target, dtype, copy=True) for name, tensor in tensors.items()}


class Saved(ABC):
    """Saving and loading; a model says what is stored and how it is built from that."""

    _kind: str  # of its checkpoints

    @abstractmethod
    def _contents(self, name: str) -> Contents:
        """Everything that is saved; `name` is the model's name in the model card."""

    @classmethod
    @abstractmethod
    def _restored(cls, contents: Contents, device: str | torch.device | None, dtype: torch.dtype | None) -> Self:
        """Build the model from what was saved."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json`, `model.safetensors`, for text `tokenizer.json`, and a model card into a folder.

        Weights of more than 5 GB are written in parts, `model-00001-of-00002.safetensors` and so on.
        An earlier save is replaced; if the process is killed, the folder holds the earlier or the new model, complete.
        `hf upload owner/name folder` publishes it.
        """
        save_checkpoint(folder, self._contents(files.expanded(folder).resolve().name))

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        **hub: Any,
    ) -> Self:
        """Load what `save_pretrained` wrote, like `he.load`, but refuse models of another class."""
        return cls._restored(load_checkpoint(source, (cls._kind,), **hub), device, dtype)


# --- writing ---------------------------------------------------------------------------------------------------------


def save_checkpoint(folder: str | Path, contents: Contents) -> None:
    """Write a checkpoint into `folder`, replacing an earlier one, all at once or not at all."""
    folder = files.expanded(folder)
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _move_up(folder)
        _require_own(folder)
        for leftover in folder.glob(".saving.*.tmp"):
            with suppress(FileNotFoundError):  # another process has just finished its save
                if time.time() - leftover.stat().st_mtime > ABANDONED:
                    files.remove(leftover)
        staging = folder / f".saving.{secrets.token_hex(4)}.tmp"
        staging.mkdir()
        try:
            _write(staging, contents)
            for path in (*staging.iterdir(), staging):
                _flush(path)
            while True:
                try:
                    staging.rename(folder / SAVED)  # the commit: from here on readers get the new model
                    break
                except OSError as error:  # the save of another process is there, or was until now
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) and not (folder / SAVED).exists():
                        raise
                    _move_up(folder)
        except BaseException:
            files.remove(staging)
            raise
        _flush(folder)
        _move_up(folder)
        kept = files.read_object(folder / CONFIG)["files"]
        for leftover in (folder / WEIGHTS, *folder.glob(SHARDS)):  # of an earlier save with another number of parts
            if leftover.name not in kept:
                leftover.unlink(missing_ok=True)


def _require_own(folder: Path) -> None:
    """Refuse a folder with files that a save would replace, unless an earlier save wrote them."""
    theirs = [name for name in (CONFIG, WEIGHTS, TOKENIZER, CARD) if (folder / name).exists()]
    if not theirs:
        return
    try:
        ours = files.read_object(folder / CONFIG).get("format") == FORMAT
    except (OSError, ValueError):
        ours = False
    if not ours:
        raise CheckpointError(f"{folder} has {', '.join(theirs)} of something else, not replaced; give a new folder")


def _move_up(folder: Path) -> None:
    """Finish a save that was committed, perhaps by a process that was killed, or together with another one."""
    saved = folder / SAVED
    if saved.is_dir():
        paths = list[Path]()
        with suppress(FileNotFoundError):  # another process was faster, here and below
            paths = sorted(saved.iterdir())
        for path in paths:
            with suppress(FileNotFoundError):
                os.replace(path, folder / path.name)
        with suppress(OSError):  # the next save of another process is there
            saved.rmdir()
        _flush(folder)


def _write(folder: Path, contents: Contents) -> None:
    """Write all files into an empty folder."""
    tensors, storages = dict[str, Tensor](), set[int]()
    for name, tensor in contents.tensors.items():
        plain = tensor.detach().cpu().contiguous()
        shared = plain.untyped_storage().data_ptr() in storages  # tied weights: the format stores no aliases
        tensors[name] = plain.clone() if shared else plain
        storages.add(tensors[name].untyped_storage().data_ptr())
    parts = huggingface_hub.split_torch_state_dict_into_shards(tensors, max_shard_size=SHARD_SIZE).filename_to_tensors
    for part, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / part, metadata={"format": "pt"})
    metadata, tokenizers = _with_tokenizer(contents.metadata, TOKENIZER)
    if texts := [text for text in tokenizers if text]:
        (folder / TOKENIZER).write_text(texts[0], encoding="utf-8")
    digests = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
    record: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION, "library_version": __version__}
    record |= {"kind": contents.kind, "model": contents.model, "metadata": metadata, "files": digests}
    files.write_json(folder / CONFIG, {**record, DIGEST: digest(record)})
    (folder / CARD).write_bytes(contents.card.encode("utf-8", errors="replace"))  # a folder may have any name
    for part in parts:
        shutil.copymode(folder / CONFIG, folder / part)  # safetensors creates the file without access for others


def _with_tokenizer(plain: Any, text: str) -> tuple[Any, list[str]]:
    """Plain data with `text` in place of every tokenizer that is not empty, and the tokenizers."""
    if not isinstance(plain, Mapping):
        return plain, []
    changed, found = {}, list[str]()
    for key, value in plain.items():
        if key == "tokenizer" and isinstance(value, str):
            changed[key], inner = (text if value else ""), [value]
        else:
            changed[key], inner = _with_tokenizer(value, text)
        found += inner
    return changed, found


def _flush(path: Path) -> None:
    """Write a file, or the list of files in a folder, to the disk."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # folders on some network disks cannot be flushed
            os.fsync(handle)
    finally:
        os.close(handle)


# --- reading ---------------------------------------------------------------------------------------------------------


def locate(source: str | Path, **hub: Any) -> Path:
    """The folder that contains a checkpoint: `source` itself, or the hub's cache after downloading its files.

    Of a build's folder it is the finished ensemble. `owner/name` is a hub id unless there is such a folder.
    """
    folder = files.expanded(source)
    if isinstance(source, str) and source.startswith(HUB):
        source, folder = source.removeprefix(HUB), Path(source)
    if folder.is_dir():
        is_run = (folder / IDENTITY).is_file() and not (folder / CONFIG).is_file()
        return folder / RESULT if is_run and (folder / RESULT / CONFIG).is_file() else folder
    if isinstance(source, Path) or folder.exists() or not HUB_ID.fullmatch(source):
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"{source} {problem}; give the folder that save_pretrained wrote, or 'hub:owner/name'")
    names = [CONFIG, WEIGHTS, SHARDS, TOKENIZER, CARD, f"{STAGES}/*"]
    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=names, **hub))
    except Exception as error:  # the hub client passes on any error of its HTTP library
        wanted = f"{source!r} is no folder here, and its revision {hub.get('revision') or 'main'!r} is not on the hub"
        advice = "check the name, the connection and, for a private model, the token"
        raise CheckpointError(f"{wanted} or cannot be read ({error}); {advice}") from error


def load_checkpoint(source: str | Path, kinds: Collection[str], **hub: Any) -> Contents:
    """Read the checkpoint of a model of one of these kinds, every file compared with its digest.

    The tensors may still be memory-mapped: `placed` copies them. `hub` are arguments of the hub's download.
    """
    folder = locate(source, **hub)
    with _reading(folder, CONFIG) as path:
        record = files.read_object(path)
        if record.get("format") != FORMAT:
            raise CheckpointError("it was not written by hydra_ensembles; convert the model: hydra_ensembles.convert")
        if (version := record.get("format_version")) != FORMAT_VERSION:
            problem = f"it has the format version {version}, and this version reads {FORMAT_VERSION}"
            raise CheckpointError(
                f"{problem}: convert and calibrate the original again, or use the version that wrote it"
            )
        if record.pop(DIGEST, None) != digest(record):
            raise CheckpointError("its content was changed; change models in Python (with_metadata), and save again")
        if record["kind"] not in kinds:
            raise CheckpointError(f"a model of kind {record['kind']!r}, not {' or '.join(kinds)}; he.load reads any")
    text = ""
    if TOKENIZER in record["files"]:
        with _reading(folder, TOKENIZER) as path:
            _verify(path, record)
            text = path.read_text(encoding="utf-8")
    tensors = dict[str, Tensor]()
    for name in sorted(record["files"].keys() - {TOKENIZER}):
        with _reading(folder, name) as path:
            _verify(path, record)
            tensors |= load_file(path)
    metadata = _with_tokenizer(record["metadata"], text)[0]
    return Contents(record["kind"], record["model"], metadata, tensors, folder=folder)


@contextmanager
def _reading(folder: Path, name: str) -> Iterator[Path]:
    """The path of one of the files; any error about it is raised as a `CheckpointError` that names it."""
    path = folder / SAVED / name if (folder / SAVED / name).exists() else folder / name
    try:
        if not path.exists():
            raise CheckpointError(_missing(folder, name))
        yield path
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); check its permissions and the disk") from error
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error


def _verify(path: Path, record: Mapping[str, Any]) -> None:
    if _checksum(path) != record["files"][path.name]:
        raise CheckpointError(
            f"its SHA-256 is not the one in {CONFIG}; save or download the model again (git lfs pull)"
        )


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _missing(folder: Path, name: str) -> str:
    """Error message for a missing file."""
    names = sorted(path.name for path in folder.iterdir())
    remedy = "give a folder that save_pretrained wrote"
    if name == CONFIG and (inside := [one for one in names if (folder / one / CONFIG).is_file()]):
        remedy += f", one of {', '.join(inside)}"
    if name not in (CONFIG, TOKENIZER) and any(file.endswith(PICKLES) for file in names):
        remedy = "pickles can run code and are never read: load the model with its own library, convert and save it"
    return f"there is no {name} (the folder has {names[:8] or 'no files'}); {remedy}"
