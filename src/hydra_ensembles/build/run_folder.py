"""The folder of a build: every stage leaves its product there, and a stage whose product exists is not run again.

A product is a folder or a file that appears in one piece (`config.json` of a saved ensemble comes last, JSON
files are renamed into place), so whatever moment a build is killed at, each product is either there or not.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from .._utils import write_atomically
from ..errors import CheckpointError, HydraError
from ..heads.ranking import HeadRanking
from ..model.ensemble import Ensemble
from .identity import require_same_run
from .member_choice import MemberChoice, load_choices, save_choices

T = TypeVar("T")

IDENTITY = "run.json"
SECONDS = "seconds.json"
SUMMARY = "summary.json"
HEADS = "heads.json"
SETTINGS = "config.yaml"  # what the command line writes beside the products, and before them
_NAMED = 6  # entries of a folder that a message lists


def require_own_folder(path: Path) -> None:
    """Refuse an output folder that is not for a build: a file, or a folder that holds other things.

    A folder with `run.json` passes; whose it is, the build itself finds out. Hidden files do not count: a build that
    was killed before it wrote `run.json` leaves one.

    Raises:
        CheckpointError: The message lists what is in the folder.
    """
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"output is {path}, which is a file; name a folder, it is made if it does not exist")
    names = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    foreign = [name for name in names if name not in (IDENTITY, SETTINGS) and not name.startswith(".")]
    if foreign and not (path / IDENTITY).exists():  # asked after the listing: another process may just have written it
        listed = ", ".join(foreign[:_NAMED]) + (f" and {len(foreign) - _NAMED} more" if len(foreign) > _NAMED else "")
        raise CheckpointError(
            f"{path} has {listed}, but no {IDENTITY} that says which build they belong to; a build needs a folder of "
            "its own: give a new or an empty one as output"
        )


class RunFolder:
    """Products of a build by name; without a path nothing is kept and every stage runs.

    Of several processes that build together, the first one writes.

    Args:
        path: The folder, or None.
        identity: What the build depends on, as plain data; a folder made by another build is refused.
        device: Where ensembles are read to.

    Attributes:
        path: The folder, or None.
        seconds: Time each stage took, without the stages inside it; over all calls that worked on the folder.
    """

    def __init__(self, path: str | Path | None, identity: Mapping[str, Any], device: torch.device) -> None:
        self.path = None if path is None else Path(path).expanduser()
        self._device = device
        self._writes = int(os.environ.get("RANK", "0")) == 0
        self._timed_here = 0.0
        self.seconds: dict[str, float] = {}
        if self.path is not None:
            self._claim(self.path, json.loads(json.dumps(identity)))
            self.seconds = _read_seconds(self.path / SECONDS)

    def place(self, name: str) -> Path | None:
        """Where a stage may keep its own files, or None."""
        return None if self.path is None else self.path / name

    def has(self, name: str) -> bool:
        """Whether a finished ensemble, or a file, of this name is there."""
        place = self.place(name)
        return place is not None and (place.is_file() or (place / "config.json").is_file())

    def ensemble(self, name: str, make: Callable[[], Ensemble]) -> Ensemble:
        """The ensemble saved under `name`, or the one `make` gives, saved."""
        return self._product(name, make, lambda folder: Ensemble.from_pretrained(folder, device=self._device), _save)

    def ranking(self, name: str, make: Callable[[], HeadRanking]) -> HeadRanking:
        """The ranking saved under `name`, or the one `make` gives, saved."""
        return self._product(f"{name}.json", make, HeadRanking.load, lambda file, ranking: ranking.save(file))

    def heads(self, make: Callable[[], tuple[MemberChoice, ...]]) -> tuple[MemberChoice, ...]:
        """The saved choice of heads for every member, or the one `make` gives, saved."""
        return self._product(HEADS, make, load_choices, save_choices)

    def write_summary(self, content: Mapping[str, Any]) -> None:
        """Write `summary.json`, the last file of a build."""
        self._write_json(SUMMARY, content)

    def _product(
        self, name: str, make: Callable[[], T], read: Callable[[Path], T], write: Callable[[Path, T], None]
    ) -> T:
        place = self.place(name)
        if place is not None and self.has(name):
            try:
                return read(place)
            except HydraError as error:
                raise CheckpointError(
                    f"{place}, which an earlier call left, cannot be used: {error}. Delete {place} and call build "
                    "again: what is missing is made anew, from the products of the stages before"
                ) from error
        product = self._timed(name, make)
        if place is not None and self._writes:
            if place.is_dir():  # what a kill in the middle of writing left
                shutil.rmtree(place)
            write(place, product)
            self._write_json(SECONDS, self.seconds)
        return product

    def _timed(self, name: str, make: Callable[[], T]) -> T:
        start, inside = time.perf_counter(), self._timed_here
        product = make()
        own = time.perf_counter() - start - (self._timed_here - inside)  # without the stages that `make` ran
        self._timed_here += own
        self.seconds[name] = round(own, 3)
        return product

    def _claim(self, path: Path, identity: dict[str, Any]) -> None:
        """Write down what this run is, or refuse a folder that holds something else."""
        require_own_folder(path)
        file = path / IDENTITY
        if file.exists():
            require_same_run(file, identity)
            if self._writes:
                _remove_leftovers(path)
            return
        self._write_json(IDENTITY, identity)

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        file = self.place(name)
        if file is not None and self._writes:
            write_atomically(file, (json.dumps(content, indent=1) + "\n").encode())


def _save(folder: Path, ensemble: Ensemble) -> None:
    ensemble.save_pretrained(folder)


def _remove_leftovers(folder: Path) -> None:
    """Temporary files and folders of writes that a kill cut short; nothing refers to them."""
    for leftover in [*folder.rglob(".*.tmp"), *folder.rglob(".saving-*")]:
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)


def _read_seconds(file: Path) -> dict[str, float]:
    """Times of earlier calls; they are for information, so a damaged file is no reason to stop."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    items = found.items() if isinstance(found, dict) else ()
    return {str(name): value for name, value in items if isinstance(value, float)}
