"""Saved models: `config.json`, `model.safetensors`, for text `tokenizer.json`, and a model card.

Nothing here knows a model class: a model hands over plain data and tensors (`Contents`) and gets them back (`Stored`),
so every kind of model goes through the same files and the same checks.

The files belong together by digests: `config.json` has those of the others, and one of its own content. A save is one
rename, that of `config.json`. Before it the earlier model is read; after it the new one, whose other files lie in the
folder `.saved-DIGEST` until they are moved up. So whoever reads gets one model or the other, also in the middle of a
save and after a kill, and without a lock.
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
from .model.contents import (
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
    renewed,
    require_fit,
    require_one_dtype,
    text_preprocessing,
)
from .schema import from_plain, short, to_plain

T = TypeVar("T")

SAVING, SAVED = ".saving-", ".saved-"  # folders of a save before and after it is whole
LOOKS = 10  # at a folder that is being saved to all the time
# bytes
MAX_CONFIG = 4 << 20
MAX_TOKENIZER = 64 << 20

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
GIT_LFS_POINTER = b"version https://git-lfs"
HUB = "hub:"  # before the name of a model or a data set that is there
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


# --- writing ---------------------------------------------------------------------------------------------------------


def save_checkpoint(folder: str | Path, contents: Contents) -> None:
    """Write the files of a checkpoint into `folder`, replacing those of an earlier one, all at once or not at all.

    Everything is flushed to disk in a folder of its own before `config.json` is renamed into place. One save at a time
    works in a folder, the next one waits; it finishes or takes away what a killed one has left.

    Raises:
        CheckpointError: The model cannot be saved, or the folder is another library's.
        StorageError: The disk does not take it; the error says which model is in the folder now.
    """
    folder = files.expanded(folder)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"cannot save to {folder}: it is a file; name a folder, it is made if it does not exist")
    with files.locked(folder, "save", wait=True):
        earlier = (folder / CONFIG).exists()
        with files.writing(folder, f"the earlier model in {folder} is untouched" if earlier else "nothing was saved"):
            _settle(folder)
            staging = folder / f"{SAVING}{secrets.token_hex(4)}"
            staging.mkdir()
            try:
                saved = _saved_folder(folder, _write(staging, contents))
                for path in (*staging.iterdir(), staging):
                    files.flush(path)
                staging.rename(saved)
                files.flush(folder)
                os.replace(saved / CONFIG, folder / CONFIG)  # from here on the new model is the one that is read
            except BaseException:
                with suppress(OSError):
                    _settle(folder)
                raise
        with files.writing(folder, "the new model is in it, whole; only tidying up failed"):
            _settle(folder)


def settle_checkpoint(folder: Path) -> None:
    """Finish, or take away, what a killed save has left in a folder; the next save does so unasked."""
    with files.locked(folder, "save", wait=True), files.writing(folder, "no model was changed"):
        _settle(folder)


def _settle(folder: Path) -> None:
    """Finish a save that was cut short after its `config.json`, remove what is left of others; under the lock."""
    if (folder / CONFIG).exists():
        with _reading(folder / CONFIG), _open(folder / CONFIG, folder) as file:  # another library's is not written over
            saved = _saved_folder(folder, _parse_config(file).get(files.DIGEST))
        for path in saved.iterdir() if saved.is_dir() and not saved.is_symlink() else ():
            os.replace(path, folder / path.name)
    for leftover in (*folder.glob(f"{SAVING}*"), *folder.glob(f"{SAVED}*")):
        files.remove(leftover)
    files.flush(folder)


def _saved_folder(folder: Path, digest: object) -> Path:
    """Where the files of a save lie until they are moved up, by the digest of its configuration."""
    valid = isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
    return folder / f"{SAVED}{digest if valid else 'nothing'}"


def _write(folder: Path, contents: Contents) -> str:
    """Write all files into `folder`; the digest of the configuration."""
    _write_weights(folder / WEIGHTS, contents.tensors)
    metadata = copy.deepcopy(dict(contents.metadata))
    covered = [WEIGHTS]
    tokenizers = [preprocessing.pop("tokenizer") for preprocessing in text_preprocessing(metadata)]  # a file of its own
    tokenizer = next(filter(None, tokenizers), None)
    if tokenizer is not None:
        (folder / TOKENIZER).write_bytes(_tokenizer_bytes(tokenizer))
        covered.append(TOKENIZER)
    digests = {name: files.checksum(folder / name) for name in covered}
    content: dict[str, Any] = {"kind": contents.kind, "model": contents.model, "metadata": metadata, "files": digests}
    record = files.sealed(to_plain(Record(library_version=__version__, **content)))
    (folder / CONFIG).write_bytes(files.json_bytes(record, CONFIG, most=MAX_CONFIG))
    (folder / CARD).write_bytes(contents.card.encode("utf-8", errors="replace"))  # a folder may have any name
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # the safetensors library makes it private
    return str(record[files.DIGEST])


def _write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors (of any device, also views and shared ones) as a safetensors file."""
    owned: dict[str, Tensor] = {}
    storages: set[int] = set()
    require_one_dtype({name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.dtype not in DTYPES.values():
            why = "without values (meta device); load them" if tensor.is_meta else f"{tensor.dtype}; convert the model"
            raise CheckpointError(f"parameter {name!r} is {why} before saving. A checkpoint holds {ACCEPTED}")
        plain = tensor.detach().to("cpu").contiguous()
        storage = plain.untyped_storage().data_ptr()
        owned[name] = plain.clone() if storage in storages else plain  # the format stores no aliases
        storages.add(storage)
    save_file(owned, path, metadata={"format": "pt"})


def _tokenizer_bytes(text: str) -> bytes:
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{TOKENIZER} has half a character ({error.reason}); replace the tokenizer") from error
    files.require_limits(content, TOKENIZER, MAX_TOKENIZER, foreign=True)
    return content


# --- the hub ---------------------------------------------------------------------------------------------------------


def push_checkpoint(
    repo_id: str, contents: Contents, *, private: bool | None, token: str | None, commit_message: str | None
) -> str:
    """Publish a checkpoint in one commit, making the repository if need be; the address of the commit."""
    if not HUB_ID.fullmatch(repo_id):
        raise CheckpointError(f"{repo_id!r} is not a hub id; it has the form 'owner/name'")
    with tempfile.TemporaryDirectory() as temporary:
        save_checkpoint(temporary, contents)
        api = huggingface_hub.HfApi(token=token)
        message = commit_message or "Upload a Hydra Ensembles model"
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(repo_id=repo_id, folder_path=temporary, commit_message=message)
        except Exception as error:  # the hub client raises whatever its HTTP library does
            raise CheckpointError(
                f"the hub did not take {repo_id!r}: {first_line(error)}. Check the name, the connection and the token"
            ) from error
    return str(commit.commit_url)


def locate(source: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """The folder a checkpoint lies in: `source` itself, or the hub's cache after downloading its files.

    A folder that exists wins. Otherwise a string like `owner/name` is a hub id; `hub:owner/name`, as the command line
    has it, is one in any case.
    """
    folder = files.expanded(source)
    if isinstance(source, str) and source.startswith(HUB):
        source, folder = source.removeprefix(HUB), Path(source)
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(f"revision is {revision!r}, but {source} is a folder; revisions belong to hub ids")
        return folder
    if isinstance(source, Path) or not HUB_ID.fullmatch(source):
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"{source} {problem}; give the folder that save_pretrained wrote, or 'hub:owner/name'")
    names = [CONFIG, WEIGHTS, TOKENIZER, CARD]
    try:
        return Path(huggingface_hub.snapshot_download(source, revision=revision, token=token, allow_patterns=names))
    except Exception as error:  # as above
        raise CheckpointError(
            f"{source!r} is no folder here, and the hub did not give revision {revision or 'main'!r}: "
            f"{first_line(error)}. Check the name, the connection and, for a private model, the token"
        ) from error


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose `config.json` and tokenizer have been read; the tensors are read when asked for."""

    folder: Path
    record: Record
    digest: str | None  # of the configuration

    def read(self, described: Callable[[Record], T]) -> T:
        """What a reader makes of the record; what it refuses is said of the file."""
        with _reading(self.folder / CONFIG):
            return described(self.record)

    def tensors(
        self,
        expected: Callable[[], Mapping[str, Tensor]],
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        at_least: int = 0,
    ) -> dict[str, Tensor]:
        """Read the tensors that a model needs, no more and no less.

        On the CPU they may still lie in the mapped file: copy them before they are used, as `Ensemble.from_state` does.
        `expected` makes them, under the meta device, to learn names and shapes without memory; with fewer tensors than
        `at_least` it is not even tried. None is the CPU, or what is stored.
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
                require_one_dtype({name: dtype for name, (_, dtype) in stored.items()})
            # after the cheap checks: it reads the whole file
            self._verify(WEIGHTS, hashlib.file_digest(opened, "sha256").hexdigest())
            wide: dict[str, torch.dtype] = {}  # of each part, the one that holds all its tensors: one, but in format 1
            for name, (_, kind) in stored.items():
                wide[part_of(name)] = torch.promote_types(wide.get(part_of(name), DTYPES[kind]), DTYPES[kind])
            dtypes = {part: torch.float32 if part == FAMILIARITY else dtype or widest for part, widest in wide.items()}
            tensors = {name: file.get_tensor(name).to(device=target, dtype=dtypes[part_of(name)]) for name in names}
            return renewed(tensors, shapes)

    def tokenizer(self) -> str:
        """The text of `tokenizer.json`."""
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
        """One of the files: from where a save keeps it before it is moved up, else from the folder."""
        with _reading(self.folder / name):
            try:
                file = _open(_saved_folder(self.folder, self.digest) / name, self.folder)
            except FileNotFoundError:
                file = _open(self.folder / name, self.folder)
            with file:
                yield file

    def _verify(self, name: str, digest: str) -> None:
        if digest != self.record.files[name]:
            raise CheckpointError(
                f"its SHA-256 is not the one in {CONFIG}: it was changed, cut off, or belongs to another model; save "
                "or download the model again"
            )


def load_checkpoint(
    source: str | Path,
    kinds: Collection[str],
    restore: Callable[[Stored], T],
    *,
    revision: str | None = None,
    token: str | None = None,
) -> T:
    """What `restore` makes of the checkpoint of a model of one of these kinds; arguments as of `from_pretrained`.

    A model that is saved again while it is read is read again: every file is held against one `config.json`.
    """
    folder = locate(source, revision, token)
    for _ in range(LOOKS):
        with _reading(folder / CONFIG):
            opened = _open(folder / CONFIG, folder)
        with opened:  # as long as it is open, no other file can pass for it
            try:
                return restore(_read_record(folder, kinds, opened))
            except CheckpointError:
                if _is_still(opened, folder / CONFIG):
                    raise
    raise CheckpointError(
        f"{folder} was saved to again during each of {LOOKS} attempts to read it; wait until that ends"
    )


def _read_record(folder: Path, kinds: Collection[str], file: BufferedReader) -> Stored:
    """The content of an opened `config.json`, with the tokenizer in its place."""
    with _reading(folder / CONFIG):
        data = _parse_config(file)
        version = data.get("format_version")
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise CheckpointError(
                f"format version {short(version)}; this library reads 1 to {FORMAT_VERSION}: update it"
            )
        digest = data.get(files.DIGEST)
        content = files.unsealed(data, CONFIG, required=version > 1)
        record = from_plain(Record, content, "config", complete=version > 1)
        if record.kind not in kinds:
            accepted = " or ".join(map(repr, kinds))
            raise CheckpointError(f"a model of kind {record.kind!r}, expected {accepted}; he.load reads any")
        if not {WEIGHTS} <= record.files.keys() <= {WEIGHTS, TOKENIZER}:
            raise CheckpointError(f"checksums are of {sorted(record.files)}; {WEIGHTS} and {TOKENIZER} are read")
        texts = text_preprocessing(record.metadata)
        if any("tokenizer" in preprocessing for preprocessing in texts):
            raise CheckpointError("preprocessing has the unknown field 'tokenizer'; a tokenizer is its own file")
        if TOKENIZER in record.files and len(texts) != 1:
            raise CheckpointError(f"it lists a tokenizer; preprocessing for text is there {len(texts)} times")
    stored = Stored(folder, record, digest)
    for preprocessing in texts:
        preprocessing["tokenizer"] = stored.tokenizer() if TOKENIZER in record.files else ""
    return stored


def _is_still(file: BufferedReader, path: Path) -> bool:
    """Whether the opened file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return True  # it was removed: nothing to look at again


def _name_of(file: BufferedReader) -> str:
    """A name under which this very file is opened, whatever has been put in its place since."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        if os.path.exists(f"{folder}/{file.fileno()}"):
            return f"{folder}/{file.fileno()}"
    return file.name  # Windows renames nothing over an open file


def _mapped(file: BufferedReader) -> safe_open:
    """The tensors of an opened file, read when asked for."""
    try:
        return safe_open(_name_of(file), framework="pt", device="cpu")
    except (MemoryError, RuntimeError) as error:  # of safetensors, of torch
        raise CheckpointError(
            f"it does not fit into memory ({first_line(error)}); free some, or look at the size of the file"
        ) from error


def _parse_config(file: BufferedReader) -> dict[str, Any]:
    data = files.parse_json(file.read(MAX_CONFIG + 1), CONFIG, most=MAX_CONFIG)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(
            f'it was not written by hydra_ensembles (it has no "format": "{FORMAT}"); load such a model with its '
            "own library and hydra_ensembles.convert, and save to a folder of its own"
        )
    return data


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever is wrong with a file becomes a `CheckpointError` that names it."""
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
    """A plain file that lies in the folder, opened for reading."""
    try:
        real = path.resolve(strict=True)
        root = folder.resolve(strict=True)
    except RuntimeError as error:  # links in a circle; an OSError from Python 3.13 on
        raise CheckpointError(_missing(folder, path.name)) from error
    roots = [root]
    if root.parent.name == "snapshots":  # the hub client's cache has links into the folders `blobs` beside it
        roots += [above / "blobs" for above in root.parents[1:3]]
    if not any(real.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(f"it is a link to {real}, outside of its folder; copy the file into the folder")
    if not stat.S_ISREG(path.stat().st_mode):  # opening a named pipe would wait for ever
        raise CheckpointError("it is not a plain file; a checkpoint has nothing else")
    file = path.open("rb")
    if file.read(len(GIT_LFS_POINTER)) == GIT_LFS_POINTER:
        file.close()
        raise CheckpointError("it is only a pointer of git-lfs; fetch the content with: git lfs pull")
    file.seek(0)
    return file


def _missing(folder: Path, name: str) -> str:
    """What to say of a file that is not there."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    remedy = "give a folder that save_pretrained wrote"
    if name == WEIGHTS and any(file.endswith(PICKLES) for file in names):
        remedy = "pickles can run code and are never read: load the model with its own library, convert and save it"
    return f"there is no {name} (the folder has {names[:8] or 'no files'}); {remedy}"
