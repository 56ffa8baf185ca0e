"""Suites: tasks with their near and far OOD sets, of the shared folder and of the paper."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from hydra_ensembles.data import Columns, load, without_classes
from hydra_ensembles.data.dataset import (
    AnyDataset,
    ImageDataset,
    Rows,
    SomeDataset,
    cut_position,
    keyed_order,
    read_image,
)
from hydra_ensembles.data.loading import HUB, LabelPolicy, numbered
from hydra_ensembles.errors import DataError
from hydra_ensembles.settings import from_plain

FOLDER = Path(__file__).parent / "data"
_LISTED = re.compile(r"(?P<path>.+?)(?: (?P<label>-?\d+))?")
SHARE_SEED = 0
"""Seed of the order in which `SetRef.share` cuts a data set, fixed so that everybody gets the same parts."""


@dataclass(frozen=True)
class SetRef:
    """A data set by reference: what to load (as in `load`), and which part of it.

    Attributes:
        source: Path below the root, or a name.
        rows: First row and the row after the last; either may be `None` (open), or negative (from the end).
        share: Start and end of a part as fractions of the data set, shuffled with a fixed seed.
        without: Classes left out because they overlap the in-distribution task.
        folder: Folder below the root, of a source that is a folder, or of a list's images.
    """

    name: str
    source: str
    split: str | None = None
    rows: tuple[int | None, int | None] | None = None
    share: tuple[float, float] | None = None
    without: tuple[str, ...] = ()
    folder: str = ""
    columns: Columns = field(default_factory=Columns)
    config: str | None = None
    labels: LabelPolicy = "required"
    class_names: tuple[str, ...] = ()

    def load(self, root: Path) -> AnyDataset:
        """Load the data set from a root folder; a hub data set from a copy in the folder of its name, if any."""
        names = self.class_names or None
        if self.source.endswith(".txt"):
            return self.part_of(listed(root / self.source, root / self.folder, names, self.labels))
        copied = self.source.startswith(HUB) and (root / self.name).is_dir()
        place = self.source if self.source.startswith(HUB) and not copied else root / self.folder / self.source
        options: dict[str, Any] = {"columns": self.columns, "labels": self.labels, "config": self.config}
        data = load(root / self.name if copied else place, self.split, class_names=names, **options)
        return self.part_of(data)

    def part_of(self, data: SomeDataset) -> SomeDataset:
        """Select the rows of loaded data that belong to this set."""
        positions = np.arange(len(data))[slice(*(self.rows or (None,)))]
        if self.share is not None:
            start, stop = (cut_position(fraction, len(data)) for fraction in self.share)
            positions = positions[np.isin(positions, keyed_order(len(data), SHARE_SEED)[start:stop])]
        return without_classes(data.select(positions, name=self.name), self.without)


def listed(file: Path, images: Path, names: Sequence[str] | None, labels: LabelPolicy) -> ImageDataset:
    """An image list of OpenOOD, lines `path label`; a label of -1, or none, means no class."""
    lines = file.read_text(encoding="utf-8-sig").splitlines()
    rows = [match for line in lines if (match := _LISTED.fullmatch(line.strip()))]
    paths = [images / row["path"] for row in rows]
    if not paths or not paths[0].exists():
        raise DataError(f"{file} lists {len(paths)} images, and the first does not exist below {images}")
    numbers, known = numbered([row["label"] and int(row["label"]) for row in rows], names, labels, str(file))
    return ImageDataset(Rows(len(paths), partial(_listed_image, paths)), numbers, known, file.stem)


def _listed_image(paths: Sequence[Path], row: int) -> Any:
    return read_image(paths[row])


@dataclass(frozen=True)
class Suite:
    """A task with its near and far OOD sets.

    Circuits are chosen on `circuit_ood`, of which no row is reported. `apart` are OOD sets that count in no mean,
    `tasks` classification tasks without OOD sets; `notes` say what a reader of the results must know.
    """

    name: str
    id: SetRef
    circuit_ood: SetRef
    near: tuple[SetRef, ...]
    far: tuple[SetRef, ...]
    notes: str
    train: SetRef | None = None
    validation: SetRef | None = None
    apart: tuple[SetRef, ...] = ()
    tasks: tuple[SetRef, ...] = ()


@cache
def read_yaml(name: str) -> Any:
    """Read a data file of the studies."""
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def overlapping(pair: str, data: str) -> tuple[str, ...]:
    """Classes of `data`, one of the sets in `pair` (such as `"cifar10, tinyimagenet"`), that the other also has."""
    overlap: Mapping[str, list[str]] = read_yaml("overlaps")[pair]
    if data == pair.partition(", ")[0]:
        return tuple(overlap)
    return tuple(sorted({name for names in overlap.values() for name in names}))


@cache
def suites() -> Mapping[str, Suite]:
    """The suites of the shared folder, and the paper's (`paper-…`), by name."""
    shared = {name: _suite(name, plain) for name, plain in read_yaml("suites").items()}
    papers = read_yaml("paper_suites").items()
    return shared | {name: from_plain(Suite, {"name": name, **plain}, name) for name, plain in papers}


def suite(name: str) -> Suite:
    """A suite by name."""
    return suites()[name]


def _suite(name: str, plain: Mapping[str, Any]) -> Suite:
    references: dict[str, Any] = {
        key: _reference(value) if isinstance(value, dict) else tuple(map(_reference, value))
        for key, value in plain.items()
        if key != "notes"
    }
    return Suite(name, notes=plain["notes"], **references)


def _reference(plain: Mapping[str, Any]) -> SetRef:
    data = plain["source"].rpartition("/")[2].removesuffix("_full")
    without = overlapping(plain["without"], data) if "without" in plain else ()
    rows = tuple(plain["rows"]) if "rows" in plain else None
    return SetRef(plain.get("name", data), plain["source"], plain.get("split", "test"), rows=rows, without=without)


def given(suite: Suite, part: Literal["train", "validation"]) -> SetRef:
    """The training or validation set of a suite; raises if it has none."""
    reference: SetRef | None = getattr(suite, part)
    if reference is None:
        raise DataError(f"suite {suite.name!r} has no {part} set")
    return reference
