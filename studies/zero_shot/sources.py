"""Where a zero-shot study gets its model and its images: two small protocols.

The study of docs/results.md implements them by `SharedSets` and `TrainedDual`. A user's own checkpoint and the
paper's data sets implement them as well; the stages know nothing else of either.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from hydra_ensembles.data.dataset import ImageDataset
from hydra_ensembles.errors import DataError
from hydra_ensembles.model.clip import DualEncoder
from hydra_ensembles.model.ensemble import Ensemble

from ..seed_folder import SeedFolder
from ..splits import Samples

Domain = Literal["seen", "unseen"]


@dataclass(frozen=True, eq=False)
class NamedImages:
    """Labelled images, and what prompts call their classes, in the order of the labels.

    Labels may leave out classes (an OOD set without those that overlap); names never do.
    """

    images: ImageDataset
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check that every label has a name, and every name is there once."""
        if len(set(self.names)) < len(self.names):
            twice = sorted({name for name in self.names if self.names.count(name) > 1})
            raise DataError(f"{self.images.name}: classes {twice} have the same name; give each its own")
        highest = int(self.images.labels.max()) if len(self.images) else -1
        if highest >= len(self.names) or not self.images.labelled:
            raise DataError(f"{self.images.name} needs a label for every image and a name for every label")


@dataclass(frozen=True, eq=False)
class CircuitData:
    """What circuits are extracted on: ID images with names, and OOD images (whose labels nobody reads)."""

    inside: NamedImages
    outside: ImageDataset


@dataclass(frozen=True, eq=False)
class Task:
    """One classification task of the tables.

    Attributes:
        name: What tables call it.
        domain: Whether the model was trained on classes and images of this kind.
        test: Its test images.
    """

    name: str
    domain: Domain
    test: NamedImages


@dataclass(frozen=True, eq=False)
class Detection:
    """One task as ID data, and the OOD sets held against it, by name; classes that overlap are left out."""

    task: str
    near: Mapping[str, ImageDataset]
    far: Mapping[str, ImageDataset]


class EvaluationSets(Protocol):
    """All images of a study. `tasks` and `detections` are called only after everything is fixed."""

    name: str

    def circuits(self) -> CircuitData:
        """What circuits of both towers are extracted on."""
        ...

    def image_circuits(self) -> CircuitData:
        """What circuits of the image tower alone are extracted on (the paper adds CIFAR-100 there).

        These are the images that are read, not a set to draw them from: `Counts` says how many of each task.
        """
        ...

    def calibration(self) -> NamedImages:
        """ID images that temperatures are fitted on; none of them in `circuits` or `tasks`."""
        ...

    def tasks(self) -> Sequence[Task]:
        """Every classification task, with its test images."""
        ...

    def detections(self) -> Sequence[Detection]:
        """Every task that is held against OOD sets; its name is that of one of `tasks`."""
        ...


class ModelSource(Protocol):
    """The dual encoder of a study.

    Attributes:
        name: What results call the model.
        description: What it is and is not, in a sentence or two; stands above the tables.
        trains_text: Whether `tuned` can be asked for: whether there are pairs to train on.
    """

    name: str
    description: str
    trains_text: bool

    def dual(self, seed: int, folder: SeedFolder, device: torch.device) -> DualEncoder:
        """The model of one seed, one member, on the device; made once, then read from the folder."""
        ...

    def tuned(self, member: DualEncoder, name: str, seed: int, folder: SeedFolder) -> DualEncoder:
        """A pruned member with its text side trained anew, the image tower locked; kept in the folder under `name`."""
        ...

    def samples(self, images: ImageDataset, device: torch.device) -> Samples:
        """Images as the image tower takes them, in batches."""
        ...


class PreparedImages:
    """Samples of a model that knows its own preprocessing (`dual.image.metadata.preprocessing`).

    Images are decoded and prepared batch by batch, so that sets of any size fit.
    """

    def __init__(self, images: ImageDataset, tower: Ensemble) -> None:
        self.images, self.tower = images, tower
        self.labels = torch.from_numpy(images.labels.copy())

    def __len__(self) -> int:
        return len(self.images)

    def evaluation(self, batch_size: int) -> "PreparedBatches":
        """Batches in order."""
        return PreparedBatches(self, batch_size, torch.arange(len(self)))

    def training(self, batch_size: int) -> "PreparedBatches":
        """Batches in random order, drawn from torch's CPU generator; no augmentation."""
        return PreparedBatches(self, batch_size, None)


class PreparedBatches:
    """Batches of prepared images and their labels; may be read again and again."""

    def __init__(self, samples: PreparedImages, batch_size: int, order: Tensor | None) -> None:
        self.samples, self.batch_size, self.order = samples, batch_size, order

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self.samples) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs `[B, 3, H, W]` and labels `[B]`."""
        order = torch.randperm(len(self.samples)) if self.order is None else self.order
        for rows in order.split(self.batch_size):
            pictures = [self.samples.images[row][0] for row in rows.tolist()]
            inputs = self.samples.tower.prepare(pictures)
            if not isinstance(inputs, Tensor):
                raise DataError("the image tower's preprocessing must give pixels; convert the model with processor=")
            yield inputs, self.samples.labels[rows]
