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
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, TypeVar

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ._utils import __version__, require_device
from .errors import CheckpointError, ConfigError
from .files import (
    DIGEST,
    checksum,
    flush,
    json_bytes,
    locked,
    parse_json,
    remove,
    require_limits,
    sealed,
    unsealed,
    writing,
)
from .model.config import DualEncoderConfig, EnsembleConfig, TextStemConfig, output_width
from .model.metadata import Familiarity, FamiliaritySettings, Metadata, TextSettings, TextSide
from .model_card import dual_model_card, model_card
from .preprocessing import TextPreprocessing
from .schema import from_plain, short, to_plain

T = TypeVar("T")

CONFIG, WEIGHTS, TOKENIZER, CARD = "config.json", "model.safetensors", "tokenizer.json", "README.md"
FORMAT, FORMAT_VERSION = "hydra_ensembles", 2  # 1 had no digest of config.json itself, and promised no single dtype
ENSEMBLE, DUAL_ENCODER = "ensemble", "dual_encoder"  # kinds of model
TEXT_SIDE = "text_side"  # name of the text side in the metadata, and prefix of its tensors
FAMILIARITY = "familiarity"  # the same of the statistics of features
BESIDE = (TEXT_SIDE, FAMILIARITY)  # prefixes of tensors that are not the model's own and have a dtype of their own
SAVING, SAVED = ".saving-", ".saved-"  # folders of a save before and after it is whole
LOOKS = 10  # at a folder that is being saved to all the time
MAX_CONFIG, MAX_TOKENIZER = 4 << 20, 64 << 20  # bytes

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ACCEPTED = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
GIT_LFS_POINTER = b"version https://git-lfs"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Record:
    """The fields of `config.json`; `files` has the SHA-256 of every other file that loading reads."""

    format: Literal["hydra_ensembles"] = "hydra_ensembles"
    format_version: Literal[1, 2] = 2
    library_version: str
    kind: str
    model: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """A model ready to be written: configuration and metadata as JSON data, tensors by canonical name, card."""

    kind: str
    model: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    card: str


# --- the two kinds of model ------------------------------------------------------------------------------------------


def ensemble_contents(name: str, config: EnsembleConfig, metadata: Metadata, state: Mapping[str, Tensor]) -> Contents:
    """What `save_pretrained` writes of an ensemble; `name` is how the model card calls it."""
    plain, tensors, side = _plain_metadata(config, metadata), dict(state), metadata.text_side
    if side is not None:
        plain[TEXT_SIDE] = to_plain(side.settings)
        tensors |= {f"{TEXT_SIDE}.{key}": tensor for key, tensor in side.state.items()}
    if (known := metadata.familiarity) is not None:
        plain[FAMILIARITY] = to_plain(known.settings)
        tensors |= {f"{FAMILIARITY}.{key}": tensor for key, tensor in known.state.items()}
    return Contents(ENSEMBLE, to_plain(config), plain, tensors, model_card(name, config, metadata, state))


def dual_encoder_contents(
    name: str, config: DualEncoderConfig, image: Metadata, text: Metadata, state: Mapping[str, Tensor]
) -> Contents:
    """What `save_pretrained` writes of a dual encoder; `name` is how the model card calls it."""
    plain = {"image": _plain_metadata(config.image, image), "text": _plain_metadata(config.text, text)}
    card = dual_model_card(name, config, image, text, state)
    return Contents(DUAL_ENCODER, to_plain(config), plain, state, card)


def read_ensemble(
    stored: "Stored",
) -> tuple[EnsembleConfig, Metadata, TextSettings | None, FamiliaritySettings | None]:
    """Configuration and metadata of a stored ensemble; settings of its text side and of its familiarity."""
    texts, fitted, data = None, None, dict(stored.record.metadata)
    with _reading(stored.folder / CONFIG):
        config = from_plain(EnsembleConfig, stored.record.model, "config.model", complete=True)
        if TEXT_SIDE in data:
            texts = from_plain(TextSettings, data.pop(TEXT_SIDE), f"config.metadata.{TEXT_SIDE}", complete=True)
            _check_text_side(config, texts)
        if FAMILIARITY in data:
            fitted = from_plain(FamiliaritySettings, data.pop(FAMILIARITY), f"config.metadata.{FAMILIARITY}")
        return config, _read_metadata(config, data, "config.metadata", stored.complete), texts, fitted


def read_dual_encoder(stored: "Stored") -> tuple[DualEncoderConfig, Metadata, Metadata]:
    """Configuration, metadata of the image tower and metadata of the text tower of a stored dual encoder."""
    data = stored.record.metadata
    with _reading(stored.folder / CONFIG):
        config = from_plain(DualEncoderConfig, stored.record.model, "config.model", complete=stored.complete)
        if data.keys() != {"image", "text"}:
            raise CheckpointError(f"config.metadata has the fields {sorted(data)}, expected ['image', 'text']")
        image = _read_metadata(config.image, data["image"], "config.metadata.image", stored.complete)
        return config, image, _read_metadata(config.text, data["text"], "config.metadata.text", stored.complete)


def with_parts(
    tensors: Mapping[str, Tensor], metadata: Metadata, texts: TextSettings | None, fitted: FamiliaritySettings | None
) -> tuple[Mapping[str, Tensor], Metadata]:
    """The tensors of an ensemble alone, and its metadata with those of its other parts, which stay on the CPU."""
    own = dict(tensors)

    def part(prefix: str) -> dict[str, Tensor]:
        names = [name for name in tensors if name.startswith(f"{prefix}.")]
        return {name.removeprefix(f"{prefix}."): own.pop(name).to("cpu", copy=True) for name in names}

    if texts is not None:
        metadata = replace(metadata, text_side=TextSide(texts, part(TEXT_SIDE)))
    if fitted is not None:
        metadata = replace(metadata, familiarity=Familiarity(fitted, part(FAMILIARITY)))
    return own, metadata


def _text_preprocessing(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where tokenizers belong in plain metadata: of a model, its text side, or its towers."""
    parts = (part for part in (metadata, *metadata.values()) if isinstance(part, Mapping))
    places = (part.get("preprocessing") for part in parts)
    return [place for place in places if isinstance(place, dict) and place.get("kind") == "text"]


def _plain_metadata(config: EnsembleConfig, metadata: Metadata) -> dict[str, Any]:
    """Metadata as JSON data without what holds tensors; what could not be read back is not written."""
    plain: dict[str, Any] = to_plain(metadata.plain)
    try:
        _read_metadata(config, plain, "metadata")
    except ConfigError as error:
        raise CheckpointError(f"the model cannot be saved: {error}; replace it with with_metadata") from error
    return plain


def _read_metadata(config: EnsembleConfig, data: Any, path: str, complete: bool = True) -> Metadata:
    """Metadata that belong to this model: labels, temperatures and preprocessing are held against it."""
    strange = sorted({TEXT_SIDE, FAMILIARITY} & data.keys()) if isinstance(data, Mapping) else []
    if strange:
        raise CheckpointError(f"{path} has the unknown field {strange[0]!r}")
    metadata = from_plain(Metadata, data, path, complete=complete)
    try:
        metadata.check(config)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if isinstance(metadata.preprocessing, TextPreprocessing):
        _check_tokens(config, metadata.preprocessing, path)
    return metadata


def _check_tokens(config: EnsembleConfig, given: TextPreprocessing, path: str) -> None:
    """Refuse padding that the model has no embedding for, and a tokenizer that cannot be parsed."""
    assert isinstance(config.stem, TextStemConfig)
    if given.pad_id >= config.stem.vocabulary:
        raise CheckpointError(f"{path}: pad_id is {given.pad_id}, in a vocabulary of {config.stem.vocabulary} tokens")
    try:
        given.require_tokenizer()
    except ConfigError as error:
        raise CheckpointError(f"{TOKENIZER}: {error}") from error


def _check_text_side(config: EnsembleConfig, texts: TextSettings) -> None:
    """Refuse a text side made for another number of members, or for what does not compare with class embeddings."""
    if config.readout.cosine is None:
        raise CheckpointError("there is a text side, but the ensemble does not classify by class embeddings")
    if texts.members not in (1, config.members):
        raise CheckpointError(f"the text side has {texts.members} members, the ensemble {config.members}")
    ends = output_width(texts.tower) if texts.projection is None else texts.projection.outputs
    if config.readout.cosine.width not in (None, ends):
        raise CheckpointError(f"embeddings have width {ends} for texts and {config.readout.cosine.width} for images")
    if not isinstance(texts.tower.stem, TextStemConfig):
        raise CheckpointError(f"the tower of the text side reads {texts.tower.kind}s, expected texts")
    if not texts.preprocessing.tokenizer:
        raise CheckpointError("the text side has no tokenizer, so no classes can be set with it")
    _check_tokens(texts.tower, texts.preprocessing, f"config.metadata.{TEXT_SIDE}")


# --- writing ---------------------------------------------------------------------------------------------------------


def save_checkpoint(folder: str | Path, contents: Contents) -> None:
    """Write the files of a checkpoint into `folder`, replacing those of an earlier one, all at once or not at all.

    Everything is flushed to disk in a folder of its own before `config.json` is renamed into place. One save at a time
    works in a folder, the next one waits; it finishes or takes away what a killed one has left.

    Raises:
        CheckpointError: The model cannot be saved, or the folder is another library's.
        StorageError: The disk does not take it; the error says which model is in the folder now.
    """
    folder = Path(folder).expanduser()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"cannot save to {folder}: it is a file; name a folder, it is made if it does not exist")
    with locked(folder, "save", wait=True):
        earlier = (folder / CONFIG).exists()
        with writing(folder, f"the earlier model in {folder} is untouched" if earlier else "nothing was saved"):
            _settle(folder)
            staging = folder / f"{SAVING}{secrets.token_hex(4)}"
            staging.mkdir()
            try:
                whole = _whole(folder, _write(staging, contents))
                for path in (*staging.iterdir(), staging):
                    flush(path)
                staging.rename(whole)
                flush(folder)
                os.replace(whole / CONFIG, folder / CONFIG)  # from here on the new model is the one that is read
            except BaseException:
                with suppress(OSError):
                    _settle(folder)
                raise
        with writing(folder, "the new model is in it, whole; only tidying up failed"):
            _settle(folder)


def settle_checkpoint(folder: Path) -> None:
    """Finish, or take away, what a killed save has left in a folder; the next save does so unasked."""
    with locked(folder, "save", wait=True), writing(folder, "no model was changed"):
        _settle(folder)


def _settle(folder: Path) -> None:
    """Finish a save that was cut short after its `config.json`, remove what is left of others; under the lock."""
    if (folder / CONFIG).exists():
        whole = _whole(folder, _own_config(folder / CONFIG).get(DIGEST))
        for path in whole.iterdir() if whole.is_dir() and not whole.is_symlink() else ():
            os.replace(path, folder / path.name)
    for leftover in (*folder.glob(f"{SAVING}*"), *folder.glob(f"{SAVED}*")):
        remove(leftover)
    flush(folder)


def _whole(folder: Path, digest: object) -> Path:
    """Where the files of a save lie until they are moved up, by the digest of its configuration."""
    known = isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
    return folder / f"{SAVED}{digest if known else 'nothing'}"


def _write(folder: Path, contents: Contents) -> str:
    """Write all files into `folder`; the digest of the configuration."""
    _write_weights(folder / WEIGHTS, contents.tensors)
    metadata, covered = copy.deepcopy(dict(contents.metadata)), [WEIGHTS]
    tokenizers = [place.pop("tokenizer") for place in _text_preprocessing(metadata)]  # a file of its own
    tokenizer = next(filter(None, tokenizers), None)
    if tokenizer is not None:
        (folder / TOKENIZER).write_bytes(_tokenizer_bytes(tokenizer))
        covered.append(TOKENIZER)
    files = {name: checksum(folder / name) for name in covered}
    known: dict[str, Any] = {"kind": contents.kind, "model": contents.model, "metadata": metadata, "files": files}
    record = sealed(to_plain(Record(library_version=__version__, **known)))
    (folder / CONFIG).write_bytes(json_bytes(record, CONFIG, most=MAX_CONFIG))
    (folder / CARD).write_bytes(contents.card.encode("utf-8", errors="replace"))  # a folder may have any name
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # the safetensors library makes it private
    return str(record[DIGEST])


def _write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors (of any device, also views and shared ones) as a safetensors file."""
    owned: dict[str, Tensor] = {}
    storages: set[int] = set()
    _require_one_dtype({name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.dtype not in DTYPES.values():
            what = "without values (meta device); load them" if tensor.is_meta else f"{tensor.dtype}; convert the model"
            raise CheckpointError(f"parameter {name!r} is {what} before saving. A checkpoint holds {ACCEPTED}")
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
    require_limits(content, TOKENIZER, MAX_TOKENIZER, foreign=True)
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
        api, message = huggingface_hub.HfApi(token=token), commit_message or "Upload a Hydra Ensembles model"
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(repo_id=repo_id, folder_path=temporary, commit_message=message)
        except Exception as error:  # the hub client raises whatever its HTTP library does
            raise CheckpointError(
                f"the hub did not take {repo_id!r}: {_first_line(error)}. Check the name, the connection and the token"
            ) from error
    return str(commit.commit_url)


def locate(source: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """The folder a checkpoint lies in: `source` itself, or the hub's cache after downloading its files.

    A folder that exists wins. Otherwise a string like `owner/name` is a hub id.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(f"revision is {revision!r}, but {source} is a folder; revisions belong to hub ids")
        return folder
    if isinstance(source, Path) or not HUB_ID.fullmatch(source):
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"{source} {what}; give the folder that save_pretrained wrote, or a hub id 'owner/name'")
    files = [CONFIG, WEIGHTS, TOKENIZER, CARD]
    try:
        return Path(huggingface_hub.snapshot_download(source, revision=revision, token=token, allow_patterns=files))
    except Exception as error:  # as above
        raise CheckpointError(
            f"{source!r} is no folder here, and the hub did not give revision {revision or 'main'!r}: "
            f"{_first_line(error)}. Check the name, the connection and, for a private model, the token"
        ) from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no further details'}"


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose `config.json` and tokenizer have been read; the tensors are read when asked for."""

    folder: Path
    record: Record
    digest: str | None  # of the configuration

    @property
    def complete(self) -> bool:
        """Whether its fields are all there; those of the first format may be left out."""
        return self.record.format_version > 1

    def tensors(
        self,
        build: Callable[[], nn.Module],
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        at_least: int = 0,
    ) -> dict[str, Tensor]:
        """Read the tensors that a model needs, no more and no less.

        On the CPU they may still lie in the mapped file: copy them before they are used, as `Ensemble.from_state` does.

        Args:
            build: Makes the model; called under the meta device, to learn names and shapes without memory.
            device: Where the tensors go; None for the CPU.
            dtype: Floating type to convert to; None keeps what is stored.
            at_least: Number of tensors below which `build` is not even tried.
        """
        place = None if device is None else require_device(device)
        if dtype is not None and dtype not in DTYPES.values():
            raise ConfigError(f"dtype is {dtype}; accepted are {ACCEPTED}, or None for the stored one")
        with self._opened(WEIGHTS) as opened, _mapped(opened) as file:
            names = list(file.keys())
            if len(names) < at_least:
                raise CheckpointError(f"it holds {len(names)} tensors, the configuration needs at least {at_least}")
            slices = {name: file.get_slice(name) for name in names}
            stored = {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
            _compare(stored, build)
            if self.complete:
                _require_one_dtype({name: dtype for name, (_, dtype) in stored.items()})
            # after the cheap checks: it reads the whole file
            self._verify(WEIGHTS, hashlib.file_digest(opened, "sha256").hexdigest())
            wide: dict[str, torch.dtype] = {}  # of each part, the one that holds all its tensors: one, but in format 1
            for name, (_, found) in stored.items():
                wide[_part(name)] = torch.promote_types(wide.get(_part(name), DTYPES[found]), DTYPES[found])
            wanted = {part: torch.float32 if part == FAMILIARITY else dtype or one for part, one in wide.items()}
            return {name: file.get_tensor(name).to(device=place, dtype=wanted[_part(name)]) for name in names}

    def tokenizer(self) -> str:
        """The text of `tokenizer.json`."""
        with self._opened(TOKENIZER) as file:
            content = file.read(MAX_TOKENIZER + 1)
            self._verify(TOKENIZER, hashlib.sha256(content).hexdigest())
            require_limits(content, TOKENIZER, MAX_TOKENIZER, foreign=True)
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
                file = _open(_whole(self.folder, self.digest) / name, self.folder)
            except FileNotFoundError:
                file = _open(self.folder / name, self.folder)
            with file:
                yield file

    def _verify(self, name: str, found: str) -> None:
        if found != self.record.files[name]:
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
        f"{folder} was saved to again during each of {LOOKS} attempts to read it; wait until that has ended"
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
        digest, content = data.get(DIGEST), unsealed(data, CONFIG, required=version > 1)
        record = from_plain(Record, content, "config", complete=version > 1)
        if record.kind not in kinds:
            wanted = " or ".join(map(repr, kinds))
            raise CheckpointError(f"a model of kind {record.kind!r}, expected {wanted}; he.load reads any")
        if not {WEIGHTS} <= record.files.keys() <= {WEIGHTS, TOKENIZER}:
            raise CheckpointError(f"checksums are of {sorted(record.files)}; {WEIGHTS} and {TOKENIZER} are read")
        texts = _text_preprocessing(record.metadata)
        if any("tokenizer" in place for place in texts):
            raise CheckpointError("preprocessing has the unknown field 'tokenizer'; a tokenizer is its own file")
        if TOKENIZER in record.files and len(texts) != 1:
            raise CheckpointError(f"it lists a tokenizer; preprocessing for text is there {len(texts)} times")
    stored = Stored(folder, record, digest)
    for place in texts:
        place["tokenizer"] = stored.tokenizer() if TOKENIZER in record.files else ""
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
            f"it does not fit into memory ({_first_line(error)}); free some, or look at the size of the file"
        ) from error


def _own_config(path: Path) -> dict[str, Any]:
    """The content of a `config.json` that this library wrote; another one is not written over."""
    with _reading(path), _open(path, path.parent) as file:
        return _parse_config(file)


def _parse_config(file: BufferedReader) -> dict[str, Any]:
    data = parse_json(file.read(MAX_CONFIG + 1), CONFIG, most=MAX_CONFIG)
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
        real, root = path.resolve(strict=True), folder.resolve(strict=True)
    except RuntimeError as error:  # links in a circle
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
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    remedy = "give a folder that save_pretrained wrote"
    if name == WEIGHTS and any(other.endswith(PICKLES) for other in found):
        remedy = "pickles can run code and are never read: load the model with its own library, convert and save it"
    return f"there is no {name} (the folder has {found[:8] or 'no files'}); {remedy}"


def _compare(stored: Mapping[str, tuple[tuple[int, ...], str]], build: Callable[[], nn.Module]) -> None:
    """Hold names, shapes and types of tensors against the model that `build` makes, without allocating any of it."""
    try:
        with torch.device("meta"):
            expected = {name: tuple(tensor.shape) for name, tensor in build().state_dict().items()}
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes whose product no tensor can have
        raise CheckpointError(f"its configuration describes an impossible model: {_first_line(error)}") from error
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
        raise CheckpointError(f"it does not fit its configuration: it {'; it '.join(problems[:5])}{more}")


def _part(name: str) -> str:
    """The part that a tensor belongs to: what lies beside the model, or the model itself, which has no name."""
    part = name.partition(".")[0]
    return part if part in BESIDE else ""


def _require_one_dtype(dtypes: Mapping[str, str]) -> None:
    """Refuse tensors of one model in several floating types; those beside it may have their own."""
    parts: dict[str, dict[str, str]] = {}
    for name, dtype in dtypes.items():
        parts.setdefault(_part(name), {}).setdefault(dtype, name)
    for found in parts.values():
        if len(found) > 1:
            examples = ", ".join(f"{dtype} ({name})" for dtype, name in found.items())
            raise CheckpointError(
                f"the tensors are of several types: {examples}; convert the model to one: model.to(...)"
            )
