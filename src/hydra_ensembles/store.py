"""The one resumable store: long work in steps, each made once, kept in a folder, and read back after a kill.

    with Store(output, {"model": digest(model), "settings": to_plain(config)}, "a build") as run:
        heads = run.step("heads", lambda: choose(model))
        members = [run.step(f"members/{i}", partial(trained, lost), ENSEMBLE) for i, lost in enumerate(heads)]

A product is finished when the file beside it, `NAME.sha256`, holds its digest; one without it is left over from a kill,
and is made again. One that was changed afterwards is refused.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from . import files
from .errors import CheckpointError, StorageError
from .settings import short, to_plain

T = TypeVar("T")
IDENTITY, LOCK, DIGEST = "run.json", ".lock", ".sha256"


@dataclass(frozen=True)
class Form(Generic[T]):
    """How a kind of product is kept: a file with this suffix, or a folder with a `config.json` if it is empty.

    `write` must be atomic. The `config.json` of a folder must hold the digests of its other files.
    """

    suffix: str
    read: Callable[[Path], T]
    write: Callable[[Path, T], None]


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}  # nothing shared
    files.write_atomically(path, save(plain))


JSON: Form[Any] = Form(".json", files.read_json, files.write_json)
TENSORS: Form[Any] = Form(".safetensors", load_file, _write_tensors)


class Store:
    """The folder of one piece of work, locked while the `with` block runs; with None as folder nothing is kept.

    `identity` is plain data on which the products depend: a folder with another identity is refused. `what` names the
    work in messages, such as "a build".
    """

    def __init__(self, folder: str | Path | None, identity: Mapping[str, Any], what: str = "a run") -> None:
        self.folder = None if folder is None else files.expanded(folder)
        self._identity = json.loads(json.dumps(to_plain(identity)))
        self._what = what
        self._open = ExitStack()

    def __enter__(self) -> "Store":
        if self.folder is None:
            return self
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is a file; {self._what} needs a folder, which is made if missing")
        with files.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._open.enter_context(FileLock(self.folder / LOCK, timeout=0))
            except Timeout:
                problem = f"another process is using {self.folder}"
                raise StorageError(f"{problem}; wait until it ends, or give another folder") from None
        try:
            self._require_own()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt) and self.folder is not None:
            error.add_note(f"finished work is kept in {self.folder}; the same call resumes it")
        self._open.close()

    def _require_own(self) -> None:
        """Refuse the folder of other work; take an empty one, and remove what a kill left in ours."""
        assert self.folder is not None
        path = self.folder / IDENTITY
        found = files.read_object(path) if path.exists() else self._identity
        for key in sorted(found.keys() | self._identity.keys()):
            was, now = found.get(key), self._identity.get(key)
            if was != now:
                problem = f"{self.folder} holds {self._what} of another run"
                raise CheckpointError(f"{problem} ({key} was {short(was)} and is {short(now)}); give another folder")
        if not path.exists():
            names = sorted(entry.name for entry in self.folder.iterdir() if not entry.name.startswith("."))
            if foreign := [name for name in names if name != IDENTITY]:
                raise CheckpointError(f"{self.folder} has other files ({foreign[0]}, …); give a new or empty folder")
            files.write_json(path, self._identity)
        with files.writing(self.folder):
            for leftover in [*self.folder.rglob(".*.tmp")]:
                files.remove(leftover)

    def path(self, name: str) -> Path | None:
        """Where the product of this name is, suffix included, or where a step may keep files; None without a folder."""
        return None if self.folder is None else self.folder / name

    def has(self, name: str, form: Form[Any] = JSON) -> bool:
        """Whether the product of this name is finished."""
        path = self.path(name + form.suffix)
        return path is not None and path.exists() and _digest_file(path).exists()

    def step(self, name: str, make: Callable[[], T], form: Form[T] = JSON) -> T:
        """The stored product of this name, or what `make` returns, which is stored.

        As JSON it is returned the way it is read, so that tuples are lists also the first time.
        """
        path = self.path(name + form.suffix)
        if path is not None and self.has(name, form):
            return _read(path, form)
        product = make() if form is not JSON else json.loads(json.dumps(to_plain(make())))
        if path is not None:
            with files.writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                files.remove(path)  # left over from a kill
                form.write(path, product)
            files.write_atomically(_digest_file(path), f"{_checksum(path)}  {path.name}\n".encode())
        return product


def _digest_file(path: Path) -> Path:
    return path.with_name(path.name + DIGEST)


def _checksum(path: Path) -> str:
    with (path / "config.json" if path.is_dir() else path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path, form: Form[T]) -> T:
    """Read a finished product, after comparing it with its digest."""
    try:
        if _digest_file(path).read_text().split()[:1] != [_checksum(path)]:
            raise CheckpointError("it was changed after this run made it")
        return form.read(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}; delete it, and run this again") from error
