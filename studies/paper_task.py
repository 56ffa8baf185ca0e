"""The paper's own tasks, for users with its data: Tables 1 and 2 on ViT-B/16 and BERT-base, by appendices C and D.

Every set is in a folder of its own name below the data folder, in any layout that `he.data.load` reads (a folder of
images by class, Parquet, CSV: columns `image`, or `text` and `text_pair`, and `label`); images may also be in OpenOOD
1.5's layout, and texts on the Hugging Face hub. The validation set and the circuits' OOD set both rank heads and choose
settings, because the paper has no others; half A and half B are the same here. `recipes/paper.yaml` marks our settings.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image
from torch.utils.data import ConcatDataset

import hydra_ensembles as he
from hydra_ensembles.data import Columns, TrainTransform, batches
from hydra_ensembles.data.dataset import AnyDataset, ImageDataset, Rows
from hydra_ensembles.errors import CheckpointError, DataError
from hydra_ensembles.training.recipe import DataRecipe

from .classifiers import ClassifierTask
from .classifiers import recipe as classifiers_recipe
from .engine import Stage
from .methods import CLASSIFIER_ALONE
from .paper import paper_numbers
from .samples import Prepared, Samples
from .sets import DataFolder, at_most, read_recipe
from .suites import SetRef, Suite, given
from .weights import own_backbone

TASKS = ("imagenet", "cifar100", "sst2")
PARTS = {"train": "train", "validation": "val", "": "test"}  # split of a set if its suite names none, by the set's name


def recipe(model: str) -> dict[str, Any]:
    """The settings of the paper's tasks for a user's own model; all others are those of our studies."""
    settings = read_recipe("paper")
    for plain in settings["tasks"].values():
        plain["backbone"] = model
    return {**classifiers_recipe(), **settings}


@dataclass(frozen=True)
class PaperFolder(DataFolder):
    """The paper's sets below one folder; see the module docstring."""

    def load(self, reference: SetRef) -> AnyDataset:
        """Load a set from its own folder if there is one, otherwise as the suite says."""
        name, part = named(reference)
        if not (self.root / name).exists():
            return reference.load(self.root)
        if part is None:  # OOD data: labels are not read, and the only split may have any name
            files = [path for below in ("", "data") for path in (self.root / name / below).glob(f"{reference.split}*")]
            reference = replace(reference, split=reference.split if files else None, labels="optional")
        local = replace(reference, source=name, config=None, folder="", columns=Columns())
        return (local if part is None else replace(local, split=reference.split or part)).load(self.root)

    def require(self, suite: Suite) -> None:
        """Raise if sets of a suite are missing; the error names all of them."""
        errors = []
        for reference in (given(suite, "train"), given(suite, "validation"), *used(suite)):
            try:
                self.load(reference)
            except DataError as error:
                errors.append(f"- {reference.name}, in {self.root / named(reference)[0]}: {error}")
        if errors:
            listed = "\n".join(errors)
            raise DataError(
                f"{len(errors)} sets are not below {self.root} (images by class, Parquet or CSV):\n{listed}"
            )


def named(reference: SetRef) -> tuple[str, str | None]:
    """The folder of a set, and its split; None for OOD data, whose folder has only one."""
    name, _, part = reference.name.partition("-")
    return name, PARTS[part] if name in TASKS else None


def used(suite: Suite) -> Iterator[SetRef]:
    """The sets of a suite besides those that train and validate."""
    yield from (suite.id, suite.circuit_ood, *suite.near, *suite.far)


class PaperTask(ClassifierTask):
    """A task of the paper with a user's own model."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kind = self.plain["kind"]

    @cached_property
    def backbone(self) -> he.Ensemble:
        """The user's model, with a classifier that is initialised later."""
        classes = self.source.load(given(self.suite, "train")).class_names
        return own_backbone(self.plain["backbone"], classes, text=self.kind == "text")

    def start(self) -> he.Ensemble:
        """The pretrained model."""
        return self.backbone.to(self.device)

    def inputs(self, sets: Sequence[AnyDataset]) -> Samples:
        """A set with the model's own preprocessing; images are cropped like the paper's."""
        if self.kind == "text":
            return Prepared(sets[0], replace(self.preprocessing, max_length=self.plain["input_size"]))
        return Prepared(sets[0], self.evaluation)

    @property
    def evaluation(self) -> he.ImagePreprocessing:
        """How images are evaluated: both sides resized, then the middle."""
        return replace(self.preprocessing, crop_fraction=self.plain["crop"], resize_mode="squash")

    def pictures(self, count: int | None) -> ImageDataset:
        """Some test images: ImageNet's as the model sees them, for ImageNet-C was made of those."""
        limit = count if self.share == 1 else math.ceil(self.share * (count or len(self.source.images(self.suite.id))))
        images = super().pictures(limit)
        if self.plain["corruptions"] != "imagenet":
            return images
        frame = replace(self.evaluation, mean=(0.0,) * 3, std=(1.0,) * 3)

        def framed(row: int) -> Image.Image:
            pixels = frame(images[row][0])[0].permute(1, 2, 0)  # [3, h, w] -> [h, w, 3]
            return Image.fromarray((255 * pixels).round().byte().numpy())

        return ImageDataset(Rows(len(images), framed), images.labels, images.class_names, images.name)

    def changed(self, sets: Sequence[ImageDataset]) -> Samples:
        """Pictures, already cropped, as inputs of the model."""
        joined = ConcatDataset[Any](sets)
        labels = np.concatenate([images.labels for images in sets])
        images = ImageDataset(Rows(len(joined), lambda row: joined[row][0]), labels, sets[0].class_names, sets[0].name)
        return Prepared(images, replace(self.evaluation, crop_fraction=1.0))

    @property
    def preprocessing(self) -> Any:
        """The model's preprocessing."""
        prepare = self.backbone.metadata.preprocessing
        if prepare is None:
            raise CheckpointError(
                f"{self.plain['backbone']} does not say how inputs are prepared; convert the model in Python with "
                "processor=, save it with save_pretrained, and give that folder"
            )
        return prepare

    def lessons(self, training: DataRecipe) -> Any:
        """Training batches for a recipe; several processes crop, mirror and augment images."""
        if self.kind == "text":
            return super().lessons(training)
        change = TrainTransform(self.preprocessing, rand_augment=training.rand_augment)
        workers = os.cpu_count() or 0 if self.device.type == "cuda" else 0
        images = cast(Prepared, self.train).dataset
        size = min(training.batch_size or 128, len(images))
        return batches(images, change, size, shuffle=True, num_workers=workers, drop_last=True)

    @cached_property
    def inside(self) -> dict[str, Samples]:
        samples = self.samples(self.validation)
        ranking = self.samples(at_most(self.validation, self.settings["circuits"]))
        return {"rank": ranking, "calibrate": samples, "B": samples}

    @cached_property
    def foreign(self) -> Samples:
        """OOD samples that rank heads; they are not reported."""
        return self.samples(at_most(self.source.load(self.suite.circuit_ood), self.settings["circuits"]))

    def _foreign(self, stage: Stage) -> dict[str, Sequence[SetRef]]:
        return {"far": [self.suite.circuit_ood]} if stage == "held_out" else super()._foreign(stage)


def methods_of_table(task: ClassifierTask) -> list[str]:
    """The methods of the paper's table without a special pretraining, and D.2 of CIFAR-100 read the other way."""
    printed: Mapping[str, Any] = paper_numbers("classifier", task.plain["paper"])
    return [method for method in task.methods if method in printed or method == CLASSIFIER_ALONE]


def folder_of(data: Path) -> PaperFolder:
    """The sets below a folder; raises if it does not exist."""
    if not data.is_dir():
        raise DataError(f"there is no folder {data}; give the one that holds the paper's sets")
    return PaperFolder(data)
