"""The folder of a build: what is done stays done, and nothing else is mixed in."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from .._utils import __version__, require_same_run, write_atomically
from ..batches import length_of
from ..errors import CheckpointError, HydraError
from ..heads.ranking import Head, HeadRanking, model_fingerprint
from ..model.ensemble import Ensemble
from ..schema import from_plain, to_plain
from .given import BuildData, Start
from .settings import HydraConfig

FORMAT = "hydra_ensembles build 1"


def run_identity(config: HydraConfig, start: Start, data: BuildData) -> dict[str, Any]:
    """Config, model and data of a build as plain data."""
    remembered = replace(start.base.metadata, text_side=None)
    metadata = json.dumps(to_plain(remembered), sort_keys=True).encode()
    model: dict[str, Any] = {
        "weights": model_fingerprint(start.ranked),
        "metadata": hashlib.sha256(metadata).hexdigest(),
    }
    if start.dual is not None:
        model["templates"] = list(start.templates)
    return {"format": FORMAT, "config": to_plain(config), "model": model, "data": data.fingerprints()}


def read_identity(file: Path) -> Any:
    """What a run folder was begun with."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); give another output folder, or delete {file.parent} to start over"
        ) from error


@dataclass(frozen=True)
class MemberChoice:
    """One member: how its heads were chosen, in words, and the heads it loses."""

    origin: str
    heads: tuple[Head, ...]


@dataclass(frozen=True)
class _SavedChoice:
    origin: str
    heads: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True)
class _SavedChoices:
    members: tuple[_SavedChoice, ...]


def save_choices(path: Path, members: Sequence[MemberChoice]) -> None:
    """Write the choices of all members as JSON."""
    write_atomically(path, (json.dumps({"members": to_plain(list(members))}, indent=1) + "\n").encode())


def load_choices(path: Path) -> tuple[MemberChoice, ...]:
    """Read what `save_choices` wrote."""
    try:
        saved = from_plain(_SavedChoices, json.loads(path.read_text(encoding="utf-8")), "choices")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} does not hold the heads of members: {error}") from error
    return tuple(MemberChoice(one.origin, tuple(Head(*head) for head in one.heads)) for one in saved.members)


def build_summary(
    config: HydraConfig,
    base: Ensemble,
    data: BuildData,
    choices: Sequence[MemberChoice],
    final: Ensemble,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Settings, data, members, cost and calibration of a build, as plain data."""
    before, after = base.describe(), final.describe()
    calibration = final.metadata.calibration
    return {
        "config": to_plain(config),
        "versions": {"hydra_ensembles": __version__, "torch": torch.__version__},
        "model": {"source": base.metadata.source, "kind": base.kind, "parameters": before.parameters},
        "samples": data.samples(),
        "train_batches": None if data.train is None else length_of(data.train),
        "members": [
            {
                "origin": choice.origin,
                "pruned": [str(head) for head in choice.heads],
                "heads_kept": [len(layer) for layer in kept],
            }
            for choice, kept in zip(choices, final.heads, strict=True)
        ],
        "trunk": final.config.trunk,
        "parameters": after.parameters,
        "multiply_adds": after.multiply_adds,
        "multiply_adds_of_the_model": before.multiply_adds,
        "calibration": None if calibration is None else to_plain(calibration),
        "metrics": dict(final.metadata.metrics),
        "history": list(final.metadata.history),
        "seconds": dict(seconds),
    }


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
            require_same_run(read_identity(file), identity, path, "a build")
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
