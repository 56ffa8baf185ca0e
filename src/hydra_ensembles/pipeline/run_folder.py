"""A folder for long work that may be stopped: what is done stays done, and nothing else is mixed in."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from .._distributed import launched_rank
from .._utils import require_same_run
from ..checkpoint import settle_checkpoint
from ..errors import CheckpointError
from ..files import read_json, write_atomically, write_json
from ..heads.ranking import HeadRanking
from ..model.ensemble import Ensemble

T = TypeVar("T")

IDENTITY = "run.json"
RESULT = "ensemble"  # the finished model of a run
SETTINGS = "config.yaml"  # what the command line writes beside the products, and before them
_NAMED = 6  # entries of a folder that a message lists
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
        listed = ", ".join(foreign[:_NAMED]) + (" and more" if len(foreign) > _NAMED else "")
        raise CheckpointError(
            f"{path} has {listed}, but no {IDENTITY} that says what they belong to; {what} needs a folder of its own: "
            "give a new or an empty one as output"
        )


class RunFolder:
    """Products by name: each is made once, written in one piece, and read back whenever it is asked for again.

    Without a path nothing is kept and everything is made. Of several processes that work together, the first writes.

    Args:
        path: The folder, or None.
        identity: What the work depends on, as plain data; a folder begun with another identity is refused.
        what: The work in words, for messages: `"a build"`.
        device: Where ensembles and tensors are read to.
        announce: Called with the name of a product and the seconds it took, when it has been made.
    """

    def __init__(
        self,
        path: str | Path | None,
        identity: Mapping[str, Any],
        *,
        what: str = "a build",
        device: torch.device = _CPU,
        announce: Callable[[str, float], None] | None = None,
    ) -> None:
        self.path = None if path is None else Path(path).expanduser()
        self._device, self._announce = device, announce
        self._writes = self.path is not None and launched_rank() == 0
        if self.path is not None:
            self._claim(self.path, json.loads(json.dumps(identity)), what)

    def place(self, name: str) -> Path | None:
        """Where the product of this name lies, or where a stage may keep files of its own; None without a folder."""
        return None if self.path is None else self.path / name

    def has(self, name: str) -> bool:
        """Whether a finished ensemble, or a file, of this name is there."""
        place = self.place(name)
        return place is not None and (place.is_file() or (place / "config.json").is_file())

    def json(self, name: str, make: Callable[[], Any]) -> Any:
        """Plain data in `name`.json, or what `make` gives, saved."""

        def made() -> Any:
            return json.loads(json.dumps(make()))  # as it will be read: tuples are lists

        return self.product(f"{name}.json", made, read_json, write_json)

    def write(self, name: str, content: Any) -> None:
        """Write plain data to `name`.json, over what is there: a summary rather than a product."""
        if self.path is not None and self._writes:
            write_json(self.path / f"{name}.json", content)

    def ranking(self, name: str, make: Callable[[], HeadRanking]) -> HeadRanking:
        """The ranking in `name`.json, or the one `make` gives, saved."""
        return self.product(f"{name}.json", make, HeadRanking.load, lambda file, ranking: ranking.save(file))

    def ensemble(self, name: str, make: Callable[[], Ensemble]) -> Ensemble:
        """The ensemble in the folder `name`, or the one `make` gives, saved."""

        def write(folder: Path, ensemble: Ensemble) -> None:
            ensemble.save_pretrained(folder)

        return self.product(name, make, lambda folder: Ensemble.from_pretrained(folder, device=self._device), write)

    def tensors(self, name: str, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors in `name`.safetensors, or those `make` gives, saved."""

        def made() -> dict[str, Tensor]:
            return {key: tensor.detach().to(self._device) for key, tensor in make().items()}

        def write(file: Path, tensors: dict[str, Tensor]) -> None:
            write_atomically(file, save({key: tensor.cpu().contiguous().clone() for key, tensor in tensors.items()}))

        return self.product(f"{name}.safetensors", made, lambda file: load_file(file, str(self._device)), write)

    def product(
        self, name: str, make: Callable[[], T], read: Callable[[Path], T], write: Callable[[Path, T], None]
    ) -> T:
        """What lies in the file or folder `name`, by `read`; or what `make` gives, put there by `write`.

        `write` must make the file appear in one piece, and the `config.json` of a folder last.
        """
        place = self.place(name)
        if place is not None and self.has(name):
            try:
                return read(place)
            except (OSError, ValueError, SafetensorError) as error:
                raise CheckpointError(
                    f"{place} cannot be used: {error}. Delete {place} and run this again: it is made anew"
                ) from error
        start = time.perf_counter()
        product = make()
        if self._announce is not None:
            self._announce(name, time.perf_counter() - start)
        if place is not None and self._writes:
            if place.is_dir():  # what a kill in the middle of writing left
                shutil.rmtree(place)
            place.parent.mkdir(parents=True, exist_ok=True)
            write(place, product)
        return product

    def _claim(self, path: Path, identity: dict[str, Any], what: str) -> None:
        """Write down what this work is, or refuse a folder that holds something else."""
        require_own_folder(path, what)
        if not (path / IDENTITY).exists():
            self.write(Path(IDENTITY).stem, identity)
            return
        require_same_run(read_json(path / IDENTITY), identity, path, what)
        if self._writes:  # the folder is ours: take away what writes that a kill cut short have left
            for leftover in [*path.rglob(".saved-*"), *path.rglob(".saving-*")]:
                settle_checkpoint(leftover.parent)
            for leftover in path.rglob(".*.tmp"):
                leftover.unlink(missing_ok=True)
