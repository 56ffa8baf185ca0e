"""Images of several sets in one safetensors file: the bytes of the source, compressed together, never decoded.

Beside each image lies where it came from (split and row of the source), so that anyone who has the source can
check the selection, and two sets can be shown to share no image.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from .._utils import write_atomically
from ..data.dataset import ImageDataset, decode_image
from ..errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMAT = "hydra_ensembles images 1"


@dataclass(frozen=True)
class PackedImage:
    """One image.

    Attributes:
        content: The image file's bytes.
        label: Class number, or -1 for an image that belongs to none of the classes.
        split: Which file of the source it came from, such as `eurosat/test`.
        row: Row there.
    """

    content: bytes
    label: int
    split: str
    row: int


@dataclass(frozen=True)
class PackedSet:
    """The images of one set, in order; a source for an `ImageDataset`."""

    name: str
    class_names: tuple[str, ...]
    images: tuple[PackedImage, ...]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> "Image":
        """Decode one image, as RGB."""
        return decode_image(self.images[row].content, f"image {row} of {self.name}")

    def dataset(self) -> ImageDataset:
        """The set as a data set, whose items are decoded when they are read."""
        return ImageDataset(self, [image.label for image in self.images], self.class_names, self.name)


def write_packed(path: Path, sets: Sequence[PackedSet]) -> None:
    """Write sets that have the same class names into one file, at once or not at all."""
    entries = [(number, image) for number, one in enumerate(sets) for image in one.images]
    splits = sorted({image.split for _, image in entries})
    blob = zlib.compress(b"".join(image.content for _, image in entries), level=9)
    tensors: dict[str, npt.NDArray[Any]] = {
        "images": np.frombuffer(blob, dtype=np.uint8),
        "lengths": np.array([len(image.content) for _, image in entries], dtype=np.int32),
        "labels": np.array([image.label for _, image in entries], dtype=np.int16),
        "sets": np.array([number for number, _ in entries], dtype=np.uint8),
        "splits": np.array([splits.index(image.split) for _, image in entries], dtype=np.uint8),
        "rows": np.array([image.row for _, image in entries], dtype=np.int32),
    }
    metadata = {
        "format": FORMAT,
        "sets": json.dumps([one.name for one in sets]),
        "splits": json.dumps(splits),
        "class_names": json.dumps(sets[0].class_names),
    }
    write_atomically(path, save(tensors, metadata))


def read_packed(path: Path) -> dict[str, PackedSet]:
    """Read the sets of a file by name.

    Raises:
        DataError: The file is missing or was not written by `write_packed`.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read as packed images: {error}; make or install it again") from error
    if metadata.get("format") != FORMAT:
        raise DataError(f"{path} has the format {metadata.get('format')!r}, expected {FORMAT!r}; make it again")
    names, splits = json.loads(metadata["sets"]), json.loads(metadata["splits"])
    classes = tuple(json.loads(metadata["class_names"]))
    content = zlib.decompress(tensors["images"].tobytes())
    ends = np.cumsum(tensors["lengths"], dtype=np.int64)
    members: dict[str, list[PackedImage]] = {name: [] for name in names}
    for index, end in enumerate(ends.tolist()):
        start = end - int(tensors["lengths"][index])
        members[names[int(tensors["sets"][index])]].append(
            PackedImage(
                content[start:end],
                int(tensors["labels"][index]),
                splits[int(tensors["splits"][index])],
                int(tensors["rows"][index]),
            )
        )
    return {name: PackedSet(name, classes, tuple(images)) for name, images in members.items()}
