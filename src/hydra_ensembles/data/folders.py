"""Images lying in folders: one subfolder a class, or a text file that lists them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DataError
from .dataset import UNLABELLED, ImageDataset
from .images import IMAGE_SUFFIXES, read_image
from .tables import LabelPolicy

if TYPE_CHECKING:
    from PIL.Image import Image

SPLIT_NAMES = ("dev", "test", "train", "training", "val", "valid", "validation")


class ImageFiles:
    """Image files, decoded when they are read."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Remember the paths."""
        self.files = tuple(files)
        self.place = tuple(str(file.absolute()) for file in files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> "Image":
        return read_image(self.files[row], f"row {row}, image file {self.files[row]},")


def load_image_folder(
    folder: Path,
    labels: LabelPolicy = "required",
    class_names: Sequence[str] | None = None,
    name: str | None = None,
) -> ImageDataset:
    """Load a folder with one subfolder a class, searched to any depth.

    Classes are numbered in the order of `class_names` (which must name the subfolders), else sorted by name.
    With `labels="optional"` images without a class, lying in the folder itself, are taken as well. Hidden subfolders
    and `__MACOSX`, which archives leave, are passed over.

    Raises:
        DataError: There are no images, a subfolder has no class, or (without `class_names`) a subfolder no images.
    """
    found = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not _is_litter(entry.name))
    names = tuple(found if class_names is None else class_names)
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise DataError(f"{folder} has subfolders {unknown} that are not among the class names {list(names)}")
    images = {class_name: _images_below(folder / class_name) for class_name in names}
    empty = [class_name for class_name in names if not images[class_name]]
    if class_names is None and labels == "optional":  # classes that nobody reads
        names = tuple(class_name for class_name in names if images[class_name])
    elif class_names is None and 0 < len(empty) < len(names):
        raise DataError(
            f"{folder} has subfolders without images: {empty}. Each subfolder is a class: move these elsewhere, or "
            "pass class_names= if they are classes without an image here"
        )
    files = [file for class_name in names for file in images[class_name]]
    numbers = [number for number, class_name in enumerate(names) for _ in images[class_name]]
    loose = [file for file in sorted(folder.iterdir()) if file.suffix.lower() in IMAGE_SUFFIXES]
    if loose and labels == "optional":
        files += loose
        numbers += [UNLABELLED] * len(loose)
    if not files:
        hint = f"; {len(loose)} images lie in it without a class: pass labels='optional'" if loose else ""
        raise DataError(
            f"{folder} has no images in class subfolders (subfolders {found}, "
            f"suffixes read: {', '.join(IMAGE_SUFFIXES)}){hint}"
        )
    return ImageDataset(ImageFiles(files), numbers, names, name or folder.name)


def load_image_list(
    list_file: Path,
    images: Path,
    labels: LabelPolicy = "required",
    class_names: Sequence[str] | None = None,
    name: str | None = None,
) -> ImageDataset:
    """Load the images that a text file lists, a line `path label` each: the format of the OpenOOD benchmark.

    Args:
        list_file: The text file; a label of -1 (or none) means that the image has no class.
        images: Folder that the paths are relative to.
        labels: Whether every image must have a label.
        class_names: Names in label order.
        name: What reports call the data set.

    Raises:
        DataError: A line cannot be read, or a label is missing.
    """
    files: list[Path] = []
    numbers: list[int] = []
    for line_number, line in enumerate(list_file.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        path, separator, label = line.strip().rpartition(" ")
        if not separator:
            path, label = label, str(UNLABELLED)
        try:
            numbers.append(max(int(label), UNLABELLED))
        except ValueError as error:
            raise DataError(f"line {line_number} of {list_file} is {line!r}; each line must be 'path label'") from error
        if numbers[-1] == UNLABELLED and labels == "required":
            raise DataError(
                f"line {line_number} of {list_file} has no label; pass labels='optional' if the labels are "
                "not needed (OOD data)"
            )
        files.append(images / path)
    if not files:
        raise DataError(f"{list_file} lists no images")
    if not files[0].exists():
        raise DataError(
            f"{files[0]}, the first image of {list_file}, does not exist; images= must name the folder that "
            "the paths in the list are relative to"
        )
    if class_names is None:
        class_names = [str(label) for label in range(max(numbers) + 1)]
    return ImageDataset(ImageFiles(files), numbers, class_names, name or list_file.stem)


def _is_litter(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _images_below(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
