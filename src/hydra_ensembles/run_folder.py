"""Run folders for long work that may be interrupted: finished products are reused, foreign ones refused."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from . import files
from ._distributed import launched_rank
from ._utils import require_same_run
from .checkpoint import IDENTITY as IDENTITY
from .checkpoint import RESULT as RESULT
from .classes import a_few
from .errors import CheckpointError
from .heads.ranking import HeadRanking
from .model.ensemble import Ensemble

T = TypeVar("T")

PRODUCTS = "products"  # key in `run.json` of the digests of its products
SETTINGS = "config.yaml"  # written by the command line next to the products, before them
_CPU = torch.device("cpu")


def require_own_folder(path: Path, what: str = "a build") -> None:
    """Refuse an output folder that is not for this kind of work: a file, or a folder with other content.

    A folder with `run.json` passes; `RunFolder` checks whose it is. Hidden files are ignored: work that was killed
    before it wrote `run.json` leaves some.
    """
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"output is {path}, which is a file; give a folder, which is created if missing")
    names = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    foreign = [name for name in names if name not in (IDENTITY, SETTINGS) and not name.startswith(".")]
    if foreign and not (path / IDENTITY).exists():  # checked after listing: another process may just have written it
        problem = f"{path} has {a_few(foreign)}, but no {IDENTITY} to say what they belong to"
        raise CheckpointError(f"{problem}; {what} needs a new or empty folder as output")


class RunFolder:
    """Products by name: each is made once, written atomically, and read back when it is needed again.

    A product is finished when `run.json` contains its digest; a file without one is left over from a kill, or was put
    there, and is made again. Products that were changed or replaced afterwards are refused. Folders of an earlier
    version have no digests and are read without them.

    Without a path nothing is stored and everything is made. Of several cooperating processes, rank 0 writes.

    `identity` is plain data on which the work depends: a folder with another identity is refused. `what` names the work
    in messages, such as `"a build"`; ensembles and tensors are loaded to `device`.
    """

    def __init__(
        self,
        path: str | Path | None,
        identity: Mapping[str, Any],
        *,
        what: str = "a build",
        device: torch.device = _CPU,
    ) -> None:
        self.path = None if path is None else files.expanded(path)
        self._identity = json.loads(json.dumps(identity))
        self._what = what
        self._device = device
        self._writes = self.path is not None and launched_rank() == 0
        self._working = False
        if self.path is not None:
            require_own_folder(self.path, what)
            if (self.path / IDENTITY).exists():
                self._digests()  # refuses the folder of another run
            elif self._writes:
                with files.locked(self.path, "run"), files.resumable(self.path):
                    self._begin()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Lock the folder and remove what killed writes left; `product` does this by itself."""
        if self.path is None or not self._writes or self._working:
            yield
            return
        with files.locked(self.path, "run"), files.resumable(self.path):
            if not self._begin():  # else the folder may be anyone's so far: keep its hidden files
                for folder in self.path.rglob(".saving.*.tmp"):
                    files.remove(folder)
                files.remove_leftovers(self.path)
            self._working = True
            try:
                yield
            finally:
                self._working = False

    def place(self, name: str) -> Path | None:
        """Path of the product of this name, or where a stage may keep its own files; None without a folder."""
        return None if self.path is None else self.path / name

    def has(self, name: str) -> bool:
        """Whether a finished ensemble or file of this name exists."""
        path = self.place(name)
        if path is None or not _content(path).is_file():
            return False
        digests = self._digests()
        return digests is None or name in digests

    def json(self, name: str, make: Callable[[], Any]) -> Any:
        """Read `name`.json, or make and save it; returned as JSON reads it: tuples become lists."""
        return self.product(f"{name}.json", lambda: json.loads(json.dumps(make())), files.read_json, files.write_json)

    def write(self, name: str, content: Any) -> None:
        """Write plain data to `name`.json, overwriting it: for people rather than for the next stage."""
        if self.path is not None and self._writes:
            files.write_json(self.path / f"{name}.json", content)

    def ranking(self, name: str, make: Callable[[], HeadRanking]) -> HeadRanking:
        """Load the ranking in `name`.json, or make and save it."""
        return self.product(f"{name}.json", make, HeadRanking.load, lambda file, ranking: ranking.save(file))

    def ensemble(self, name: str, make: Callable[[], Ensemble]) -> Ensemble:
        """Load the ensemble in the folder `name`, or make and save it."""
        read = partial(Ensemble.from_pretrained, device=self._device)
        return self.product(name, make, read, lambda folder, ensemble: ensemble.save_pretrained(folder))

    def tensors(self, name: str, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Load the tensors in `name`.safetensors, or make and save them."""

        def on_device() -> dict[str, Tensor]:
            return {key: tensor.detach().to(self._device) for key, tensor in make().items()}

        def write(file: Path, tensors: dict[str, Tensor]) -> None:
            content = save({key: tensor.cpu().contiguous().clone() for key, tensor in tensors.items()})
            files.write_atomically(file, content)

        return self.product(f"{name}.safetensors", on_device, lambda file: load_file(file, str(self._device)), write)

    def product(
        self, name: str, make: Callable[[], T], read: Callable[[Path], T], write: Callable[[Path, T], None]
    ) -> T:
        """Load the file or folder `name` with `read`, or `make` it and store it with `write`.

        `write` must be atomic; the `config.json` of a folder must contain the digests of its other files.
        """
        path = self.place(name)
        if path is not None and self.has(name):
            try:
                content = _content(path)
                digest = files.checksum(content, files.MAX_BYTES if content.suffix == ".json" else None)
                promised = (self._digests() or {}).get(name, digest)  # folders of an earlier version promise nothing
                if digest != promised:
                    raise CheckpointError("it is not what this run made: it was changed, or comes from another run")
                return read(path)
            except (OSError, ValueError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be used: {error}. Delete it and run this again") from error
        with self.working():
            product = make()
            if path is not None and self._writes:
                if path.is_dir():  # left by a kill during writing
                    shutil.rmtree(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                write(path, product)
                digests = self._digests()
                if digests is not None:
                    self._write_identity({**digests, name: files.checksum(_content(path))})
            return product

    def _begin(self) -> bool:
        """Take a folder that no run has by writing `run.json`; returns False if this run did so before."""
        assert self.path is not None
        if (self.path / IDENTITY).exists():
            self._digests()
            return False
        self._write_identity({})
        return True

    def _write_identity(self, digests: Mapping[str, str]) -> None:
        assert self.path is not None
        files.write_sealed(self.path / IDENTITY, {**self._identity, PRODUCTS: digests})

    def _digests(self) -> Mapping[str, str] | None:
        """Digests of finished products by name, None if the folder has none; refuses the folder of another run."""
        assert self.path is not None
        if not (self.path / IDENTITY).exists():  # rank 0 is about to write it
            return {}
        plain = files.read_object(self.path / IDENTITY)
        identity = files.unsealed(plain, str(self.path / IDENTITY), required=PRODUCTS in plain)
        products = identity.pop(PRODUCTS, None)  # missing in earlier versions
        are_digests = isinstance(products, dict) and all(isinstance(digest, str) for digest in products.values())
        if products is not None and not are_digests:
            raise CheckpointError(f"{self.path / IDENTITY} does not list digests of products; give another folder")
        require_same_run(identity, self._identity, self.path, self._what)
        return products


def _content(path: Path) -> Path:
    """The file whose digest identifies a product: for an ensemble `config.json`, which has the other files' digests."""
    return path / "config.json" if path.is_dir() else path
