"""Files: atomic writes, strict JSON with digests, and folder locks.

Every file that this library writes goes through `write_atomically` or `writing`; files that it reads are not trusted.
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

# limits for a JSON file
MAX_BYTES = 64 << 20
MAX_DEPTH = 32
DIGEST = "digest"  # key under which a JSON object stores the digest of its other content
LOCK = ".lock"
_BYTES_A_VALUE = 24  # minimum bytes per value at the size limit: denser text takes fifty times its size in memory

_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT} if sys.platform != "win32" else {errno.ENOSPC, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_LOCKLESS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
_UNFLUSHED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}  # raised for folders on some network disks
_VANISHED = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY}
_OF_A_FILE = {None, *_FORBIDDEN, *_VANISHED, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG}  # no disk errors


def expanded(path: str | Path) -> Path:
    """Expand a leading `~` or `~name` to the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # unknown user, or no home folder
        raise ConfigError(f"{path}: there is no such home folder here; give the whole path") from error


# --- writing ---------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file in the same folder, flush it to disk, then rename it; the umask is respected.

    If that fails, or the path is not a regular file (a device, say), what was there before is untouched.
    """
    require_regular(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead(path)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with _open_locked(temporary) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                if os.name != "nt":  # while locked: otherwise another writer would take it for dead and remove it
                    os.replace(temporary, path)
            if os.name == "nt":  # open files cannot be renamed here, and there are no such locks
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def require_regular(path: Path) -> None:
    """Refuse a path that exists and is not a regular file."""
    with writing(path):
        if path.exists() and not path.is_file():
            raise FileExistsError(errno.EEXIST, "it exists and is not a plain file")


def _open_locked(temporary: Path) -> BinaryIO:
    """Create and lock a new file with the usual permissions (unlike mkstemp); the lock shows that its writer lives."""
    while True:
        file = temporary.open("xb")
        _flock(file, wait=True)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another writer removed it before it was locked


def _remove_dead(path: Path) -> None:
    """Remove temporary files of killed writers; those of live writers are locked."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if leftover.is_file():
            with suppress(OSError), leftover.open("rb") as file:
                if _flock(file, wait=False):
                    leftover.unlink(missing_ok=True)


def _flock(file: BinaryIO, wait: bool) -> bool:
    """Lock an open file; False if another process holds the lock, or if locks are not supported."""
    with suppress(OSError):
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
    return False


@contextmanager
def writing(path: Path, safe: str = "what was there before is untouched") -> Iterator[None]:
    """Turn disk errors into a `StorageError` that says what is `safe` and what to do."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, SafetensorError) as error:  # safetensors wraps the error of the disk
        number, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
        remedy = "check the space and the permissions there, or give another place"
        if number in _FULL:
            remedy = "free some space (or raise the limit on the size of files), or give another place"
        elif number in _FORBIDDEN:
            remedy = "allow writing there, or give another place"
        elif number in _VANISHED:
            remedy = "check what was moved, removed or added there, then run this again"
        raise StorageError(f"{path} cannot be written ({reason or error}); {safe}. To continue, {remedy}") from error


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Make a file, or the names in a folder (if its disk supports that), survive a power cut."""
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

_held: set[int] = set()  # file descriptors of the locks held
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)  # the lock file is written to, so never follow a link


@contextmanager
def locked(folder: Path, what: str, *, file: str | None = None, wait: bool = False) -> Iterator[None]:
    """Work alone in `folder`, which is created if needed; without a lock on systems that have none (Windows).

    On a disk without locks, as on some clusters, a warning is given. The system releases the lock when the process
    ends, however it ends, so leftovers of killed work may be removed inside. The lock file is `.lock` in the folder,
    removed when the work ends; with `file`, only that file is locked, by `.FILE.lock`. If another process holds the
    lock, wait for it with `wait`, else raise a `StorageError` that calls the work `what`.
    """
    path, lock = (folder, folder / LOCK) if file is None else (folder / file, folder / f".{file}{LOCK}")
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        handle = _lock(lock, wait)
    if handle is None:
        raise StorageError(f"another {what} is using {path}{_holder(lock)}; wait until it ends, or give another place")
    _held.add(handle)
    try:
        yield
    finally:
        _held.discard(handle)
        with writing(path, "the work itself is done"):
            lock.unlink(missing_ok=True)  # while still held: waiting processes check the name again
            if sys.platform != "win32":
                with suppress(OSError):  # the disk has no locks
                    fcntl.flock(handle, fcntl.LOCK_UN)  # explicitly, since a child process may still have it open
            os.close(handle)


@contextmanager
def resumable(path: Path | None) -> Iterator[None]:
    """Add to an interruption where finished work is kept; of nested places, the outermost is named."""
    try:
        yield
    except KeyboardInterrupt as error:
        if path is not None and (path.is_file() or any(not file.name.startswith(".") for file in path.rglob("*.*"))):
            error.__notes__ = [f"finished work is kept in {path}; the same call resumes it"]
        raise


def _lock(path: Path, wait: bool) -> int | None:
    """The descriptor of the locked file, or None if another process holds the lock."""
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
            pass  # its owner just ended; likewise if the name now refers to another file
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _flock_if_any(handle: int, path: Path, wait: bool) -> None:
    """Lock an open file; warn if its disk has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _LOCKLESS:
            raise
        warn(f"the file system of {path.parent} has no locks ({error.strerror}): never run two processes there at once")


def _holder(path: Path) -> str:
    with suppress(OSError):
        process = path.read_text(encoding="ascii", errors="replace")[:20].strip()
        if process.isdigit():
            return f" (process {process})"
    return ""


def _close_in_child() -> None:
    """Close inherited lock files: a child must not keep the lock of a killed parent."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


# --- JSON ------------------------------------------------------------------------------------------------------------


def plain_file(path: Path) -> Path:
    """The path, unless it exists and is not a regular file: opening a named pipe would block forever."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a plain file; move it away, or give another path")
    return path


def read_file(path: Path, most: int | None = MAX_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes; a `StorageError` (the disk failed) may be retried."""
    try:
        with plain_file(path).open("rb") as file:
            content = file.read() if most is None else file.read(most + 1)
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror or error})"
        if error.errno in _OF_A_FILE:
            raise CheckpointError(f"{problem}; check the path and its permissions") from error
        raise StorageError(f"{problem}; check the disk, and try again") from error
    _require_size(len(content), path, most)
    return content


def _require_size(size: int, name: object, most: int | None) -> None:
    if most is not None and size > most:
        raise CheckpointError(f"{name} has more than {most} bytes, which is the limit for such a file")


def read_json(path: Path) -> Any:
    """Read a JSON file with `parse_json`."""
    return parse_json(read_file(path), str(path))


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object."""
    plain = read_json(path)
    if not isinstance(plain, dict):
        raise CheckpointError(f"{path} holds a {type(plain).__name__}, not an object with named fields")
    return plain


def write_json(path: Path, value: Any) -> None:
    """Write plain data as JSON, atomically."""
    write_atomically(path, json_bytes(value, str(path)))


def parse_json(content: bytes, name: str, *, most: int = MAX_BYTES, foreign: bool = False) -> Any:
    """Parse the JSON of the file `name`: UTF-8, no duplicate keys, NaN, infinities, deep nesting or lone surrogates.

    For a `foreign` file, one of another library, only what `json` itself might fail on is checked.
    """
    require_limits(content, name, most, foreign=foreign)
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=unique, parse_constant=_refuse)
        if not foreign:
            _check(value)
    except RecursionError as error:
        raise CheckpointError(f"{name} is nested too deeply; at most {MAX_DEPTH} levels are accepted") from error
    except ValueError as error:  # includes Unicode errors
        raise CheckpointError(f"{name} is not valid JSON: {error}") from error
    return value


def require_limits(content: bytes, name: str, most: int, *, foreign: bool = False) -> None:
    """Refuse JSON text with more bytes, or more values, than can be parsed in reasonable memory."""
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
    """Object hook for `json` that refuses duplicate keys, since one of two values would be lost."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return dict(pairs)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check(value: Any) -> None:
    """Refuse deep nesting, lone surrogates (not valid text), and numbers too large for a float."""
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
    """Hexadecimal SHA-256 of a file of at most `most` bytes; None for no limit."""
    with path.open("rb") as file:
        _require_size(os.fstat(file.fileno()).st_size, path, most)
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(value: Any) -> str:
    """SHA-256 of plain data, independent of text layout and key order."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the data have no digest: {error}; JSON has finite numbers, texts and lists") from error
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with the digest of its content added, so that any later change is detected."""
    return {**plain, DIGEST: digest_of(plain)}


def unsealed(plain: Mapping[str, Any], name: str, *, required: bool = True) -> dict[str, Any]:
    """The content of a `sealed` object, verified; without `required`, objects of earlier versions may lack a digest."""
    content = dict(plain)
    digest = content.pop(DIGEST, None)
    if (digest is not None or required) and digest != digest_of(content):
        raise CheckpointError(f"{name} was changed: it does not match its digest; restore it, or make it again")
    return content


def write_sealed(path: Path, plain: Mapping[str, Any]) -> None:
    """Write a JSON object with its digest, atomically."""
    write_json(path, sealed(plain))


def read_sealed(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Read and verify what `write_sealed` wrote; a missing digest is accepted unless `required`."""
    return unsealed(read_object(path), str(path), required=required)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writes left below `folder`; the caller must hold its lock."""
    with writing(folder, "nothing else was removed"):
        for leftover in folder.rglob(".*.tmp"):
            remove(leftover)
