"""The data sets that torchvision knows by name."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._utils import require
from ..errors import DataError
from ..preprocessing import to_rgb
from .dataset import ImageDataset

if TYPE_CHECKING:
    from PIL.Image import Image

_LABEL_ATTRIBUTES = ("targets", "labels", "_labels", "y")  # torchvision's own names for the same thing
_NAME_ATTRIBUTES = ("classes", "categories")


class _TorchvisionImages:
    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, row: int) -> "Image":
        image, _ = self._data[row]
        image.load()  # some sets hand out a file that is still open
        return to_rgb(image)


def load_torchvision(name: str, split: str | None, root: Path, download: bool) -> ImageDataset:
    """Load a classification data set of torchvision.

    Args:
        name: Class name in `torchvision.datasets`, such as `CIFAR10`.
        split: Passed on as `split`, or as `train=True/False` (`"train"` or `"test"`), as the class takes it.
        root: Folder that holds the data set, as torchvision lays it out.
        download: Whether torchvision may download what is missing.

    Raises:
        DataError: No such data set, no such split, or the files are not there.
    """
    library = require("torchvision.datasets", extra="data")
    factory = getattr(library, name, None)
    if not inspect.isclass(factory) or name.startswith("_"):
        raise DataError(
            f"torchvision has no data set {name!r}; write its class name as in torchvision.datasets, "
            f"such as 'torchvision:CIFAR10'. Known: {', '.join(sorted(library.__all__))}"
        )
    accepted = inspect.signature(factory).parameters
    settings: dict[str, Any] = {"root": root} if "root" in accepted else {}
    if "download" in accepted:
        settings["download"] = download
    if "split" in accepted and split is not None:
        settings["split"] = split
    elif "train" in accepted:
        if split not in ("train", "test"):
            raise DataError(f"torchvision:{name} has the splits ['test', 'train'], got {split!r}; choose one")
        settings["train"] = split == "train"
    elif split is not None:
        raise DataError(f"torchvision:{name} has no splits, got split={split!r}; leave it out")
    try:
        data: Any = factory(**settings)
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        raise DataError(
            f"torchvision:{name} (split {split!r}) cannot be loaded from {root}: {error}. "
            "Check root= and split=, or pass download=True"
        ) from error
    labels = next((getattr(data, key) for key in _LABEL_ATTRIBUTES if hasattr(data, key)), None)
    if labels is None:
        labels = [data[row][1] for row in range(len(data))]
    numbers = [int(label) for label in labels]
    names = next((getattr(data, key) for key in _NAME_ATTRIBUTES if hasattr(data, key)), ())
    class_names = tuple(", ".join(entry) if isinstance(entry, tuple) else str(entry) for entry in names)
    return ImageDataset(_TorchvisionImages(data), numbers, class_names, f"torchvision:{name}")
