"""Files: written whole or not at all, JSON read strictly with its digest, one worker at a time in a folder.

Every file that this library writes goes through `write_atomically` or `writing`; what it reads back is not trusted.
"""

import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from safetensors import SafetensorError

from ._utils import warn
from .errors import CheckpointError, ConfigError, StorageError

if sys.platform != "win32":
    import fcntl

# of a JSON file
MAX_BYTES = 64 << 20
MAX_DEPTH = 32
DIGEST = "digest"  # where a JSON object keeps the digest of the rest of itself
LOCK = ".lock"
_BYTES_A_VALUE = 24  # of a file as large as allowed; guards against text that takes fifty times its size in memory

_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT} if sys.platform != "win32" else {errno.ENOSPC, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_LOCKLESS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
_UNFLUSHED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}  # said of folders by some network disks
_VANISHED = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY}
_OF_A_FILE = {None, *_FORBIDDEN, *_VANISHED, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG}  # not of the disk


def expanded(path: str | Path) -> Path:
    """A path with the home folder in place of a `~` or `~name` at its beginning."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # of Python: nobody of that name, or no home folder
        home = Path(path).parts[0]
        raise ConfigError(f"{path}: there is no home folder {home} here; give the whole path") from error


# --- writing ---------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary name in the same folder, flush to disk, then rename; the umask is respected.

    Raises:
        StorageError: The disk does not take it, or there is something else than a file, such as a device, which would
            be replaced by one; what was there before is untouched.
    """
    with writing(path):
        if path.exists() and not path.is_file():
            raise FileExistsError(errno.EEXIST, "it is there, and it is not a plain file")
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead(path)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with _open_locked(temporary) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                if os.name != "nt":  # while it is locked: without, another writer thinks it dead and takes it away
                    os.replace(temporary, path)
            if os.name == "nt":  # where an open file cannot be renamed, and there are no such locks
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _open_locked(temporary: Path) -> BinaryIO:
    """A new file, made as any file is (mkstemp would give it to its owner alone), locked: its writer lives."""
    while True:
        file = temporary.open("xb")
        _flock(file, wait=True)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another writer came between and thought it dead


def _remove_dead(path: Path) -> None:
    """Remove what killed writers of this file have left; what a living one writes is locked."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if leftover.is_file():
            with suppress(OSError), leftover.open("rb") as file:
                if _flock(file, wait=False):
                    leftover.unlink(missing_ok=True)


def _flock(file: BinaryIO, wait: bool) -> bool:
    """Lock an open file; False where another one has it, or where there are no such locks."""
    with suppress(OSError):
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
    return False


@contextmanager
def writing(path: Path, safe: str = "what was there before is untouched") -> Iterator[None]:
    """Whatever the disk refuses inside becomes a `StorageError` that says what is `safe` and what to do."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, SafetensorError) as error:  # the safetensors library wraps what the disk said
        number, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
        remedy = "check the space and the permissions there, or give another place"
        if number in _FULL:
            remedy = "free some space (or raise the limit on the size of files), or give another place"
        elif number in _FORBIDDEN:
            remedy = "allow writing there, or give another place"
        elif number in _VANISHED:
            remedy = "see what was moved, removed or put there, then run this again"
        raise StorageError(f"{path} cannot be written ({reason or error}); {safe}. To continue, {remedy}") from error


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it; nothing where there is nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Make sure that a file, or the names in a folder, survive a power cut; of a folder, where its disk knows how."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNFLUSHED or not path.is_dir():
            raise
    finally:
        os.close(handle)


# --- one worker in a folder ------------------------------------------------------------------------------------------

_held: set[int] = set()  # file descriptors of locks
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)  # a lock is written to: not to where somebody's link leads


@contextmanager
def locked(folder: Path, what: str, *, file: str | None = None, wait: bool = False) -> Iterator[None]:
    """Work alone in `folder`, which is made if need be; where systems have no such locks (Windows), without one.

    A disk that has none, as those of some clusters, is warned of. The system lets go when the process ends, however it
    ends. Leftovers of killed work may be removed inside. The lock is the file `.lock` of the folder, which goes when
    the work ends; where one `file` of it is worked on and the others are free, `.FILE.lock`. Where another one works
    there, whoever does not `wait` gets a `StorageError` with the work in words, `what`.
    """
    path, lock = (folder, folder / LOCK) if file is None else (folder / file, folder / f".{file}{LOCK}")
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        handle = _lock(lock, wait)
    if handle is None:
        raise StorageError(f"another {what} works in {path}{_holder(lock)}; wait until it ends, or give another place")
    _held.add(handle)
    try:
        yield
    finally:
        _held.discard(handle)
        with writing(path, "the work itself is done"):
            lock.unlink(missing_ok=True)  # while it is held: whoever waits for it looks at the name again
            if sys.platform != "win32":
                with suppress(OSError):  # where the disk has no locks
                    fcntl.flock(handle, fcntl.LOCK_UN)  # also where a child process still has it open
            os.close(handle)


@contextmanager
def resumable(path: Path | None) -> Iterator[None]:
    """An interruption inside says where what is done is kept; of nested places, the outermost is named."""
    try:
        yield
    except KeyboardInterrupt as error:
        if path is not None and path.exists():
            error.__notes__ = [f"finished work is kept in {path}; the same call resumes it"]
        raise


def _lock(path: Path, wait: bool) -> int | None:
    """The open, locked file, or None if another one has it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINKS, 0o666)
        try:
            if sys.platform != "win32":
                _flock_if_any(handle, path, wait)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                os.ftruncate(handle, 0)
                os.write(handle, str(os.getpid()).encode())
                return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except FileNotFoundError:
            pass  # its owner has just ended, as where the name is that of another file by now
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _flock_if_any(handle: int, path: Path, wait: bool) -> None:
    """Lock an open file; where its disk has no locks, warn."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _LOCKLESS:
            raise
        warn(
            f"the disk of {path.parent} has no locks ({error.strerror}), so nothing keeps two processes from working "
            "there at the same time: run only one, or give another place"
        )


def _holder(path: Path) -> str:
    try:
        process = path.read_text(encoding="ascii", errors="replace")[:20].strip()
    except OSError:
        process = ""
    return f" (process {process})" if process.isdigit() else ""


def _close_in_child() -> None:
    """A child must not keep the lock of a parent that was killed."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


# --- JSON ------------------------------------------------------------------------------------------------------------


def plain_file(path: Path) -> Path:
    """The path, unless it is something else than a file: to open a named pipe would be to wait for ever."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a plain file; move it away, or give another path")
    return path


def read_file(path: Path, most: int | None = MAX_BYTES) -> bytes:
    """The content of a plain file of at most so many bytes; None for any number.

    Raises:
        CheckpointError: The file is missing, or not to be read.
        StorageError: It is no fault of the file, as where the disk fails: another time it may be read.
    """
    try:
        with plain_file(path).open("rb") as file:
            content = file.read() if most is None else file.read(most + 1)
    except OSError as error:
        own = error.errno in _OF_A_FILE
        advice = "check the path and its permissions" if own else "see to the disk, and try again"
        failure = f"{path} cannot be read ({error.strerror or error}); {advice}"
        raise (CheckpointError if own else StorageError)(failure) from error
    _require_size(len(content), path, most)
    return content


def _require_size(size: int, name: object, most: int | None) -> None:
    if most is not None and size > most:
        raise CheckpointError(f"{name} has more than {most} bytes, which is the limit for such a file")


def read_json(path: Path) -> Any:
    """The plain data in a JSON file, by the rules of `parse_json`."""
    return parse_json(read_file(path), str(path))


def read_object(path: Path) -> dict[str, Any]:
    """The plain data in a JSON file that holds an object."""
    plain = read_json(path)
    if not isinstance(plain, dict):
        raise CheckpointError(f"{path} holds a {type(plain).__name__}, not an object with named fields")
    return plain


def write_json(path: Path, value: Any) -> None:
    """Write plain data as JSON, at once or not at all."""
    write_atomically(path, json_bytes(value, str(path)))


def parse_json(content: bytes, name: str, *, most: int = MAX_BYTES, foreign: bool = False) -> Any:
    """Read the JSON of the file `name`: UTF-8, no key twice, no NaN, nothing nested deeply, no half characters.

    Of a `foreign` file, one of another library, only what `json` itself may stumble over is checked.
    """
    require_limits(content, name, most, foreign=foreign)
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=unique, parse_constant=_refuse)
        if not foreign:
            _check(value)
    except RecursionError as error:
        raise CheckpointError(f"{name} is nested too deeply; at most {MAX_DEPTH} levels are accepted") from error
    except ValueError as error:  # those of Unicode too
        raise CheckpointError(f"{name} is not valid JSON: {error}") from error
    return value


def require_limits(content: bytes, name: str, most: int, *, foreign: bool = False) -> None:
    """Refuse JSON text of more than so many bytes, or of so many values that reading it would take memory for long."""
    _require_size(len(content), name, most)
    values = sum(map(content.count, (b",", b"[", b"{")))
    accepted = most // (8 if foreign else _BYTES_A_VALUE)
    if values > accepted:
        raise CheckpointError(f"{name} has about {values} values; at most {accepted} are accepted")


def json_bytes(value: Any, name: str, *, most: int = MAX_BYTES) -> bytes:
    """JSON text of plain data; refuses what `parse_json` would refuse."""
    try:
        content = (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} cannot be written as JSON: {error}") from error
    parse_json(content, name, most=most)
    return content


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for `json`; one that has a key twice is refused: of two values, one would be lost."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return dict(pairs)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check(value: Any) -> None:
    """Refuse deep nesting, half of a surrogate pair, which is not text, and numbers too large for a float."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                item.encode("utf-8")
            elif isinstance(item, float) and item in (float("inf"), float("-inf")):
                raise ValueError("a number is too large")
            elif isinstance(item, dict):
                inner += (*item, *item.values())
            elif isinstance(item, list):
                inner += item
        if not inner:
            return
        level = inner
    raise RecursionError


# --- digests ---------------------------------------------------------------------------------------------------------


def checksum(path: Path, most: int | None = None) -> str:
    """SHA-256 of a file of at most so many bytes, in hexadecimal; None for any number."""
    with path.open("rb") as file:
        _require_size(os.fstat(file.fileno()).st_size, path, most)
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(value: Any) -> str:
    """SHA-256 of plain data, whatever the layout of their text and the order of their keys."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the data have no digest: {error}; JSON has finite numbers, texts and lists") from error
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with the digest of its content in it, so that any later change is noticed."""
    return {**plain, DIGEST: digest_of(plain)}


def unsealed(plain: Mapping[str, Any], name: str, *, required: bool = True) -> dict[str, Any]:
    """The content of a `sealed` object; one without digest passes where it is not `required` (files of before).

    Raises:
        CheckpointError: The content is not what was written.
    """
    content = dict(plain)
    digest = content.pop(DIGEST, None)
    if (digest is not None or required) and digest != digest_of(content):
        raise CheckpointError(
            f"{name} was changed after it was written: its content does not match its digest; restore it, or make it "
            "again"
        )
    return content


def write_sealed(path: Path, plain: Mapping[str, Any]) -> None:
    """Write a JSON object with its digest, at once or not at all."""
    write_json(path, sealed(plain))


def read_sealed(path: Path, *, required: bool = False) -> dict[str, Any]:
    """The content of what `write_sealed` wrote, unchanged; without a digest, only where it is not `required`."""
    return unsealed(read_object(path), str(path), required=required)


def remove_leftovers(folder: Path) -> None:
    """Take away what killed writes have left below `folder`; only for whoever holds its lock."""
    with writing(folder, "nothing else was removed"):
        for leftover in folder.rglob(".*.tmp"):
            remove(leftover)
