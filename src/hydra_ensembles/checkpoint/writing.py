"""Writing a checkpoint so that a kill at any moment leaves whole files, and a mixture of saves is noticed."""

import os
import shutil
import tempfile
from pathlib import Path

from .._version import __version__
from ..errors import CheckpointError
from ..schema import to_plain
from . import strict_json
from .checksum import checksum
from .contents import CARD, CONFIG, FORMAT_VERSION, TOKENIZER, WEIGHTS, Contents, Record
from .weights import write_weights


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
