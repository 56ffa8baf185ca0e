"""Saved models: `config.json`, `model.safetensors`, for text `tokenizer.json`, and a model card.

This module knows no model class: a model passes plain data and tensors (`Contents`) and gets them back (`Stored`), so
all kinds of models share the same files and checks.

Digests tie the files together: `config.json` contains those of the other files and one of its own content. A save is
committed by a single rename, that of `config.json`. Readers get the earlier model before it and the new one after it;
the other new files stay in the folder `.saved-DIGEST` until they are moved up. So a reader always gets one complete
model, without a lock, even during a save or after a kill.
"""

import copy
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from . import files
from ._utils import __version__, require_device
from .errors import CheckpointError, ConfigError
from .model.saved_contents import (
    ACCEPTED,
    CARD,
    CONFIG,
    DTYPES,
    FAMILIARITY,
    FORMAT,
    FORMAT_VERSION,
    TOKENIZER,
    WEIGHTS,
    Contents,
    Record,
    first_line,
    part_of,
    require_fit,
    require_one_dtype,
    text_preprocessing,
    upgrade_tensors,
)
from .schema import from_plain, short, to_plain

T = TypeVar("T")

SAVING, SAVED = ".saving-", ".saved-"  # folder of a save while it is written, and once it is complete
READ_ATTEMPTS = 10  # attempts to read a folder that is saved to continuously
# bytes
MAX_CONFIG = 4 << 20
MAX_TOKENIZER = 64 << 20

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
GIT_LFS_POINTER = b"version https://git-lfs"
IDENTITY = "run.json"  # in a run folder: identity of the run, and digests of its products
RESULT = "ensemble"  # in a run folder: the finished model
HUB = "hub:"  # prefix of a hub id of a model or a data set
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


# --- writing ---------------------------------------------------------------------------------------------------------


def save_checkpoint(folder: str | Path, contents: Contents) -> None:
    """Write a checkpoint into `folder`, replacing an earlier one, all at once or not at all.

    Everything is flushed to disk in a staging folder before `config.json` is renamed into place. Saves to the same
    folder wait for each other; the next one finishes or removes what a killed one left.
    """
    folder = files.expanded(folder)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"cannot save to {folder}: it is a file; give a folder, which is created if missing")
    with files.locked(folder, "save", wait=True):
        earlier = (folder / CONFIG).exists()
        with files.writing(folder, f"the earlier model in {folder} is untouched" if earlier else "nothing was saved"):
            _clean_up(folder)
            _require_no_others(folder)
            staging = folder / f"{SAVING}{secrets.token_hex(4)}"
            staging.mkdir()
            try:
                saved = _saved_folder(folder, _write(staging, contents))
                for path in (*staging.iterdir(), staging):
                    files.flush(path)
                staging.rename(saved)
                files.flush(folder)
                os.replace(saved / CONFIG, folder / CONFIG)  # commit: from here on readers get the new model
            except BaseException:
                with suppress(OSError):
                    _clean_up(folder)
                raise
        with files.writing(folder, "the new model is saved there completely; only cleaning up failed"):
            _clean_up(folder)


def _require_no_others(folder: Path) -> None:
    """Refuse a folder with files that a save would replace, unless an earlier save wrote them."""
    theirs = [name for name in (WEIGHTS, TOKENIZER, CARD) if (folder / name).exists()]
    if theirs and not (folder / CONFIG).exists():
        way = f"give a new folder{f', or remove {CARD}' if theirs == [CARD] else ''}"
        raise CheckpointError(f"{folder} has {', '.join(theirs)} of something else, not replaced; {way}")


def clean_up_checkpoint(folder: Path) -> None:
    """Finish or remove what a killed save left in a folder; the next save does this anyway."""
    with files.locked(folder, "save", wait=True), files.writing(folder, "no model was changed"):
        _clean_up(folder)


def _clean_up(folder: Path) -> None:
    """Finish a save that was killed after its commit, and remove the remains of others; needs the lock."""
    if (folder / CONFIG).exists():
        with _reading(folder / CONFIG), _open(folder / CONFIG, folder) as file:  # never overwrite another library's
            saved = _saved_folder(folder, _parse_config(file).get(files.DIGEST))
        if saved.is_dir() and not saved.is_symlink():
            for path in saved.iterdir():
                os.replace(path, folder / path.name)
    for leftover in (*folder.glob(f"{SAVING}*"), *folder.glob(f"{SAVED}*")):
        files.remove(leftover)
    files.flush(folder)


def _saved_folder(folder: Path, digest: object) -> Path:
    """Folder with the files of a save until they are moved up, named by the digest of its configuration."""
    valid = isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
    return folder / f"{SAVED}{digest if valid else 'nothing'}"


def _write(folder: Path, contents: Contents) -> str:
    """Write all files into `folder`, and return the digest of the configuration."""
    _write_weights(folder / WEIGHTS, contents.tensors)
    metadata = copy.deepcopy(dict(contents.metadata))
    covered = [WEIGHTS]
    tokenizers = [preprocessing.pop("tokenizer") for preprocessing in text_preprocessing(metadata)]  # a separate file
    tokenizer = next(filter(None, tokenizers), None)
    if tokenizer is not None:
        (folder / TOKENIZER).write_bytes(_tokenizer_bytes(tokenizer))
        covered.append(TOKENIZER)
    digests = {name: files.checksum(folder / name) for name in covered}
    content: dict[str, Any] = {"kind": contents.kind, "model": contents.model, "metadata": metadata, "files": digests}
    record = files.sealed(to_plain(Record(library_version=__version__, **content)))
    (folder / CONFIG).write_bytes(files.json_bytes(record, CONFIG, most=MAX_CONFIG))
    (folder / CARD).write_bytes(contents.card.encode("utf-8", errors="replace"))  # a folder may have any name
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors creates the file without access for others
    return str(record[files.DIGEST])


def _write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors (on any device, including views and shared ones) as a safetensors file."""
    owned: dict[str, Tensor] = {}
    storages: set[int] = set()
    require_one_dtype({name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.dtype not in DTYPES.values():
            why = "without values (meta device); load them" if tensor.is_meta else f"{tensor.dtype}; convert the model"
            raise CheckpointError(f"parameter {name!r} is {why} before saving. A checkpoint holds {ACCEPTED}")
        plain = tensor.detach().to("cpu").contiguous()
        storage = plain.untyped_storage().data_ptr()
        owned[name] = plain.clone() if storage in storages else plain  # the format does not store aliases
        storages.add(storage)
    save_file(owned, path, metadata={"format": "pt"})


def _tokenizer_bytes(text: str) -> bytes:
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{TOKENIZER} has a lone surrogate ({error.reason}); replace the tokenizer") from error
    files.require_limits(content, TOKENIZER, MAX_TOKENIZER, foreign=True)
    return content


# --- the hub ---------------------------------------------------------------------------------------------------------


def push_checkpoint(
    repo_id: str, contents: Contents, *, private: bool | None, token: str | None, commit_message: str | None
) -> str:
    """Publish a checkpoint in one commit, creating the repository if needed; returns the URL of the commit."""
    if not HUB_ID.fullmatch(repo_id):
        raise CheckpointError(f"{repo_id!r} is not a hub id; it has the form 'owner/name'")
    with tempfile.TemporaryDirectory() as temporary:
        save_checkpoint(temporary, contents)
        api = huggingface_hub.HfApi(token=token)
        message = commit_message or "Upload a Hydra Ensembles model"
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(repo_id=repo_id, folder_path=temporary, commit_message=message)
        except Exception as error:  # the hub client passes on any error of its HTTP library
            problem = f"uploading to {repo_id!r} failed: {first_line(error)}"
            raise CheckpointError(f"{problem}. Check the name, the connection and the token") from error
    return str(commit.commit_url)


def locate(source: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """The folder that contains a checkpoint: `source` itself, or the hub's cache after downloading its files.

    An existing folder takes precedence; of a build's folder without a model of its own it is the finished ensemble.
    Otherwise a string like `owner/name` is a hub id; `hub:owner/name`, the form used on the command line, always is.
    """
    folder = files.expanded(source)
    if isinstance(source, str) and source.startswith(HUB):
        source, folder = source.removeprefix(HUB), Path(source)
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(f"revision is {revision!r}, but {source} is a folder; revisions belong to hub ids")
        finished = folder / RESULT
        is_run = (folder / IDENTITY).is_file() and not (folder / CONFIG).is_file()
        return finished if is_run and (finished / CONFIG).is_file() else folder
    if isinstance(source, Path) or folder.exists() or not HUB_ID.fullmatch(source):
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"{source} {problem}; give the folder that save_pretrained wrote, or 'hub:owner/name'")
    names = [CONFIG, WEIGHTS, TOKENIZER, CARD]
    try:
        return Path(huggingface_hub.snapshot_download(source, revision=revision, token=token, allow_patterns=names))
    except Exception as error:  # as above
        wanted = f"{source!r} is no folder here, and revision {revision or 'main'!r} cannot be loaded from the hub"
        advice = "Check the name, the connection and, for a private model, the token"
        raise CheckpointError(f"{wanted}: {first_line(error)}. {advice}") from error


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose `config.json` and tokenizer have been read; tensors are read on demand."""

    folder: Path
    record: Record
    digest: str | None  # of the configuration

    def read(self, described: Callable[[Record], T]) -> T:
        """Apply a reader to the record; its errors name the file."""
        with _reading(self.folder / CONFIG):
            return described(self.record)

    def tensors(
        self,
        expected: Callable[[], Mapping[str, Tensor]],
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        at_least: int = 0,
    ) -> dict[str, Tensor]:
        """Read exactly the tensors that a model needs.

        On the CPU they may still be memory-mapped: copy them before use, as `Ensemble.from_state` does. `expected`
        creates the model's tensors on the meta device, to get names and shapes without memory; it is not called if the
        file holds fewer than `at_least` tensors. None means the CPU, or the stored dtype.
        """
        target = None if device is None else require_device(device)
        if dtype is not None and dtype not in DTYPES.values():
            raise ConfigError(f"dtype is {dtype}; accepted are {ACCEPTED}, or None for the stored one")
        with self._opened(WEIGHTS) as opened, _mapped(opened) as file:
            names = list(file.keys())
            if len(names) < at_least:
                raise CheckpointError(f"it holds {len(names)} tensors, the configuration needs at least {at_least}")
            slices = {name: file.get_slice(name) for name in names}
            stored = {name: (tuple(entry.get_shape()), entry.get_dtype()) for name, entry in slices.items()}
            shapes = require_fit(stored, expected)
            if self.record.complete:
                require_one_dtype({name: kind for name, (_, kind) in stored.items()})
            # last, because it reads the whole file
            self._verify(WEIGHTS, hashlib.file_digest(opened, "sha256").hexdigest())
            wide: dict[str, torch.dtype] = {}  # per part, a dtype for all its tensors, which differ only in format 1
            for name, (_, kind) in stored.items():
                part = part_of(name)
                wide[part] = torch.promote_types(wide.get(part, DTYPES[kind]), DTYPES[kind])
            dtypes = {part: torch.float32 if part == FAMILIARITY else dtype or widest for part, widest in wide.items()}
            tensors = {name: file.get_tensor(name).to(device=target, dtype=dtypes[part_of(name)]) for name in names}
            return upgrade_tensors(tensors, shapes)

    def tokenizer(self) -> str:
        """Read the text of `tokenizer.json`."""
        with self._opened(TOKENIZER) as file:
            content = file.read(MAX_TOKENIZER + 1)
            self._verify(TOKENIZER, hashlib.sha256(content).hexdigest())
            files.require_limits(content, TOKENIZER, MAX_TOKENIZER, foreign=True)
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                raise CheckpointError(f"it is not UTF-8 ({error}); save or download it again") from error
            if not text:
                raise CheckpointError("it is empty; save or download it again")
            return text

    @contextmanager
    def _opened(self, name: str) -> Iterator[BufferedReader]:
        """Open one of the files: from the folder of an unfinished save if it is there, else from the checkpoint."""
        with _reading(self.folder / name):
            try:
                file = _open(_saved_folder(self.folder, self.digest) / name, self.folder)
            except FileNotFoundError:
                file = _open(self.folder / name, self.folder)
            with file:
                yield file

    def _verify(self, name: str, digest: str) -> None:
        if digest != self.record.files[name]:
            raise CheckpointError(f"its SHA-256 is not the one in {CONFIG}; save or download the model again")


def load_checkpoint(
    source: str | Path,
    kinds: Collection[str],
    restore: Callable[[Stored], T],
    *,
    revision: str | None = None,
    token: str | None = None,
) -> T:
    """Read the checkpoint of a model of one of these kinds with `restore`; arguments as for `from_pretrained`.

    If the model is saved again meanwhile, reading restarts: all files must match one `config.json`.
    """
    folder = locate(source, revision, token)
    for _ in range(READ_ATTEMPTS):
        with _reading(folder / CONFIG):
            opened = _open(folder / CONFIG, folder)
        with opened:  # while it is open, its inode cannot be reused
            try:
                return restore(_read_record(folder, kinds, opened))
            except CheckpointError:
                if _is_same_file(opened, folder / CONFIG):
                    raise
    raise CheckpointError(f"{folder} is being saved to all the time ({READ_ATTEMPTS} attempts); wait until that ends")


def _read_record(folder: Path, kinds: Collection[str], file: BufferedReader) -> Stored:
    """Parse an opened `config.json`, and insert the tokenizer."""
    with _reading(folder / CONFIG):
        data = _parse_config(file)
        version = data.get("format_version")
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise CheckpointError(f"format version {short(version)}; readable are 1 to {FORMAT_VERSION}: update it")
        content = files.unsealed(data, CONFIG, required=version > 1)
        record = from_plain(Record, content, "config", complete=version > 1)
        if record.kind not in kinds:
            accepted = " or ".join(map(repr, kinds))
            raise CheckpointError(f"a model of kind {record.kind!r}, expected {accepted}; he.load reads any")
        if not {WEIGHTS} <= record.files.keys() <= {WEIGHTS, TOKENIZER}:
            raise CheckpointError(f"checksums are of {sorted(record.files)}; expected are {WEIGHTS} and {TOKENIZER}")
        texts = text_preprocessing(record.metadata)
        if any("tokenizer" in preprocessing for preprocessing in texts):
            raise CheckpointError("preprocessing has the unknown field 'tokenizer'; a tokenizer is its own file")
        if TOKENIZER in record.files and len(texts) != 1:
            raise CheckpointError(f"it lists a tokenizer, but has {len(texts)} text preprocessings instead of one")
    stored = Stored(folder, record, data.get(files.DIGEST))
    for preprocessing in texts:
        preprocessing["tokenizer"] = stored.tokenizer() if TOKENIZER in record.files else ""
    return stored


def _is_same_file(file: BufferedReader, path: Path) -> bool:
    """Whether `path` still refers to the opened file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return True  # removed: no reason to read again


def _name_of(file: BufferedReader) -> str:
    """A name that opens this very file, even if another one has replaced it since."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        if os.path.exists(f"{folder}/{file.fileno()}"):
            return f"{folder}/{file.fileno()}"
    return file.name  # on Windows an open file cannot be replaced


def _mapped(file: BufferedReader) -> safe_open:
    """Open the tensors of a file, to be read on demand."""
    try:
        return safe_open(_name_of(file), framework="pt", device="cpu")
    except (MemoryError, RuntimeError) as error:  # of safetensors or torch
        raise CheckpointError(f"it does not fit into memory ({first_line(error)}); free some") from error


def _parse_config(file: BufferedReader) -> dict[str, Any]:
    data = files.parse_json(file.read(MAX_CONFIG + 1), CONFIG, most=MAX_CONFIG)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        problem = f'it was not written by hydra_ensembles (it has no "format": "{FORMAT}")'
        raise CheckpointError(f"{problem}; use its own library and hydra_ensembles.convert, and a folder of its own")
    return data


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn any error about a file into a `CheckpointError` that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: {_missing(path.parent, path.name)}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); check its permissions and the disk") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or incomplete ({error}); save or download it again") from error
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _open(path: Path, folder: Path) -> BufferedReader:
    """Open a regular file inside the folder for reading."""
    try:
        real = path.resolve(strict=True)
        root = folder.resolve(strict=True)
    except RuntimeError as error:  # symlink loop; an OSError from Python 3.13 on
        raise CheckpointError(_missing(folder, path.name)) from error
    roots = [root]
    if root.parent.name == "snapshots":  # the hub client's cache has links into sibling `blobs` folders
        roots += [above / "blobs" for above in root.parents[1:3]]
    if not any(real.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(f"it is a link to {real}, outside its folder; copy the file into the folder")
    if not stat.S_ISREG(path.stat().st_mode):  # opening a named pipe would block forever
        raise CheckpointError("it is not a plain file; a checkpoint contains nothing else")
    file = path.open("rb")
    if file.read(len(GIT_LFS_POINTER)) == GIT_LFS_POINTER:
        file.close()
        raise CheckpointError("it is only a git-lfs pointer; fetch the content with: git lfs pull")
    file.seek(0)
    return file


def _missing(folder: Path, name: str) -> str:
    """Error message for a missing file."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    remedy = "give a folder that save_pretrained wrote"
    if name == CONFIG and (inside := [one for one in names if (folder / one / CONFIG).is_file()]):  # a build's folder
        remedy += f", one of {', '.join(inside)}"
    if name == WEIGHTS and any(file.endswith(PICKLES) for file in names):
        remedy = "pickles can run code and are never read: load the model with its own library, convert and save it"
    return f"there is no {name} (the folder has {names[:8] or 'no files'}); {remedy}"
