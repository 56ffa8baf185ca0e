"""Saved models: `config.json`, `model.safetensors`, for text `tokenizer.json`, and a model card.

Nothing here knows a model class. A model that wants to be saved hands over plain data (`Contents`) and gets
plain data back (`Stored`), so every kind of model goes through the same files and the same checks.
"""

import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from . import schema as strict_json
from ._utils import __version__, require_device
from .errors import CheckpointError, ConfigError
from .model.config import DualEncoderConfig, EnsembleConfig, TextStemConfig, output_width
from .model.metadata import Metadata, TextSettings, TextSide
from .model_card import dual_model_card, model_card
from .preprocessing import TextPreprocessing
from .schema import from_plain, to_plain

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
CARD = "README.md"
FILE_NAMES = (CONFIG, WEIGHTS, TOKENIZER, CARD)  # no other file is ever written, downloaded or read

FORMAT_VERSION: Literal[1] = 1


@dataclass(frozen=True)
class Contents:
    """A model as plain data, ready to be written.

    Attributes:
        kind: Which class of model this is; loading asks for the same kind.
        model: Its configuration as JSON data.
        metadata: What it remembers beside its weights, as JSON data.
        tensors: Its parameters by canonical name.
        card: Text of the model card.
        tokenizer: Content of `tokenizer.json`; None when there is none.
    """

    kind: str
    model: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    card: str
    tokenizer: str | None = None


@dataclass(frozen=True)
class Record:
    """The fields of `config.json`.

    `files` holds the SHA-256 of every other file that loading reads, so that a mixture of two saves, a
    truncated download or a changed file is noticed before anything is built from it.
    """

    format: Literal["hydra_ensembles"]
    format_version: Literal[1]
    library_version: str
    kind: str
    model: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


GIT_LFS_POINTER = b"version https://git-lfs"


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path, expected: str) -> None:
    """Refuse a file that is not the one `config.json` was saved with."""
    if checksum(path) != expected:
        raise CheckpointError(
            f"{path} is not the file that {CONFIG} was saved with (its SHA-256 differs); it was changed or cut off, "
            "or a save was interrupted: save or download the model again"
        )


def refuse_pointer(path: Path) -> None:
    """Refuse what git leaves in place of a large file when git-lfs is not set up."""
    with path.open("rb") as file:
        if file.read(len(GIT_LFS_POINTER)) == GIT_LFS_POINTER:
            raise CheckpointError(f"{path} is only a pointer of git-lfs; fetch the content with: git lfs pull")


DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
ACCEPTED = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors (of any device, also views and shared ones) as a safetensors file."""
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.dtype not in DTYPES.values():
            place = "without values (meta device)" if tensor.is_meta else f"{tensor.dtype}"
            raise CheckpointError(
                f"parameter {name!r} is {place}; a checkpoint holds {ACCEPTED}. "
                "Load the values, or convert the model with .to(torch.float32), before saving"
            )
    owned: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        storage = plain.untyped_storage().data_ptr()
        owned[name] = plain.clone() if storage in storages else plain  # the format stores no aliases
        storages.add(storage)
    save_file(owned, path, metadata={"format": "pt"})


def read_weights(
    path: Path,
    checksum: str,
    build: Callable[[], nn.Module],
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    at_least: int = 0,
) -> dict[str, Tensor]:
    """Read the tensors that a model needs, no more and no less.

    Args:
        path: The safetensors file.
        checksum: SHA-256 it must have.
        build: Makes the model; called under the meta device, to learn names and shapes without memory.
        device: Where the tensors go; None for the CPU.
        dtype: Floating type to convert to; None keeps what is stored.
        at_least: Number of tensors below which `build` is not even tried.

    Returns:
        Tensors by name. On the CPU they may still lie in the mapped file: copy them before they are used,
        as `Ensemble.from_state` does.
    """
    place = require_device(device)
    if dtype is not None and dtype not in DTYPES.values():
        raise ConfigError(f"dtype is {dtype}; accepted are {ACCEPTED}, or None for the stored one")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = list(file.keys())
            if len(names) < at_least:
                raise CheckpointError(
                    f"{path} holds {len(names)} tensors, the configuration needs at least {at_least}; "
                    "weights and configuration do not belong together"
                )
            stored = {}
            for name in names:
                part = file.get_slice(name)
                stored[name] = (tuple(part.get_shape()), part.get_dtype())
            _compare(path, stored, _shapes(path, build))
            verify(path, checksum)  # after the cheap checks: it reads the whole file
            return {name: file.get_tensor(name).to(device=place, dtype=dtype) for name in names}
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a valid safetensors file ({error}); it is damaged or incomplete, save or download it again"
        ) from error


def _shapes(path: Path, build: Callable[[], nn.Module]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's parameters, without allocating any of them."""
    try:
        with torch.device("meta"):
            model = build()
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes whose product no tensor can have
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"the configuration beside {path} describes an impossible model: {reason}") from error
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _compare(
    path: Path, stored: Mapping[str, tuple[tuple[int, ...], str]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    problems = [f"lacks {name!r}" for name in sorted(expected.keys() - stored.keys())]
    problems += [f"has the unknown {name!r}" for name in sorted(stored.keys() - expected.keys())]
    for name in sorted(expected.keys() & stored.keys()):
        shape, dtype = stored[name]
        if shape != expected[name]:
            problems.append(f"has {name!r} with shape {list(shape)} instead of {list(expected[name])}")
        elif dtype not in DTYPES:
            problems.append(f"has {name!r} as {dtype}; accepted are {ACCEPTED}")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{path} does not fit its configuration: it {'; it '.join(problems[:5])}{more}. "
            "Save the model again with save_pretrained; the two files must come from one save"
        )


def save_checkpoint(folder: str | Path, contents: Contents) -> None:
    """Write the files of a checkpoint into `folder`, replacing those of an earlier one.

    Everything is written to a temporary folder inside `folder` and flushed to disk before the first file is
    renamed into place; `config.json`, which knows the checksums of the others, comes last. So a kill leaves
    each file either old or new, never half written, and loading recognises the moment between two renames.

    Raises:
        CheckpointError: `folder` is a file, or holds the `config.json` of something else.
    """
    folder = Path(folder).expanduser()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"cannot save to {folder}: it is a file; name a folder, it is made if it does not exist")
    if (folder / CONFIG).exists() and not _is_ours(folder / CONFIG):
        raise CheckpointError(
            f"cannot save to {folder}: its {CONFIG} is not of this library, and would be overwritten with what belongs "
            "to it; name another folder, or delete the files there first"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temporary:
        staging = Path(temporary)
        names = _write(staging, contents)
        for name in names:
            _flush(staging / name)
        for name in names:
            os.replace(staging / name, folder / name)
    _flush(folder)


def _is_ours(config: Path) -> bool:
    try:
        found = strict_json.parse(config.read_bytes(), CONFIG)
    except (OSError, CheckpointError):
        return False
    return isinstance(found, dict) and found.get("format") == "hydra_ensembles"


def _write(folder: Path, contents: Contents) -> list[str]:
    """Write all files into `folder`; their names, in the order in which they are to be renamed."""
    write_weights(folder / WEIGHTS, contents.tensors)
    covered = [WEIGHTS]
    if contents.tokenizer is not None:
        content = _utf8(contents.tokenizer, TOKENIZER)
        strict_json.parse_foreign(content, TOKENIZER)
        (folder / TOKENIZER).write_bytes(content)
        covered.append(TOKENIZER)
    record = Record(
        format="hydra_ensembles",
        format_version=FORMAT_VERSION,
        library_version=__version__,
        kind=contents.kind,
        model=contents.model,
        metadata=contents.metadata,
        files={name: checksum(folder / name) for name in covered},
    )
    (folder / CARD).write_bytes(_utf8(contents.card, CARD))
    (folder / CONFIG).write_bytes(strict_json.write(to_plain(record), CONFIG))
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # the safetensors library makes it private
    return [*covered, CARD, CONFIG]


def _utf8(text: str, name: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{name} has text that is not valid Unicode: {error}") from error


def _flush(path: Path) -> None:
    """Make sure that a file, or the names in a folder, survive a power cut."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def locate(source: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """The folder a checkpoint lies in: `source` itself, or the hub's cache after downloading `source`.

    A folder that exists wins. Otherwise a string like `owner/name` is a hub id; from the hub come only the
    files of a checkpoint, whatever else the repository holds.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"revision {revision!r} was given, but {source} is a folder; revisions belong to hub ids"
            )
        return folder
    if isinstance(source, Path) or not HUB_ID.fullmatch(source):
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(
            f"{source} {what}; give the folder that save_pretrained wrote, or a hub id of the form 'owner/name'"
        )
    try:
        snapshot = huggingface_hub.snapshot_download(
            source, revision=revision, token=token, allow_patterns=list(FILE_NAMES)
        )
    except Exception as error:  # the hub client raises whatever its HTTP library does
        raise CheckpointError(
            f"{source!r} is no folder here, and the hub did not give it as a model (revision "
            f"{revision or 'main'!r}): {_first_line(error)}. Check the name, the connection and, for a private "
            "model, the token"
        ) from error
    return Path(snapshot)


def push_checkpoint(
    repo_id: str,
    contents: Contents,
    *,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Publish a checkpoint, making the repository if need be; the address of the commit.

    All files go into one commit, so nobody can download half of an update.
    """
    if not HUB_ID.fullmatch(repo_id):
        raise CheckpointError(f"{repo_id!r} is not a hub id; it has the form 'owner/name'")
    with tempfile.TemporaryDirectory() as temporary:
        save_checkpoint(temporary, contents)
        operations = [
            huggingface_hub.CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=path)
            for path in sorted(Path(temporary).iterdir())
        ]
        api = huggingface_hub.HfApi(token=token)
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.create_commit(
                repo_id, operations, commit_message=commit_message or "Upload a Hydra Ensembles model"
            )
        except Exception as error:  # as above
            raise CheckpointError(
                f"the hub did not take {repo_id!r}: {_first_line(error)}. Check the name, the connection and that "
                "the token may write there (log in with: hf auth login)"
            ) from error
    return str(commit.commit_url)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no further details'}"


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


ENSEMBLE = "ensemble"  # the kind of an ensemble's checkpoint


TEXT_SIDE = "text_side"  # name of the text side in the metadata, and prefix of its tensors


def ensemble_contents(name: str, config: EnsembleConfig, metadata: Metadata, state: Mapping[str, Tensor]) -> Contents:
    """Everything that `save_pretrained` writes; `name` is how the model card calls the model."""
    check_fits(config, metadata)
    plain, tokenizer = metadata_to_plain(metadata)
    texts = metadata.text_side
    if texts is not None:
        plain[TEXT_SIDE] = to_plain(texts.settings)
        tokenizer = plain[TEXT_SIDE]["preprocessing"].pop("tokenizer")
    stored = {} if texts is None else {f"{TEXT_SIDE}.{key}": tensor for key, tensor in texts.state.items()}
    return Contents(
        kind=ENSEMBLE,
        model=to_plain(config),
        metadata=plain,
        tensors={**state, **stored},
        card=model_card(name, config, metadata, state),
        tokenizer=tokenizer,
    )


def read_ensemble(stored: Stored) -> tuple[EnsembleConfig, Metadata, TextSettings | None]:
    """Configuration and metadata of a stored ensemble, and the settings of its text side where it kept one."""
    config = stored.read(EnsembleConfig, stored.record.model, "config.model", complete=True)
    data = dict(stored.record.metadata)
    texts = _read_text_settings(stored, data.pop(TEXT_SIDE)) if TEXT_SIDE in data else None
    metadata = read_metadata(stored, data, "config.metadata", own_tokenizer=texts is None)
    try:
        check_fits(config, metadata)
        _check_text_side(config, texts)
    except CheckpointError as error:
        raise CheckpointError(f"{stored.folder / CONFIG}: {error}") from error
    return config, metadata, texts


def with_text_side(
    tensors: Mapping[str, Tensor], metadata: Metadata, texts: TextSettings | None
) -> tuple[dict[str, Tensor], Metadata]:
    """The tensors of an ensemble alone, and its metadata with those of the text side, which stays on the CPU."""
    prefix = f"{TEXT_SIDE}."
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    if texts is None:
        return own, metadata
    kept = {
        name.removeprefix(prefix): tensor.to("cpu", copy=True)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    return own, replace(metadata, text_side=TextSide(texts, kept))


def metadata_to_plain(metadata: Metadata) -> tuple[dict[str, Any], str | None]:
    """Metadata as JSON data without the text side, and the text of its tokenizer, which is a file of its own."""
    plain = to_plain(replace(metadata, text_side=None))
    try:
        from_plain(Metadata, plain, "metadata")
    except ConfigError as error:
        raise CheckpointError(f"the model cannot be saved: {error}; replace it with with_metadata") from error
    tokenizer = plain["preprocessing"].pop("tokenizer", "") if plain["preprocessing"] else ""
    return plain, tokenizer or None


def read_metadata(stored: Stored, data: Any, path: str, own_tokenizer: bool = True) -> Metadata:
    """Metadata from its part of `config.json`; with `own_tokenizer`, a stored tokenizer is put back into it."""
    _refuse_tokenizer(stored, data, path)
    if isinstance(data, Mapping) and TEXT_SIDE in data:
        raise CheckpointError(f"{stored.folder / CONFIG}: {path} has the unknown field {TEXT_SIDE!r}")
    metadata = stored.read(Metadata, data, path)
    tokenizer = stored.tokenizer() if own_tokenizer else None
    if tokenizer is None:
        return metadata
    if not isinstance(metadata.preprocessing, TextPreprocessing):
        raise CheckpointError(f"{stored.folder / CONFIG} lists a tokenizer, but {path}.preprocessing is not for text")
    return replace(metadata, preprocessing=replace(metadata.preprocessing, tokenizer=tokenizer))


def _read_text_settings(stored: Stored, data: Any) -> TextSettings:
    """The settings of a text side, with the tokenizer put back."""
    path = f"config.metadata.{TEXT_SIDE}"
    _refuse_tokenizer(stored, data, path)
    tokenizer = stored.tokenizer()
    if tokenizer is None:
        raise CheckpointError(f"{stored.folder / CONFIG}: {path} needs a tokenizer, but no file of one is listed")
    if isinstance(data, Mapping) and isinstance(data.get("preprocessing"), Mapping):
        data = {**data, "preprocessing": {**data["preprocessing"], "tokenizer": tokenizer}}
    return stored.read(TextSettings, data, path, complete=True)


def _refuse_tokenizer(stored: Stored, data: Any, path: str) -> None:
    preprocessing = data.get("preprocessing") if isinstance(data, Mapping) else None
    if isinstance(preprocessing, Mapping) and "tokenizer" in preprocessing:
        raise CheckpointError(
            f"{stored.folder / CONFIG}: {path}.preprocessing has the unknown field 'tokenizer'; "
            "a tokenizer is a file of its own"
        )


def _check_text_side(config: EnsembleConfig, texts: TextSettings | None) -> None:
    """Refuse a text side made for another number of members, or for what does not compare with class embeddings."""
    if texts is None:
        return
    if config.readout.cosine is None:
        raise CheckpointError("there is a text side, but the ensemble does not classify by class embeddings")
    if texts.members not in (1, config.members):
        raise CheckpointError(f"the text side has {texts.members} members, the ensemble {config.members}")
    ends, expected = output_width(texts.tower), config.readout.cosine.width
    if texts.projection is not None:
        ends = texts.projection.outputs
    if expected not in (None, ends):
        raise CheckpointError(f"the text side ends in an embedding of width {ends}, the images in one of {expected}")


def check_fits(config: EnsembleConfig, metadata: Metadata) -> None:
    """Refuse metadata that belongs to another model: labels, temperatures, kind of preprocessing."""
    classes, labels = config.readout.num_classes, len(metadata.labels)
    if classes and labels not in (0, classes):
        raise CheckpointError(f"there are {labels} labels for {classes} classes; give one label per class, or none")
    temperatures = 1 if metadata.calibration is None else len(metadata.calibration.temperature)
    if temperatures not in (1, config.members):
        raise CheckpointError(
            f"there are {temperatures} temperatures for {config.members} members; give one, or one per member"
        )
    text = isinstance(config.stem, TextStemConfig)
    if metadata.preprocessing is not None and isinstance(metadata.preprocessing, TextPreprocessing) != text:
        raise CheckpointError(
            f"preprocessing is {type(metadata.preprocessing).__name__} for a model of {'text' if text else 'images'}"
        )


DUAL_ENCODER = "dual_encoder"  # the kind of a dual encoder's checkpoint
_TOWERS = {"image", "text"}


def dual_encoder_contents(
    name: str, config: DualEncoderConfig, image: Metadata, text: Metadata, state: Mapping[str, Tensor]
) -> Contents:
    """Everything that `save_pretrained` writes; `name` is how the model card calls the model."""
    check_fits(config.image, image)
    check_fits(config.text, text)
    plain_text, tokenizer = metadata_to_plain(text)
    return Contents(
        kind=DUAL_ENCODER,
        model=to_plain(config),
        metadata={"image": metadata_to_plain(image)[0], "text": plain_text},
        tensors=state,
        card=dual_model_card(name, config, image, text, state),
        tokenizer=tokenizer,
    )


def read_dual_encoder(stored: Stored) -> tuple[DualEncoderConfig, Metadata, Metadata]:
    """Configuration, metadata of the image tower and metadata of the text tower of a stored dual encoder."""
    config = stored.read(DualEncoderConfig, stored.record.model, "config.model")
    data = stored.record.metadata
    if data.keys() != _TOWERS:
        raise CheckpointError(
            f"{stored.folder / CONFIG}: config.metadata has the fields {sorted(data)}, expected {sorted(_TOWERS)}"
        )
    image = stored.read(Metadata, data["image"], "config.metadata.image")
    text = read_metadata(stored, data["text"], "config.metadata.text")
    for tower, tower_config, metadata in (("image", config.image, image), ("text", config.text, text)):
        try:
            check_fits(tower_config, metadata)
        except CheckpointError as error:
            raise CheckpointError(f"{stored.folder / CONFIG}: {tower} tower: {error}") from error
    return config, image, text
