"""Suites: a task with its near and far OOD sets; the paper's are declared in `suites.yaml`."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from .._utils import require
from ..errors import DataError
from ..files import expanded
from ..settings import from_plain
from .dataset import AnyDataset, SomeDataset, cut_position, keyed_order, without_classes
from .loading import HUB, Columns, LabelPolicy, load

SHARE_SEED = 0
"""Seed of the order in which `SetRef.share` cuts a data set, fixed so that everybody gets the same parts."""


@dataclass(frozen=True)
class SetRef:
    """A data set by reference: what to load, and which part of it.

    Attributes:
        name: What reports call it.
        source: Path below the root, or a name, as in `load`.
        split: Split, as in `load`.
        rows: First row and the row after the last; either may be `None` (open), or negative (from the end).
        share: Start and end of a part as fractions of the data set, shuffled with a fixed seed.
        without: Classes left out because they overlap the in-distribution task.
        folder: Folder below the root: torchvision's root, or the folder of a list's images.
        columns: Column names of a table.
        config: Configuration of a hub data set.
        labels: Whether labels are needed.
        class_names: Names in label order, for a list of images, which has none.
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

    def __post_init__(self) -> None:
        if self.share is not None and not 0 <= self.share[0] < self.share[1] <= 1:
            raise DataError(f"{self.name}: share must be 0 <= start < end <= 1, got {self.share}")

    def load(self, root: str | Path | None = None) -> AnyDataset:
        """Load the data set from a root folder; a hub data set from a copy in the folder of its name, if any."""
        is_list = self.source.endswith(".txt")
        base = expanded(root or "")
        copied = root is not None and self.source.startswith(HUB) and (base / self.name).is_dir()
        data = load(
            self.name if copied else self.source,
            self.split,
            root=base if is_list else base / self.folder,
            columns=self.columns,
            labels=self.labels,
            class_names=self.class_names or None,
            config=self.config,
            images=self.folder if is_list else None,
        )
        return self.part_of(data)

    def part_of(self, data: SomeDataset) -> SomeDataset:
        """Select the rows of loaded data that belong to this set."""
        positions = np.arange(len(data))[slice(*(self.rows or (None,)))]
        if self.share is not None:
            start, stop = (cut_position(fraction, len(data)) for fraction in self.share)
            positions = positions[np.isin(positions, keyed_order(len(data), SHARE_SEED)[start:stop])]
        return without_classes(data.select(positions, name=self.name), self.without)

    def may_share_rows(self, other: "SetRef") -> bool:
        """Whether some rows may be in both sets, regardless of their names and the classes left out.

        The number of rows is unknown, so rows counted from the start and from the end may coincide. An unnamed split
        may be any split, except for torchvision, which has a default.
        """
        if (self.source, self.config) != (other.source, other.config):
            return False
        unnamed = None in (self.split, other.split) and not self.source.startswith("torchvision:")
        if self.split != other.split and not unnamed:
            return False
        return not (self._ends_before(other) or other._ends_before(self))

    def _ends_before(self, later: "SetRef") -> bool:
        """Whether this part certainly ends before another begins."""
        if (self.share or (0.0, 1.0))[1] <= (later.share or (0.0, 1.0))[0]:
            return True
        stop, start = (self.rows or (None, None))[1], (later.rows or (None, None))[0] or 0
        return stop is not None and (stop < 0) == (start < 0) and stop <= start


@dataclass(frozen=True)
class Suite:
    """A task with its near and far OOD sets.

    Attributes:
        id: Test set of the task.
        circuit_ood: OOD set on which circuits are chosen; no row of it is reported.
        notes: What a reader of the results must know.
        apart: Further OOD sets, reported separately and included in no mean.
        tasks: Further classification tasks (zero-shot suites), without OOD sets of their own.
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

    def __post_init__(self) -> None:
        reported = (*self.near, *self.far, *self.apart)
        names = sorted(ref.name for ref in reported)
        if len(set(names)) != len(names):
            raise DataError(f"suite {self.name!r} names a set twice: {names}")
        sealed = [ref.name for ref in (self.id, *reported, *self.tasks) if ref.may_share_rows(self.circuit_ood)]
        used = [ref.name for ref in (self.train, self.validation) if ref is not None and ref.may_share_rows(self.id)]
        if sealed or used:
            both = f"reports {sealed}, which may share rows with the data that choose its circuits"
            both = both if sealed else f"tests on {self.id.name}, which may share rows with {used}"
            raise DataError(f"suite {self.name!r} {both}; give other sets, or rows or shares that do not overlap")
        if not self.near or not self.far:
            raise DataError(f"suite {self.name!r} needs at least one near and one far set")

    def load(self, root: str | Path | None = None) -> dict[str, dict[str, AnyDataset]]:
        """Load the OOD sets: `{"near": {name: data}, "far": {name: data}}`, as `evaluate` takes them."""
        groups = {"near": self.near, "far": self.far}
        return {group: {ref.name: ref.load(root) for ref in refs} for group, refs in groups.items()}


def suite(name: str) -> Suite:
    """Return a suite by name; the `DataError` for an unknown one lists all of them."""
    suites = all_suites()
    if name not in suites:
        raise DataError(f"no suite {name!r}; choose one of {', '.join(suites)}")
    return suites[name]


@cache
def all_suites() -> dict[str, Suite]:
    """The suites of `suites.yaml` by name."""
    file = Path(__file__).with_name("suites.yaml")
    declared = require("yaml", extra="data").safe_load(file.read_text(encoding="utf-8"))
    return {name: from_plain(Suite, {"name": name, **plain}, name) for name, plain in declared.items()}
