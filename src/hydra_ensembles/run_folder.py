"""Run folders for long work that may be interrupted: finished products are kept, others are refused."""

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
from .checkpoint import settle_checkpoint
from .classes import some
from .errors import CheckpointError
from .heads.ranking import HeadRanking
from .model.ensemble import Ensemble

T = TypeVar("T")

IDENTITY = "run.json"  # what the run is, and the digests of its products
PRODUCTS = "products"  # where these stand in it
RESULT = "ensemble"  # the finished model of a run
SETTINGS = "config.yaml"  # what the command line writes beside the products, and before them
_CPU = torch.device("cpu")


def require_own_folder(path: Path, what: str = "a build") -> None:
    """Refuse an output folder that is not for this kind of work: a file, or a folder that holds other things.

    A folder with `run.json` passes; whose it is, `RunFolder` finds out. Hidden files do not count: work that was
    killed before it wrote `run.json` leaves one.
    """
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"output is {path}, which is a file; name a folder, it is made if it does not exist")
    names = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    foreign = [name for name in names if name not in (IDENTITY, SETTINGS) and not name.startswith(".")]
    if foreign and not (path / IDENTITY).exists():  # asked after the listing: another process may just have written it
        raise CheckpointError(
            f"{path} has {some(foreign)}, but no {IDENTITY} that says what they belong to; {what} needs a folder of "
            "its own: give a new or an empty one as output"
        )


class RunFolder:
    """Products by name: each is made once, written in one piece, and read back whenever it is asked for again.

    A product is finished when `run.json` has its digest; what lies there without one is what a kill left, or was put
    there, and is made anew. What was changed or exchanged afterwards is refused. A folder that an earlier version began
    has no digests and is read without.

    Without a path nothing is kept and everything is made. Of several processes that work together, the first writes.

    `identity` is what the work depends on, as plain data: a folder begun with another is refused. `what` is the work
    in words, for messages: `"a build"`; ensembles and tensors are read to the device.
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
                self._finished()
            else:
                with self.working():  # writes it
                    pass

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work alone in the folder, cleared of what killed writes have left; whoever makes a product does, unasked.

        Raises:
            StorageError: Another process works there.
        """
        if self.path is None or not self._writes or self._working:
            yield
            return
        with files.locked(self.path, "run"), files.resumable(self.path):
            if (self.path / IDENTITY).exists():
                self._finished()
                leftovers = (*self.path.rglob(".saved-*"), *self.path.rglob(".saving-*"))
                for folder in {path.parent for path in leftovers} - {self.path}:  # which is no model, and is locked
                    settle_checkpoint(folder)
                files.remove_leftovers(self.path)
            else:  # the folder may have been anybody's so far: what is hidden in it stays
                self._write_identity({})
            self._working = True
            try:
                yield
            finally:
                self._working = False

    def place(self, name: str) -> Path | None:
        """Where the product of this name lies, or where a stage may keep files of its own; None without a folder."""
        return None if self.path is None else self.path / name

    def has(self, name: str) -> bool:
        """Whether a finished ensemble, or a file, of this name is there."""
        path = self.place(name)
        if path is None or not _content(path).is_file():
            return False
        finished = self._finished()
        return finished is None or name in finished

    def json(self, name: str, make: Callable[[], Any]) -> Any:
        """Plain data in `name`.json, or what `make` gives, saved; as it will be read: tuples are lists."""
        return self.product(f"{name}.json", lambda: json.loads(json.dumps(make())), files.read_json, files.write_json)

    def write(self, name: str, content: Any) -> None:
        """Write plain data to `name`.json, over what is there: for people rather than for the next stage."""
        if self.path is not None and self._writes:
            files.write_json(self.path / f"{name}.json", content)

    def ranking(self, name: str, make: Callable[[], HeadRanking]) -> HeadRanking:
        """The ranking in `name`.json, or the one `make` gives, saved."""
        return self.product(f"{name}.json", make, HeadRanking.load, lambda file, ranking: ranking.save(file))

    def ensemble(self, name: str, make: Callable[[], Ensemble]) -> Ensemble:
        """The ensemble in the folder `name`, or the one `make` gives, saved."""
        read = partial(Ensemble.from_pretrained, device=self._device)
        return self.product(name, make, read, lambda folder, ensemble: ensemble.save_pretrained(folder))

    def tensors(self, name: str, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors in `name`.safetensors, or those `make` gives, saved."""

        def on_device() -> dict[str, Tensor]:
            return {key: tensor.detach().to(self._device) for key, tensor in make().items()}

        def write(file: Path, tensors: dict[str, Tensor]) -> None:
            content = save({key: tensor.cpu().contiguous().clone() for key, tensor in tensors.items()})
            files.write_atomically(file, content)

        return self.product(f"{name}.safetensors", on_device, lambda file: load_file(file, str(self._device)), write)

    def product(
        self, name: str, make: Callable[[], T], read: Callable[[Path], T], write: Callable[[Path, T], None]
    ) -> T:
        """What lies in the file or folder `name`, by `read`; or what `make` gives, put there by `write`.

        `write` must make the file appear in one piece; the `config.json` of a folder must hold the digests of the rest.
        """
        path = self.place(name)
        if path is not None and self.has(name):
            try:
                content = _content(path)
                digest = files.checksum(content, files.MAX_BYTES if content.suffix == ".json" else None)
                if (self._finished() or {name: digest})[name] != digest:
                    raise CheckpointError("it is not what this run made: it was changed, or comes from another run")
                return read(path)
            except (OSError, ValueError, SafetensorError) as error:
                raise CheckpointError(
                    f"{path} cannot be used: {error}. Delete {path} and run this again, which makes it again"
                ) from error
        with self.working():
            product = make()
            if path is not None and self._writes:
                if path.is_dir():  # what a kill in the middle of writing left
                    shutil.rmtree(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                write(path, product)
                finished = self._finished()
                if finished is not None:
                    self._write_identity({**finished, name: files.checksum(_content(path))})
            return product

    def _write_identity(self, digests: Mapping[str, str]) -> None:
        assert self.path is not None
        files.write_sealed(self.path / IDENTITY, {**self._identity, PRODUCTS: digests})

    def _finished(self) -> Mapping[str, str] | None:
        """Digests of the products of this run by name, None where none are kept; a folder of another run is refused."""
        assert self.path is not None
        if not (self.path / IDENTITY).exists():  # rank 0 is about to write it
            return {}
        plain = files.read_object(self.path / IDENTITY)
        identity = files.unsealed(plain, str(self.path / IDENTITY), required=PRODUCTS in plain)
        products = identity.pop(PRODUCTS, None)  # an earlier version has none
        are_digests = isinstance(products, dict) and all(isinstance(digest, str) for digest in products.values())
        if products is not None and not are_digests:
            raise CheckpointError(f"{self.path / IDENTITY} has no digests of products by name; give another folder")
        require_same_run(identity, self._identity, self.path, self._what)
        return products


def _content(path: Path) -> Path:
    """The file whose digest stands for a product: of an ensemble, the one that has those of its other files."""
    return path / "config.json" if path.is_dir() else path
