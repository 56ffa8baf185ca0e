"""Map-style data sets: items by position, with labels and class names known before any item is decoded."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset as TorchDataset

from ..errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)
Picture: TypeAlias = "Image"
Text = str | tuple[str, str]
Labels = npt.NDArray[np.int64]

UNLABELLED = -1
"""Label of an item that has none; only data sets loaded with `labels="optional"` hold it."""


class Source(Protocol[Item_co]):
    """Where the items of a data set come from: a length, and one item by its row."""

    def __len__(self) -> int:
        """Count the rows."""
        ...

    def __getitem__(self, row: int, /) -> Item_co:
        """Read one row."""
        ...


class Dataset(TorchDataset[tuple[Item, int]], Generic[Item]):
    """Items with integer labels, read one at a time from a source.

    A subset is another `Dataset` over the same source, so selecting rows copies no data. Use the subclasses
    `ImageDataset` and `TextDataset`.

    Attributes:
        name: What reports and error messages call the data set.
        class_names: Names of the classes, in label order; empty if they are not known.
        labels: Label of every item, `[N]`; `-1` where an item has none.
        rows: Row of the source behind every item, `[N]`.
    """

    kind: ClassVar[Literal["image", "text"]]

    def __init__(
        self,
        source: Source[Item],
        labels: npt.ArrayLike,
        class_names: Sequence[str] = (),
        name: str = "data",
        rows: npt.ArrayLike | None = None,
    ) -> None:
        """Wrap a source.

        Args:
            source: Gives an item for each of its rows.
            labels: One integer for each row of the source (not of `rows`).
            class_names: Names in label order.
            name: What reports and error messages call the data set.
            rows: Rows to show, in this order; all of them if not given.

        Raises:
            DataError: The labels do not fit the source or the class names.
        """
        all_labels = np.array(labels, dtype=np.int64).reshape(-1)
        if len(all_labels) != len(source):
            raise DataError(f"{name}: {len(source)} items but {len(all_labels)} labels; give one label an item")
        names = tuple(str(class_name) for class_name in class_names)
        _check_labels(all_labels, names, name)
        self.name = name
        self.class_names = names
        self.rows: Labels = np.arange(len(source)) if rows is None else np.array(rows, dtype=np.int64).reshape(-1)
        if len(self.rows) and not 0 <= self.rows.min() <= self.rows.max() < len(source):
            raise DataError(f"{name}: rows must lie in 0..{len(source) - 1}, got {self.rows.min()}..{self.rows.max()}")
        self.labels: Labels = all_labels[self.rows]
        self._source = source
        self._source_labels = all_labels
        for array in (self.rows, self.labels, self._source_labels):
            array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Item, int]:
        """Read the item at a position and its label; negative positions count from the end."""
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"{self.name} has {len(self)} items, position {index} is outside it")
        return self._source[int(self.rows[position])], int(self.labels[position])

    def __iter__(self) -> Iterator[tuple[Item, int]]:
        """Go through the items in order."""
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self)} items, {len(self.class_names)} classes)"

    @property
    def labelled(self) -> bool:
        """Whether every item has a label."""
        return bool((self.labels >= 0).all())

    def same_items(self, other: "Dataset[Any]") -> bool:
        """Whether both show the same rows of one source, in whatever order.

        Sources are one where they are the same object or, by their `place`, read the same files; no item is read.
        """
        place = getattr(self._source, "place", None)
        alike = type(self._source) is type(other._source) and isinstance(place, tuple)
        one_source = self._source is other._source or (alike and place == getattr(other._source, "place", None))
        return one_source and np.array_equal(np.sort(self.rows), np.sort(other.rows))

    def select(self, indices: npt.ArrayLike | Iterable[int], name: str | None = None) -> Self:
        """Give the items at these positions, in this order, as a data set of their own."""
        positions = np.array(indices, dtype=np.int64).reshape(-1)
        if len(positions) and not 0 <= positions.min() <= positions.max() < len(self):
            raise DataError(
                f"{self.name} has {len(self)} items; positions must lie in 0..{len(self) - 1}, "
                f"got {positions.min()}..{positions.max()}"
            )
        return self._with(rows=self.rows[positions], name=name)

    def relabel(self, new_labels: dict[int, int], class_names: Sequence[str]) -> Self:
        """Replace labels, e.g. to number the classes that remain from zero.

        Args:
            new_labels: New label for each label that occurs.
            class_names: Names in the order of the new labels.

        Raises:
            DataError: A label that occurs has no replacement.
        """
        missing = sorted(set(self.labels.tolist()) - set(new_labels))
        if missing:
            raise DataError(f"{self.name}: no new label given for labels {missing}")
        labels = [new_labels.get(int(label), UNLABELLED) for label in self._source_labels]
        return self._with(labels=labels, class_names=class_names)

    def _with(self, **changes: Any) -> Self:
        settings: dict[str, Any] = {
            "labels": self._source_labels,
            "class_names": self.class_names,
            "name": self.name,
            "rows": self.rows,
        }
        settings.update({key: value for key, value in changes.items() if value is not None})
        return type(self)(self._source, **settings)


class ImageDataset(Dataset[Picture]):
    """Images (PIL, always RGB) with labels."""

    kind = "image"


class TextDataset(Dataset[Text]):
    """Strings, or pairs of strings, with labels."""

    kind = "text"


AnyDataset = ImageDataset | TextDataset


def _check_labels(labels: Labels, class_names: tuple[str, ...], name: str) -> None:
    if not len(labels):
        return
    if labels.min() < UNLABELLED:
        raise DataError(f"{name}: label {labels.min()} in row {int(labels.argmin())}; labels start at 0")
    if class_names and labels.max() >= len(class_names):
        raise DataError(
            f"{name}: label {labels.max()} in row {int(labels.argmax())}, but there are only "
            f"{len(class_names)} class names (labels 0..{len(class_names) - 1}); check the class names"
        )
