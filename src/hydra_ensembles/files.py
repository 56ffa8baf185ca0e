"""Files: atomic writes, JSON, and errors that say what to do.

What is written is complete or not there: bytes go to a temporary file beside their place, which is flushed to the disk
and renamed. `store` has locks and resuming, `checkpoint` folders of several files.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from .errors import CheckpointError, StorageError


def expanded(path: str | Path) -> Path:
    """Expand a leading `~` or `~name` to the home folder."""
    return Path(path).expanduser()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn disk errors into a `StorageError` that names the path."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, SafetensorError) as error:  # safetensors wraps the error of the disk
        reason = getattr(error, "strerror", None) or error
        safe = "what was there before is untouched; check the space and the permissions there, or give another place"
        raise StorageError(f"{path} cannot be written ({reason}); {safe}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file in the same folder, flush it to disk, then rename it; folders are made."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    """Write plain data as JSON, atomically; NaN and infinity are no JSON."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, text.encode())


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_file(path: Path) -> bytes:
    """The content of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        why = error.strerror or error
        raise CheckpointError(f"{path} cannot be read ({why}); check the path and its permissions") from error


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    content = read_file(path)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # includes text that is not Unicode
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object."""
    plain = read_json(path)
    if not isinstance(plain, dict):
        raise CheckpointError(f"{path} holds a {type(plain).__name__}, not an object with named fields")
    return plain
